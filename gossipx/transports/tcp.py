"""Streams over TCP sockets. This module is a :class:`gossipx.transports.Transport`.

Sockets never block in the kernel's calls but in poll, whose time-out is what is left to the
caller's deadline: so one deadline holds for a whole transfer, for each direction on its own.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from gossipx.errors import GossipxError, LocalFaultError, PeerTimeoutError, PeerUnreachableError
from gossipx.transports import Address

__all__ = ["Address", "TcpListener", "TcpStream", "connect", "listen"]

# Bytes taken from the kernel at once: as many as its receive buffer holds at most by default.
_PIECE = 4 * 2**20
# Buffers given to the kernel at once; it takes 1,024 at most.
_VECTORS = 64
# Connections that wait to be accepted: more than a burst of all peers of a run of 100.
_BACKLOG = 256
# An idle connection to a machine that vanished ends after 30 + 3 · 10 seconds.
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
# What this process lacks, whatever the other side does.
_LACKING = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_NO_LOOK_UP = {socket.EAI_AGAIN, socket.EAI_MEMORY, socket.EAI_SYSTEM}

_Found = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[object, ...]]


class TcpStream:
    """A connected socket as a :class:`gossipx.transports.Stream`."""

    def __init__(self, connected: socket.socket, remote: Address):
        connected.setblocking(False)
        # A request is one small write, answered by one: waiting to fill a packet only adds delay.
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            if hasattr(socket, option):  # macOS names the first one differently, and its default will do
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._socket = connected
        self._remote = str(remote)
        self._lock = threading.Lock()
        self._users = 0
        self._aborted = False

    @property
    def remote(self) -> str:
        """The other side's host:port."""
        return self._remote

    def send(self, buffers: Sequence[bytes | memoryview], deadline: float) -> None:
        """Hand over all bytes to the kernel; see :class:`gossipx.transports.Stream`."""
        left = [view for view in (memoryview(item).cast("B") for item in buffers) if view.nbytes]
        with self._use():
            while left:
                sent = self._attempt(lambda: self._socket.sendmsg(left[:_VECTORS]), select.POLLOUT, deadline)
                while left and sent >= left[0].nbytes:
                    sent -= left.pop(0).nbytes
                if sent:
                    left[0] = left[0][sent:]

    def receive_into(self, view: memoryview, deadline: float) -> int:
        """Receive at least one byte; see :class:`gossipx.transports.Stream`."""
        piece = view[:_PIECE]
        with self._use():
            count = self._attempt(lambda: self._socket.recv_into(piece), select.POLLIN, deadline)
            if not count:
                raise PeerUnreachableError(f"{self._remote} closed the connection")
            return count

    def quiet(self) -> bool:
        """Whether nothing has come that is still unread, not even the end."""
        try:
            with self._use():
                self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except (OSError, PeerUnreachableError):
            return False
        return False

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

    def _attempt(self, call: Callable[[], int], event: int, deadline: float) -> int:
        """``call``, which does not block, until it gets somewhere."""
        while True:
            if time.monotonic() >= deadline:
                raise PeerTimeoutError(f"{self._remote} did not keep up with the deadline")
            try:
                return call()
            except BlockingIOError:
                _wait(self._socket, event, deadline)
            except OSError as error:
                raise PeerUnreachableError(f"lost the connection to {self._remote}: {_reason(error)}") from error


