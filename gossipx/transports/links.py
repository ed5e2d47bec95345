"""All connections of a peer, and the threads that use them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from gossipx.errors import PeerUnreachableError
from gossipx.transports import Stream
from gossipx.transports.link import Link
from gossipx.transports.pace import Pace

# Idle links kept to another peer: a pull and a message beside it.
_KEPT = 2


class Links:
    """All links of a peer, their bytes, and the threads that use them: ended together.

    Args:
        name: of this peer, for its threads' names.
        peers: how many there are; links that it opened itself are kept by rank for later use.
        timeout: seconds within which a frame that has begun must be whole, where the call sets no
            deadline.
        pace: of the models that are sent over a network, all together; None: as fast as it goes.

    Attributes:
        closed: set once no more links and threads can be had.
        sent, received: bytes of the whole wire.
    """

    def __init__(self, name: str, peers: int, timeout: float, pace: Pace | None = None):
        self.timeout = timeout
        self.pace = pace
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

    def add(self, stream: Stream) -> Link:
        """A link over ``stream``, which is aborted with PeerUnreachableError once closed."""
        link = Link(stream, self)
        with self._lock:
            if not self.closed.is_set():
                self._links.add(link)
                return link
        stream.abort()
        raise self.gone()

    def drop(self, link: Link) -> None:
        """End a link."""
        link.abort()
        with self._lock:
            self._links.discard(link)

    @contextlib.contextmanager
    def dropped_on_failure(self, link: Link) -> Iterator[None]:
        """End ``link`` if what is done with it raises."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.drop, link)
            yield
            undo.pop_all()

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
            link.abort()

    def join(self, seconds: float) -> None:
        """Wait for all threads but the caller's, no longer than ``seconds`` altogether, and let go of all links."""
        until = time.monotonic() + seconds
        with self._lock:
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        with self._lock:  # they refer to us: they would stay, with the memory that they have mapped, until a gc run
            self._links.clear()
            for idle in self._idle:
                idle.clear()

    def gone(self) -> PeerUnreachableError:
        """Why nothing can be sent any more."""
        return PeerUnreachableError(f"{self._name} has ended its connections")
