"""Loopback addresses and TCP ports for the peers of tests.

On Linux all of 127.0.0.0/8 is loopback, so that each test process has addresses of its own: none can meet what another
one listens to, whatever the port. Elsewhere only 127.0.0.1 is there, and ports alone are apart.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import TextIO

FIRST, END = 10_000, 20_000
"""The range lies below those of outgoing connections and of jobs (``gossipx.launch.world.launchers.PORTS``), which
could take a port between its choice and its use."""
NETWORKS = range(10, 250)
"""Second numbers of the addresses: 127.10.0.0/16 and so on."""
_HELD: list[TextIO] = []
"""The lock of the network that this process has."""


@functools.cache
def _network() -> int:
    """Return a network that no other living test process of this user has."""
    if sys.platform != "linux":
        return 0
    for number in NETWORKS:
        file = (Path(tempfile.gettempdir()) / f"gossipx-test-network-{os.getuid()}-{number}").open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
        else:
            _HELD.append(file)
            return number
    raise AssertionError(f"{len(NETWORKS)} test processes have all networks")


def address(number: int = 1) -> str:
    """Return one of the loopback addresses of this test process, for the ``number``-th machine of a test."""
    return f"127.{_network()}.0.{number}"


def free_ports(count: int) -> list[int]:
    """Return loopback ports on which no process listens. Other test processes of this user get different ones.

    They are free on 127.0.0.1 and on the first addresses of this process.
    """
    path = Path(tempfile.gettempdir()) / f"gossipx-test-ports-{os.getuid()}"
    with path.open("a+") as last:
        fcntl.flock(last, fcntl.LOCK_EX)
        last.seek(0)
        port = int(last.read() or FIRST)
        found: list[int] = []
        for _ in range(END - FIRST):
            port = port + 1 if port + 1 < END else FIRST
            if all(_is_free(own, port) for own in {"127.0.0.1", address()}):
                found.append(port)
            if len(found) == count:
                break
        last.truncate(0)
        last.write(str(port))
    assert len(found) == count, f"fewer than {count} ports from {FIRST} to {END} are free"
    return found


def places(count: int) -> list[str]:
    """Return addresses with free ports for peers of one machine."""
    return [f"{address()}:{port}" for port in free_ports(count)]


def _is_free(own: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((own, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True
