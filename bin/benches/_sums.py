"""Arithmetic for the figures of bin/bench server."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gossipx.metrics.intervals import estimate


def interval(values: Sequence[float]) -> float:
    """Return half the 95 % interval of the mean; NaN for one value."""
    found = estimate(values).interval
    return math.nan if found is None else found


def held_at(times: Sequence[float], moments: Sequence[float]) -> list[int]:
    """Return, for each moment, the index of the last time not after it, or 0 before all times.

    Args:
        times: ascending, at least one.
        moments: ascending.
    """
    found, place = [], 0
    for moment in moments:
        while place + 1 < len(times) and times[place + 1] <= moment:
            place += 1
        found.append(place)
    return found


def equal_staleness(staleness: int, inverse: int) -> int:
    """Return s' = s + 1/c − 1: SSP with s' has the regret bound of PSSP with s and c (FluentPS, section III-E.1).

    Args:
        staleness: s.
        inverse: 1/c.
    """
    return staleness + inverse - 1
