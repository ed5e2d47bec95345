"""The curves of a whole run beside those of its peers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from runs import Folder, Run, folder

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
def test_a_run_without_tensorboard_has_no_curves_of_the_whole_run(two: Folder) -> None:
    run = two.run(*BRIEF, "--recorder", "csv")
    assert not any(run.directory.rglob("events.out.tfevents.*")) and not (run.directory / "all").exists()
    assert all((run.directory / f"peer-{rank:02d}" / "metrics.csv").stat().st_size > 100 for rank in (0, 1))


# --- The curves that only a run with a hub or with servers has -----------------------------------------


EVERY_FIFTH = ("--policy", "tau:5")
RECORDED = ("--iterations", "60", "--eval-interval", "20", "--log-interval", "5")
AROUND = ("hub/", "server/", "sync/elastic_distance", "time/tables_fraction")
"""Prefixes of tags that only runs with a hub or servers have."""


def curves(run: Run, rank: int) -> dict[str, Curve]:
    """Return the curves of a peer whose tags start with one of AROUND, by tag."""
    own = read(run.directory / f"peer-{rank:02d}")
    return {tag: curve for tag, curve in own.items() if tag.startswith(AROUND)}


def grows(curve: Curve) -> bool:
    """Return whether neither its iterations nor its values ever decrease."""
    return curve == sorted(curve) and [value for _, value in curve] == sorted(value for _, value in curve)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """One run of each kind, with two workers; the third peer only serves."""
    path = tmp_path_factory.mktemp("three")
    options = {
        "hub": (*EVERY_FIFTH, "--hub", "0", "--hub-only"),
        "server": ("--servers", "0", "--servers-only", "--sync", "bsp"),
    }
    with folder(path, 3) as here:
        return {name: here.run(*RECORDED, *given, name=name) for name, given in options.items()}


@pytest.mark.slow
def test_curves_of_a_hub(three: dict[str, Run]) -> None:
    """The aggregate is over the peers that train."""
    run = three["hub"]
    check(run, range(1, 3))
    centre, *workers = (curves(run, rank) for rank in range(3))
    assert list(centre) == ["hub/exchanges"] and grows(centre["hub/exchanges"])
    assert centre["hub/exchanges"][-1][1] == run.summary["merged_by_hub"][0]
    for rank, worker in enumerate(workers, start=1):
        assert list(worker) == ["sync/elastic_distance"]
        distances = [value for _, value in worker["sync/elastic_distance"]]
        # One point per exchange, all above 0: worker and centre approach each other but do not meet (alpha < 1).
        assert len(distances) == run.summary["retrievals"][rank] > 0 and min(distances) > 0


@pytest.mark.slow
def test_curves_of_a_shard_and_of_its_workers(three: dict[str, Run]) -> None:
    run = three["server"]
    shard, *workers = (curves(run, rank) for rank in range(3))
    names = ("clock", "delayed_pulls", "gradients", "staleness", "buffered")
    assert list(shard) == [f"server/{name}/shard-00" for name in names]
    clock, delayed, gradients, staleness, buffered = shard.values()
    assert all(map(grows, (clock, delayed, gradients)))
    assert all(value <= step for step, value in clock), "the clock is behind the fastest worker, or with it"
    assert clock[-1] == (60, 60) and gradients[-1] == (60, 120), "two workers, 60 iterations"
    assert delayed[-1][1] == run.summary["delayed_pulls"][0] > 0, "bsp: the first of two waits for the other"
    assert {value for _, value in staleness} == {0}, "bsp: every gradient is of the values that it changes"
    assert {value for _, value in buffered} <= {0, 1}, "that of the first of the two"
    for worker in workers:
        assert list(worker) == ["time/tables_fraction"]
        assert all(0 <= value < 1 for _, value in worker["time/tables_fraction"])
        assert worker["time/tables_fraction"][-1][1] > 0
