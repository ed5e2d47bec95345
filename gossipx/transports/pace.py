"""The rate limit for models (``--max-rate``): a token bucket shared by all connections of a peer."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from gossipx.errors import UsageError
from gossipx.memory import PIECE

TICK = 0.01
"""Seconds that one piece takes: short compared with a long round trip, long compared with a system call."""
PIECE_LEAST = 4096
"""Bytes of the smallest piece."""
BURST = 0.02
"""Seconds of idle time whose bytes may be sent in a burst."""
LEAST, MOST = 1e3, 1.25e11
"""Limits of the rate, bytes per second: 8 kbit/s to 1000 Gbit/s, more than any link has."""
_BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def parse_rate(text: str, option: str = "--max-rate") -> float:
    """Parse a rate such as ``100mbit``, ``2.5gbit`` or ``500kbit``, as tc writes rates; return bytes per second.

    Args:
        option: name of the option, for messages.

    Raises:
        UsageError: not a rate, or below :data:`LEAST` or above :data:`MOST`.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text.strip().lower())
    rate = float(found[1]) * _BITS[found[2]] / 8 if found else 0.0
    if not LEAST <= rate <= MOST:
        raise UsageError(f"{option} '{text}': not a rate from 8kbit to 1000gbit, such as 100mbit or 2.5gbit")
    return rate


def parse_bandwidth(text: str) -> float:
    """Parse the bandwidth of a link; as :func:`parse_rate`."""
    return parse_rate(text, "bandwidth")


class Pace:
    """Schedules when bytes may be sent. Senders take turns piece by piece, so that all get an equal share.

    Args:
        rate: bytes per second.
        clock: returns seconds.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic):
        self._rate = rate
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = clock()
        self._piece = min(max(int(rate * TICK), PIECE_LEAST), PIECE)

    def reserve(self, nbytes: int, within: float = math.inf) -> float:
        """Reserve ``nbytes``; return seconds until they may be sent. Above ``within``, nothing was reserved."""
        with self._lock:
            now = self._clock()
            begins = max(self._free_at, now - BURST)
            wait = max(0.0, begins - now)
            if wait <= within:
                self._free_at = begins + nbytes / self._rate
            return wait

    def parts(self, buffers: Sequence[bytes | memoryview]) -> Iterator[memoryview]:
        """Yield all bytes of ``buffers`` in order, in pieces that must each be reserved."""
        for buffer in buffers:
            view = memoryview(buffer)
            for start in range(0, len(view), self._piece):
                yield view[start : start + self._piece]
