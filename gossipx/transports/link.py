"""Connections: frames and payloads over a stream, from the first frame to the last, and all of them that a peer has.

A *link* is one connection, which carries frames over a stream. A payload travels in one of three ways: inside the
stream, in shared memory whose descriptor follows the frame, or over a carrier (gloo, NCCL), a side channel that both
sides have built. The last two are called out of band. :class:`Links` keeps all links of a peer, so that connections can
be reused and end together.
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

from gossipx import errors, wire
from gossipx.figures import Counters
from gossipx.memory import PIECE, ByteObserver, Source
from gossipx.protocol.fields import MAX_METADATA, SMALL_METADATA
from gossipx.protocol.server_messages import CarryingReply, CarryingRequest
from gossipx.transports import Carrier, Carriers, Certified, SharesMemory, Stream
from gossipx.transports.pace import Pace
from gossipx.transports.shared_memory import LinkStore, PeerMemory
from gossipx.wire import auth, frames
from gossipx.wire.pieces import gather

# Seconds between two checks that the other side is still connected while a carrier transfers a payload.
_POLL = 0.5


class Link:
    """A stream that carries frames, for use by one thread at a time; made by :class:`Links`.

    Args:
        stream: the connection, ready to send and receive.
        owner: counts bytes, and limits rate and time.

    Attributes:
        heard: whether anything arrived since the last frame was sent.
        checks: checksums or MACs of sent frames, for :func:`gossipx.wire.frames.encode`.
        carrier: side channel for models, once built.
        opened: what the other side has proven to be; None without a secret.
    """

    def __init__(self, stream: Stream, owner: Links):
        self.stream = stream
        self.heard = False
        self.carrier: Carrier | None = None
        self._memory = PeerMemory()
        self.checks: frames.Checks = frames.Unchecked if isinstance(stream, Certified) else frames.CHECKSUMS
        self._owner = owner
        self._decoder = frames.Decoder(wire.no_payload, SMALL_METADATA)
        self._decoder.use(self.checks)
        self.opened: wire.Open | None = None

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
            raise errors.PeerTimeoutError(f"--max-rate leaves no room for a model to {self.stream.remote} in time")

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
        if not isinstance(answer.message, wire.ModelAck) or answer.request != number:
            raise errors.ProtocolError(f"it answered a model with {type(answer.message).__name__}")

    def _send_with(self, message: wire.Message, number: int, payload: Source, deadline: float) -> None:
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

        def before_part(part: memoryview) -> None:
            if self._owner.pace is not None:
                for piece in self._owner.pace.parts([part]):
                    self._wait_for_turn(self._owner.pace, len(piece), deadline)

        with self._watching(carrier):
            for part in carrier.send(view.cast("B"), deadline, before_part):
                for start in range(0, len(part), PIECE):
                    check.update(part[start : start + PIECE])
                self._owner.count(len(part), 0)
        self.send(frames.encode(wire.Carried(check.digest().hex()), number, checks=self.checks), deadline)

    def _take_carried(self, carrier: Carrier, sink: wire.Sink, number: int, deadline: float) -> None:
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
        last = self._receive(deadline, wire.no_payload)
        if not isinstance(last.message, wire.Carried) or last.request != number:
            raise errors.ProtocolError(f"a payload was followed by {type(last.message).__name__}")
        if not hmac.compare_digest(last.message.digest, check.digest().hex()):
            raise errors.CorruptedError("a payload that does not match its checksum")

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
            raise errors.LocalFaultError(
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
        self.send(frames.encode(wire.CarrierRequest(carriers.kind), number, checks=self.checks), deadline)
        self.build_carrier(carriers, True, number, deadline)

    def build_carrier(self, carriers: Carriers, receives: bool, number: int, deadline: float) -> None:
        """Build this side's end of :attr:`carrier`; errors as :meth:`request_carrier`."""
        notes = LinkStore(
            lambda message: self.send(frames.encode(message, number, checks=self.checks), deadline),
            lambda: self.receive(deadline).message,
        )
        try:
            self.carrier = carriers.build(receives, notes, self.stream.here, deadline)
        except errors.NoCarrierError as error:
            self.refuse_carrier(str(error), number, deadline)
            raise
        notes.end()

    def refuse_carrier(self, reason: str, number: int, deadline: float) -> None:
        """Tell the other side that this side cannot build a carrier."""
        with contextlib.suppress(errors.PeerFaultError):  # a side that has refused already may have closed
            self.send(frames.encode(wire.NoCarrierReply(reason), number, checks=self.checks), deadline)

    def abort(self) -> None:
        """Close the connection and its carrier at once; may be called from any thread, any number of times."""
        self.stream.abort()
        if self.carrier is not None:
            self.carrier.abort()

    def receive(self, deadline: float, expect: wire.Expect = wire.no_payload) -> frames.Frame:
        """Receive the next frame; an infinite deadline becomes ``Links.timeout`` after the frame's first byte.

        A request with a payload may take as long as its sender is willing to wait, if that is more.

        Raises:
            PeerTimeoutError, PeerUnreachableError: as :meth:`Stream.receive_into`.
            ProtocolError: the frame is invalid, or ``expect`` refused it.
        """
        try:
            return self._receive(deadline, expect)
        except errors.CorruptedError:
            self._owner.count_corrupted()
            raise

    def _receive(self, deadline: float, expect: wire.Expect) -> frames.Frame:
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

    def _take_out_of_band(self, sink: wire.Sink, deadline: float) -> None:
        """Read a payload from shared memory whose descriptor follows its frame."""
        if not isinstance(self.stream, SharesMemory):
            raise errors.ProtocolError(
                "it announced a payload in shared memory, but this connection cannot share memory"
            )
        sink.take(0, self._memory.view(self.stream.receive_descriptor(deadline), sink.nbytes)[: sink.nbytes])
        self._owner.count(0, sink.nbytes)

    def request(
        self,
        message: wire.Message,
        number: int,
        deadline: float,
        payload: wire.Sink | wire.SinkFactory | None = None,
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
        frame = self.receive(deadline, wire.answer_to(message, number, payload))
        if isinstance(frame.message, CarryingReply):
            try:
                self.send(frames.encode(wire.ModelAck(), number, checks=self.checks), deadline)
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
        with contextlib.suppress(errors.PeerFaultError):
            while True:
                self._owner.count(0, self.stream.receive_into(scrap, deadline))


# Idle links kept per remote peer: one for a pull, and one for messages while the pull is under way.
_MAX_IDLE = 2


class Links:
    """All links of a peer, those that it opened and those that it accepted, and the threads that use them.

    Links that this peer opened are kept for reuse while they are idle, by rank of the remote peer.

    Args:
        name: name of this peer, for thread names and messages.
        peers: number of peers in the run.
        timeout: seconds in which the rest of a frame must arrive once it has begun, if the caller sets no deadline.
        pace: rate limit shared by all models sent over a network; None: unlimited.
        counts: get the number of corrupted frames.

    Attributes:
        closed: set once no new links are accepted.
        sent, received: numbers of bytes on the wire, over all links.
    """

    def __init__(self, name: str, peers: int, timeout: float, pace: Pace | None = None, counts: Counters | None = None):
        self.timeout = timeout
        self.pace = pace
        self.closed = threading.Event()
        self.sent = 0
        self.received = 0
        self.counts = Counters() if counts is None else counts
        self._name = name
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._idle: list[list[Link]] = [[] for _ in range(peers)]
        self._threads: set[threading.Thread] = set()

    def count(self, sent: int, received: int) -> None:
        """Add to the byte counters."""
        with self._lock:
            self.sent += sent
            self.received += received

    def count_corrupted(self) -> None:
        """Count a frame that did not match its checksum."""
        with self._lock:
            self.counts.add("corrupted")

    def add(self, stream: Stream) -> Link:
        """Return a new link over ``stream``.

        Raises:
            PeerUnreachableError: no new links are accepted any more; the stream was aborted.
        """
        link = Link(stream, self)
        with self._lock:
            if not self.closed.is_set():
                self._links.add(link)
                return link
        stream.abort()
        raise self.closed_error()

    def renew(self, link: Link) -> Link:
        """Return a new link over the stream of ``link``, where another peer speaks from now on.

        Raises:
            PeerUnreachableError: as :meth:`add`.
        """
        with self._lock:
            self._links.discard(link)
        return self.add(link.stream)

    def drop(self, link: Link) -> None:
        """Close a link and remove it from the collection."""
        link.abort()
        with self._lock:
            self._links.discard(link)

    @contextlib.contextmanager
    def dropped_on_failure(self, link: Link) -> Iterator[None]:
        """Return a context that drops ``link`` if its block raises."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.drop, link)
            yield
            undo.pop_all()

    def release(self, to: int, link: Link) -> None:
        """Make a link to peer ``to`` available for reuse; drop it if enough links to that peer are idle."""
        with self._lock:
            while len(self._idle) <= to:  # it joined the run while it was in progress
                self._idle.append([])
            if len(self._idle[to]) < _MAX_IDLE:
                self._idle[to].append(link)
                return
        self.drop(link)

    def acquire(self, to: int) -> Link | None:
        """Return an idle link to peer ``to``, for the caller's use until :meth:`release`; None: no link is idle.

        Links that the peer has closed, or on which it has sent something unexpectedly, are dropped.
        """
        while True:
            with self._lock:
                if to >= len(self._idle) or not self._idle[to]:
                    return None
                link = self._idle[to].pop()
            if link.stream.quiet():
                return link
            self.drop(link)

    def forget(self, to: int) -> None:
        """Drop the idle links to peer ``to``."""
        with self._lock:
            idle, self._idle[to : to + 1] = self._idle[to : to + 1], [[]] if to < len(self._idle) else []
        for link in (one for links in idle for one in links):
            self.drop(link)

    def spawn(self, what: str, target: Callable[..., None], *given: object) -> None:
        """Start a daemon thread that runs ``target(*given)``; :meth:`join` waits for it.

        Hold no lock meanwhile that the end of this peer needs: CPython waits until the thread runs, for ever if that
        has no memory to begin.

        Args:
            what: purpose of the thread, for its name.

        Raises:
            RuntimeError: the system cannot start another thread.
        """

        def run() -> None:
            try:
                target(*given)
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=f"gossipx-{what}-{self._name}", daemon=True)
        with self._lock:
            self._threads.add(thread)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            with self._lock:
                self._threads.discard(thread)
            raise RuntimeError(str(error) or "not enough memory") from error

    @property
    def threads(self) -> int:
        """Number of threads that :meth:`spawn` has started and that have not ended."""
        with self._lock:
            return len(self._threads)

    def abort(self) -> None:
        """Close all links at once, and accept no new ones. Threads that use them get errors and end."""
        with self._lock:
            self.closed.set()
            links = list(self._links)
        for link in links:
            link.abort()

    def join(self, seconds: float) -> None:
        """Wait at most ``seconds`` in total for all threads but the caller's, then forget all links.

        Call this after :meth:`abort`, which makes the threads end.
        """
        until = time.monotonic() + seconds
        with self._lock:
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            with contextlib.suppress(RuntimeError):  # it has not begun
                thread.join(max(0.0, until - time.monotonic()))
        with self._lock:  # links refer back to this object: the cycle would keep mapped memory until a gc run
            self._links.clear()
            for idle in self._idle:
                idle.clear()

    def closed_error(self) -> errors.PeerUnreachableError:
        """Return the error to raise for a caller that needs a connection after :meth:`abort`."""
        return errors.PeerUnreachableError(f"{self._name} has ended its connections")
