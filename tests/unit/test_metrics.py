"""The summary of a run, the comparison of runs, and TensorBoard's files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from small_disks import SmallDisk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from gossipx.errors import UsageError
from gossipx.metrics import Summary, TensorBoardRecorder
from gossipx.metrics.board import PAGE
from gossipx.metrics.compare import compare
from gossipx.metrics.summary import FILE, PER_PEER, per_peer, read

RELIED_ON = {
    "name",
    "policy",
    "codec",
    "seed",
    "peers",
    "iterations",
    "retrievals",
    "bytes_received",
    "test_accuracy",
    "test_accuracy_before_finish",
    "consensus_accuracy",
    "test_loss",
    "test_loss_before_finish",
    "consensus_loss",
    "agreed",
    "lost",
    "stopped",
    "finish_bytes",
    "wall_seconds",
    "blocked_seconds",
}
"""Keys of summary.json that users rely on (the design, "Public surface")."""

REPORT = {
    "retrievals": 30,
    "taken_in": 0,
    "delayed_pulls": 0,
    "bytes_received": 4_000_000,
    "finish_bytes": 500_000,
    "test_accuracy": 0.75,
    "test_accuracy_before_finish": 0.5,
    "test_loss": 0.625,
    "test_loss_before_finish": 1.25,
    "consensus_distance": 0.125,
    "train_seconds": 8.0,
    "blocked_seconds": 2.0,
    "overhead_seconds": 0.5,
    "skipped": 3,
    "failed": 1,
    "unwritten": 0,
    "poisoned": 0,
    "corrupted": 0,
    "strangers": 0,
    "suspicions": 0,
    "set_back": 0,
}
"""The report of one peer."""


def summary(*reports: dict[str, Any] | None, **others: Any) -> Summary:
    """Return the summary of a run from its peers' reports; None for a peer that was lost."""
    values: dict[str, Any] = {
        "name": "mine",
        "policy": "tau:period=10",
        "codec": "none",
        "seed": 3,
        "peers": len(reports),
        "task": "fashion-mnist",
        "model": "lenet",
        "partition": "iid",
        "iterations": 300,
        "consensus_accuracy": 0.875,
        "consensus_loss": 0.375,
        "agreed": True,
        "lost": [f"localhost:{29400 + rank}" for rank, report in enumerate(reports) if report is None],
        "stopped": [],
        "wall_seconds": 12.5,
    }
    return Summary(**{**values, **per_peer(reports), **others})


# --- the summary --------------------------------------------------------------------------------------


def test_a_summary_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    written = summary(REPORT, None, {**REPORT, "retrievals": 7, "test_accuracy": None})
    written.write(tmp_path)
    assert read(tmp_path) == read(tmp_path / FILE) == written
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


def test_a_summary_replaces_an_existing_one(tmp_path: Path) -> None:
    summary(REPORT).write(tmp_path)
    later = summary(REPORT, REPORT, name="later")
    later.write(tmp_path)
    assert read(tmp_path) == later


def test_the_file_has_the_documented_keys(tmp_path: Path) -> None:
    summary(REPORT, None).write(tmp_path)
    data = json.loads((tmp_path / FILE).read_text(encoding="utf-8"))
    assert data.keys() >= RELIED_ON
    assert data["peers"] == 2 and data["lost"] == ["localhost:29401"]
    for name in ("retrievals", "bytes_received", "test_accuracy", "test_accuracy_before_finish", "blocked_seconds"):
        assert data[name] == [REPORT[name], None], name


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    written = summary(REPORT)
    text = json.dumps({**dataclasses.asdict(written), "of_a_later_version": 1})
    (tmp_path / FILE).write_text(text, encoding="utf-8")
    assert read(tmp_path) == written


def test_figures_by_rank_are_null_for_a_lost_peer() -> None:
    lists = per_peer([{**REPORT, "retrievals": 1}, None, {**REPORT, "retrievals": 3}])
    assert set(lists) == set(PER_PEER) == set(REPORT)
    assert lists["retrievals"] == [1, None, 3]
    assert all(figures[1] is None and len(figures) == 3 for figures in lists.values())


def test_a_figure_that_a_peer_did_not_measure_is_null() -> None:
    """A user's script without an ``evaluate`` has no accuracy."""
    lists = per_peer([{"retrievals": 4}])
    assert lists["retrievals"] == [4] and lists["test_accuracy"] == [None]


# --- invalid summaries --------------------------------------------------------------------------------


def refused(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message and caught.value.exit_code == 2
    return message


def test_a_missing_summary_is_reported(tmp_path: Path) -> None:
    told = "no summary here: name the directory of a finished run"
    assert refused(tmp_path) == f"{tmp_path / FILE}: {told}"
    assert refused(tmp_path / "none") == f"{tmp_path / 'none'}: {told}"


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b'{"name": }', b"curves"])
def test_a_file_that_is_not_json_is_reported(tmp_path: Path, text: bytes) -> None:
    (tmp_path / FILE).write_bytes(text)
    assert refused(tmp_path).startswith(f"{tmp_path / FILE}: not a summary: ")


