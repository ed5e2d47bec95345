"""The Unix socket transport, for peers on one machine. This module is a :class:`gossipx.transports.Transport`.

An address is a name in Linux's abstract namespace, which disappears with its socket, or a path on other systems. File
descriptors can be passed over a stream, so models are shared in memory instead of copied through the socket.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import sys
import time
from pathlib import Path

from gossipx import errors
from gossipx.transports import Address
from gossipx.transports.sockets import BACKLOG, SocketListener, SocketStream, advice, reason

__all__ = ["Address", "UnixStream", "connect", "listen", "machine"]


def machine() -> str:
    """Return Linux's boot ID, which identifies the machine; empty elsewhere, where memory cannot be shared."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


# Bytes of a socket's send buffer: larger ones were not faster.
_SEND_BUFFER = 2**20
# Errors of a name without a listener: another network namespace hides it, or the system denies access.
_OUT_OF_REACH = {errno.ECONNREFUSED, errno.ENOENT, errno.EACCES, errno.EPERM}


def _place(address: Address) -> str:
    return f"\0{address.host}" if sys.platform == "linux" else address.host


class UnixStream(SocketStream):
    """A connected Unix socket as a :class:`gossipx.transports.Stream` that shares memory."""

    def __init__(self, connected: socket.socket, address: Address):
        super().__init__(connected, address.host, sends_whole=False)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)

    def send_descriptor(self, descriptor: int, deadline: float) -> None:
        """Pass a file descriptor; see :class:`gossipx.transports.SharesMemory`."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        with self._use():
            self._attempt(lambda flags: self._socket.sendmsg([b"\0"], rights, flags), self._sending, deadline)

    def receive_descriptor(self, deadline: float) -> int:
        """Receive a descriptor, which the caller must close.

        Raises:
            ProtocolError: something else arrived.
        """

        def receive(flags: int) -> int | None:
            _, rights, _, _ = self._socket.recvmsg(1, socket.CMSG_SPACE(4), flags)
            found = [
                array.array("i", data[: len(data) // 4 * 4]) for _, kind, data in rights if kind == socket.SCM_RIGHTS
            ]
            descriptors = [each for numbers in found for each in numbers]
            for each in descriptors[1:]:
                os.close(each)
            return descriptors[0] if descriptors else None

        with self._use():
            descriptor = self._attempt(receive, self._receiving, deadline)
        if descriptor is None:
            raise errors.ProtocolError("it announced a descriptor but sent none")
        return descriptor


def listen(address: Address) -> SocketListener[UnixStream]:
    """Listen at the name ``address.host``; the port is ignored.

    Raises:
        GossipxError: the name is in use or not allowed.
    """
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(_place(address))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise errors.GossipxError(f"cannot listen at {address}: {advice(error)}") from error
    return SocketListener(listening, address, lambda connected, remote: UnixStream(connected, address))


def connect(address: Address, deadline: float) -> UnixStream:
    """Connect to the name ``address.host``.

    Raises:
        OutOfReachError: this process sees no listener of that name.
        PeerUnreachableError: the connection failed for another reason.
        PeerTimeoutError: not accepted by the deadline.
        LocalFaultError: this machine has run out of a resource.
    """
    try:
        connecting = socket.socket(socket.AF_UNIX)
    except OSError as error:
        raise errors.LocalFaultError(f"cannot connect to {address}: {reason(error)}") from error
    with contextlib.ExitStack() as undo:
        undo.callback(connecting.close)
        connecting.settimeout(max(1e-3, min(deadline - time.monotonic(), 3600.0)))
        try:
            connecting.connect(_place(address))
        except TimeoutError as error:
            raise errors.PeerTimeoutError(f"{address} did not answer within the deadline") from error
        except OSError as error:
            kind = errors.OutOfReachError if error.errno in _OUT_OF_REACH else errors.PeerUnreachableError
            raise kind(f"cannot connect to {address}: {reason(error)}") from error
        undo.pop_all()
    return UnixStream(connecting, address)
