"""bin/bench compression: its file of completed runs, and its tables."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from _bench.cached_runs import CachedRuns


@pytest.fixture(scope="module")
def bench(benches: Path) -> Any:
    return importlib.import_module("compression")


def work(job: dict[str, Any]) -> int:
    return 10 * int(job["n"])


def test_a_completed_run_is_not_repeated(tmp_path: Path) -> None:
    file, done = tmp_path / "kept", []

    def counted(job: dict[str, Any]) -> int:
        done.append(job["n"])
        return work(job)

    jobs = [{"n": n} for n in range(4)]
    CachedRuns(file).complete(jobs[:2], counted, 1)
    again = CachedRuns(file)
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
    plan = bench.Plan(full=False)
    kept = CachedRuns(None)
    for job in plan.jobs("accuracy"):
        kept.add(job, trained(0.8 + 0.05 * job["seed"] - (0.001 if "3lc" in job["spec"] else 0)))
    table = bench.accuracy_table(plan, kept)
    row = dict(zip(table.headings, table.rows[-1], strict=True))
    assert row["accuracy %"] == "82.40"
    assert row["less float"] == "-0.10 ± 0.00"  # the seeds differ by far more
    assert row["times fewer bytes"] == "50.0"
    assert table.figures[-1]["met"] is True and table.figures[0]["met"] is None


@pytest.mark.parametrize(
    ("mean", "half", "met"),
    [(-0.2, 0.0, True), (-0.5, 0.6, True), (-0.5, 0.4, False), (-2.0, 3.0, False), (float("nan"), 1.0, False)],
)
def test_within_a_third_of_a_point_or_within_the_interval(bench: Any, mean: float, half: float, met: bool) -> None:
    assert bench.is_as_good(mean, half) is met


def test_ratios_include_both_directions(bench: Any) -> None:
    plan = bench.Plan(full=True)
    kept = CachedRuns(None)
    for job in plan.jobs("ratios"):
        kept.add(job, trained(0.9))
    table = bench.ratios_table(plan, kept)
    row = dict(zip(table.headings, table.rows[0], strict=True))
    assert row["payload"] == "64.0" and row["all frames"] == "50.0"
    assert [one["met"] for one in table.figures if one["goal"]] == [True, False]  # 39 of sparsity 1, 107 of 1.75


def test_a_step_is_compared_on_its_own_link(bench: Any) -> None:
    plan = bench.Plan(full=True)
    kept = CachedRuns(None)
    for job in bench.link_jobs(plan.specs, plan.rounds):
        slow = 10.0 if job["link"] == "10mbit" else 1.0
        kept.add(job, {"seconds": slow * (1.0 if job["spec"] == "none" else 0.05) + 0.001 * job["round"]})
    table = bench.links_table(plan, kept)
    (row,) = (dict(zip(table.headings, one, strict=True)) for one in table.rows if one[0] == "3LC (s=1.75)")
    assert row["10mbit, s a step"] == "0.501"
    assert [one["met"] for one in table.figures if one["goal"]] == [True]


def test_jobs_are_ordered_by_seed(bench: Any) -> None:
    seeds = [job["seed"] for job in bench.Plan(full=True).jobs("accuracy")]
    assert seeds == sorted(seeds) and set(seeds) == set(range(5))
