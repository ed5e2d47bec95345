"""How fast, and how often, models are given: token buckets that all connections of a peer share."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from gossipx.errors import UsageError
from gossipx.memory import PIECE

TICK = 0.01
"""Seconds that one piece takes: short beside a round trip over a long path, long beside a system call."""
PIECE_LEAST = 4096
"""Bytes of the smallest piece."""
BURST = 0.02
"""Seconds whose bytes may be saved up while nothing is sent."""
_BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def parse_rate(text: str) -> float:
    """Bytes a second, of ``100mbit``, ``2.5gbit``, ``500kbit``; as tc writes rates.

    Raises:
        UsageError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text.strip().lower())
    rate = float(found[1]) * _BITS[found[2]] / 8 if found else 0.0
    if rate < 1000:
        raise UsageError(f"--max-rate '{text}': a rate from 8kbit on, as 100mbit or 2.5gbit")
    return rate


class Bucket:
    """A token bucket: says when something may be used of which there is so much a second.

    Args:
        rate: of it, a second.
        saved: seconds whose share may be saved up while none is used.
        clock: seconds.
    """

    def __init__(self, rate: float, saved: float, clock: Callable[[], float] = time.monotonic):
        self._rate = rate
        self._saved = saved
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = clock()

    def reserve(self, amount: float, within: float = math.inf) -> float:
        """Reserve so much; seconds from now at which it may be used. More than ``within``: nothing was reserved."""
        with self._lock:
            now = self._clock()
            begins = max(self._free_at, now - self._saved)
            wait = max(0.0, begins - now)
            if wait <= within:
                self._free_at = begins + amount / self._rate
            return wait


class Pace(Bucket):
    """Says when bytes may be sent (``--max-rate``). Senders take turns piece by piece, so that all are served alike.

    Args:
        rate: bytes a second.
        clock: seconds.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic):
        super().__init__(rate, BURST, clock)
        self._piece = min(max(int(rate * TICK), PIECE_LEAST), PIECE)

    def parts(self, buffers: Sequence[bytes | memoryview]) -> Iterator[memoryview]:
        """All bytes of ``buffers`` in their order, in pieces that are each to be reserved."""
        for buffer in buffers:
            view = memoryview(buffer)
            for start in range(0, len(view), self._piece):
                yield view[start : start + self._piece]
