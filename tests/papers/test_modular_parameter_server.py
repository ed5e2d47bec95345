"""P.-Y. Wu, Versatile Communication Optimization for Deep Learning by Modularized Parameter Server (2018), chapter 5.

Its figures are pictures without numbers, so these tests check statements of its text, besides those that ``bin/papers
modular-server`` asserts. There are four servers, since uniform split makes "four times" as many partitions as there are
layers (chapter 5).
"""

from __future__ import annotations

from functools import cache

import pytest
from _papers._placements import Placed, placed

from gossipx.server.placement import BUILT_IN, Table
from gossipx.tasks.costs import published_sizes

SERVERS = 4
MODELS = ["googlenet", "resnet110", "inception-v4"]
"""The three of Figures 5.1 to 5.3; Table 1.1's 1.73 million parameters are those of the ResNet with 110 layers."""


@cache
def tables(model: str) -> tuple[Table, ...]:
    return tuple(Table(name, size) for name, size in published_sizes(model))


@cache
def outcome(model: str, placement: str) -> Placed:
    return placed(tables(model), SERVERS, BUILT_IN[placement]())


@pytest.mark.parametrize("model", MODELS)
def test_variation_of_figure_5_3(model: str) -> None:
    """Uniform split: "no variation"; the heuristic "effectively reduces the coefficient of variation"."""
    uniform, heuristic, turns = (outcome(model, name) for name in ("uniform", "heuristic", "round-robin"))
    assert max(uniform.bytes) - min(uniform.bytes) <= 4, "one element of float32"
    assert heuristic.variation < turns.variation / 100
    assert heuristic.variation < outcome(model, "greedy").variation, "which depends on the order of variables (2.3.1)"


def test_uniform_split_of_resnet_has_four_times_as_many_partitions_most_of_them_tiny() -> None:
    """Chapter 5: "many partitions are even smaller in size than the message headers and metadata"."""
    assert outcome("resnet110", "uniform").partitions == 4 * outcome("resnet110", "heuristic").partitions
    assert outcome("resnet110", "heuristic").partitions == len(tables("resnet110"))
    shares = [4 * table.size / SERVERS for table in tables("resnet110")]
    assert sum(share <= 64 for share in shares) > len(shares) / 2, "bytes; a header alone has about this size"


def test_ps_lites_ranges_put_most_on_one_server() -> None:
    """X. Yao et al., FluentPS (2019), section III-A, about the residual nets of its evaluation; slicing makes them
    even.
    """
    for model in ("resnet56", "resnet110"):
        ranges = outcome(model, "range")
        assert max(ranges.bytes) > sum(ranges.bytes) / 2
        assert max(outcome(model, "sliced").bytes) - min(outcome(model, "sliced").bytes) <= 4
