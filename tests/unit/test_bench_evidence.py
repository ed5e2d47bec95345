"""The figures of bin/bench evidence: goals, and which systems are ahead of gossipx; and its rows are valid runs."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gossipx.cli import main


@pytest.fixture(scope="module")
def bench(benches: Path) -> Any:
    return importlib.import_module("_evidence_table")


def points(*each: tuple[float, float, float]) -> list[dict[str, float]]:
    """Return the points of a run from loss, seconds and bytes."""
    return [
        {"loss": loss, "seconds": seconds, "bytes": count, "accuracy": 0.0, "own": loss + 0.5}
        for loss, seconds, count in each
    ]


def compared(bench: Any, rate: str = "100mbit", **runs: tuple[float, float, float]) -> Any:
    """Return a comparison of systems by the ends of their runs."""
    made: dict[str, list[Sequence[Any]]] = {name.replace("_", "-"): [points(end)] for name, end in runs.items()}
    return bench.Comparison("text", rate, 4, 800, made, {})


def test_a_loss_is_reached_on_the_line_between_two_points(bench: Any) -> None:
    run = points((3.0, 10.0, 100.0), (2.0, 20.0, 300.0), (1.0, 30.0, 500.0))
    assert bench.reach(run, 1.75) == {"seconds": 22.5, "bytes": 350.0}
    assert bench.reach(run, 3.5) == {"seconds": 10.0, "bytes": 100.0}
    assert bench.reach(run, 0.5) is None


def test_a_system_is_ahead_if_it_is_lower_in_both(bench: Any) -> None:
    comparison = compared(bench, ddp=(1.8, 100, 1e9), diloco=(1.9, 10, 4e7), pairs=(1.95, 20, 2e7))
    assert (comparison.ahead("seconds"), comparison.ahead("bytes")) == (["diloco"], [])
    noise = compared(bench, ddp=(1.8000, 100, 1.00e9), bsp=(1.8001, 101, 1.01e9))
    assert noise.ahead("seconds") == noise.ahead("bytes") == []


def test_a_row_has_the_figures_of_the_average_and_of_own_models(bench: Any) -> None:
    comparison = compared(bench, ddp=(1.8, 100, 1e9), pairs=(1.85, 20, 2e7))
    table = comparison.table()
    (_, pairs) = (dict(zip(table.headings, row, strict=True)) for row in table.rows)
    shown = {"system": "gossipx pairs", "loss": "1.850", "own models": "2.350", "of DDP's": "1/50", "s": "20.0"}
    assert shown.items() <= pairs.items()


def test_only_the_best_of_gossipx_count(bench: Any) -> None:
    runs = {"diloco": (1.95, 50, 5e7), "tau:10": (2.0, 60, 1e8), "pairs": (1.9, 20, 2e7)}
    assert compared(bench, **runs).ahead("bytes") == []
    del runs["pairs"]
    assert compared(bench, **runs).ahead("bytes") == ["diloco"]


def test_all_periods_count(bench: Any) -> None:
    """Of each system; and for a goal."""
    made = {name: [points((loss, 50, 2e7))] for name, loss in (("pairs", 1.9), ("diloco", 1.95))}
    sooner = points((1.8, 60, 1e7))
    for ends, ahead in (({}, []), ({"diloco": sooner}, ["diloco"]), ({"diloco": sooner, "pairs": sooner}, [])):
        assert bench.Comparison("text", "1000mbit", 4, 800, made, {}, ends).ahead("bytes") == ahead
    made = {"ddp": [points((1.8, 400, 1.5e9))], "pairs": [points((1.81, 25, 3e7))]}
    comparison = bench.Comparison("text", "1000mbit", 4, 800, made, {}, {"pairs": points((1.84, 25, 3e6))})
    assert [one["value"] for one in comparison.table().figures if one["name"].endswith("0.05 above its loss")] == [500]


def test_a_rival_without_results_leaves_the_goal_unmet(bench: Any) -> None:
    made = {"pairs": [points((1.9, 50, 2e7))]}
    for left_out, met in (((), True), (("hub",), True), (("hivemind",), False)):
        comparison = bench.Comparison("text", "1000mbit", 4, 800, made, {}, {}, left_out)
        goals = [one for one in comparison.table().figures if "ahead" in one["name"]]
        assert [one["met"] for one in goals] == [met, met]
        assert all(met != one["name"].endswith(", without a result of hivemind") for one in goals), "it says why"
        assert all(bench.shown(name) in comparison.title() for name in left_out)


def test_goals_are_relative_to_ddp(bench: Any) -> None:
    comparison = compared(bench, ddp=(1.8, 400, 1.5e9), pairs=(1.84, 25, 3e6), momentum_3lc=(1.89, 19, 1e6))
    goals = [(one["value"], one["met"]) for one in comparison.table().figures if one["goal"]]
    expected = [(500, True), (1500, True), (1500, False), (400 / 19, True)]
    assert goals == [(pytest.approx(value), met) for value, met in expected]


def test_other_periods_count_with_the_same_seeds_only(bench: Any) -> None:
    """A run of seed 0 would be compared with the mean over all seeds."""
    evidence = importlib.import_module("evidence")
    kept = evidence.CachedRuns(None)
    for period, losses in ((10, (1.5, 1.7)), (20, (1.6,))):
        for seed, loss in enumerate(losses):
            job = evidence.job("text", "pairs", "1000mbit", 4, seed, 800, period)
            kept.add(job, points((3.0, 1, 1), (loss, 9, 4e6)))
    for seeds, expected in ((1, [1.5, 1.6]), (2, [1.6])):
        given = argparse.Namespace(
            systems=["pairs"], full=True, steps=800, peers=4, seeds=seeds, rate=["1000mbit"], period=10
        )
        plan = evidence.Plan("text", given, (), kept)
        assert plan.periods == {"pairs": 10}
        assert [end["loss"] for end in plan.ends("pairs")] == pytest.approx(expected)


@pytest.mark.slow
def test_gossipx_accepts_the_options_of_each_of_its_rows(bench: Any, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("localhost slots=4\n")
    task = ("--peers", str(hosts), "--logdir", str(tmp_path), "--task", "text", "--model", "transformer", "--dry-run")
    own = {name: one for name, one in bench.SYSTEMS.items() if one.is_gossipx}
    assert len(own) > 5
    for name, system in own.items():
        done = CliRunner().invoke(main, ["run", *task, *system.arguments("text", 50, 4)])
        assert done.exit_code == 0, f"{name}: {done.output}"


def test_a_synchronous_system_has_the_losses_of_any_link(bench: Any) -> None:
    fast = [{**point, "step": step} for step, point in zip((100, 200), points((3, 1, 10), (2, 2, 20)), strict=True)]
    slow = [{**point, "step": step} for step, point in zip((4, 8), points((5, 9, 1), (4, 11, 1)), strict=True)]
    assert [(one["loss"], one["seconds"], one["bytes"]) for one in bench.stretched(fast, slow)] == [
        (3, 50, 10),
        (2, 100, 20),
    ]
