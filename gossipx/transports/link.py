"""One connection: frames and payloads over a stream, from the first frame to the last.

A payload travels in one of three ways: inside the stream, in shared memory whose descriptor follows the frame, or over
a carrier (gloo, NCCL), a side channel that both sides have built. The last two are called out of band.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from gossipx.errors import (
    CorruptedError,
    LocalFaultError,
    NoCarrierError,
    PeerFaultError,
    PeerTimeoutError,
    PeerUnreachableError,
    ProtocolError,
)
from gossipx.memory import PIECE, ByteObserver, Source
from gossipx.protocol.fields import MAX_METADATA, SMALL_METADATA
from gossipx.protocol.messages import CarryingReply, CarryingRequest
from gossipx.transports import Carrier, Carriers, Certified, SharesMemory, Stream
from gossipx.transports.pace import Pace
from gossipx.transports.shared_memory import LinkStore, PeerMemory
from gossipx.wire import (
    Carried,
    CarrierRequest,
    Expect,
    Message,
    ModelAck,
    NoCarrierReply,
    Open,
    Sink,
    SinkFactory,
    answer_to,
    auth,
    frames,
    no_payload,
)
from gossipx.wire.pieces import gather

# Seconds between two checks that the other side is still connected while a carrier transfers a payload.
_POLL = 0.5


class Owner(Protocol):
    """The owner of a link; :class:`gossipx.transports.links.Links`.

    Attributes:
        timeout: seconds allowed to receive a frame once it has begun, where the call sets no deadline.
        pace: rate limit for models sent over a network; None: unlimited.
        closed: set once nothing more may be sent.
    """

    timeout: float
    pace: Pace | None
    closed: threading.Event

    def count(self, sent: int, received: int) -> None:
        """Add to the byte counters."""

    def count_corrupted(self) -> None:
        """Count a frame that did not match its checksum."""

    def spawn(self, what: str, target: Callable[..., None], *given: object) -> None:
        """Start a daemon thread; RuntimeError if the system cannot start another one."""

    def closed_error(self) -> PeerUnreachableError:
        """Return the error to raise after all connections have ended."""


class Link:
    """A stream that carries frames, for use by one thread at a time; made by :class:`gossipx.transports.links.Links`.

    Args:
        stream: the connection, ready to send and receive.
        owner: counts bytes, and limits rate and time.

    Attributes:
        heard: whether anything arrived since the last frame was sent.
        checks: checksums or MACs of sent frames, for :func:`gossipx.wire.frames.encode`.
        carrier: side channel for models, once built.
        opened: what the other side has proven to be; None without a secret.
    """

    def __init__(self, stream: Stream, owner: Owner):
        self.stream = stream
        self.heard = False
        self.carrier: Carrier | None = None
        self._memory = PeerMemory()
        self.checks: frames.Checks = frames.Unchecked if isinstance(stream, Certified) else frames.CHECKSUMS
        self._owner = owner
        self._decoder = frames.Decoder(no_payload, SMALL_METADATA)
        self._decoder.use(self.checks)
        self.opened: Open | None = None

    def send(self, frame: Iterable[frames.Part], deadline: float) -> None:
        """Send a frame from :func:`gossipx.wire.frames.encode`; errors as :meth:`Stream.send`."""
        self.heard = False
        for buffers, observe in frame:
            if observe is None:
                self.stream.send(buffers, deadline)
                self._owner.count(sum(map(len, buffers)), 0)
            else:
                self.stream.send(buffers, deadline, functools.partial(self._sent, observe))

    def _sent(self, observe: ByteObserver, part: memoryview) -> None:
        """Count a sent part of a payload, and pass it on to ``observe``."""
        self._owner.count(len(part), 0)
        observe(part)

    def _send_paced(self, frame: Iterable[frames.Part], pace: Pace, deadline: float) -> None:
        """Send a frame as :meth:`send`, no faster than ``pace``."""
        for buffers, observe in frame:
            for part in pace.parts(buffers):
                self._wait_for_turn(pace, len(part), deadline)
                self.send([([part], observe)], deadline)

    def _wait_for_turn(self, pace: Pace, nbytes: int, deadline: float) -> None:
        left = deadline - time.monotonic()
        wait = pace.reserve(nbytes, left)
        if self._owner.closed.wait(min(wait, left)):
            raise self._owner.closed_error()
        if wait > left:
            raise PeerTimeoutError(f"--max-rate leaves no room for a model to {self.stream.remote} in time")

    def send_model(self, reply: CarryingReply, number: int, payload: Source, deadline: float) -> None:
        """Send a model, and wait until the other side acknowledges it.

        Raises:
            PeerTimeoutError, PeerUnreachableError: as :meth:`Stream.send`; the model may have arrived all the same.
            ProtocolError: the other side sent something else than the acknowledgement.
        """
        self.stream.tune()
        if payload.view.nbytes and self.carrier is not None:
            self.send(frames.encode(reply, number, payload, self.checks, out_of_band=True), deadline)
            self._carry(self.carrier, payload.view, number, deadline)
        else:
            self._send_with(reply, number, payload, deadline)
        answer = self.receive(deadline)
        if not isinstance(answer.message, ModelAck) or answer.request != number:
            raise ProtocolError(f"it answered a model with {type(answer.message).__name__}")

    def _send_with(self, message: Message, number: int, payload: Source, deadline: float) -> None:
        """Send a message with its payload, in shared memory if both sides support it, else in the stream."""
        stream, descriptor = self.stream, payload.descriptor
        if payload.view.nbytes and descriptor is not None and isinstance(stream, SharesMemory):
            self.send(frames.encode(message, number, payload, self.checks, out_of_band=True), deadline)
            stream.send_descriptor(descriptor, deadline)
            self._owner.count(payload.view.nbytes, 0)
        elif self._owner.pace is not None:
            self._send_paced(frames.encode(message, number, payload, self.checks), self._owner.pace, deadline)
        else:
            self.send(frames.encode(message, number, payload, self.checks), deadline)

    def _carry(self, carrier: Carrier, view: memoryview, number: int, deadline: float) -> None:
        """Send a payload over the carrier, then its checksum over the connection."""
        check = hashlib.sha256() if isinstance(self.stream, Certified) else self.checks()

        def turn(part: memoryview) -> None:
            if self._owner.pace is not None:
                for piece in self._owner.pace.parts([part]):
                    self._wait_for_turn(self._owner.pace, len(piece), deadline)

        with self._watching(carrier):
            for part in carrier.send(view.cast("B"), deadline, turn):
                for start in range(0, len(part), PIECE):
                    check.update(part[start : start + PIECE])
                self._owner.count(len(part), 0)
        self.send(frames.encode(Carried(check.digest().hex()), number, checks=self.checks), deadline)

    def _take_carried(self, carrier: Carrier, sink: Sink, number: int, deadline: float) -> None:
        """Receive a payload over the carrier, as counterpart of :meth:`_carry`.

        TLS authenticates the connection but not the carrier, so the digest must then be collision-resistant (SHA-256).
        Without TLS the check of the frames is used.
        """
        check = hashlib.sha256() if isinstance(self.stream, Certified) else self._decoder.next_check()

        def parts() -> Iterator[memoryview]:
            for part in carrier.receive(sink.nbytes, deadline):
                self._owner.count(0, len(part))
                yield part

        with self._watching(carrier):
            gather(parts(), sink, check.update)
        last = self._receive(deadline, no_payload)
        if not isinstance(last.message, Carried) or last.request != number:
            raise ProtocolError(f"a payload was followed by {type(last.message).__name__}")
        if not hmac.compare_digest(last.message.digest, check.digest().hex()):
            raise CorruptedError("a payload that does not match its checksum")

    @contextlib.contextmanager
    def _watching(self, carrier: Carrier) -> Iterator[None]:
        """Abort the carrier if the connection ends: gloo does not always notice that the other side has closed."""
        finished = threading.Event()

        def watch() -> None:
            while not finished.wait(_POLL):
                if self.stream.hung_up():
                    carrier.abort()
                    return

        try:
            self._owner.spawn("watch", watch)
        except RuntimeError as error:
            raise LocalFaultError(
                f"no model can be sent over a process group to {self.stream.remote}: {error};"
                " allow more threads (ulimit -u)"
            ) from error
        try:
            yield
        finally:
            finished.set()

    def request_carrier(self, carriers: Carriers, number: int, deadline: float) -> None:
        """Build :attr:`carrier` together with the other side, which calls :meth:`build_carrier`.

        Raises:
            NoCarrierError: one side cannot build it; the connection is then unusable.
        """
        self.send(frames.encode(CarrierRequest(carriers.kind), number, checks=self.checks), deadline)
        self.build_carrier(carriers, True, number, deadline)

    def build_carrier(self, carriers: Carriers, receives: bool, number: int, deadline: float) -> None:
        """Build this side's end of :attr:`carrier`; errors as :meth:`request_carrier`."""
        notes = LinkStore(
            lambda message: self.send(frames.encode(message, number, checks=self.checks), deadline),
            lambda: self.receive(deadline).message,
        )
        try:
            self.carrier = carriers.build(receives, notes, self.stream.here, deadline)
        except NoCarrierError as error:
            self.refuse_carrier(str(error), number, deadline)
            raise
        notes.end()

    def refuse_carrier(self, reason: str, number: int, deadline: float) -> None:
        """Tell the other side that this side cannot build a carrier."""
        with contextlib.suppress(PeerFaultError):  # a side that has refused already may have closed
            self.send(frames.encode(NoCarrierReply(reason), number, checks=self.checks), deadline)

    def abort(self) -> None:
        """Close the connection and its carrier at once; may be called from any thread, any number of times."""
        self.stream.abort()
        if self.carrier is not None:
            self.carrier.abort()

    def receive(self, deadline: float, expect: Expect = no_payload) -> frames.Frame:
        """Receive the next frame; an infinite deadline becomes ``Owner.timeout`` after the frame's first byte.

        A request with a payload may take as long as its sender is willing to wait, if that is more.

        Raises:
            PeerTimeoutError, PeerUnreachableError: as :meth:`Stream.receive_into`.
            ProtocolError: the frame is invalid, or ``expect`` refused it.
        """
        try:
            return self._receive(deadline, expect)
        except CorruptedError:
            self._owner.count_corrupted()
            raise

    def _receive(self, deadline: float, expect: Expect) -> frames.Frame:
        self._decoder.expect = expect
        frame = None
        unbounded = deadline == math.inf
        while frame is None:
            if unbounded and self._decoder.in_payload and isinstance(self._decoder.current_message, CarryingRequest):
                unbounded = False
                deadline = time.monotonic() + max(self._owner.timeout, self._decoder.current_message.patience)
            buffer = self._decoder.next_buffer()
            if self._decoder.in_payload:
                count = self.stream.receive_into(buffer, deadline, self._observe)
            else:
                count = self.stream.receive_into(buffer, deadline)
                self._owner.count(0, count)
            self.heard = True
            if deadline == math.inf:
                deadline = time.monotonic() + self._owner.timeout
            frame = self._decoder.received(count)
        if frame.out_of_band and frame.payload is not None:
            if self.carrier is not None:
                self._take_carried(self.carrier, frame.payload, frame.request, deadline)
            else:
                self._take_out_of_band(frame.payload, deadline)
        return frame

    def _observe(self, part: memoryview) -> None:
        """Count a received part of a payload, and pass it on to the decoder."""
        self._owner.count(0, len(part))
        self._decoder.update_check(part)

    def _take_out_of_band(self, sink: Sink, deadline: float) -> None:
        """Read a payload from shared memory whose descriptor follows its frame."""
        if not isinstance(self.stream, SharesMemory):
            raise ProtocolError("it announced a payload in shared memory, but this connection cannot share memory")
        sink.take(0, self._memory.view(self.stream.receive_descriptor(deadline), sink.nbytes)[: sink.nbytes])
        self._owner.count(0, sink.nbytes)

    def request(
        self,
        message: Message,
        number: int,
        deadline: float,
        payload: Sink | SinkFactory | None = None,
        upload: Source | None = None,
    ) -> frames.Frame:
        """Send ``message`` with payload ``upload`` as request ``number``; return the reply.

        The reply's payload is stored in ``payload``.
        """
        if upload is None:
            self.send(frames.encode(message, number, checks=self.checks), deadline)
        else:
            self.stream.tune()
            self._send_with(message, number, upload, deadline)
        frame = self.receive(deadline, answer_to(message, number, payload))
        if isinstance(frame.message, CarryingReply):
            try:
                self.send(frames.encode(ModelAck(), number, checks=self.checks), deadline)
            finally:
                self.heard = True  # the payload was received, so the request must not be repeated
        return frame

    def secure(self, session: auth.Session) -> None:
        """Authenticate every frame from now on by a MAC of ``session``."""
        self.checks = session.sending
        self._decoder.use(session.receiving)
        self.opened = session.opened

    def admitted(self) -> None:
        """Allow larger messages, as the other side has finished the handshake."""
        self._decoder.max_metadata = MAX_METADATA

    def read_out(self, deadline: float) -> None:
        """Read and discard bytes until the other side closes, or until the deadline."""
        scrap = memoryview(bytearray(4096))
        with contextlib.suppress(PeerFaultError):
            while True:
                self._owner.count(0, self.stream.receive_into(scrap, deadline))
