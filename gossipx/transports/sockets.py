"""Streams and listeners over connected and listening sockets of any address family.

Where a socket timeout (SO_SNDTIMEO, SO_RCVTIMEO) covers a whole system call, calls block in the kernel, and the timeout
is set to the remaining time every few milliseconds. A model then moves in large parts, without the interpreter's lock.
Elsewhere the timeout restarts whenever some bytes move; there calls do not block, and waiting is done in poll. Either
way one deadline covers a whole transfer, in each direction separately.
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

from gossipx.errors import ConnectionClosedError, GossipxError, PeerTimeoutError, PeerUnreachableError
from gossipx.memory import OBSERVED_PIECE, ByteObserver
from gossipx.transports import Address

# Buffers per sendmsg call; the kernel accepts at most 1,024.
_VECTORS = 64
# Length of the accept queue: more than a burst of all peers of a run of 100.
BACKLOG = 256
# The poll event for "the remote side sends no more". POLLERR and POLLHUP are always reported.
_HANG_UP = getattr(select, "POLLRDHUP", 0)
# Seconds for which a socket timeout is not refreshed: a call may exceed its deadline by this much.
_UNTIMED = 0.01
# Upper limit of a single wait, in seconds; callers wait again.
_LONGEST = 3600.0
# Seconds without progress after which a sender looks whether the remote side has ended. That side's kernel need not
# tell: if its buffer was full when it closed, its window stays closed, and what cannot be sent is not reset.
_STALLED = 5.0


class SocketStream:
    """A connected socket as a :class:`gossipx.transports.Stream`.

    Args:
        connected: the socket; the stream takes ownership.
        remote: the remote address, for messages.
        sends_whole: whether a send timeout covers a whole system call.
    """

    def __init__(self, connected: socket.socket, remote: str, sends_whole: bool):
        connected.setblocking(True)
        self._sending = _Direction(socket.SO_SNDTIMEO, select.POLLOUT, sends_whole, _STALLED)
        self._receiving = _Direction(socket.SO_RCVTIMEO, select.POLLIN, sys.platform == "linux", _LONGEST)
        self._socket = connected
        self._remote = remote
        self._lock = threading.Lock()
        self._users = 0
        self._aborted = False

    @property
    def remote(self) -> str:
        """The remote address."""
        return self._remote

    @property
    def here(self) -> str:
        """The local address; empty if the stream has no local address."""
        with self._use():
            own = self._socket.getsockname()
        return str(own[0]) if isinstance(own, tuple) else ""

    def send(self, buffers: Sequence[bytes | memoryview], deadline: float, observe: ByteObserver | None = None) -> None:
        """Pass all bytes to the kernel; see :class:`gossipx.transports.Stream`."""
        left = [view for view in (memoryview(item).cast("B") for item in buffers) if view.nbytes]
        with self._use():
            while left:
                sent = self._attempt(lambda flags: self._hand_over(left, flags, observe), self._sending, deadline)
                while left and sent >= left[0].nbytes:
                    sent -= left.pop(0).nbytes
                if sent:
                    left[0] = left[0][sent:]

    def _hand_over(self, buffers: list[memoryview], flags: int, observe: ByteObserver | None) -> int:
        """Send some of the bytes; return how many.

        A large buffer is sent in parts: after a single call for all of it, the bytes would have left the processor's
        cache before the receiver reads them.
        """
        small = list(itertools.takewhile(lambda buffer: len(buffer) <= OBSERVED_PIECE, buffers[:_VECTORS]))
        if small and observe is None:
            return self._socket.sendmsg(small, [], flags)
        # ``observe`` runs after sending, so that it overlaps with the receiver's own work.
        return _by_parts(buffers[0], lambda part: self._socket.send(part, flags), observe)

    def receive_into(self, view: memoryview, deadline: float, observe: ByteObserver | None = None) -> int:
        """Receive; see :class:`gossipx.transports.Stream`."""
        with self._use():
            start = self._receive(view, deadline, observe)
            while observe is not None and start < len(view):
                start += self._receive(view[start:], deadline, observe)
            return start

    def _receive(self, view: memoryview, deadline: float, observe: ByteObserver | None) -> int:
        count = self._attempt(lambda flags: self._take_in(view, flags, observe), self._receiving, deadline)
        if not count:
            raise ConnectionClosedError(f"{self._remote} closed the connection")
        return count

    def _take_in(self, view: memoryview, flags: int, observe: ByteObserver | None) -> int:
        """Receive some bytes, all of ``view`` with ``observe``; return how many, 0 at the end of the stream."""
        if observe is None:
            return self._socket.recv_into(view, 0, flags)
        return _by_parts(view, lambda part: self._socket.recv_into(part, 0, flags | socket.MSG_WAITALL), observe)

    def tune(self) -> None:
        """Do nothing: there is nothing to tune."""

    def quiet(self) -> bool:
        """Return whether nothing is unread, not even the end of the stream."""
        try:
            with self._use():
                self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except (OSError, PeerUnreachableError):
            return False
        return False

    def hung_up(self) -> bool:
        """Return whether the remote side has closed; without POLLRDHUP only once all bytes have been read."""
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
        """Close both directions at once."""
        with self._lock:
            self._aborted = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            # Closing the descriptor while another thread still uses it is unsafe: by the time of its
            # system call the number may belong to another connection. The last user closes it instead.
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

    def _attempt(self, call: Callable[[int], _Result], direction: _Direction, deadline: float) -> _Result:
        """Repeat ``call``, which takes the flags to use, until it makes progress; return its result."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerTimeoutError(f"{self._remote} did not keep up with the deadline")
            try:
                if direction.whole:
                    self._socket.setsockopt(socket.SOL_SOCKET, direction.limit, _timeval(min(left, direction.wait)))
                return call(0 if direction.whole else socket.MSG_DONTWAIT)
            except BlockingIOError:
                until = time.monotonic() + min(left, direction.wait)
                if not direction.whole and wait(self._socket, direction.event, until):
                    continue
                if direction is self._sending and self.hung_up():
                    raise ConnectionClosedError(f"{self._remote} closed the connection") from None
            except OSError as error:
                if self._aborted:
                    raise PeerUnreachableError(f"the connection to {self._remote} was closed here") from error
                raise PeerUnreachableError(f"lost the connection to {self._remote}: {reason(error)}") from error


