"""Frames over a stream: one :class:`Link`, and all :class:`Links` of a peer."""

from __future__ import annotations

import math
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from gossipx.errors import ModelMismatchError, PeerFaultError, PeerUnreachableError, ProtocolError
from gossipx.memory import cannot_shrink
from gossipx.messages import ModelReply
from gossipx.transports import Stream
from gossipx.wire import (
    Bytes,
    DescribeRequest,
    Expect,
    Hello,
    Message,
    Refused,
    Sink,
    Source,
    Taken,
    Welcome,
    answer_to,
    difference,
    frames,
    no_payload,
    objection,
    pour,
)


class Link:
    """A stream that carries frames; for one thread at a time. Made by :class:`Links`.

    Attributes:
        heard: whether anything came since a frame was last sent.
        shares_memory: whether models go beside the stream, as memory that the other side maps.
    """

    def __init__(self, stream: Stream, links: Links, shares_memory: bool):
        self.stream = stream
        self.heard = False
        self.shares_memory = shares_memory
        self._mapped: dict[tuple[int, int], mmap.mmap] = {}  # memory of the other side, by its file
        self._links = links
        self._expect: Expect = no_payload
        self._decoder = frames.Decoder(lambda message, request: self._expect(message, request))

    def send(self, frame: Iterable[frames.Buffers], deadline: float) -> None:
        """Send what :func:`gossipx.wire.frames.encode` gave; errors as :meth:`Stream.send`."""
        self.heard = False
        for buffers in frame:
            self.stream.send(buffers, deadline)
            self._links.count(sum(map(len, buffers)), 0)

    def send_model(self, reply: ModelReply, number: int, payload: Source, deadline: float) -> None:
        """Send a model, and wait until the other side has it whole.

        Raises:
            PeerTimeoutError, PeerUnreachableError: as :meth:`Stream.send`; it may have arrived even so.
            ProtocolError: something else came than that it has.
        """
        view, descriptor = payload.view, payload.descriptor
        beside = self.shares_memory and descriptor is not None and view.nbytes > 0
        self.stream.tune()
        self.send(frames.encode(reply, number, view, beside), deadline)
        if beside and descriptor is not None:
            self.stream.send_descriptor(descriptor, deadline)
            self._links.count(view.nbytes, 0)
        answer = self.receive(deadline)
        if not isinstance(answer.message, Taken) or answer.request != number:
            raise ProtocolError(f"it answered a model by {type(answer.message).__name__}")

    def receive(self, deadline: float, expect: Expect = no_payload) -> frames.Frame:
        """The next frame; an infinite deadline ends ``Links.timeout`` after its first byte.

        Raises:
            PeerTimeoutError, PeerUnreachableError: as :meth:`Stream.receive_into`.
            ProtocolError: it is not allowed, or ``expect`` refused it.
        """
        self._expect = expect
        frame = None
        while frame is None:
            count = self.stream.receive_into(self._decoder.next_buffer(), deadline, self._decoder.in_payload)
            self._links.count(0, count)
            self.heard = True
            if deadline == math.inf:
                deadline = time.monotonic() + self._links.timeout
            frame = self._decoder.received(count)
        if frame.beside and frame.payload is not None:
            self._take_beside(frame.payload, deadline)
        return frame

    def _take_beside(self, sink: Sink, deadline: float) -> None:
        """Read a payload from the memory whose descriptor follows its frame."""
        if not self.shares_memory:
            raise ProtocolError("a payload that lies beside a connection which shares no memory")
        shared = memoryview(self._map(self.stream.receive_descriptor(deadline), sink.nbytes))
        pour(shared, sink)
        self._links.count(0, sink.nbytes)

    def _map(self, descriptor: int, nbytes: int) -> mmap.mmap:
        """The other side's memory, mapped once and kept while the link lives."""
        try:
            status = os.fstat(descriptor)
            place = status.st_dev, status.st_ino
            if place not in self._mapped:
                if not stat.S_ISREG(status.st_mode) or status.st_size < nbytes or not cannot_shrink(descriptor):
                    raise ProtocolError(f"a descriptor of no memory of {nbytes} bytes that stays as it is")
                if len(self._mapped) >= _MAPPED:
                    self._mapped.pop(next(iter(self._mapped)))
                # Private, so that nothing done here could reach the other side.
                self._mapped[place] = mmap.mmap(descriptor, status.st_size, flags=mmap.MAP_PRIVATE)
            elif len(self._mapped[place]) < nbytes:
                raise ProtocolError(f"memory of {len(self._mapped[place])} bytes for a payload of {nbytes}")
            return self._mapped[place]
        except (OSError, ValueError) as error:
            raise ProtocolError(f"memory that cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)

    def ask(self, message: Message, number: int, deadline: float, payload: Sink | None = None) -> frames.Frame:
        """Send ``message`` as request ``number``; its answer, a model's bytes in ``payload``."""
        self.send(frames.encode(message, number), deadline)
        frame = self.receive(deadline, answer_to(message, number, payload))
        if isinstance(frame.message, ModelReply):
            self.send(frames.encode(Taken(), number), deadline)
        return frame

    def greet(self, me: Hello, to: int, name: str, manifest: bytes, deadline: float) -> Welcome:
        """Open a connection: say who ``me`` is, and hear that peer ``to`` answers.

        Raises:
            ProtocolError: it refuses, or another peer answers.
            ModelMismatchError: its manifest differs from ours.
        """
        they = cast(Welcome, self.ask(me, 0, deadline).message)
        if (they.rank, they.name) != (to, name):
            raise ProtocolError(
                f"at {self.stream.remote} answers {they.name}, rank {they.rank}, not rank {to};"
                " start every peer with the same hosts file"
            )
        if they.model != me.model:
            described = self.ask(DescribeRequest(), 0, deadline).payload
            theirs = bytes(described.view) if isinstance(described, Bytes) else b""
            raise ModelMismatchError(
                f"the models of {me.name} and {name} differ:"
                f" {difference(manifest, theirs)};"
                " build the same model on every host"
            )
        return they

    def admit(self, me: Hello, names: Sequence[str], welcome: Welcome, deadline: float) -> Hello:
        """The other side of :meth:`greet`: hear who opened the connection, and welcome or refuse.

        Raises:
            ProtocolError: it is refused.
        """
        try:
            they = self.receive(deadline).message
        except frames.VersionError as error:
            raise self.refuse(str(error), deadline) from None
        if not isinstance(they, Hello):
            raise ProtocolError(f"it began with {type(they).__name__}, not Hello")
        reason = objection(me, they, names)
        if reason is not None:
            raise self.refuse(reason, deadline)
        self.send(frames.encode(welcome, 0), deadline)
        return they

    def refuse(self, reason: str, deadline: float) -> ProtocolError:
        """Say why the connection will be closed; the error to end it with."""
        self.send(frames.encode(Refused(reason), 0), deadline)
        # Closed while bytes of theirs are unread, TCP may take the reason back; so read them out.
        scrap = memoryview(bytearray(4096))
        try:
            while True:
                self._links.count(0, self.stream.receive_into(scrap, deadline))
        except PeerFaultError:
            return ProtocolError(reason)


# Blocks of another peer's memory that a link keeps mapped: as many as a peer has models in at a time.
_MAPPED = 4
# Idle links kept to another peer: a pull and a message beside it.
_KEPT = 2


class Links:
    """All links of a peer, their bytes, and the threads that use them: ended together.

    Args:
        name: of this peer, for its threads' names.
        peers: how many there are; links that it opened itself are kept by rank for later use.
        timeout: seconds within which a frame that has begun must be whole, where the call sets no
            deadline.

    Attributes:
        closed: set once no more links and threads can be had.
        sent, received: bytes of the whole wire.
    """

    def __init__(self, name: str, peers: int, timeout: float):
        self.timeout = timeout
        self.closed = threading.Event()
        self.sent = 0
        self.received = 0
        self._name = name
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._idle: list[list[Link]] = [[] for _ in range(peers)]
        self._threads: set[threading.Thread] = set()

    def count(self, sent: int, received: int) -> None:
        """Add bytes."""
        with self._lock:
            self.sent += sent
            self.received += received

    def add(self, stream: Stream, shares_memory: bool = False) -> Link:
        """A link over ``stream``, which is aborted with PeerUnreachableError once closed."""
        link = Link(stream, self, shares_memory)
        with self._lock:
            if not self.closed.is_set():
                self._links.add(link)
                return link
        stream.abort()
        raise self.gone()

    def drop(self, link: Link) -> None:
        """End a link."""
        link.stream.abort()
        with self._lock:
            self._links.discard(link)

    def keep(self, to: int, link: Link) -> None:
        """Keep a link to peer ``to`` for its next use, or end it if there are enough."""
        with self._lock:
            if len(self._idle[to]) < _KEPT:
                self._idle[to].append(link)
                return
        self.drop(link)

    def take(self, to: int) -> Link | None:
        """A kept link to peer ``to`` that the peer has not closed, if there is one."""
        while True:
            with self._lock:
                if not self._idle[to]:
                    return None
                link = self._idle[to].pop()
            if link.stream.quiet():
                return link
            self.drop(link)

    def spawn(self, what: str, target: Callable[..., None], *given: object) -> None:
        """Start a daemon thread; RuntimeError if the system has none left."""

        def run() -> None:
            try:
                target(*given)
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=f"gossipx-{what}-{self._name}", daemon=True)
        with self._lock:
            thread.start()
            self._threads.add(thread)

    def abort(self) -> None:
        """Abort all links; from now on there are no new ones."""
        with self._lock:
            self.closed.set()
            links = list(self._links)
        for link in links:
            link.stream.abort()

    def join(self, seconds: float) -> None:
        """Wait for all threads but the caller's, no longer than ``seconds`` altogether."""
        until = time.monotonic() + seconds
        with self._lock:
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def gone(self) -> PeerUnreachableError:
        """Why nothing can be sent any more."""
        return PeerUnreachableError(f"{self._name} has ended its connections")
