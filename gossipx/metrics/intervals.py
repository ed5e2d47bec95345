"""Means of a few seeds with their confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t for a two-sided 95 % interval, for 1, 2, ... degrees of freedom."""
NORMAL_95 = 1.960
"""Its limit for many degrees of freedom."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds.

    Attributes:
        mean: the mean.
        interval: half the width of its 95 % interval; None for a single value.
        seeds: number of values.
    """

    mean: float
    interval: float | None
    seeds: int


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of at least one value with its 95 % interval, t · s / √n (Student, 1908)."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None, 1)
    return Estimate(mean, student_t(count - 1) * statistics.stdev(values) / math.sqrt(count), count)


def student_t(freedom: int) -> float:
    """Return Student's t for a two-sided 95 % interval with ``freedom`` degrees of freedom, at least 1."""
    if freedom <= len(T_95):
        return T_95[freedom - 1]
    # Two terms of its expansion at the normal limit (Abramowitz and Stegun, 26.7.5); the rest is below 0.0005.
    z = NORMAL_95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