class TcpListener:
    """A listening socket as a :class:`gossipx.transports.Listener`."""

    def __init__(self, listening: socket.socket):
        host, port = listening.getsockname()[:2]
        self._socket = listening
        self._address = Address(host, port)
        self._closed = False
        self._accepting = threading.Lock()

    @property
    def address(self) -> Address:
        """Numeric host and port."""
        return self._address

    def accept(self) -> TcpStream:
        """Wait for the next connection; one thread at a time."""
        with self._accepting:
            while True:
                if self._closed:
                    self._socket.close()
                    raise GossipxError(f"no longer listening at {self._address}")
                try:
                    connected, remote = self._socket.accept()
                    return TcpStream(connected, Address(*remote[:2]))
                except BlockingIOError:
                    _wait(self._socket, select.POLLIN, math.inf)
                except ConnectionError:
                    pass  # gone before it was accepted: the next one, please
                except OSError as error:
                    if not self._closed:
                        raise GossipxError(f"cannot accept connections at {self._address}: {_reason(error)}") from error

    def close(self) -> None:
        """Stop listening; wakes a blocked accept, which then closes the socket."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._accepting.acquire(blocking=False):
            self._socket.close()
            self._accepting.release()


def listen(address: Address) -> TcpListener:
    """Listen at ``address``; SO_REUSEADDR, so that a peer can restart at once.

    Raises:
        GossipxError: the port is in use or not allowed, or the host is not this machine.
    """
    try:
        found = socket.getaddrinfo(address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, place = found[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise GossipxError(f"cannot listen at {address}: {_reason(error)}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen(_BACKLOG)
        listening.setblocking(False)
        return TcpListener(listening)
    except OSError as error:
        listening.close()
        raise GossipxError(f"cannot listen at {address}: {_advice(error)}") from error


def connect(address: Address, deadline: float) -> TcpStream:
    """Connect to ``address``, trying each address that its name stands for.

    Raises:
        PeerUnreachableError: the name does not resolve, or nothing listens there.
        PeerTimeoutError: no answer by the deadline.
        LocalFaultError: this machine has no file descriptor left, or cannot look names up.
    """
    failure: OSError | None = None
    for family, kind, protocol, _, place in _resolve(address, deadline):
        try:
            connecting = socket.socket(family, kind, protocol)
        except OSError as error:
            if error.errno in _LACKING:
                raise LocalFaultError(f"cannot connect to {address}: {_reason(error)}") from error
            failure = error
            continue
        try:
            _connect(connecting, place, address, deadline)
            return TcpStream(connecting, address)
        except OSError as error:
            connecting.close()
            failure = error
        except BaseException:
            connecting.close()
            raise
    reason = "no address" if failure is None else _reason(failure)
    raise PeerUnreachableError(f"cannot connect to {address}: {reason}") from failure


def _connect(connecting: socket.socket, place: tuple[object, ...], address: Address, deadline: float) -> None:
    connecting.setblocking(False)
    code = connecting.connect_ex(place)
    if code == errno.EINPROGRESS:
        _wait(connecting, select.POLLOUT, deadline)
        code = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not code and time.monotonic() >= deadline:
            raise PeerTimeoutError(f"{address} did not answer within the deadline")
    if code:
        raise OSError(code, os.strerror(code))
    # Where nobody listens on a local port, the system may pick that port for our own end and
    # connect the socket to itself.
    if connecting.getsockname() == connecting.getpeername():
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def _resolve(address: Address, deadline: float) -> Sequence[_Found]:
    """Addresses of a host. The system's look-up knows no deadline, so that a thread waits for it."""

    def look_up(flags: int) -> Sequence[_Found]:
        return socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)

    def into(answer: queue.SimpleQueue[Sequence[_Found] | OSError]) -> None:
        try:
            answer.put(look_up(0))
        except OSError as error:
            answer.put(error)

    with contextlib.suppress(OSError):
        return look_up(socket.AI_NUMERICHOST)
    answer: queue.SimpleQueue[Sequence[_Found] | OSError] = queue.SimpleQueue()
    threading.Thread(target=into, args=(answer,), name="gossipx-resolve", daemon=True).start()
    try:
        found = answer.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise PeerTimeoutError(f"no address was found for {address} in time") from None
    if isinstance(found, socket.gaierror) and found.errno in _NO_LOOK_UP:
        raise LocalFaultError(f"no address can be looked up for {address} now: {_reason(found)}")
    if isinstance(found, OSError):
        raise PeerUnreachableError(f"no address is known for {address}: {_reason(found)}")
    return found


def _wait(waiting: socket.socket, event: int, deadline: float) -> None:
    """Until ``event``, an error or the deadline; which of them, the next call on it tells."""
    poll = select.poll()
    poll.register(waiting, event)
    left = deadline - time.monotonic()
    # An hour at most, as poll counts in 32-bit milliseconds; callers come back.
    poll.poll(math.ceil(1000 * min(max(left, 0.0), 3600.0)))


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _advice(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use; stop what listens there, or choose another port"
    if error.errno == errno.EADDRNOTAVAIL:
        return "this machine has no such address; choose one of its own to bind to"
    if error.errno == errno.EACCES:
        return "not allowed; choose a port from 1024 on"
    return _reason(error)