@pytest.mark.parametrize("value", [[], 5, None, "text", {}, {"name": "mine"}])
def test_json_that_is_no_summary_is_reported(tmp_path: Path, value: object) -> None:
    (tmp_path / FILE).write_text(json.dumps(value), encoding="utf-8")
    assert f"not a summary: it {'lacks' if isinstance(value, dict) else 'is not a JSON object'}" in refused(tmp_path)


@pytest.mark.parametrize("missing", ["retrievals", "lost", "wall_seconds"])
def test_a_missing_field_is_named(tmp_path: Path, missing: str) -> None:
    data = dataclasses.asdict(summary(REPORT))
    del data[missing]
    (tmp_path / FILE).write_text(json.dumps(data), encoding="utf-8")
    assert refused(tmp_path) == f"{tmp_path / FILE}: not a summary: it lacks '{missing}'"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("retrievals", 30),
        ("retrievals", [30]),
        ("retrievals", [30, "many"]),
        ("test_accuracy", None),
        ("blocked_seconds", [1.0, 2.0, 3.0]),
        ("train_seconds", [True, 1.0]),
        ("lost", None),
        ("agreed", "yes"),
        ("wall_seconds", None),
        ("wall_seconds", "long"),
        ("consensus_accuracy", "good"),
        ("name", None),
        ("policy", 5),
    ],
)
def test_a_field_of_the_wrong_type_is_named(tmp_path: Path, name: str, value: object) -> None:
    """After an edit by hand or by a program, the comparison must not fail with a traceback."""
    data = {**dataclasses.asdict(summary(REPORT, REPORT)), name: value}
    (tmp_path / FILE).write_text(json.dumps(data), encoding="utf-8")
    assert refused(tmp_path).startswith(f"{tmp_path / FILE}: not a summary: '{name}' is ")


# --- comparing ----------------------------------------------------------------------------------------


def test_the_comparisons_figures() -> None:
    """By hand: 2 peers with 300 and 100 retrievals have 200 per peer; 20 per peer are 90 % fewer."""
    first = summary(
        {**REPORT, "retrievals": 300, "bytes_received": 6_000_000, "finish_bytes": 1_000_000},
        {**REPORT, "retrievals": 100, "bytes_received": 2_000_000, "finish_bytes": 2_000_000},
        name="first",
        wall_seconds=40.0,
    )
    second = summary(
        {
            **REPORT,
            "retrievals": 15,
            "test_accuracy": 0.5,
            "test_accuracy_before_finish": 0.25,
            "blocked_seconds": 1.0,
            "train_seconds": 10.0,
        },
        {
            **REPORT,
            "retrievals": 25,
            "test_accuracy": 1.0,
            "test_accuracy_before_finish": 0.75,
            "blocked_seconds": 6.0,
            "train_seconds": 20.0,
        },
        name="second",
        policy="adaptive:threshold=0.02",
        codec="efsignsgd",
        consensus_accuracy=0.9375,
    )
    one, other = compare([first, second])
    assert (one.name, one.policy, one.wall_seconds) == ("first", "tau:period=10", 40.0)
    assert (one.retrievals, one.reduction) == (200.0, 0.0)
    assert (one.received_mb, one.finish_mb) == (pytest.approx(4.0), pytest.approx(1.5))
    assert (other.name, other.policy) == ("second", "adaptive:threshold=0.02")
    assert (one.codec, other.codec) == ("none", "efsignsgd")
    assert other.retrievals == 20.0
    assert other.reduction == pytest.approx(0.9)
    assert (other.accuracy, other.accuracy_worst, other.accuracy_before_finish) == (0.75, 0.5, 0.5)
    assert other.accuracy_averaged == 0.9375
    # The mean of the peers' shares, 1/10 and 6/20; not the share of the sums, 7/30.
    assert other.blocked == pytest.approx(0.2)
    assert one.lost == other.lost == 0


def test_a_run_that_pulls_more_has_a_negative_reduction() -> None:
    rows = compare([summary({**REPORT, "retrievals": 10}), summary({**REPORT, "retrievals": 25})])
    assert rows[1].reduction == pytest.approx(-1.5)


def test_lost_peers_do_not_count_in_means() -> None:
    [row] = compare([summary({**REPORT, "retrievals": 10}, None, {**REPORT, "retrievals": 20}, None)])
    assert row.retrievals == 15.0 and row.lost == 2
    assert row.accuracy == row.accuracy_worst == 0.75
    assert row.blocked == 0.25


@pytest.mark.fault(50)
def test_skipped_decisions_are_compared() -> None:
    [row] = compare([summary({**REPORT, "skipped": 10}, None, {**REPORT, "skipped": 174})])
    assert row.skipped == 92.0


