"""The arithmetic of the benchmarks."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest
from _bench.tables import interval


def test_the_interval_of_five_seeds() -> None:
    """Computed by hand: mean 3, standard deviation √2.5, t = 2.776."""
    assert interval([1, 2, 3, 4, 5]) == pytest.approx(2.776 * math.sqrt(2.5 / 5))
    assert interval([4.0, 4.0, 4.0]) == 0
    assert math.isnan(interval([1.0]))


def test_the_interval_of_a_median(benches: Path) -> None:
    """Of 100 values, the ranks that are 1.96 standard deviations of 5 away."""
    assert importlib.import_module("overhead").interval([float(value) for value in range(100)]) == (40, 60)
