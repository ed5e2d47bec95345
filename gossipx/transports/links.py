"""All connections of a peer, the idle ones among them, and the threads that use them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from gossipx.errors import PeerUnreachableError
from gossipx.transports import Stream
from gossipx.transports.link import Link
from gossipx.transports.pace import Pace

# Idle links kept per peer: one for a pull, and one for a message meanwhile.
_KEPT = 2


class Links:
    """All links of a peer, their byte counters, and the threads that use them; all end together.

    Args:
        name: name of this peer, for thread names.
        peers: number of peers; idle links that this peer opened are kept by rank.
        timeout: seconds allowed to receive a frame once it has begun, where the call sets no
            deadline.
        pace: rate limit shared by all models sent over a network; None: unlimited.

    Attributes:
        closed: set once no new links are accepted.
        sent, received: bytes on the wire.
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
        """Add to the byte counters."""
        with self._lock:
            self.sent += sent
            self.received += received

    def add(self, stream: Stream) -> Link:
        """Return a link over ``stream``; once closed, abort the stream and raise PeerUnreachableError."""
        link = Link(stream, self)
        with self._lock:
            if not self.closed.is_set():
                self._links.add(link)
                return link
        stream.abort()
        raise self.gone()

    def drop(self, link: Link) -> None:
        """Close a link."""
        link.abort()
        with self._lock:
            self._links.discard(link)

    @contextlib.contextmanager
    def dropped_on_failure(self, link: Link) -> Iterator[None]:
        """Close ``link`` if the block raises."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.drop, link)
            yield
            undo.pop_all()

    def keep(self, to: int, link: Link) -> None:
        """Keep an idle link to peer ``to`` for reuse, or close it if enough are idle."""
        with self._lock:
            if len(self._idle[to]) < _KEPT:
                self._idle[to].append(link)
                return
        self.drop(link)

    def take(self, to: int) -> Link | None:
        """Return an idle link to peer ``to`` which the peer has not closed, or None."""
        while True:
            with self._lock:
                if not self._idle[to]:
                    return None
                link = self._idle[to].pop()
            if link.stream.quiet():
                return link
            self.drop(link)

    def spawn(self, what: str, target: Callable[..., None], *given: object) -> None:
        """Start a daemon thread; RuntimeError if the system cannot start another one."""

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
        """Abort all links, and accept no new ones."""
        with self._lock:
            self.closed.set()
            links = list(self._links)
        for link in links:
            link.abort()

    def join(self, seconds: float) -> None:
        """Wait at most ``seconds`` in total for all threads but the caller's, then drop all links."""
        until = time.monotonic() + seconds
        with self._lock:
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        with self._lock:  # links refer back to this object: the cycle would keep mapped memory until a gc run
            self._links.clear()
            for idle in self._idle:
                idle.clear()

    def gone(self) -> PeerUnreachableError:
        """Return the error to raise after all connections have ended."""
        return PeerUnreachableError(f"{self._name} has ended its connections")
