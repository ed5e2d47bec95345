"""TensorBoard's files: curves, the page that lays them over each other, and hyperparameters."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_disks import SmallDisk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from gossipx.metrics import TensorBoardRecorder, event_file, records
from gossipx.metrics.board import PAGE, PEERS, SERVERS, TEXT, WHOLE


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
def test_curves_stay_in_order_if_the_clock_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: int
) -> None:
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
    """First those of whole runs, one line each, then those of all peers."""
    TensorBoardRecorder(tmp_path).close()
    page = page_of(recorded(tmp_path))
    assert list(page) == [WHOLE, PEERS], "no charts without curves"
    assert page == {part: PAGE[part] for part in (WHOLE, PEERS)}
    assert all(tag.startswith(("mean/", "worst/")) for tags in page[WHOLE].values() for tag in tags)
    shown = {tag.rstrip("$") for tags in page[PEERS].values() for tag in tags}
    # Accuracy, the paper's Figure 7, and its Figures 3 to 5.
    asked = ["test/accuracy", "sync/retrievals", "sync/delta", "sync/delta_difference", "sync/consensus_distance"]
    assert set(asked) <= shown


def test_no_chart_mixes_tags_with_a_common_beginning() -> None:
    """TensorBoard draws each tag that a pattern matches at its beginning."""
    patterns = [tag for charts in PAGE.values() for tags in charts.values() for tag in tags]
    for pattern in ("test/accuracy", "sync/delta", "mean/test/accuracy"):
        assert f"{pattern}$" in patterns and pattern not in patterns


def test_the_page_has_the_charts_that_suit_the_run(tmp_path: Path) -> None:
    """Those of a hub or of servers where there are some, and no accuracy of a run on text."""
    for name, parts in {"served": [WHOLE, SERVERS], "text": [WHOLE, TEXT, PEERS]}.items():
        TensorBoardRecorder(tmp_path / name, parts).close()
    served, text = (page_of(recorded(tmp_path / name)) for name in ("served", "text"))
    assert list(served) == [WHOLE, SERVERS] and ["server/clock/"] in served[SERVERS].values()
    tags = [tag for charts in text.values() for chart in charts.values() for tag in chart]
    assert "mean/test/bits_per_character$" in tags and "mean/test/loss$" in tags
    assert not [tag for tag in tags if "accuracy" in tag]
