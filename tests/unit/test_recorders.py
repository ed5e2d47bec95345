"""Recorders of curves: CSV files, foreign services, objects of a script's own."""

from __future__ import annotations

import csv
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from managers import HERE
from small_disks import SmallDisk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from torch import nn

from gossipx import policies, recorders
from gossipx.assembly.managers import Managers
from gossipx.assembly.peer import build_peer
from gossipx.errors import UsageError
from gossipx.metrics import TensorBoardRecorder, event_file, records
from gossipx.metrics.board import PAGE, PEERS, SERVERS, TEXT, WHOLE
from gossipx.recorders import Recorded, RecorderKind
from gossipx.runtime.figures.progress import Progress
from gossipx.runtime.optimizers import Optimizers
from gossipx.runtime.place import Place
from gossipx.runtime.training.peer import Peer
from gossipx.settings import files
from gossipx.transports import Address


def of(directory: Path, **more: Any) -> Recorded:
    return Recorded("mine", "peer-a", 0, directory, {"policy": "tau:10", "seed": 1}, **more)


def rows(directory: Path) -> list[list[str]]:
    with (directory / "metrics.csv").open(newline="") as file:
        return list(csv.reader(file))


def test_csv_has_a_row_per_value(tmp_path: Path) -> None:
    recorder = recorders.open_all("csv", None, of(tmp_path / "peer-00"))
    recorder.scalar("train/loss", 1.5, 10)
    recorder.scalar("sync/delta", 0.25, 10)
    assert recorder.unwritten() == 0
    recorder.scalar("train/loss", 1.25, 20)
    recorder.close()
    head, *values = rows(tmp_path / "peer-00")
    assert head == ["iteration", "seconds", "tag", "value"]
    assert [(row[0], *row[2:]) for row in values] == [
        ("10", "train/loss", "1.5"),
        ("10", "sync/delta", "0.25"),
        ("20", "train/loss", "1.25"),
    ]
    assert all(float(row[1]) >= 0 for row in values)


def test_a_resumed_run_continues_its_csv_file_without_lost_work(tmp_path: Path) -> None:
    first = recorders.open_all("csv", None, of(tmp_path))
    for step in (10, 20, 30):
        first.scalar("train/loss", step / 10, step)
    first.close()
    again = recorders.open_all("csv", None, of(tmp_path, resumes_at=20))
    again.scalar("train/loss", 9.0, 30)
    again.close()
    assert [(row[0], row[3]) for row in rows(tmp_path)[1:]] == [("10", "1.0"), ("20", "2.0"), ("30", "9.0")]


@pytest.mark.fault(57)
def test_rows_that_cannot_be_written_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning; the rows are counted, and written once that is possible."""
    recorder = recorders.open_all("csv", None, of(tmp_path))
    path = tmp_path / "metrics.csv"
    kept = path.read_bytes()
    path.unlink()
    path.mkdir()  # nothing can be appended to it, even by root
    for step in (1, 2):
        recorder.scalar("train/loss", 1.0, step)
        assert recorder.unwritten() == step
    assert len(caplog.records) == 1 and "curves cannot be written" in caplog.text
    path.rmdir()
    path.write_bytes(kept)
    assert recorder.unwritten() == 0
    assert [row[0] for row in rows(tmp_path)[1:]] == ["1", "2"]


@pytest.mark.parametrize(("spec", "names"), [("none", []), ("csv+tensorboard", ["events.out.tfevents", "metrics.csv"])])
def test_each_recorder_that_is_named_gets_the_curves(tmp_path: Path, spec: str, names: list[str]) -> None:
    recorder = recorders.open_all(spec, None, of(tmp_path, parts=("gossipx",)))
    recorder.scalar("train/loss", 1.0, 1)
    recorder.close()
    assert sorted(path.name[: len("events.out.tfevents")] for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("tensorbord", "unknown recorder 'tensorbord' (did you mean 'tensorboard'?)"),
        ("csv+", "unknown recorder ''"),
        ("csv:path=x", "recorder 'csv:path=x': unknown key 'path'"),
    ],
)
def test_a_wrong_recorder_is_one_line(spec: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        recorders.recorders_from(spec)
    assert str(caught.value).startswith(told) and "\n" not in str(caught.value)


class Kept:
    """A recorder of a script's own."""

    def __init__(self) -> None:
        self.values: list[tuple[str, float, int]] = []

    def scalar(self, tag: str, value: float, step: int) -> None:
        self.values.append((tag, value, step))

    def unwritten(self) -> int:
        return 0

    def close(self) -> None:
        self.values.append(("closed", 0.0, 0))


