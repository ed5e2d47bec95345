"""The curves of a whole run beside those of its peers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from runs import Folder, Run

Curve = list[tuple[int, float]]
BRIEF = ("--iterations", "40", "--eval-interval", "20", "--policy", "tau:10")


def read(directory: Path) -> dict[str, Curve]:
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def check(run: Run, training: range) -> dict[str, Curve]:
    """Return the aggregate curves; they must be the means of those of the peers that train."""
    whole = read(run.directory / "all")
    peers = [read(run.directory / f"peer-{rank:02d}") for rank in training]
    assert {tag.partition("/")[0] for tag in whole} == {"mean", "worst"}
    for tag in ("train/loss", "sync/retrievals", "test/accuracy", "test/accuracy_after_finish"):
        steps = sorted({step for step, _ in whole[f"mean/{tag}"]})
        assert steps == sorted({step for step, _ in peers[0][tag]}), tag
        at = {step: [dict(peer[tag])[step] for peer in peers] for step in steps}
        for step, value in dict(whole[f"mean/{tag}"]).items():  # the last one of a step, as in ``at``
            assert value == pytest.approx(sum(at[step]) / len(peers)), tag
    return whole


def test_a_run_has_aggregate_curves(two: Folder) -> None:
    run = two.run(*BRIEF)
    whole = check(run, range(2))
    assert sorted({step for step, _ in whole["mean/sync/retrievals"]}) == [10, 20, 30, 40]
    worst = min(run.summary["test_accuracy_before_finish"])
    assert whole["worst/test/accuracy"][-1] == (40, pytest.approx(worst))
    ended = two.start("-m", "gossipx", "compare", run.directory, "--plot", two.path / "x.png").end()
    assert ended.code == 0, "the directory is no peer's"
    again = two.run(*BRIEF, "--overwrite")
    assert len(list((again.directory / "all").iterdir())) == 1, "those of the replaced run are gone"


@pytest.mark.slow
def test_the_aggregate_is_over_the_peers_that_train(three: Folder) -> None:
    check(three.run(*BRIEF, "--hub", "0", "--hub-only"), range(1, 3))


@pytest.mark.slow
def test_a_run_without_tensorboard_has_no_curves_of_the_whole_run(two: Folder) -> None:
    run = two.run(*BRIEF, "--recorder", "csv")
    assert not any(run.directory.rglob("events.out.tfevents.*")) and not (run.directory / "all").exists()
    assert all((run.directory / f"peer-{rank:02d}" / "metrics.csv").stat().st_size > 100 for rank in (0, 1))