def _by_parts(view: memoryview, move: Callable[[memoryview], int], observe: ByteObserver | None) -> int:
    """Send or receive parts for at most :data:`_UNTIMED` seconds; return how many bytes, 0 at the end of the stream.

    Each part costs two system calls, so the loop around them does as little as possible.
    """
    start, until = 0, time.monotonic() + _UNTIMED
    while True:
        part = view[start : start + OBSERVED_PIECE]
        try:
            count = move(part)
        except BlockingIOError:
            if not start:
                raise
            return start
        if observe is not None:
            observe(part[:count])
        start += count
        if count < len(part) or start == len(view) or time.monotonic() > until:
            return start


@dataclass(frozen=True)
class _Direction:
    """Sending or receiving.

    Attributes:
        limit: its timeout option.
        event: its poll event.
        whole: whether the timeout covers a whole call.
        wait: seconds of a single wait at most.
    """

    limit: int
    event: int
    whole: bool
    wait: float


_Result = TypeVar("_Result")


def _timeval(seconds: float) -> bytes:
    """Encode a timeout as struct timeval; never zero, which means no limit."""
    microseconds = max(1, math.ceil(seconds * 1e6))
    return struct.pack("@ll", *divmod(microseconds, 1_000_000))


_Stream = TypeVar("_Stream", bound=SocketStream)


class SocketListener(Generic[_Stream]):
    """A listening socket as a :class:`gossipx.transports.Listener`.

    Args:
        listening: the socket; the listener takes ownership.
        address: the address it listens at.
        stream: makes a stream from an accepted socket and its remote address.
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
        """The address listened at."""
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
                    pass  # the connection ended before it was accepted: wait for the next one
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


def wait(waiting: socket.socket, event: int, deadline: float) -> bool:
    """Wait for ``event``, an error or the deadline; return whether it was one of the first two."""
    poll = select.poll()
    poll.register(waiting, event)
    left = deadline - time.monotonic()
    # poll takes 32-bit milliseconds; callers wait again.
    return bool(poll.poll(math.ceil(1000 * min(max(left, 0.0), _LONGEST))))


def reason(error: OSError) -> str:
    """Return the system's description of an error."""
    return error.strerror or str(error)


def advice(error: OSError) -> str:
    """Return why an address cannot be listened at, and what to do."""
    if error.errno == errno.EADDRINUSE:
        return "the port is in use; stop the process that listens there, or choose another port"
    if error.errno == errno.EADDRNOTAVAIL:
        return "this machine does not have that address; bind to one of its own"
    if error.errno == errno.EACCES:
        return "not allowed; choose a port from 1024 on"
    return reason(error)
