"""The comparison of runs with several seeds, and with a fixed period at equal retrievals."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest
from summaries import summary_of

from gossipx.metrics.compare import Row, compare
from gossipx.metrics.intervals import estimate, student_t
from gossipx.metrics.summary import Summary


def run(policy: str, seed: int, accuracy: float | None, retrievals: float = 30, **others: object) -> Summary:
    """Return the summary of a run of one peer."""
    report = {"retrievals": retrievals, "bytes_received": 4e6, "blocked_seconds": 1.0, "train_seconds": 10.0}
    name = f"{policy.partition(':')[0]}-seed{seed}"
    values = {"name": name, "policy": policy, "seed": seed, "consensus_accuracy": None, "consensus_loss": None}
    return summary_of({**report, "test_accuracy": accuracy}, **{**values, **others})


def names(rows: list[Row]) -> list[tuple[str, tuple[int, ...]]]:
    return [(row.name, row.seeds) for row in rows]


def test_an_interval_is_student_s() -> None:
    """By hand: 1, 2, 3 have s = 1, and t is 4.303 for two degrees of freedom."""
    found = estimate([1.0, 2.0, 3.0])
    assert (found.mean, found.seeds) == (2.0, 3)
    assert found.interval == pytest.approx(4.303 / math.sqrt(3))
    assert estimate([5.0]).interval is None


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.706), (30, 2.042), (31, 2.040), (60, 2.000), (10**6, 1.960)])
def test_student_s_t_is_that_of_the_tables(freedom: int, expected: float) -> None:
    assert student_t(freedom) == pytest.approx(expected, abs=0.0006)


def test_runs_that_differ_only_in_their_seeds_share_a_row() -> None:
    tau = [run("tau:10", seed, accuracy) for seed, accuracy in enumerate([0.80, 0.84, 0.88])]
    [row] = compare(tau)
    assert names([row]) == [("tau", (0, 1, 2))] and row.runs == ("tau-seed0", "tau-seed1", "tau-seed2")
    assert row.accuracy == pytest.approx(0.84)
    assert row.intervals["accuracy"] == pytest.approx(4.303 * statistics.stdev([0.80, 0.84, 0.88]) / math.sqrt(3))
    assert row.intervals["wall_seconds"] == 0.0 and "loss" not in row.intervals


@pytest.mark.parametrize(
    "others", [{"codec": "fp16"}, {"partition": "dirichlet:alpha=0.3"}, {"iterations": 600}, {"model": "resnet20"}]
)
def test_runs_that_differ_otherwise_do_not(others: dict[str, object]) -> None:
    rows = compare([run("tau:10", 0, 0.5), run("tau:10", 1, 0.6, **others)])
    assert [(row.seeds, row.accuracy) for row in rows] == [((0,), 0.5), ((1,), 0.6)]


def test_settings_that_no_summary_has_tell_runs_apart() -> None:
    runs = [run("tau:10", seed, 0.5) for seed in range(3)]
    assert len(compare(runs, ["ring", "ring", "full"])) == 2
    assert len(compare(runs, [None, None, None])) == 1


def test_two_runs_of_one_seed_are_compared_with_each_other() -> None:
    rows = compare([run("tau:10", 0, 0.5, name="first"), run("tau:10", 0, 0.6, name="again")])
    assert names(rows) == [("first", (0,)), ("again", (0,))]


def test_differences_are_paired_by_seed() -> None:
    """Seeds differ by 0.1, the policies by 0.01 on each seed: only the pairs show the latter."""
    first = [run("tau:10", seed, 0.5 + 0.1 * seed) for seed in range(3)]
    second = [run("travel:2", seed, 0.51 + 0.1 * seed) for seed in (2, 1, 0, 7)]
    one, other = compare([*first, *second])
    assert one.paired == {}
    difference = other.paired["accuracy"]
    assert (difference.mean, difference.seeds) == (pytest.approx(0.01), 3), "seed 7 has no pair"
    assert difference.interval == pytest.approx(0, abs=1e-9)
    assert other.intervals["accuracy"] > 0.1


def test_a_single_pair_has_no_interval() -> None:
    rows = compare([run("tau:10", 0, 0.5), run("tau:10", 1, 0.5), run("travel:2", 1, 0.75)])
    assert rows[1].paired["accuracy"].mean == 0.25 and rows[1].paired["accuracy"].interval is None


PERIODS = (run("tau:100", 0, 0.6, 10), run("tau:10", 0, 0.8, 100), run("tau:1", 0, 0.85, 1000))


def test_a_policy_is_compared_with_a_fixed_period_of_as_many_retrievals() -> None:
    """Halfway between 10 and 100 in their logarithms, 31.6, lies halfway between .6 and .8."""
    *periods, row = compare([*PERIODS, run("adaptive:0.02", 0, 0.7, 10 * math.sqrt(10))])
    assert row.fixed_period is not None and [period.fixed_period for period in periods] == [None] * 3
    assert row.fixed_period.between == ("tau-seed0", "tau-seed0")
    assert row.fixed_period.figures["accuracy"] == pytest.approx(0.7)
    assert "loss" not in row.fixed_period.figures


@pytest.mark.parametrize("retrievals", [9.9, 1000.1, 0])
def test_nothing_is_assumed_beyond_the_measured_periods(retrievals: float) -> None:
    assert compare([*PERIODS, run("adaptive:0.02", 0, 0.7, retrievals)])[-1].fixed_period is None


def test_periods_of_another_setting_or_with_a_warm_up_are_no_reference() -> None:
    adaptive = run("adaptive:0.02", 0, 0.7, 30, codec="fp16")
    assert compare([*PERIODS, adaptive])[-1].fixed_period is None
    late = [run("tau:100,warmup=5", 0, 0.6, 10), run("tau:10,warmup=5", 0, 0.8, 100)]
    assert compare([*late, run("adaptive:0.02", 0, 0.7, 30)])[-1].fixed_period is None


def test_means_over_seeds_are_interpolated() -> None:
    runs = [*PERIODS[:2], run("tau:100", 1, 0.7, 10), run("tau:10", 1, 0.9, 100), run("adaptive:0.02", 0, 0.7, 100)]
    found = compare(runs)[-1].fixed_period
    assert found is not None and found.figures["accuracy"] == pytest.approx(0.85)


def test_a_run_that_was_stopped_is_compared_with_none() -> None:
    """It trained less: it is no seed of the others, and neither its retrievals nor its accuracy compare with theirs."""
    cut = run("tau:10", 1, 0.3, 5, stopped=["a"])
    whole, early, other = compare([run("tau:10", 0, 0.5), cut, run("adaptive:0.02", 1, 0.6)])
    assert names([whole, early]) == [("tau-seed0", (0,)), ("tau-seed1", (1,))] and early.stopped == 1
    assert (whole.accuracy, early.reduction, early.paired, other.paired) == (0.5, None, {}, {})
    assert [row.reduction for row in compare([cut, run("tau:20", 1, 0.5)])] == [None, None]
    adaptive = run("adaptive:0.02", 0, 0.7, 30)
    assert compare([*PERIODS, dataclasses.replace(adaptive, stopped=["a"])])[-1].fixed_period is None
    assert compare([dataclasses.replace(PERIODS[0], stopped=["a"]), *PERIODS[1:], adaptive])[-1].fixed_period is None


@pytest.mark.parametrize("spec", ["tau:period=10", "tau: 10", "tau:period=10,warmup=0"])
def test_a_policy_may_be_written_in_several_ways(spec: str) -> None:
    assert len(compare([run("tau:10", 0, 0.5), run(spec, 1, 0.6)])) == 1
    periods = (run(spec, 0, 0.8, 100), *PERIODS[::2])
    assert compare([*periods, run("adaptive:0.02", 0, 0.7, 50)])[-1].fixed_period is not None


def test_policies_of_scripts_are_told_apart_by_their_text() -> None:
    assert len(compare([run(f"function {name}", seed, 0.5) for name in ("a", "b") for seed in (0, 1)])) == 2


def test_a_model_that_differs_in_one_run_differs() -> None:
    assert compare([run("tau:10", 0, 0.5), run("tau:10", 1, 0.5, agreed=False)])[0].agreed is False
    assert compare([run("tau:10", 0, 0.5), run("tau:10", 1, 0.5, agreed=None)])[0].agreed is None
