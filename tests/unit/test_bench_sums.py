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


def test_a_model_holds_until_the_next_one(benches: Path) -> None:
    held_at = importlib.import_module("_hybrid").held_at
    assert held_at([0.0, 1.0, 1.5, 4.0], [0.5, 1.0, 1.4, 3.9, 9.0]) == [0, 1, 1, 2, 3]
    assert held_at([2.0, 3.0], [1.0, 2.5]) == [0, 0]


@pytest.mark.parametrize(("inverse", "staleness"), [(2, 4), (3, 5), (5, 7), (10, 12), (1, 3)])
def test_equal_regret_bounds_are_those_of_figure_9(benches: Path, inverse: int, staleness: int) -> None:
    """A and B, C and D, E and F, G and H; with c = 1 PSSP is SSP."""
    assert importlib.import_module("_staleness").equal_staleness(3, inverse) == staleness
