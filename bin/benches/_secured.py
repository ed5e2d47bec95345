"""Pulls over blocking sockets with one security primitive: a MAC, a checksum or TLS.

They show the cost of each primitive alone in Python, as the reference for gossipx. The server is a separate process, as
in :mod:`_remote`.
"""

from __future__ import annotations

import hmac
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash
from _remote import HERE, KEY, SECONDS, filled, loss_based, serve, start

from gossipx.memory import HOT, PIECE, Memory
from gossipx.tools.certs import folder_of
from gossipx.wire.frames import Unchecked

CHECKS: dict[str, Callable[[], Any]] = {
    "mac": lambda: hmac.new(KEY, digestmod="sha256"),
    "xxh3": xxhash.xxh3_64,
    "tls": Unchecked,
}


def context(folder: Path, purpose: ssl._SSLMethod) -> ssl.SSLContext:
    """Return a context for TLS 1.3 with certificates on both sides, as in gossipx."""
    made = ssl.SSLContext(purpose)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False
    made.load_cert_chain(folder / folder_of(HERE) / "cert.pem", folder / folder_of(HERE) / "key.pem")
    made.load_verify_locations(folder / "ca.pem")
    made.verify_mode = ssl.CERT_REQUIRED
    return made


def serve_secured(size: int, way: str) -> None:
    """Send the model for each received byte: under a MAC, with an XXH3 checksum, or by TLS."""
    model = filled(size)
    kind, _, folder = way.partition(":")
    with socket.create_server((HERE, 0)) as listening:
        loss_based(listening)
        print(listening.getsockname()[1], flush=True)
        connected, _ = listening.accept()
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if kind == "tls":
            connected = context(Path(folder), ssl.PROTOCOL_TLS_SERVER).wrap_socket(connected, server_side=True)
        while connected.recv(1):
            check = CHECKS[kind]()
            for start in range(0, size, PIECE):
                piece = model.view[start : start + PIECE]
                connected.sendall(piece)
                check.update(piece)  # while it is in the processor's cache
            connected.sendall(check.digest())


class Secured:
    """A client over blocking sockets with one primitive on both sides."""

    def __init__(self, size: int, way: str):
        self._process, port = start(__file__, "secured", size, way)
        self._kind, _, folder = way.partition(":")
        self._socket = socket.socket()
        loss_based(self._socket)
        self._socket.connect((HERE, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._kind == "tls":
            self._socket = context(Path(folder), ssl.PROTOCOL_TLS_CLIENT).wrap_socket(self._socket)
        self._buffer = Memory(size + CHECKS[self._kind]().digest_size).view
        self._size = size

    def pull(self) -> None:
        self._socket.send(b"x")
        check = CHECKS[self._kind]()
        done = 0
        while done < len(self._buffer):
            end = min(done + HOT, self._size) if done < self._size else len(self._buffer)
            begin = done
            while done < end:
                done += self._socket.recv_into(self._buffer[done:end], 0, *self._flags())
            if end <= self._size:
                check.update(self._buffer[begin:end])
        assert bytes(self._buffer[self._size :]) == check.digest()

    def _flags(self) -> tuple[int, ...]:
        return () if self._kind == "tls" else (socket.MSG_WAITALL,)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(SECONDS)


if __name__ == "__main__":
    serve({"secured": serve_secured})