def built(directory: Path, given: dict[str, Any], **more: Any) -> Peer:
    """Return the only peer of a run in this directory."""
    place = Place(0, ("a",), (Address("127.0.0.1", 1),), HERE, "list", directory, Progress(None), False)
    module = nn.Linear(2, 1)
    return build_peer(module, Optimizers(module, None), files.resolve(given), place, **more)


def test_a_scripts_own_recorder_gets_the_curves(tmp_path: Path) -> None:
    kept = Kept()
    peer = built(tmp_path, {}, managers=Managers(recorder=kept))
    peer.log("train/loss", 0.5)
    peer.close()
    assert ("train/loss", 0.5, 0) in kept.values
    assert not any((tmp_path / "peer-00").glob("events.out.tfevents.*"))


def test_a_recorder_is_told_the_policy_that_a_script_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Recorded] = []

    @dataclass(frozen=True)
    class Told(RecorderKind):
        def open(self, of: Recorded) -> Kept:
            told.append(of)
            return Kept()

    monkeypatch.setitem(recorders.BUILT_IN, "told", Told)
    built(tmp_path, {"recorder": "told"}, policy=policies.Tau(7)).close()
    assert [one.settings["policy"] for one in told] == ["tau:period=7"]


@pytest.mark.fault(66)
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "recorder= of type list has no method 'scalar'"),
        (Kept, "recorder= is the class Kept: give an object of it, such as Kept()"),
    ],
)
def test_an_object_that_is_no_recorder_is_refused(tmp_path: Path, given: Any, told: str) -> None:
    """A class has all methods, but they need an object."""
    with pytest.raises(UsageError) as caught:
        recorders.open_all("csv", given, of(tmp_path))
    assert str(caught.value) == told


def test_errors_of_a_service_are_told_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    def scalar(tag: str, value: float, step: int) -> None:
        raise ConnectionError("no route")

    guarded = recorders.Guarded(scalar, lambda: None, "wandb")
    for step in range(3):
        guarded.scalar("train/loss", 1.0, step)
    assert guarded.unwritten() == 3
    assert caplog.messages == ["wandb refuses curves (no route); training continues"]


class Sent:
    """A value that a thread of a service sends; it is refused if it is negative."""

    def __init__(self, value: float):
        self._value = value

    def wait(self) -> None:
        if self._value < 0:
            raise ConnectionError("no route")


def test_values_that_a_service_refuses_later_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    guarded = recorders.Guarded(lambda tag, value, step: Sent(value), lambda: None, "mlflow")
    for step, value in enumerate((1.0, -1.0, 2.0, -2.0)):
        guarded.scalar("train/loss", value, step)
    assert guarded.unwritten() == 2
    guarded.scalar("train/loss", -3.0, 4)
    guarded.close()
    assert guarded.unwritten() == 3
    assert len(caplog.records) == 1


def test_the_end_waits_for_ever_neither_for_values_nor_for_the_end_of_a_record(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorders, "PATIENCE", 0.01)
    ended = threading.Event()
    silent = recorders.Guarded(lambda tag, value, step: threading.Event(), lambda: None, "mlflow")
    silent.scalar("train/loss", 1.0, 0)
    assert silent.unwritten() == 1
    silent.close()
    recorders.Guarded(lambda tag, value, step: None, ended.wait, "wandb").close()
    ended.set()
    assert caplog.messages == [
        "mlflow has not taken all curves within 0.01 s; missing values: 1",
        "wandb has not ended the record of this peer within 0.01 s",
    ]


