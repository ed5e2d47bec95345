"""Runs without a final summary: the figures that their peers recorded last, and how they are listed."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from gossipx.errors import UsageError
from gossipx.launch.directory import CONFIG_FILE, HOSTS_FILE, is_in_progress
from gossipx.metrics.board import TensorBoardRecorder
from gossipx.settings import files
from gossipx.settings.sections import RunConfig, RunSettings
from gossipx.tools import recorded
from gossipx.tools.runs import runs_in


def begun(logdir: Path, name: str) -> Path:
    """Return the directory of a run of three peers that has just begun."""
    run = logdir / name
    run.mkdir(parents=True)
    (run / CONFIG_FILE).write_text(files.dump(RunConfig(run=RunSettings(name=name))))
    (run / HOSTS_FILE).write_text("localhost slots=3\n")
    return run


def record(run: Path, rank: int, step: int, **curves: float) -> None:
    recorder = TensorBoardRecorder(run / f"peer-{rank:02d}")
    for tag, value in curves.items():
        recorder.scalar(tag.replace("__", "/"), value / 2, step // 2)
        recorder.scalar(tag.replace("__", "/"), value, step)
    recorder.close()


def train(run: Path) -> None:
    """Record what two of its peers have done; the third was lost before."""
    for rank, step in ((0, 100), (2, 80)):
        record(
            run,
            rank,
            step,
            sync__retrievals=step / 10,
            comm__bytes_received=step * 1e6,
            time__train_seconds=20.0,
            time__blocked_fraction=0.1,
            test__accuracy=0.5 + step / 1000,
        )


def test_a_killed_run_has_the_last_figures_that_its_peers_recorded(tmp_path: Path) -> None:
    run = begun(tmp_path, "cut")
    train(run)
    found = recorded.read(run)
    assert (found.name, found.policy, found.peers, found.iterations) == ("cut", "tau:10", 3, 100)
    assert found.stopped == ["localhost:29400", "localhost:29402"] and found.lost == ["localhost:29401"]
    assert found.retrievals == [10.0, None, 8.0]
    assert found.bytes_received == [1e8, None, 8e7]
    assert found.blocked_seconds == [pytest.approx(2.0), None, pytest.approx(2.0)]
    assert found.test_accuracy_before_finish == [pytest.approx(0.6), None, pytest.approx(0.58)]
    assert found.test_accuracy == [None] * 3 and found.agreed is None


def test_a_stopped_run_keeps_its_figures_and_gets_the_last_measured_accuracy(tmp_path: Path) -> None:
    run = begun(tmp_path, "stopped")
    train(run)
    unmeasured = dict.fromkeys(("test_accuracy_before_finish", "test_loss_before_finish"), [None] * 3)
    stopped = recorded.read(run).with_figures({"retrievals": [11.0, None, 9.0], **unmeasured})
    stopped.write(run)
    found = recorded.read(run)
    assert found.retrievals == [11.0, None, 9.0]
    assert found.test_accuracy_before_finish == [pytest.approx(0.6), None, pytest.approx(0.58)]


def test_a_run_that_recorded_nothing_has_no_figures(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no summary and no curves here"):
        recorded.read(begun(tmp_path, "empty"))


def test_runs_are_listed_with_their_states(tmp_path: Path) -> None:
    for name in ("killed", "stopped", "broken"):
        train(begun(tmp_path, name))
    recorded.read(tmp_path / "stopped").write(tmp_path / "stopped")
    (tmp_path / "broken" / CONFIG_FILE).write_text("x = [")
    begun(tmp_path, "empty")
    (tmp_path / "no run").mkdir()
    found = {run.name: run for run in runs_in(tmp_path)}
    assert {name: run.state for name, run in found.items()} == {
        "killed": "killed",
        "stopped": "stopped",
        "broken": "unreadable",
        "empty": "killed",
    }
    assert found["killed"].iterations == 100 and found["killed"].received_mb == pytest.approx(90.0)
    assert found["killed"].accuracy == pytest.approx(0.59)
    assert found["empty"].iterations is None and found["empty"].peers == 3


def test_a_run_is_in_progress_while_its_directory_is_locked(tmp_path: Path) -> None:
    run = begun(tmp_path, "x")
    assert not is_in_progress(run)
    lock = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert is_in_progress(run)
        assert [one.state for one in runs_in(tmp_path)] == ["in progress"]
    finally:
        os.close(lock)
    assert not is_in_progress(run)


def test_folders_that_are_none_of_its_own_do_no_harm(tmp_path: Path) -> None:
    run = begun(tmp_path, "shared")
    train(run)
    (run / "peer-00").rename(run / "peer-00 (copy)")
    for name in ("kept", "30"):
        file = run / "peer-02" / "checkpoints" / name / "manifest.json"
        file.parent.mkdir(parents=True)
        file.touch()
    (listed,) = runs_in(tmp_path)
    assert (listed.state, listed.iterations, listed.resumable) == ("killed", 80, 30)
