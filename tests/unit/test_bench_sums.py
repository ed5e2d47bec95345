"""The arithmetic of bin/bench server."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def sums() -> ModuleType:
    """Import the module; the benchmarks are no package."""
    file = Path(__file__).parents[2] / "bin" / "benches" / "_sums.py"
    spec = importlib.util.spec_from_file_location("_sums", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_interval_of_five_seeds(sums: ModuleType) -> None:
    """Computed by hand: mean 3, standard deviation √2.5, t = 2.776."""
    assert sums.interval([1, 2, 3, 4, 5]) == pytest.approx(2.776 * math.sqrt(2.5 / 5))
    assert sums.interval([4.0, 4.0, 4.0]) == 0
    assert math.isnan(sums.interval([1.0]))


def test_a_model_holds_until_the_next_one(sums: ModuleType) -> None:
    assert sums.held_at([0.0, 1.0, 1.5, 4.0], [0.5, 1.0, 1.4, 3.9, 9.0]) == [0, 1, 1, 2, 3]
    assert sums.held_at([2.0, 3.0], [1.0, 2.5]) == [0, 0]


@pytest.mark.parametrize(("inverse", "staleness"), [(2, 4), (3, 5), (5, 7), (10, 12), (1, 3)])
def test_equal_regret_bounds_are_those_of_figure_9(sums: ModuleType, inverse: int, staleness: int) -> None:
    """A and B, C and D, E and F, G and H; with c = 1 PSSP is SSP."""
    assert sums.equal_staleness(3, inverse) == staleness
