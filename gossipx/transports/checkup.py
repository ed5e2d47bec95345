"""What a process tells of itself to whoever looks at the machines of a run (``gossipx doctor``)."""

from __future__ import annotations

import functools
import platform
import time
from importlib import metadata

from gossipx.transports import unix
from gossipx.wire import Hello, frames


def facts(me: Hello, role: str) -> dict[str, object]:
    """The facts of this process, as a report.

    Args:
        me: who it is; of the model the digest, or nothing where it has none.
        role: "run" or "doctor".
    """
    return {
        "name": me.name,
        "role": role,
        "peers": me.peers,
        "size": me.size,
        "model": me.model,
        "protocol": frames.VERSION,
        **versions(),
        "machine": unix.machine(),
        "clock": time.time(),
    }


@functools.cache
def versions() -> dict[str, str]:
    """Of what two machines may have different: gossipx, torch and Python; "unknown" of what is not installed."""
    found = {"python": platform.python_version()}
    for package in ("gossipx", "torch"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found
