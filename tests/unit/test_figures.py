"""The declarations of figures: each reaches every place that shows figures, under the names that files have."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from figure_tables import TABLES, written
from summaries import summary_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from gossipx.cli.results import _lines
from gossipx.figures import COUNTED, FIGURES, LINES, PER_PEER, Counters
from gossipx.launch.run.display import PeerStatus
from gossipx.launch.run.outcome import RunCurves
from gossipx.metrics import summary
from gossipx.metrics.aggregate import DIRECTORY, METRICS, WORST, Aggregate, Record
from gossipx.metrics.board import TensorBoardRecorder
from gossipx.metrics.compare import compare
from gossipx.metrics.prometheus import Exporter
from gossipx.peer.server_role import Total
from gossipx.runtime.figures.measured import Figures
from gossipx.runtime.figures.reporting import Reporter
from gossipx.runtime.figures.scores import scores
from gossipx.server import hosted_shards
from gossipx.server.shard_clock import ShardClock
from gossipx.server.sync_models import sync_model_from
from gossipx.settings import files
from gossipx.tools import recorded


def ended(**figures: list[float | None]) -> summary.Summary:
    return summary_of(*[dict.fromkeys(PER_PEER, 0)] * 2, **figures)


def test_each_place_shows_a_name_once() -> None:
    for of_place in (
        [figure.name for figure in FIGURES if figure.where.summary],
        [figure.where.prometheus for figure in FIGURES if figure.where.prometheus],
        [figure.where.tag for figure in FIGURES if figure.where.tag],
        [line.key for _, line in LINES],
        [line.heading for _, line in LINES],
    ):
        assert len(set(of_place)) == len(of_place)


def test_names_of_curves_that_are_read_back() -> None:
    assert recorded._TAGS["retrievals"] == "sync/retrievals" and "test_accuracy" not in recorded._TAGS
    assert (WORST["test/accuracy"], WORST["test/loss"], WORST["train/loss"]) == (min, max, None)


@pytest.mark.fault(12, 15, 22, 57)
@pytest.mark.parametrize("name", COUNTED)
def test_a_counter_is_shown_wherever_figures_are(name: str, tmp_path: Path) -> None:
    """A peer counts twice, another one once; the checkpoint of the first has counted three before."""
    counts = Counters()
    counts.add(name)
    counts.add(name)
    earlier, resumed = Figures(lambda: 1.0), Figures(lambda: 1.0)
    resumed.load_state_dict(earlier.state_dict(0, 0, counts | {name: 3}))
    of_first = resumed.all_counts(counts)[name]
    assert of_first == 5
    ended(**{name: [of_first, 1]}).write(tmp_path)
    [row] = rows = compare([summary.read(tmp_path)])
    total = 5 if name == "shard_rollbacks" else 6  # each worker sees the same one
    assert row.as_dict()[name] == total
    [line] = [line for figure, line in LINES if figure.name == name]
    assert [cell(row) for heading, cell in _lines(rows) if heading == line.heading] == [str(total)]
    exporter: Any = SimpleNamespace(_sample=lambda family, name, *rest, **labels: (name, rest[1]))
    core = SimpleNamespace(CounterMetricFamily=None, GaugeMetricFamily=None)
    exporter._prometheus, exporter._status = SimpleNamespace(core=core), lambda: {**counts, "stage": "train"}
    [shown] = [figure.where.prometheus for figure in FIGURES if figure.name == name]
    assert (shown, 2) in Exporter.collect(exporter)


def test_what_is_not_declared_is_not_counted() -> None:
    with pytest.raises(KeyError):
        Counters().add("reconnects")
    assert not {line.heading for figure, line in LINES if figure.name in COUNTED} & {
        heading for heading, _ in _lines(compare([ended()]))
    }, "and what did not happen has no line"


@pytest.mark.parametrize(("was", "name"), [("taken_in", "merged_by_hub"), ("set_back", "shard_rollbacks")])
def test_files_of_earlier_versions_are_read(was: str, name: str, tmp_path: Path) -> None:
    """With other names, and without a counter that came later."""
    data = ended(**{name: [3, 4]}).as_dict()
    data[was] = data.pop(name)
    del data["outliers"]
    (tmp_path / summary.FILE).write_text(json.dumps(data), encoding="utf-8")
    found = summary.read(tmp_path)
    assert getattr(found, name) == [3, 4] and found.outliers == [None, None]
    figures = Figures(lambda: 1.0)
    state = figures.state_dict(0, 0, Counters())
    state["before"] = {"set_back" if key == "shard_rollbacks" else key: 7 for key in state["before"]}
    figures.load_state_dict(state)
    assert figures.earlier.counts["shard_rollbacks"] == 7


@pytest.mark.parametrize("page", TABLES)
def test_the_pages_have_the_tables_of_the_declarations(page: str) -> None:
    found, wanted = written(page)
    assert found == wanted, "run bin/docs"


# --- The curves of a server ----------------------------------------------------------------------------


def test_a_total_is_recorded_as_the_mean_since_the_last_record() -> None:
    now: dict[str, Any] = {}
    recorded: list[tuple[str, float, int]] = []
    role = SimpleNamespace(server=SimpleNamespace(metrics=now))
    driver: Any = SimpleNamespace(role=role, arena=None, read=lambda look: look(role), now=time.monotonic)
    recorder: Any = SimpleNamespace(scalar=lambda *record: recorded.append(record))
    unused: Any = None
    place: Any = SimpleNamespace(progress=None)
    reporter = Reporter(unused, driver, unused, recorder, unused, place, "")
    for step, total, clock in ((5, (6, 3), 4), (7, (8, 4), 6), (10, (26, 7), 9), (20, (26, 7), 9), (30, (1, 1), 29)):
        now.update({"staleness": (step, Total(*total)), "clock": (step, clock)})
        reporter.record_server_metrics(every=5)
    assert [record for record in recorded if record[0] == "clock"] == [
        *(("clock", 4, 5), ("clock", 9, 10), ("clock", 9, 20), ("clock", 29, 30))
    ]
    # Nothing was applied from 10 to 20. At 30 the shard has moved here from another peer, and counts anew.
    assert [record for record in recorded if record[0] == "staleness"] == [("staleness", 2, 5), ("staleness", 5, 10)]


def test_figures_of_a_shard_are_declared() -> None:
    clock = ShardClock(sync_model_from("hybrid:step=5"), None, "lazy", [0, 1], random.Random(0))
    declared = {figure.where.tag for figure in FIGURES if figure.where.tag.startswith("server/")}
    assert declared == {f"server/{name}/shard-00" for name in hosted_shards.figures(clock)}


# --- The curves of a whole run: mean and worst over its peers ----------------------------------------


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
            {"policy": "tau:10", "lr": 0.01, "codec": "fp16", "topology": "ring"},
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
    names = {"policy", "exchange", "codec", "outer", "topology", "seed", "peers", "optimizer", "learning rate"}
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
