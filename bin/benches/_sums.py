"""Arithmetic for the figures of bin/bench server."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
"""Student's t for a two-sided 95 % interval, by the number of values."""


def interval(values: Sequence[float]) -> float:
    """Return half the 95 % interval of the mean; NaN for one value, or more than the table of t covers."""
    if len(values) not in T_95:
        return float("nan")
    return T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5


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
