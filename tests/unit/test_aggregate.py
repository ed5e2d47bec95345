"""The curves of a whole run: mean and worst over its peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from summaries import summary_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from gossipx.launch.run.display import PeerStatus
from gossipx.launch.run.outcome import RunCurves
from gossipx.metrics.aggregate import DIRECTORY, METRICS, Aggregate, Record
from gossipx.metrics.board import TensorBoardRecorder
from gossipx.runtime.figures.scores import scores
from gossipx.settings import files

Curve = list[tuple[int, float]]


def events_of(directory: Path) -> EventAccumulator:
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return events


def read(run: Path) -> dict[str, Curve]:
    events = events_of(run / DIRECTORY)
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def accuracy(*points: tuple[int, float]) -> list[Record]:
    return [("test/accuracy", step, value) for step, value in points]


def test_mean_and_worst_over_peers(tmp_path: Path) -> None:
    """The worst accuracy is the least, the worst loss the largest; of retrievals none is bad."""
    curves = Aggregate(tmp_path, dict)
    for rank, share in enumerate((0.5, 0.75)):
        curves.add(rank, [("test/accuracy", 10, share), ("test/loss", 10, share), ("sync/retrievals", 10, share)])
        curves.add(rank, [("sync/delta", 10, 1.0)])
    curves.write(10)
    curves.close()
    assert read(tmp_path) == {
        "mean/test/accuracy": [(10, 0.625)],
        "worst/test/accuracy": [(10, 0.5)],
        "mean/test/loss": [(10, 0.625)],
        "worst/test/loss": [(10, 0.75)],
        "mean/sync/retrievals": [(10, 0.625)],
    }


def test_an_iteration_waits_until_all_peers_have_passed_it(tmp_path: Path) -> None:
    statuses = {rank: PeerStatus(f"peer {rank}") for rank in range(3)}
    curves = RunCurves(Aggregate(tmp_path, dict, False), statuses)

    def handle(rank: int, state: str, step: int, *points: tuple[int, float]) -> None:
        statuses[rank].state, statuses[rank].step = state, step
        curves.handle(rank, accuracy(*points))

    handle(0, "train", 25, (10, 0.5), (20, 0.5))
    handle(1, "train", 12, (10, 0.75))
    assert read(tmp_path) == {}, "the third one has not begun"
    handle(2, "serve", 0)
    handle(1, "train", 20)
    handle(1, "train", 20, (20, 1.0))  # the figures of an iteration may come after it
    handle(0, "train", 30, (30, 0.25))
    handle(1, "lost", 20)
    handle(0, "train", 41, (40, 0.25))
    curves.close()
    assert read(tmp_path)["mean/test/accuracy"] == [(10, 0.625), (20, 0.75), (30, 0.25), (40, 0.25)]


def test_figures_of_the_final_model_are_written_for_all_peers_at_once(tmp_path: Path) -> None:
    """Peers evaluate it at the last iteration too, on other images and at different times."""
    curves = Aggregate(tmp_path, dict)
    curves.add(0, accuracy((10, 0.5), (10, 0.125)))
    curves.add(1, accuracy((10, 0.75)))
    curves.write(10)
    curves.add(1, accuracy((10, 0.25)))
    curves.write(10)
    training = {"retrievals": 2, "blocked_seconds": 1.0, "test_accuracy": 0.25}
    serving = {"retrievals": 0, "blocked_seconds": None, "test_accuracy": 0.25}
    curves.conclude(
        summary_of(
            training,
            training,
            serving,
            iterations=10,
            test_accuracy_before_finish=[0.125, 0.25, None],
            test_bits_per_character=[0.25, 0.5, None],
        )
    )
    curves.close()
    found = read(tmp_path)
    assert found["mean/test/accuracy"] == [(10, 0.625), (10, 0.1875)]
    assert found["mean/test/accuracy_after_finish"] == [(10, 0.25)]
    assert found["mean/test/bits_per_character_after_finish"] == [(10, 0.375)]
    assert found["worst/test/bits_per_character_after_finish"] == [(10, 0.5)]
    assert found["mean/sync/retrievals"] == [(10, 2.0)]


def test_a_resumed_run_hides_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    for resumes, steps in ((False, (10, 20, 30)), (True, (20, 30, 40))):
        curves = Aggregate(tmp_path, dict, resumes)
        curves.add(0, accuracy(*((step, 0.5 if resumes else 0.25) for step in steps)))
        curves.write(100)
        curves.close()
    assert read(tmp_path)["mean/test/accuracy"] == [(10, 0.25), (20, 0.5), (30, 0.5), (40, 0.5)]


def test_a_directory_that_cannot_be_written_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / DIRECTORY).write_text("in the way")
    curves = RunCurves(Aggregate(tmp_path, dict, False), {0: PeerStatus("a", "train", 10)})
    for step in (10, 20):
        curves.handle(0, accuracy((step, 0.5)))
    curves.close()
    [told] = caplog.messages
    assert "the aggregate curves cannot be written (File exists): the run has only those of its peers" in told


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"policy": "tau:10", "base_lr": 0.01, "codec": "fp16", "topology": "ring"},
            {"policy": "tau:10", "exchange": "pull", "codec": "fp16", "topology": "ring", "learning rate": 0.01},
        ),
        ({"exchange": "waves"}, {"exchange": "waves"}),
        ({"mode": "pushpull"}, {"exchange": "pushpull"}),
        ({"hub": "0"}, {"exchange": "hub"}),
        ({"servers": "0", "sync": "asp"}, {"policy": "asp", "exchange": "server", "codec": "push none, pull none"}),
    ],
)
def test_a_run_is_one_trial(given: dict[str, object], expected: dict[str, object]) -> None:
    found = files.resolve(given).hyperparameters(4)
    assert found.items() >= {**expected, "seed": 0, "peers": 4}.items()
    names = {"policy", "exchange", "codec", "outer", "topology", "seed", "peers", "learning rate"}
    assert found.keys() <= names and ("topology" in found) == (found["exchange"] not in ("hub", "server"))


def test_hyperparameters_are_written_once(tmp_path: Path) -> None:
    curves = Aggregate(tmp_path, lambda: {"policy": "tau:10", "seed": 3})
    curves.add(0, accuracy((10, 0.5)))
    curves.write(10)
    curves.close()
    events = events_of(tmp_path / DIRECTORY)
    start, experiment = (
        HParamsPluginData.FromString(events.SummaryMetadata(f"_hparams_/{name}").plugin_data.content)
        for name in ("session_start_info", "experiment")
    )
    hparams = start.session_start_info.hparams
    assert (hparams["policy"].string_value, hparams["seed"].number_value, len(hparams)) == ("tau:10", 3, 2)
    assert [metric.name.tag for metric in experiment.experiment.metric_infos] == list(METRICS)
    shown_first = [info.name for info in experiment.experiment.hparam_infos if info.differs]
    assert shown_first == ["policy", "seed"], "TensorBoard shows five, these and the first of the alphabet"


def test_the_curves_of_runs_come_before_those_of_peers_and_so_have_colours_of_their_own(tmp_path: Path) -> None:
    """TensorBoard colours runs in the order of their first records, and has seven colours. Those of two runs were one
    if each had six peers."""
    began = {}
    for start, name in ((1.7e9, "one"), (1.7e9 + 10, "two")):
        board = TensorBoardRecorder(tmp_path / name / "peer-00", clock=lambda start=start: start)
        curves = Aggregate(tmp_path / name, lambda: {"policy": "tau:10"}, clock=lambda start=start: start + 5)
        curves.add(0, accuracy((10, 0.5)))
        curves.write(10)
        board.close()
        curves.close()
        for part in ("peer-00", DIRECTORY):
            began[name, part] = events_of(tmp_path / name / part).FirstEventTimestamp()
    order = sorted(began, key=began.__getitem__)
    assert order == [("one", DIRECTORY), ("two", DIRECTORY), ("one", "peer-00"), ("two", "peer-00")]


# --- The results that a script's ``evaluate`` may return, and those that are left out with a warning ---


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (0.5, {"accuracy": 0.5}),
        (torch.tensor(0.25, requires_grad=True), {"accuracy": 0.25}),
        ({"loss": 1.5}, {"loss": 1.5}),
        ({"accuracy": 1, "loss": torch.tensor([0.5])}, {"accuracy": 1.0, "loss": 0.5}),
        ({"loss": 1.0, "bits_per_character": 1.5}, {"loss": 1.0, "bits_per_character": 1.5}),
        ({}, {}),
        (float("nan"), {}),
        ({"accuracy": 0.5, "loss": float("inf")}, {"accuracy": 0.5}),
    ],
    ids=str,
)
def test_an_accuracy_or_figures_by_name(result: Any, found: dict[str, float], caplog: pytest.LogCaptureFixture) -> None:
    assert scores(result) == found
    assert not caplog.records


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (None, "evaluate returned a NoneType as accuracy: it must return an accuracy from 0 to 1, or numbers by name"),
        ({"loss": "high", "accuracy": 0.5}, "evaluate returned a str as loss: it must return"),
        ({"loss": torch.zeros(2), "accuracy": 0.5}, "evaluate returned a Tensor as loss: it must return"),
        ({"test/loss": 1.0, "accuracy": 0.5}, "evaluate returned a figure named 'test/loss': use letters, digits"),
        ({3: 1.0, "accuracy": 0.5}, "evaluate returned a figure named 3: use letters"),
    ],
    ids=str,
)
def test_other_figures_are_left_out_and_named(result: Any, told: str, caplog: pytest.LogCaptureFixture) -> None:
    """An error would lose a completed training."""
    assert scores(result) == ({} if result is None else {"accuracy": 0.5})
    (record,) = caplog.records
    assert record.getMessage().startswith(told)
