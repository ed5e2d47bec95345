"""Runs with several seeds, and runs whose length is in seconds."""

from __future__ import annotations

import json
import signal

import pytest
from click.testing import CliRunner

from gossipx.cli import main
from runs import Folder


@pytest.mark.slow
def test_seeds_are_run_and_compared(two: Folder) -> None:
    started = two.start_run("--seeds", "0,3", "--iterations", "20", "--eval-interval", "0", "--policy", "tau:5")
    ended = started.end()
    assert ended.code == 0, ended.shown
    found = {name: json.loads((two.path / name / "summary.json").read_text()) for name in ("x-seed0", "x-seed3")}
    assert [one["seed"] for one in found.values()] == [0, 3]
    paths = [str(two.path / name) for name in found]
    assert f"compare the seeds: gossipx compare {' '.join(paths)}" in ended.output
    [row] = json.loads(CliRunner().invoke(main, ["compare", *paths, "--json"]).stdout)
    assert (row["name"], row["seeds"]) == ("x", [0, 3]) and row["intervals"]["accuracy"] > 0
    table = CliRunner().invoke(main, ["compare", *paths]).stdout
    assert "x, 2 seeds" in table and " ± " in table


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="SIGINT"),
        pytest.param(signal.SIGTERM, 0, id="SIGTERM"),
    ],
)
@pytest.mark.slow
def test_a_signal_ends_the_seeds(two: Folder, number: int, code: int) -> None:
    started = two.start_run("--seeds", "0-4", "--iterations", "1000000", "--policy", "tau:50")
    started.line(r"train \d")
    started.signal(number)
    ended = started.end()
    assert ended.code == code, ended.shown
    assert [path.name for path in two.path.glob("x-seed*")] == ["x-seed0"], ended.shown


def test_training_ends_after_its_seconds(two: Folder) -> None:
    """And the number of iterations is the one that was reached; a limit of iterations may come first."""
    run = two.run("--seconds", "1", "--eval-interval", "0", "--policy", "tau:50")
    assert all(seconds >= 1.0 for seconds in run.summary["train_seconds"])
    assert 1 < run.summary["iterations"] < 1_000_000
    short = two.run("--seconds", "600", "--iterations", "5", "--eval-interval", "0", name="short")
    assert short.summary["iterations"] == 5
