"""Benchmarks: their arithmetic, bin/bench compression's file of completed runs and tables, and what is compared."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import runpy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _bench.cached_runs import CachedRuns
from _bench.tables import interval
from click.testing import CliRunner
from torch import Tensor

from gossipx import codecs
from gossipx.cli import main


def test_the_intervals_of_five_seeds_and_of_a_median(benches: Path) -> None:
    """By hand: mean 3, standard deviation √2.5, t = 2.776; and the ranks that are 1.96 deviations of 5 away."""
    assert interval([1, 2, 3, 4, 5]) == pytest.approx(2.776 * math.sqrt(2.5 / 5))
    assert interval([4.0, 4.0, 4.0]) == 0
    assert math.isnan(interval([1.0]))
    assert importlib.import_module("overhead").interval([float(value) for value in range(100)]) == (40, 60)


@pytest.mark.parametrize("whole", [False, True])
def test_the_int8_of_torch_operations_does_the_same_work(benches: Path, whole: bool) -> None:
    """Its codes are ours, and add up to the input with the error."""
    speed = SimpleNamespace(**runpy.run_path(str(benches / "codecs.py")))
    case = speed.Case.of(speed.drawn(5120, 0.1), 2 * 5120)
    case.turn(0)
    left = torch.full_like(case.x, 0.1)
    theirs = speed.TorchInt8(case, left, whole)

    def decoded() -> Tensor:
        return torch.cat([levels * scale for scale, levels in theirs.codes])

    theirs.works()[speed.FED]()
    assert torch.allclose(decoded() + left, case.x + 0.1, atol=1e-4)
    theirs.works()[speed.ENCODE]()
    x, ours = case.x[:5120], codecs.parse("int8")
    assert torch.allclose(codecs.decode(ours.encode(x, ours.init(x))[0]), decoded()[:5120])


# --- bin/bench compression ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(benches: Path) -> Any:
    return importlib.import_module("compression")


def work(job: dict[str, Any]) -> int:
    return 10 * int(job["n"])


def test_a_completed_run_is_not_repeated(tmp_path: Path) -> None:
    done = []

    def counted(job: dict[str, Any]) -> int:
        done.append(job["n"])
        return work(job)

    jobs = [{"n": n} for n in range(4)]
    CachedRuns(tmp_path / "kept").complete(jobs[:2], counted, 1)
    again = CachedRuns(tmp_path / "kept")
    again.complete(jobs, counted, 1)
    assert done == [0, 1, 2, 3]
    assert [again[job] for job in jobs] == [0, 10, 20, 30]
    assert {"n": 4} not in again


def test_a_truncated_line_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kept"
    CachedRuns(file).complete([{"n": 1}, {"n": 2}], work, 1)
    file.write_text(file.read_text()[:-9])
    again = CachedRuns(file)
    assert f"{file}, line 2 is invalid" in capsys.readouterr().err
    assert {"n": 1} in again and {"n": 2} not in again
    again.complete([{"n": 2}], work, 1)
    last = CachedRuns(file)
    assert last[{"n": 1}] == 10 and last[{"n": 2}] == 20


def test_parallel_runs_give_the_same_results(tmp_path: Path) -> None:
    kept = CachedRuns(tmp_path / "kept")
    jobs = [{"object": n} for n in range(3)]
    kept.complete(jobs, json.dumps, 2)
    assert [kept[job] for job in jobs] == [json.dumps(job) for job in jobs]


def trained(accuracy: float) -> dict[str, Any]:
    return {"accuracy": accuracy, "bits": [0.4, 0.6], "wire": 100, "whole": 5000}


def test_accuracy_is_compared_seed_by_seed(bench: Any) -> None:
    kept, jobs = CachedRuns(None), bench.runs("lenet", ["none", "3lc:sparsity=1"], 2, 300)
    for job in jobs:
        kept.add(job, trained(0.8 + 0.05 * job["seed"] - (0.001 if "3lc" in job["spec"] else 0)))
    table = bench.trained_table("accuracy", jobs, kept)
    row = dict(zip(table.headings, table.rows[-1], strict=True))
    assert row["accuracy %"] == "82.40"
    assert row["less none"] == "-0.10 ± 0.00"  # the seeds differ by far more
    assert row["payload, times fewer"] == "64.0" and row["all frames"] == "50.0"  # of both directions


def test_a_step_is_compared_on_its_own_link(bench: Any) -> None:
    kept, specs = CachedRuns(None), ["none", "3lc:sparsity=1.75"]
    for job in bench.link_jobs(specs, 3):
        slow = 10.0 if job["link"] == "10mbit" else 1.0
        kept.add(job, {"seconds": slow * (1.0 if job["spec"] == "none" else 0.05) + 0.001 * job["round"]})
    table = bench.links_table(specs, 3, kept)
    row = dict(zip(table.headings, table.rows[-1], strict=True))
    assert row["10mbit, s a step"] == "0.501"
    assert [one["met"] for one in table.figures if one["goal"]] == [True]


# --- The figures of bin/bench evidence: goals, and which systems are ahead of gossipx; and its rows are valid runs ---


@pytest.fixture(scope="module")
def evidence(benches: Path) -> Any:
    return importlib.import_module("_evidence_table")


def points(*each: tuple[float, float, float]) -> list[dict[str, float]]:
    """Return the points of a run from loss, seconds and bytes."""
    return [
        {"loss": loss, "seconds": seconds, "bytes": count, "accuracy": 0.0, "own": loss + 0.5}
        for loss, seconds, count in each
    ]


def compared(evidence: Any, rate: str = "100mbit", **runs: tuple[float, float, float]) -> Any:
    """Return a comparison of systems by the ends of their runs."""
    made: dict[str, list[Sequence[Any]]] = {name.replace("_", "-"): [points(end)] for name, end in runs.items()}
    return evidence.Comparison("text", rate, 4, 800, made, {})


def test_a_loss_is_reached_on_the_line_between_two_points(evidence: Any) -> None:
    run = points((3.0, 10.0, 100.0), (2.0, 20.0, 300.0), (1.0, 30.0, 500.0))
    assert evidence.reach(run, 1.75) == {"seconds": 22.5, "bytes": 350.0}
    assert evidence.reach(run, 3.5) == {"seconds": 10.0, "bytes": 100.0}
    assert evidence.reach(run, 0.5) is None


def test_a_system_is_ahead_if_it_is_lower_in_both(evidence: Any) -> None:
    comparison = compared(evidence, ddp=(1.8, 100, 1e9), diloco=(1.9, 10, 4e7), pairs=(1.95, 20, 2e7))
    assert (comparison.ahead("seconds"), comparison.ahead("bytes")) == (["diloco"], [])
    noise = compared(evidence, ddp=(1.8000, 100, 1.00e9), bsp=(1.8001, 101, 1.01e9))
    assert noise.ahead("seconds") == noise.ahead("bytes") == []


def test_a_row_has_the_figures_of_the_average_and_of_own_models(evidence: Any) -> None:
    comparison = compared(evidence, ddp=(1.8, 100, 1e9), pairs=(1.85, 20, 2e7))
    table = comparison.table()
    (_, pairs) = (dict(zip(table.headings, row, strict=True)) for row in table.rows)
    shown = {"system": "gossipx pairs", "loss": "1.850", "own models": "2.350", "of DDP's": "1/50", "s": "20.0"}
    assert shown.items() <= pairs.items()


def test_only_the_best_of_gossipx_count(evidence: Any) -> None:
    runs = {"diloco": (1.95, 50, 5e7), "tau:10": (2.0, 60, 1e8), "pairs": (1.9, 20, 2e7)}
    assert compared(evidence, **runs).ahead("bytes") == []
    del runs["pairs"]
    assert compared(evidence, **runs).ahead("bytes") == ["diloco"]


def test_all_periods_count(evidence: Any) -> None:
    """Of each system; and for a goal."""
    made = {name: [points((loss, 50, 2e7))] for name, loss in (("pairs", 1.9), ("diloco", 1.95))}
    sooner = points((1.8, 60, 1e7))
    for ends, ahead in (({}, []), ({"diloco": sooner}, ["diloco"]), ({"diloco": sooner, "pairs": sooner}, [])):
        assert evidence.Comparison("text", "1000mbit", 4, 800, made, {}, ends).ahead("bytes") == ahead
    made = {"ddp": [points((1.8, 400, 1.5e9))], "pairs": [points((1.81, 25, 3e7))]}
    comparison = evidence.Comparison("text", "1000mbit", 4, 800, made, {}, {"pairs": points((1.84, 25, 3e6))})
    assert [one["value"] for one in comparison.table().figures if one["name"].endswith("0.05 above its loss")] == [500]


def test_a_rival_without_results_leaves_the_goal_unmet(evidence: Any) -> None:
    made = {"pairs": [points((1.9, 50, 2e7))]}
    for left_out, met in (((), True), (("hub",), True), (("hivemind",), False)):
        comparison = evidence.Comparison("text", "1000mbit", 4, 800, made, {}, {}, left_out)
        goals = [one for one in comparison.table().figures if "ahead" in one["name"]]
        assert [one["met"] for one in goals] == [met, met]
        assert all(met != one["name"].endswith(", without a result of hivemind") for one in goals), "it says why"
        assert all(evidence.shown(name) in comparison.title() for name in left_out)


def test_goals_are_relative_to_ddp(evidence: Any) -> None:
    comparison = compared(evidence, ddp=(1.8, 400, 1.5e9), pairs=(1.84, 25, 3e6), momentum_3lc=(1.89, 19, 1e6))
    goals = [(one["value"], one["met"]) for one in comparison.table().figures if one["goal"]]
    expected = [(500, True), (1500, True), (1500, False), (400 / 19, True)]
    assert goals == [(pytest.approx(value), met) for value, met in expected]


def test_other_periods_count_with_the_same_seeds_only(evidence: Any) -> None:
    """A run of seed 0 would be compared with the mean over all seeds."""
    runs = importlib.import_module("evidence")
    kept = runs.CachedRuns(None)
    for period, losses in ((10, (1.5, 1.7)), (20, (1.6,))):
        for seed, loss in enumerate(losses):
            job = runs.job("text", "pairs", "1000mbit", 4, seed, 800, period)
            kept.add(job, points((3.0, 1, 1), (loss, 9, 4e6)))
    for seeds, expected in ((1, [1.5, 1.6]), (2, [1.6])):
        given = argparse.Namespace(
            systems=["pairs"], full=True, steps=800, peers=4, seeds=seeds, rate=["1000mbit"], period=10
        )
        plan = runs.Plan("text", given, (), kept)
        assert plan.periods == {"pairs": 10}
        assert [end["loss"] for end in plan.ends("pairs")] == pytest.approx(expected)


@pytest.mark.slow
def test_gossipx_accepts_the_options_of_each_of_its_rows(evidence: Any, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("localhost slots=4\n")
    task = ("--peers", str(hosts), "--logdir", str(tmp_path), "--task", "text", "--model", "transformer", "--dry-run")
    own = {name: one for name, one in evidence.SYSTEMS.items() if one.is_gossipx}
    assert len(own) > 5
    for name, system in own.items():
        done = CliRunner().invoke(main, ["run", *task, *system.arguments("text", 50, 4)])
        assert done.exit_code == 0, f"{name}: {done.output}"


def test_a_synchronous_system_has_the_losses_of_any_link(evidence: Any) -> None:
    fast = [{**point, "step": step} for step, point in zip((100, 200), points((3, 1, 10), (2, 2, 20)), strict=True)]
    slow = [{**point, "step": step} for step, point in zip((4, 8), points((5, 9, 1), (4, 11, 1)), strict=True)]
    shown = [(one["loss"], one["seconds"], one["bytes"]) for one in evidence.stretched(fast, slow)]
    assert shown == [(3, 50, 10), (2, 100, 20)]
