"""The TCP transport. This module is a :class:`gossipx.transports.Transport`."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from gossipx.errors import GossipxError, LocalFaultError, PeerTimeoutError, PeerUnreachableError
from gossipx.transports import Address
from gossipx.transports.sockets import BACKLOG, SocketListener, SocketStream, advice, reason, wait

__all__ = ["Address", "TcpStream", "connect", "listen"]

# An idle connection to a machine that has vanished ends after 30 + 3 · 10 seconds.
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
# Errors of this machine's resources, whatever the remote side does.
_LACKING = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_NO_LOOK_UP = {socket.EAI_AGAIN, socket.EAI_MEMORY, socket.EAI_SYSTEM}

# Congestion control, by preference. Without loss, the loss-based algorithms reach twice the rate of bbr (the default of
# many systems) on loopback and a LAN; with 50 ms and 1 % loss, bbr reaches 25 times their rate. A connection that began
# with bbr keeps the kernel's pacing for good, which sometimes halves its rate: so all begin with the first.
_SHORT = ("cubic", "reno")
_LONG = ("bbr", "cubic")
# Microseconds: longer than a round trip within a building, shorter than one between cities.
_LONG_ROUND_TRIP = 10_000
# The share of retransmitted segments above which a path counts as lossy, and the segments needed to judge it.
_LOSSY = 0.005
_ENOUGH_SEGMENTS = 1_000
# Bytes of Linux's struct tcp_info up to the count of sent segments.
_INFO_BYTES = 140

_Found = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[object, ...]]


class TcpStream(SocketStream):
    """A connected TCP socket as a :class:`gossipx.transports.Stream`."""

    def __init__(self, connected: socket.socket, remote: Address):
        super().__init__(connected, str(remote), sends_whole=sys.platform == "linux")
        # Requests and replies are single small writes: coalescing them (Nagle) only adds delay.
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            if hasattr(socket, option):  # macOS names the first one differently; its default is acceptable
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._control = ""
        self.tune()

    def tune(self) -> None:
        """Choose the congestion control that suits the path, if the system offers and allows it."""
        wanted = _LONG if _is_long(self._socket) else _SHORT
        if self._control != wanted[0]:
            self._control = _control(self._socket, wanted)


def _control(socket_: socket.socket, wanted: Sequence[str]) -> str:
    """Set the first available congestion control and return its name; empty: the system's default stays."""
    for name in wanted if hasattr(socket, "TCP_CONGESTION") else ():
        with contextlib.suppress(OSError):  # not loaded, or not allowed
            socket_.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
            return name
    return ""


def _is_long(connected: socket.socket) -> bool:
    """Return whether delay or loss, rather than bandwidth, would limit loss-based congestion control on this path."""
    if not hasattr(socket, "TCP_INFO"):
        return False
    try:
        info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        return False
    if len(info) < _INFO_BYTES:
        return False
    (round_trip,) = struct.unpack_from("@I", info, 68)
    (resent,) = struct.unpack_from("@I", info, 100)
    (sent,) = struct.unpack_from("@I", info, 136)
    return bool(round_trip > _LONG_ROUND_TRIP or (sent > _ENOUGH_SEGMENTS and resent > _LOSSY * sent))


def _accepted(connected: socket.socket, remote: Any) -> TcpStream:
    return TcpStream(connected, Address(*remote[:2]))


def listen(address: Address) -> SocketListener[TcpStream]:
    """Listen at ``address``, with SO_REUSEADDR so that a peer can restart at once.

    Raises:
        GossipxError: the port is in use or not allowed, or the host is not this machine.
    """
    try:
        family, kind, protocol, _, place = _look_up(address, socket.AI_PASSIVE)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise GossipxError(f"cannot listen at {address}: {reason(error)}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _control(listening, _SHORT)  # inherited by accepted connections
        listening.bind(place)
        listening.listen(BACKLOG)
        own = Address(*listening.getsockname()[:2])
        return SocketListener(listening, own, _accepted)
    except OSError as error:
        listening.close()
        raise GossipxError(f"cannot listen at {address}: {advice(error)}") from error


def connect(address: Address, deadline: float) -> TcpStream:
    """Connect to ``address``, trying each IP address of its host.

    Raises:
        PeerUnreachableError: the name does not resolve, or nothing listens there.
        PeerTimeoutError: no answer by the deadline.
        LocalFaultError: this machine has no file descriptor left, or cannot resolve names.
    """
    cause = "no address"  # a string: an exception's traceback would keep all callers' frames until a gc run
    for family, kind, protocol, _, place in _resolve(address, deadline):
        try:
            connecting = socket.socket(family, kind, protocol)
        except OSError as error:
            if error.errno in _LACKING:
                raise LocalFaultError(f"cannot connect to {address}: {reason(error)}") from error
            cause = reason(error)
            continue
        with contextlib.ExitStack() as undo:
            undo.callback(connecting.close)
            try:
                _connect(connecting, place, address, deadline)
                stream = TcpStream(connecting, address)
            except OSError as error:
                cause = reason(error)
                continue
            undo.pop_all()
            return stream
    raise PeerUnreachableError(f"cannot connect to {address}: {cause}")


def _connect(connecting: socket.socket, place: tuple[object, ...], address: Address, deadline: float) -> None:
    _control(connecting, _SHORT)
    connecting.setblocking(False)
    code = connecting.connect_ex(place)
    if code == errno.EINPROGRESS:
        wait(connecting, select.POLLOUT, deadline)
        code = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not code and time.monotonic() >= deadline:
            raise PeerTimeoutError(f"{address} did not answer within the deadline")
    if code:
        raise OSError(code, os.strerror(code))
    # Connecting to a local port without a listener can make the system choose the same port for
    # this end, and connect the socket to itself.
    if connecting.getsockname() == connecting.getpeername():
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def _look_up(address: Address, flags: int) -> Sequence[_Found]:
    try:
        return socket.getaddrinfo(address.host or None, address.port, type=socket.SOCK_STREAM, flags=flags)
    except ValueError as error:  # no name that the resolver could be asked for, such as one with a label of 64 letters
        raise OSError(f"not a host name ({error})") from error


def _resolve(address: Address, deadline: float) -> Sequence[_Found]:
    """Resolve a host. The system's resolver takes no deadline, so it runs on a thread of its own."""

    def into(answer: queue.SimpleQueue[Sequence[_Found] | OSError]) -> None:
        try:
            answer.put(_look_up(address, 0))
        except OSError as error:
            answer.put(error)

    with contextlib.suppress(OSError):
        return _look_up(address, socket.AI_NUMERICHOST)
    answer: queue.SimpleQueue[Sequence[_Found] | OSError] = queue.SimpleQueue()
    threading.Thread(target=into, args=(answer,), name="gossipx-resolve", daemon=True).start()
    try:
        found = answer.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise PeerTimeoutError(f"{address} did not resolve within the deadline") from None
    if isinstance(found, socket.gaierror) and found.errno in _NO_LOOK_UP:
        raise LocalFaultError(f"cannot resolve {address} now: {reason(found)}")
    if isinstance(found, OSError):
        raise PeerUnreachableError(f"cannot resolve {address}: {reason(found)}")
    return found
