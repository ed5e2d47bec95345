"""Arithmetic of bin/bench server's figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
"""Student's t for a two-sided 95 % interval, by the number of values."""


def interval(values: Sequence[float]) -> float:
    """Half the 95 % interval of the mean; of one value, or more than there is a t for, NaN."""
    if len(values) not in T_95:
        return float("nan")
    return T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5


def held_at(times: Sequence[float], moments: Sequence[float]) -> list[int]:
    """What held at each moment: the place of the last time that is not after it; before all of them the first.

    Args:
        times: ascending, one at least.
        moments: ascending.
    """
    found, place = [], 0
    for moment in moments:
        while place + 1 < len(times) and times[place + 1] <= moment:
            place += 1
        found.append(place)
    return found


def equal_staleness(staleness: int, inverse: int) -> int:
    """s' = s + 1/c − 1: SSP with it has the regret bound of PSSP with s and c (FluentPS, section III-E.1).

    Args:
        staleness: s.
        inverse: 1/c.
    """
    return staleness + inverse - 1