@pytest.mark.fault(12, 15, 22, 57)
def test_faults_of_all_peers_are_compared() -> None:
    faults = ("poisoned", "corrupted", "strangers", "suspicions", "unwritten")
    [row] = compare([summary({**REPORT, **dict.fromkeys(faults, 2)}, None, {**REPORT, **dict.fromkeys(faults, 3)})])
    assert [getattr(row, fault) for fault in faults] == [5] * 5


@pytest.mark.fault(44)
def test_a_shard_that_was_set_back_is_counted_once() -> None:
    """Each worker sees it; one was restarted after the first time."""
    [row] = compare([summary({**REPORT, "set_back": 2}, None, {**REPORT, "set_back": 1})])
    assert row.set_back == 2


def test_delayed_pulls_are_those_of_all_shards() -> None:
    """Two servers, a worker, and a lost peer: the number of peers does not matter."""
    servers = ({**REPORT, "delayed_pulls": 30}, {**REPORT, "delayed_pulls": 12})
    assert compare([summary(*servers, REPORT, None)])[0].delayed_pulls == 42


def test_values_that_a_run_does_not_have_are_none() -> None:
    """All peers were lost; or the first run has no retrievals to save."""
    [lost] = compare([summary(None, None, consensus_accuracy=None, agreed=None)])
    assert lost.lost == 2
    for field in dataclasses.fields(lost):
        if field.name not in ("name", "policy", "codec", "wall_seconds", "lost", "stopped"):
            assert getattr(lost, field.name) is None, field.name
    never, tau = compare([summary({**REPORT, "retrievals": 0}), summary(REPORT)])
    assert never.reduction is None and tau.reduction is None
    assert never.retrievals == 0.0 and tau.retrievals == 30.0


def test_a_peer_that_only_serves_others_does_not_count_as_unblocked() -> None:
    assert compare([summary({**REPORT, "blocked_seconds": None}, REPORT)])[0].blocked == 0.25


def test_a_peer_that_trained_no_time_has_no_blocked_share() -> None:
    idle = {**REPORT, "train_seconds": 0.0, "blocked_seconds": 0.0}
    assert compare([summary(idle)])[0].blocked is None
    assert compare([summary(idle, REPORT)])[0].blocked == 0.25


# --- TensorBoard --------------------------------------------------------------------------------------


def recorded(directory: Path) -> EventAccumulator:
    events = EventAccumulator(str(directory))
    events.Reload()
    return events


def test_scalars_settings_and_the_page_are_in_one_directory(tmp_path: Path) -> None:
    """SummaryWriter.add_hparams would write a separate run in a subdirectory."""
    directory = tmp_path / "peer-00"
    recorder = TensorBoardRecorder(directory, {"sync.policy": "tau:10", "run.seed": 3, "sync.blocking": True})
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

    settings = HParamsPluginData.FromString(
        events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    ).session_start_info.hparams
    assert settings["sync.policy"].string_value == "tau:10"
    assert settings["run.seed"].number_value == 3
    experiment = HParamsPluginData.FromString(
        events.SummaryMetadata("_hparams_/experiment").plugin_data.content
    ).experiment
    assert [metric.name.tag for metric in experiment.metric_infos] == ["test/accuracy"]
    assert {one.name for one in experiment.hparam_infos} == {"sync.policy", "run.seed", "sync.blocking"}


@pytest.mark.fault(57)
def test_curves_survive_a_full_disk(small_disk: SmallDisk, caplog: pytest.LogCaptureFixture) -> None:
    """Records of that time follow when there is room, and the file has no part of a record."""
    recorder = TensorBoardRecorder(small_disk.path / "peer-00", {})
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
    recorder = TensorBoardRecorder(small_disk.path / "peer-00", {})
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
    TensorBoardRecorder(tmp_path, {}).close()
    page = page_of(recorded(tmp_path))
    charts = page["gossipx"]
    assert charts == {title: tags for title, (_, tags) in PAGE["gossipx"].items()}
    assert list(page) == ["gossipx"], "no charts without curves"
    shown = {tag.rstrip("$") for tags in charts.values() for tag in tags}
    # Issue 2: accuracy, the paper's Figure 7, and its Figures 3 to 5.
    asked = ["test/accuracy", "sync/retrievals", "sync/delta", "sync/delta_difference", "sync/consensus_distance"]
    assert set(asked) <= shown


def test_the_page_has_charts_of_a_hub_or_of_servers_where_the_run_has_them(tmp_path: Path) -> None:
    TensorBoardRecorder(tmp_path, {}, ["gossipx", "gossipx: servers"]).close()
    page = page_of(recorded(tmp_path))
    assert list(page) == ["gossipx", "gossipx: servers"]
    assert ["server/clock/"] in page["gossipx: servers"].values()


def test_close_flushes_the_records(tmp_path: Path) -> None:
    recorder = TensorBoardRecorder(tmp_path, {})
    for step in range(1000):
        recorder.scalar("sync/retrievals", step, step)
    recorder.close()
    # By default the accumulator keeps only a sample of these.
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    events.Reload()
    assert [one.step for one in events.Scalars("sync/retrievals")] == list(range(1000))