def test_the_time_between_the_waits_of_the_end_does_not_count(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer waits for others between its report and its end."""
    now = 0.0
    monkeypatch.setattr(recorders, "time", SimpleNamespace(monotonic=lambda: now))
    begun = threading.Event()
    guarded = recorders.Guarded(lambda tag, value, step: None, lambda: begun.wait(5), "wandb")
    assert guarded.unwritten() == 0
    now = 10 * recorders.PATIENCE
    threading.Timer(0.01, begun.set).start()
    guarded.close()
    assert not caplog.records


class RefusedError(Exception):
    """An error of a service."""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RefusedError("no API key\nrun wandb login"), "--recorder wandb: no API key"),
        (ConnectionRefusedError(), "--recorder wandb: ConnectionRefusedError"),
    ],
)
def test_what_wandb_refuses(error: Exception, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**arguments: Any) -> None:
        raise error

    errors = SimpleNamespace(Error=RefusedError)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, errors=errors))
    with pytest.raises(UsageError) as caught:
        recorders.open_all("wandb", None, of(tmp_path))
    assert str(caught.value) == told


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_service_names_its_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not, where it is
    with pytest.raises(UsageError, match=rf"^--recorder {name} needs {name}: pip install '\.\[{name}\]' in your clone"):
        recorders.open_all(name, None, of(tmp_path))


def test_a_service_that_refuses_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    with pytest.raises(UsageError, match=r"^--recorder mlflow: ") as caught:
        recorders.open_all("mlflow:uri=nosuch://store", None, of(tmp_path))
    assert "\n" not in str(caught.value)


def test_wandb_records_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    recorder = recorders.open_all("wandb:project=tests", None, of(tmp_path))
    recorder.scalar("train/loss", 1.0, 10)
    recorder.scalar("train/loss", 0.5, 5)
    recorder.close()
    assert recorder.unwritten() == 0
    assert list(tmp_path.rglob("*.wandb"))


def test_mlflow_records_in_a_local_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more than mlflow-skinny
    store = (tmp_path / "runs").as_uri()
    recorder = recorders.open_all(f"mlflow:experiment=tests,uri={store}", None, of(tmp_path))
    recorder.scalar("train/loss", 1.0, 10)
    recorder.scalar("train/loss", 0.5, 20)
    recorder.close()
    assert recorder.unwritten() == 0
    client = mlflow.MlflowClient(store)
    number = client.get_experiment_by_name("tests").experiment_id
    (run,) = client.search_runs([number])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in history] == [(10, 1.0), (20, 0.5)]
    assert run.data.params["policy"] == "tau:10"


# --- TensorBoard's files: curves, the page that lays them over each other, and hyperparameters -------


def recorded(directory: Path) -> EventAccumulator:
    events = EventAccumulator(str(directory))
    events.Reload()
    return events


def test_scalars_and_the_page_are_in_one_file(tmp_path: Path) -> None:
    directory = tmp_path / "peer-00"
    recorder = TensorBoardRecorder(directory)
    for step, value in ((10, 2.5), (20, 1.25)):
        recorder.scalar("train/loss", value, step)
    recorder.scalar("sync/delta", 0.5, 20)
    recorder.close()

    [file] = list(tmp_path.rglob("events.*"))
    assert [path for path in tmp_path.rglob("*") if path.is_dir()] == [directory] and file.parent == directory

    events = recorded(directory)
    assert sorted(events.Tags()["scalars"]) == ["sync/delta", "train/loss"]
    assert [(one.step, one.value) for one in events.Scalars("train/loss")] == [(10, 2.5), (20, 1.25)]
    assert [(one.step, one.value) for one in events.Scalars("sync/delta")] == [(20, 0.5)]


@pytest.mark.fault(77)
@pytest.mark.parametrize("behind", [0, 60, 10**6])
def test_curves_are_in_order_if_a_clock_is_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: int) -> None:
    """Of a run that resumes twice: readers order the files of a directory by the time in their names."""
    now = [1_900_000_000.0]
    monkeypatch.setattr(event_file.time, "time", lambda: now[0])
    for number in range(3):
        resume_step = 2 * number if number else None
        recorder = TensorBoardRecorder(tmp_path, resume_step=resume_step)
        for step in range(2 * number + 1, 2 * number + 5):  # the last two of an attempt are lost, and made again
            recorder.scalar("train/loss", float(100 * number + step), step)
        recorder.close()
        (tmp_path / "events.out.tfevents.profile").touch()  # of another program
        now[0] -= behind
    found = [(one.step, one.value) for one in recorded(tmp_path).Scalars("train/loss")]
    assert found == [(1, 1), (2, 2), (3, 103), (4, 104), (5, 205), (6, 206), (7, 207), (8, 208)]


def test_records_are_those_of_torch() -> None:
    """torch.utils.tensorboard's are read by each version of TensorBoard."""
    from torch.utils.tensorboard import summary

    assert records.scalar("train/loss", 0.5) == summary.scalar("train/loss", 0.5)
    page = {part: {title: ["Multiline", tags] for title, tags in charts.items()} for part, charts in PAGE.items()}
    assert records.page(PAGE) == summary.custom_scalars(page)
    hparams = {"policy": "tau:10", "learning rate": 0.01}
    theirs = summary.hparams(hparams, {"mean/test/accuracy": 0.0})
    # torch names no type of a number in the experiment's list, and no domain; the session is all that is compared.
    assert records.trial(hparams, ["mean/test/accuracy"])[1:] == list(theirs[1:])


@pytest.mark.fault(57)
def test_curves_survive_a_full_disk(small_disk: SmallDisk, caplog: pytest.LogCaptureFixture) -> None:
    """Records of that time follow when there is room, and the file has no part of a record."""
    recorder = TensorBoardRecorder(small_disk.path / "peer-00")
    recorder.scalar("train/loss", 1.0, 1)
    assert recorder.unwritten() == 0
    small_disk.fill()
    for step in range(2, 500):
        recorder.scalar("train/loss", float(step), step)
    assert recorder.unwritten() == 498 == recorder.unwritten()
    assert [one.step for one in recorded(small_disk.path / "peer-00").Scalars("train/loss")] == [1]
    small_disk.free()
    recorder.scalar("train/loss", 500.0, 500)
    assert recorder.unwritten() == 0
    recorder.close()
    assert [one.step for one in recorded(small_disk.path / "peer-00").Scalars("train/loss")] == [*range(1, 501)]
    [warning] = caplog.messages
    assert "No space left on device" in warning and "peer-00/events" in warning


@pytest.mark.fault(57)
def test_curves_that_cannot_be_written_are_counted(small_disk: SmallDisk, caplog: pytest.LogCaptureFixture) -> None:
    recorder = TensorBoardRecorder(small_disk.path / "peer-00")
    recorder.scalar("train/loss", 1.0, 1)
    assert recorder.unwritten() == 0
    small_disk.allow_writing(False)
    for step in range(2, 30_000):
        recorder.scalar("train/loss", float(step), step)
    recorder.close()
    assert [one.step for one in recorded(small_disk.path / "peer-00").Scalars("train/loss")] == [1]
    begun, ended = caplog.messages
    assert "Read-only file system" in begun
    assert "29998 records of curves were not written" in ended


def page_of(events: EventAccumulator) -> dict[str, dict[str, list[str]]]:
    """Return the tags of each chart and part of the custom-scalars page."""
    assert events.SummaryMetadata("custom_scalars__config__").plugin_data.plugin_name == "custom_scalars"
    layout = Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    return {part.title: {chart.title: list(chart.multiline.tag) for chart in part.chart} for part in layout.category}


def test_the_page_lays_curves_over_each_other(tmp_path: Path) -> None:
    """First those of whole runs, one line each, then those of all peers; no pattern matches a longer tag."""
    TensorBoardRecorder(tmp_path).close()
    page = page_of(recorded(tmp_path))
    assert list(page) == [WHOLE, PEERS], "no charts without curves"
    assert page == {part: PAGE[part] for part in (WHOLE, PEERS)}
    whole, of_peers = ({tag for tags in charts.values() for tag in tags} for charts in page.values())
    assert all(tag.startswith(("mean/", "worst/")) for tag in whole) and "mean/test/accuracy$" in whole
    # Accuracy, the paper's Figure 7, and its Figures 3 to 5.
    asked = {"test/accuracy$", "sync/retrievals", "sync/delta$", "sync/delta_difference", "sync/consensus_distance"}
    assert {tag.rstrip("$") for tag in asked} <= {tag.rstrip("$") for tag in of_peers}
    assert "test/accuracy$" in of_peers and "sync/delta$" in of_peers


def test_the_page_has_the_charts_that_suit_the_run(tmp_path: Path) -> None:
    """Those of a hub or of servers where there are some, and no accuracy of a run on text."""
    for name, parts in {"served": [WHOLE, SERVERS], "text": [WHOLE, TEXT, PEERS]}.items():
        TensorBoardRecorder(tmp_path / name, parts).close()
    served, text = (page_of(recorded(tmp_path / name)) for name in ("served", "text"))
    assert list(served) == [WHOLE, SERVERS] and ["server/clock/"] in served[SERVERS].values()
    tags = [tag for charts in text.values() for chart in charts.values() for tag in chart]
    assert "mean/test/bits_per_character$" in tags and "mean/test/loss$" in tags
    assert not [tag for tag in tags if "accuracy" in tag]
