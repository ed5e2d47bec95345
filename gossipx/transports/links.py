"""The collection of all links of a peer, so that connections can be reused and end together.

A *link* (:class:`gossipx.transports.link.Link`) is one connection, which carries frames over a stream.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from gossipx.errors import PeerUnreachableError
from gossipx.transports import Stream
from gossipx.transports.link import Link
from gossipx.transports.pace import Pace

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

    Attributes:
        closed: set once no new links are accepted.
        sent, received: numbers of bytes on the wire, over all links.
        corrupted: received frames that did not match their checksums.
    """

    def __init__(self, name: str, peers: int, timeout: float, pace: Pace | None = None):
        self.timeout = timeout
        self.pace = pace
        self.closed = threading.Event()
        self.sent = 0
        self.received = 0
        self.corrupted = 0
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
            self.corrupted += 1

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
            thread.start()
            self._threads.add(thread)

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
            thread.join(max(0.0, until - time.monotonic()))
        with self._lock:  # links refer back to this object: the cycle would keep mapped memory until a gc run
            self._links.clear()
            for idle in self._idle:
                idle.clear()

    def closed_error(self) -> PeerUnreachableError:
        """Return the error to raise for a caller that needs a connection after :meth:`abort`."""
        return PeerUnreachableError(f"{self._name} has ended its connections")
