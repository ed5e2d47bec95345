"""Benchmarks: their arithmetic, bin/bench compression's file of completed runs and tables, and what is compared."""

from __future__ import annotations

import importlib
import json
import math
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _bench.cached_runs import CachedRuns
from _bench.tables import interval
from torch import Tensor

from gossipx import codecs


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
