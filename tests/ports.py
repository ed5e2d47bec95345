"""TCP ports for the peers of tests."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import tempfile
from pathlib import Path

FIRST, END = 10_000, 20_000
"""The range lies below those of outgoing connections and of jobs (``gossipx.launch.cluster.world.PORTS``), which could
take a port between its choice and its use."""


def free_ports(count: int) -> list[int]:
    """Return loopback ports on which no process listens. Other test processes of this user get different ones."""
    path = Path(tempfile.gettempdir()) / f"gossipx-test-ports-{os.getuid()}"
    with path.open("a+") as last:
        fcntl.flock(last, fcntl.LOCK_EX)
        last.seek(0)
        port = int(last.read() or FIRST)
        found: list[int] = []
        for _ in range(END - FIRST):
            port = port + 1 if port + 1 < END else FIRST
            if _is_free(port):
                found.append(port)
            if len(found) == count:
                break
        last.truncate(0)
        last.write(str(port))
    assert len(found) == count, f"fewer than {count} ports from {FIRST} to {END} are free"
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True
