"""Facts about a process for ``gossipx doctor``: names, versions, clock and digests.

A doctor and a peer of a run report the same facts, so that one can examine the other.
"""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from gossipx.errors import ProtocolError
from gossipx.wire import Hello, frames


def facts(me: Hello, role: str) -> dict[str, Any]:
    """Return the facts of this process. ``role`` is "run" or "doctor"; hosts file and model are given as digests."""
    own = {"name": me.name, "role": role, "peers": me.peers, "size": me.size, "model": me.model}
    return {**own, "protocol": frames.VERSION, **_versions(), "clock": time.time()}


def read(report: Mapping[str, object]) -> dict[str, Any]:
    """Return the facts in a report; ProtocolError if one is missing."""
    wanted = facts(Hello(0, "", 1, "", ""), "")
    for name, example in wanted.items():
        if type(report.get(name)) is not type(example):
            raise ProtocolError(f"its report has no {name}")
    return {name: report[name] for name in wanted}


@functools.cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("gossipx", "torch"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found
