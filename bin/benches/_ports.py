"""Loopback ports for the benchmarks, reserved from their choice until the peers listen on them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

from gossipx.launch.ports import reserve
from gossipx.transports import Address

HERE = "127.0.0.1"
FIRST, END = 10_000, 32_000
"""Below the ports of outgoing connections, of which some remain in use after hundreds of connections."""


@contextlib.contextmanager
def reserved(count: int) -> Iterator[int]:
    """Return a context that yields the first of ``count`` consecutive ports, which no other process gets meanwhile."""
    for _ in range(100):
        first = random.randrange(FIRST, END - count)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(reserve(Address(HERE, port)))
            until_end = held.pop_all()
            break
    else:
        raise SystemExit(f"no {count} consecutive ports on loopback are free")
    with until_end:
        yield first
