"""Connected and listening sockets of any family, as streams and listeners.

Where a socket's own time-out holds for a whole call, calls block in the kernel, and what is left to the deadline is set
now and then: a model then moves in calls of a part each, in which no lock of the interpreter is held. Elsewhere, where
such a time-out begins anew with each part, calls do not block but in poll. Either way one deadline holds for a whole
transfer, for each direction on its own.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from gossipx.errors import GossipxError, PeerTimeoutError, PeerUnreachableError
from gossipx.memory import HOT, ByteObserver
from gossipx.transports import Address

# Buffers given to the kernel at once; it takes 1,024 at most.
_VECTORS = 64
# Connections that wait to be accepted: more than a burst of all peers of a run of 100.
BACKLOG = 256
# In poll, that the other side sends no more; an error, or that neither does, is told unasked.
_HANG_UP = getattr(select, "POLLRDHUP", 0)
# Seconds for which a socket's time-out stays as it was set: by as much a call may end past its deadline.
_UNTIMED = 0.01
# A socket's time-out is at most this many seconds; callers come back.
_LONGEST = 3600.0


class SocketStream:
    """A connected socket as a :class:`gossipx.transports.Stream`.

    Args:
        connected: taken over.
        remote: the other side, for messages.
        sends_whole: whether a time-out for sending holds for a whole call.
    """

    def __init__(self, connected: socket.socket, remote: str, sends_whole: bool):
        connected.setblocking(True)
        self._sending = _Direction(socket.SO_SNDTIMEO, select.POLLOUT, sends_whole)
        self._receiving = _Direction(socket.SO_RCVTIMEO, select.POLLIN, sys.platform == "linux")
        self._socket = connected
        self._remote = remote
        self._lock = threading.Lock()
        self._users = 0
        self._aborted = False

    @property
    def remote(self) -> str:
        """The other side's address."""
        return self._remote

    @property
    def here(self) -> str:
        """This machine's address on it; empty where it has none."""
        with self._use():
            own = self._socket.getsockname()
        return str(own[0]) if isinstance(own, tuple) else ""

    def send(self, buffers: Sequence[bytes | memoryview], deadline: float, look: ByteObserver | None = None) -> None:
        """Hand over all bytes to the kernel; see :class:`gossipx.transports.Stream`."""
        left = [view for view in (memoryview(item).cast("B") for item in buffers) if view.nbytes]
        with self._use():
            while left:
                sent = self._attempt(lambda flags: self._hand_over(left, flags, look), self._sending, deadline)
                while left and sent >= left[0].nbytes:
                    sent -= left.pop(0).nbytes
                if sent:
                    left[0] = left[0][sent:]

    def _hand_over(self, buffers: list[memoryview], flags: int, look: ByteObserver | None) -> int:
        """Send some of the bytes; how many. Large buffers go by parts: what a call for all of them sends has left the
        cache when the other side comes to it.
        """
        small = list(itertools.takewhile(lambda buffer: len(buffer) <= HOT, buffers[:_VECTORS]))
        if small and look is None:
            return self._socket.sendmsg(small, [], flags)
        # Looked at after it was sent: what the other side does with it takes as long.
        return _by_parts(buffers[0], lambda part: self._socket.send(part, flags), look)

    def receive_into(self, view: memoryview, deadline: float, look: ByteObserver | None = None) -> int:
        """Receive; see :class:`gossipx.transports.Stream`."""
        with self._use():
            start = self._receive(view, deadline, look)
            while look is not None and start < len(view):
                start += self._receive(view[start:], deadline, look)
            return start

    def _receive(self, view: memoryview, deadline: float, look: ByteObserver | None) -> int:
        count = self._attempt(lambda flags: self._take_in(view, flags, look), self._receiving, deadline)
        if not count:
            raise PeerUnreachableError(f"{self._remote} closed the connection")
        return count

    def _take_in(self, view: memoryview, flags: int, look: ByteObserver | None) -> int:
        """Receive some bytes, as many as ``view`` takes if they are looked at; how many, 0 at the end."""
        if look is None:
            return self._socket.recv_into(view, 0, flags)
        return _by_parts(view, lambda part: self._socket.recv_into(part, 0, flags | socket.MSG_WAITALL), look)

    def tune(self) -> None:
        """Nothing to tune."""

    def quiet(self) -> bool:
        """Whether nothing has come that is still unread, not even the end."""
        try:
            with self._use():
                self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except (OSError, PeerUnreachableError):
            return False
        return False

    def hung_up(self) -> bool:
        """Whether the other side has closed; where the system does not tell so before all was read, not before."""
        poll = select.poll()
        try:
            with self._use():
                poll.register(self._socket, _HANG_UP)
                return bool(poll.poll(0)) or not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except (OSError, PeerUnreachableError):
            return True

    def abort(self) -> None:
        """End both ways at once."""
        with self._lock:
            self._aborted = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            # Closed under a thread that still uses it, the descriptor could already be another
            # connection's when that thread comes to its system call; the last user closes then.
            if not self._users:
                self._socket.close()

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        with self._lock:
            if self._aborted:
                raise PeerUnreachableError(f"the connection to {self._remote} was closed here")
            self._users += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._aborted and not self._users:
                self._socket.close()

    def _attempt(self, call: Callable[[int], _Given], way: _Direction, deadline: float) -> _Given:
        """``call``, given flags, until it gets somewhere."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerTimeoutError(f"{self._remote} did not keep up with the deadline")
            try:
                if way.whole:
                    self._socket.setsockopt(socket.SOL_SOCKET, way.limit, _timeval(min(left, _LONGEST)))
                return call(0 if way.whole else socket.MSG_DONTWAIT)
            except BlockingIOError:
                if not way.whole:
                    wait(self._socket, way.event, deadline)
            except OSError as error:
                if self._aborted:
                    raise PeerUnreachableError(f"the connection to {self._remote} was closed here") from error
                raise PeerUnreachableError(f"lost the connection to {self._remote}: {reason(error)}") from error


def _by_parts(view: memoryview, move: Callable[[memoryview], int], look: ByteObserver | None) -> int:
    """Send or receive without a look at the clock for as long as that is allowed; how many bytes, 0 at the end.

    Each part costs what two calls of the system cost, and hardly more: around it, nothing is to be done.
    """
    start, until = 0, time.monotonic() + _UNTIMED
    while True:
        part = view[start : start + HOT]
        try:
            count = move(part)
        except BlockingIOError:
            if not start:
                raise
            return start
        if look is not None:
            look(part[:count])
        start += count
        if count < len(part) or start == len(view) or time.monotonic() > until:
            return start


@dataclass(frozen=True)
class _Direction:
    """Sending, or receiving: its time-out, its event in poll, and whether the time-out holds for a whole call."""

    limit: int
    event: int
    whole: bool


_Given = TypeVar("_Given")


def _timeval(seconds: float) -> bytes:
    """As the kernel takes it; never zero, which means no limit."""
    microseconds = max(1, math.ceil(seconds * 1e6))
    return struct.pack("@ll", *divmod(microseconds, 1_000_000))


_Stream = TypeVar("_Stream", bound=SocketStream)


class SocketListener(Generic[_Stream]):
    """A listening socket as a :class:`gossipx.transports.Listener`.

    Args:
        listening: taken over.
        address: where it listens.
        stream: makes a stream of what was accepted: the socket, and whatever the family calls its other end.
    """

    def __init__(self, listening: socket.socket, address: Address, stream: Callable[[socket.socket, object], _Stream]):
        listening.setblocking(False)
        self._socket = listening
        self._address = address
        self._stream = stream
        self._closed = False
        self._accepting = threading.Lock()

    @property
    def address(self) -> Address:
        """Where it listens."""
        return self._address

    def accept(self) -> _Stream:
        """Wait for the next connection; one thread at a time."""
        with self._accepting:
            while True:
                if self._closed:
                    self._socket.close()
                    raise GossipxError(f"no longer listening at {self._address}")
                try:
                    return self._stream(*self._socket.accept())
                except BlockingIOError:
                    wait(self._socket, select.POLLIN, math.inf)
                except ConnectionError:
                    pass  # gone before it was accepted: the next one, please
                except OSError as error:
                    if not self._closed:
                        raise GossipxError(f"cannot accept connections at {self._address}: {reason(error)}") from error

    def close(self) -> None:
        """Stop listening; wakes a blocked accept, which then closes the socket."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._accepting.acquire(blocking=False):
            self._socket.close()
            self._accepting.release()


def wait(waiting: socket.socket, event: int, deadline: float) -> None:
    """Until ``event``, an error or the deadline; which of them, the next call on it tells."""
    poll = select.poll()
    poll.register(waiting, event)
    left = deadline - time.monotonic()
    # poll counts in 32-bit milliseconds; callers come back.
    poll.poll(math.ceil(1000 * min(max(left, 0.0), _LONGEST)))


def reason(error: OSError) -> str:
    """What the system says of it."""
    return error.strerror or str(error)


def advice(error: OSError) -> str:
    """What it says of an address that cannot be listened at, and what to do."""
    if error.errno == errno.EADDRINUSE:
        return "the port is in use; stop what listens there, or choose another port"
    if error.errno == errno.EADDRNOTAVAIL:
        return "this machine has no such address; choose one of its own to bind to"
    if error.errno == errno.EACCES:
        return "not allowed; choose a port from 1024 on"
    return reason(error)
