"""The summary of a run, and the comparison of runs."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
import statistics
from pathlib import Path

import pytest
from summaries import summary_of

from gossipx.errors import UsageError
from gossipx.figures import COUNTED, PER_PEER
from gossipx.launch.directory import CONFIG_FILE, HOSTS_FILE, is_in_progress
from gossipx.metrics.board import TensorBoardRecorder
from gossipx.metrics.compare import Row, compare
from gossipx.metrics.intervals import estimate, student_t
from gossipx.metrics.summary import FILE, Summary, per_peer, read
from gossipx.settings import files
from gossipx.settings.sections import RunConfig, RunSettings
from gossipx.tools import recorded
from gossipx.tools.runs import runs_in

RELIED_ON = {
    *("name", "policy", "codec", "seed", "peers", "iterations", "agreed", "lost", "stopped", "wall_seconds"),
    *("retrievals", "bytes_received", "finish_bytes", "blocked_seconds", "consensus_accuracy", "consensus_loss"),
    *("test_accuracy", "test_accuracy_before_finish", "test_loss", "test_loss_before_finish"),
}
"""Keys of summary.json that users rely on (the design, "Public surface")."""

REPORT = dict.fromkeys(COUNTED, 0)
REPORT |= {"retrievals": 30, "delayed_pulls": 0, "skipped": 3, "failed": 1, "unwritten": 0}
REPORT |= {"bytes_received": 4_000_000, "finish_bytes": 500_000, "consensus_distance": 0.125}
REPORT |= {
    "test_accuracy": 0.75,
    "test_accuracy_before_finish": 0.5,
    "test_loss": 0.625,
    "test_loss_before_finish": 1.25,
}
REPORT |= {"train_seconds": 8.0, "blocked_seconds": 2.0, "overhead_seconds": 0.5}
"""The report of one peer."""


# --- the summary --------------------------------------------------------------------------------------


def test_a_summary_is_read_back_as_it_was_written_in_place_of_an_earlier_one(tmp_path: Path) -> None:
    """Fields of a later version are ignored."""
    summary_of(REPORT).write(tmp_path)
    written = summary_of(REPORT, None, {**REPORT, "retrievals": 7, "test_accuracy": None}, name="later")
    written.write(tmp_path)
    assert read(tmp_path) == read(tmp_path / FILE) == written
    assert [file.name for file in tmp_path.iterdir()] == [FILE]
    (tmp_path / FILE).write_text(json.dumps({**written.as_dict(), "of_a_later_version": 1}), encoding="utf-8")
    assert read(tmp_path) == written


def test_the_file_has_the_documented_keys(tmp_path: Path) -> None:
    summary_of(REPORT, None).write(tmp_path)
    data = json.loads((tmp_path / FILE).read_text(encoding="utf-8"))
    assert data.keys() >= RELIED_ON
    assert data["peers"] == 2 and data["lost"] == ["localhost:29401"]
    for name in ("retrievals", "bytes_received", "test_accuracy", "test_accuracy_before_finish", "blocked_seconds"):
        assert data[name] == [REPORT[name], None], name


def test_figures_are_null_for_a_lost_peer_and_where_a_peer_did_not_measure_them() -> None:
    """A user's script without an ``evaluate`` has no accuracy."""
    lists = per_peer([{**REPORT, "retrievals": 1}, None, {"retrievals": 3}])
    assert set(lists) == set(PER_PEER)
    assert (lists["retrievals"], lists["test_accuracy"]) == ([1, None, 3], [0.75, None, None])
    assert all(figures[1] is None and len(figures) == 3 for figures in lists.values())


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


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "not a summary: "),
        (b'{"name": }', "not a summary: "),
        (b"\xff\xfe", "cannot read the summary: not UTF-8 text"),
        (b"[]", "not a summary: it is not a JSON object"),
        (b"null", "not a summary: it is not a JSON object"),
        (b'{"name": "mine"}', "not a summary: it lacks "),
    ],
)
def test_a_file_that_is_no_summary_is_reported(tmp_path: Path, text: bytes, told: str) -> None:
    (tmp_path / FILE).write_bytes(text)
    assert refused(tmp_path).startswith(f"{tmp_path / FILE}: {told}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("retrievals", [30]),
        ("blocked_seconds", [1.0, 2.0, 3.0]),
        ("lost", None),
        ("agreed", "yes"),
        ("wall_seconds", "long"),
        ("consensus_accuracy", "good"),
        ("policy", 5),
    ],
)
def test_a_field_of_the_wrong_type_or_that_is_missing_is_named(tmp_path: Path, name: str, value: object) -> None:
    """After an edit by hand or by a program, the comparison must not fail with a traceback."""
    data = summary_of(REPORT, REPORT).as_dict()
    (tmp_path / FILE).write_text(json.dumps({**data, name: value}), encoding="utf-8")
    assert refused(tmp_path).startswith(f"{tmp_path / FILE}: not a summary: '{name}' is ")
    del data[name]
    (tmp_path / FILE).write_text(json.dumps(data), encoding="utf-8")
    told = f"not a summary: it lacks '{name}', or another version of gossipx has written it"
    assert refused(tmp_path) == f"{tmp_path / FILE}: {told}"


# --- comparing ----------------------------------------------------------------------------------------


def test_the_comparisons_figures() -> None:
    """By hand: 2 peers with 300 and 100 retrievals have 200 per peer; 20 per peer are 90 % fewer."""
    many = {**REPORT, "retrievals": 300, "bytes_received": 6_000_000, "finish_bytes": 1_000_000}
    some = {**REPORT, "retrievals": 100, "bytes_received": 2_000_000, "finish_bytes": 2_000_000}
    few = {**REPORT, "retrievals": 15, "test_accuracy": 0.5, "blocked_seconds": 1.0, "train_seconds": 10.0}
    more = {**REPORT, "retrievals": 25, "test_accuracy": 1.0, "blocked_seconds": 6.0, "train_seconds": 20.0}
    second = {"name": "second", "policy": "adaptive:threshold=0.02", "codec": "efsignsgd"}
    one, other = compare(
        [
            summary_of(many, some, name="first", wall_seconds=40.0),
            summary_of(few, more, **second, consensus_accuracy=0.9375, test_accuracy_before_finish=[0.25, 0.75]),
        ]
    )
    assert (one.name, one.policy, one.wall_seconds) == ("first", "tau:period=10", 40.0)
    assert (one.retrievals, one.reduction) == (200.0, 0.0)
    assert (one.received_mb, one.finish_mb) == (pytest.approx(4.0), pytest.approx(1.5))
    assert (other.name, other.policy) == ("second", "adaptive:threshold=0.02")
    assert (one.codec, other.codec) == ("none", "efsignsgd")
    assert other.retrievals == 20.0
    assert other.reduction == pytest.approx(0.9) and other.train_seconds == 20.0
    assert (other.accuracy, other.accuracy_worst, other.accuracy_before_finish) == (0.75, 0.5, 0.5)
    assert other.accuracy_averaged == 0.9375
    # The mean of the peers' shares, 1/10 and 6/20; not the share of the sums, 7/30.
    assert other.blocked == pytest.approx(0.2)
    assert one.lost == other.lost == 0


@pytest.mark.fault(44, 50)
def test_which_peers_count_in_a_comparison() -> None:
    """Lost ones do not count in means; a shard that was set back counts once, as each worker sees it; the delayed pulls
    are those of all shards; a peer that trained no time has no share of it."""
    first = {**REPORT, "retrievals": 10, "skipped": 10, "shard_rollbacks": 2, "delayed_pulls": 30}
    second = {**REPORT, "retrievals": 20, "skipped": 174, "shard_rollbacks": 1, "delayed_pulls": 12}
    [row] = compare([summary_of(first, None, second, None)])
    assert row.retrievals == 15.0 and row.skipped == 92.0 and row.lost == 2
    assert row.accuracy == row.accuracy_worst == 0.75
    assert (row.blocked, row.shard_rollbacks, row.delayed_pulls) == (0.25, 2, 42)
    idle = {**REPORT, "train_seconds": 0.0, "blocked_seconds": 0.0}
    assert [row.blocked for one in ([idle], [idle, REPORT]) for row in compare([summary_of(*one)])] == [None, 0.25]


def test_values_that_a_run_does_not_have_are_none() -> None:
    """All peers were lost; or the first run has no retrievals to save."""
    [lost] = compare([summary_of(None, None, consensus_accuracy=None, consensus_loss=None, agreed=None)])
    assert lost.lost == 2
    for name, value in lost.as_dict().items():
        if name not in ("name", "runs", "seeds", "policy", "codec", "wall_seconds", "lost", "stopped"):
            assert not value, name
    never, tau = compare([summary_of({**REPORT, "retrievals": 0}), summary_of(REPORT)])
    assert never.reduction is None and tau.reduction is None
    assert never.retrievals == 0.0 and tau.retrievals == 30.0


SERVING = (
    REPORT
    | {"retrievals": 0, "skipped": 0, "failed": 0, "blocked_seconds": None, "train_seconds": 11.0}
    | {"bytes_received": 16_000_000, "finish_bytes": 900_000}
    | {"test_accuracy": 0.875, "test_accuracy_before_finish": None}
)
"""The report of a peer that only serves others."""


def test_averages_are_over_the_peers_that_train() -> None:
    """Four workers that pull 30 times each are no saving against five peers that pull 30 times."""
    peers, hub = compare([summary_of(*[REPORT] * 5), summary_of(SERVING, *[REPORT] * 4, name="hub")])
    for name in ("retrievals", "skipped", "failed", "received_mb", "finish_mb", "accuracy", "accuracy_worst"):
        assert getattr(hub, name) == getattr(peers, name), name
    assert hub.reduction == 0.0 and hub.accuracy_before_finish == 0.5 and hub.blocked == 0.25
    assert (peers.serving_mb, hub.serving_mb) == (None, 16.0)
    assert (hub.train_seconds, hub.wall_seconds) == (8.0, 12.5), "of the workers; and to the end of the last peer"


def test_a_loss_is_compared_as_an_accuracy_is() -> None:
    losses = {"test_loss": [1.5, 2.5], "test_loss_before_finish": [2.0, 3.0], "test_bits_per_character": [2.25, 3.75]}
    [row] = compare([summary_of(REPORT, REPORT, consensus_loss=1.25, test_accuracy=[None, None], **losses)])
    assert (row.loss, row.loss_worst, row.loss_before_finish, row.loss_averaged) == (2.0, 2.5, 2.5, 1.25)
    assert row.bits_per_character == 3.0
    assert row.accuracy is None


# --- Runs without a final summary: the figures that their peers recorded last, and how they are listed -


def begun(logdir: Path, name: str) -> Path:
    """Return the directory of a run of three peers that has just begun."""
    run = logdir / name
    run.mkdir(parents=True)
    (run / CONFIG_FILE).write_text(files.dump(RunConfig(run=RunSettings(name=name))))
    (run / HOSTS_FILE).write_text("localhost slots=3\n")
    return run


def train(run: Path) -> None:
    """Record what two of its peers have done; the third was lost before."""
    for rank, step in ((0, 100), (2, 80)):
        curves = {
            "sync/retrievals": step / 10,
            "comm/bytes_received": step * 1e6,
            "time/train_seconds": 20.0,
            "time/blocked_fraction": 0.1,
            "test/accuracy": 0.5 + step / 1000,
        }
        recorder = TensorBoardRecorder(run / f"peer-{rank:02d}")
        for tag, value in curves.items():
            recorder.scalar(tag, value / 2, step // 2)
            recorder.scalar(tag, value, step)
        recorder.close()


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


# --- The comparison of runs with several seeds, and with a fixed period at equal retrievals ----------


def seeded(policy: str, seed: int, accuracy: float | None, retrievals: float = 30, **others: object) -> Summary:
    """Return the summary of a seeded of one peer."""
    report = {"retrievals": retrievals, "bytes_received": 4e6, "blocked_seconds": 1.0, "train_seconds": 10.0}
    name = f"{policy.partition(':')[0]}-seed{seed}"
    values = {"name": name, "policy": policy, "seed": seed, "consensus_accuracy": None, "consensus_loss": None}
    return summary_of({**report, "test_accuracy": accuracy}, **{**values, **others})


def names(rows: list[Row]) -> list[tuple[str, tuple[int, ...]]]:
    return [(row.name, row.seeds) for row in rows]


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.706), (30, 2.042), (31, 2.040), (60, 2.000), (10**6, 1.960)])
def test_an_interval_is_student_s(freedom: int, expected: float) -> None:
    """By the tables; and by hand: 1, 2, 3 have s = 1, and t is 4.303 for two degrees of freedom."""
    assert student_t(freedom) == pytest.approx(expected, abs=0.0006)
    found = estimate([1.0, 2.0, 3.0])
    assert (found.mean, found.seeds, found.interval) == (2.0, 3, pytest.approx(4.303 / math.sqrt(3)))
    assert estimate([5.0]).interval is None


def test_runs_that_differ_only_in_their_seeds_share_a_row() -> None:
    tau = [seeded("tau:10", seed, accuracy) for seed, accuracy in enumerate([0.80, 0.84, 0.88])]
    [row] = compare(tau)
    assert names([row]) == [("tau", (0, 1, 2))] and row.runs == ("tau-seed0", "tau-seed1", "tau-seed2")
    assert row.accuracy == pytest.approx(0.84)
    assert row.intervals["accuracy"] == pytest.approx(4.303 * statistics.stdev([0.80, 0.84, 0.88]) / math.sqrt(3))
    assert row.intervals["wall_seconds"] == 0.0 and "loss" not in row.intervals


@pytest.mark.parametrize(
    "others",
    [
        {"codec": "fp16"},
        {"partition": "dirichlet:alpha=0.3"},
        {"iterations": 600},
        {"model": "resnet20"},
        {"policy": "function a"},
        {"seed": 0},
    ],
)
def test_runs_that_differ_otherwise_or_have_one_seed_do_not(others: dict[str, object]) -> None:
    rows = compare([seeded("tau:10", 0, 0.5), seeded(**{"policy": "tau:10", "seed": 1, "accuracy": 0.6, **others})])
    assert [(row.seeds, row.accuracy) for row in rows] == [((0,), 0.5), ((others.get("seed", 1),), 0.6)]


def test_settings_that_no_summary_has_tell_runs_apart() -> None:
    """And the text of a script's policy does."""
    runs = [seeded("tau:10", seed, 0.5) for seed in range(3)]
    assert len(compare(runs, ["ring", "ring", "full"])) == 2
    assert len(compare(runs, [None, None, None])) == 1
    assert len(compare([seeded(f"function {name}", seed, 0.5) for name in ("a", "b") for seed in (0, 1)])) == 2


def test_differences_are_paired_by_seed() -> None:
    """Seeds differ by 0.1, the policies by 0.01 on each seed: only the pairs show the latter."""
    first = [seeded("tau:10", seed, 0.5 + 0.1 * seed) for seed in range(3)]
    second = [seeded("travel:2", seed, 0.51 + 0.1 * seed) for seed in (2, 1, 0, 7)]
    one, other = compare([*first, *second])
    assert one.paired == {}
    difference = other.paired["accuracy"]
    assert (difference.mean, difference.seeds) == (pytest.approx(0.01), 3), "seed 7 has no pair"
    assert difference.interval == pytest.approx(0, abs=1e-9)
    assert other.intervals["accuracy"] > 0.1
    [_, single] = compare([*first[:2], second[1]])
    assert single.paired["accuracy"].mean == pytest.approx(0.01) and single.paired["accuracy"].interval is None


PERIODS = (seeded("tau:100", 0, 0.6, 10), seeded("tau:10", 0, 0.8, 100), seeded("tau:1", 0, 0.85, 1000))


def test_a_policy_is_compared_with_a_fixed_period_of_as_many_retrievals() -> None:
    """Halfway between 10 and 100 in their logarithms, 31.6, lies halfway between .6 and .8."""
    *periods, row = compare([*PERIODS, seeded("adaptive:0.02", 0, 0.7, 10 * math.sqrt(10))])
    assert row.fixed_period is not None and [period.fixed_period for period in periods] == [None] * 3
    assert row.fixed_period.between == ("tau-seed0", "tau-seed0")
    assert row.fixed_period.figures["accuracy"] == pytest.approx(0.7)
    assert "loss" not in row.fixed_period.figures


def test_nothing_is_assumed_beyond_the_measured_periods() -> None:
    """Nor from periods of another setting or with a warm-up."""
    late = (seeded("tau:100,warmup=5", 0, 0.6, 10), seeded("tau:10,warmup=5", 0, 0.8, 100))
    beyond = [(PERIODS, seeded("adaptive:0.02", 0, 0.7, retrievals)) for retrievals in (9.9, 1000.1, 0)]
    others = [(PERIODS, seeded("adaptive:0.02", 0, 0.7, 30, codec="fp16")), (late, seeded("adaptive:0.02", 0, 0.7, 30))]
    for periods, adaptive in [*beyond, *others]:
        assert compare([*periods, adaptive])[-1].fixed_period is None


def test_means_over_seeds_are_interpolated() -> None:
    runs = [
        *PERIODS[:2],
        seeded("tau:100", 1, 0.7, 10),
        seeded("tau:10", 1, 0.9, 100),
        seeded("adaptive:0.02", 0, 0.7, 100),
    ]
    found = compare(runs)[-1].fixed_period
    assert found is not None and found.figures["accuracy"] == pytest.approx(0.85)


def test_a_run_that_was_stopped_is_compared_with_none() -> None:
    """It trained less: it is no seed of the others, and neither its retrievals nor its accuracy compare with theirs."""
    cut = seeded("tau:10", 1, 0.3, 5, stopped=["a"])
    whole, early, other = compare([seeded("tau:10", 0, 0.5), cut, seeded("adaptive:0.02", 1, 0.6)])
    assert names([whole, early]) == [("tau-seed0", (0,)), ("tau-seed1", (1,))] and early.stopped == 1
    assert (whole.accuracy, early.reduction, early.paired, other.paired) == (0.5, None, {}, {})
    assert [row.reduction for row in compare([cut, seeded("tau:20", 1, 0.5)])] == [None, None]
    adaptive = seeded("adaptive:0.02", 0, 0.7, 30)
    assert compare([*PERIODS, dataclasses.replace(adaptive, stopped=["a"])])[-1].fixed_period is None
    assert compare([dataclasses.replace(PERIODS[0], stopped=["a"]), *PERIODS[1:], adaptive])[-1].fixed_period is None


@pytest.mark.parametrize("spec", ["tau:period=10", "tau: 10", "tau:period=10,warmup=0"])
def test_a_policy_may_be_written_in_several_ways(spec: str) -> None:
    assert len(compare([seeded("tau:10", 0, 0.5), seeded(spec, 1, 0.6)])) == 1
    periods = (seeded(spec, 0, 0.8, 100), *PERIODS[::2])
    assert compare([*periods, seeded("adaptive:0.02", 0, 0.7, 50)])[-1].fixed_period is not None


def test_a_model_that_differs_in_one_run_differs() -> None:
    assert compare([seeded("tau:10", 0, 0.5), seeded("tau:10", 1, 0.5, agreed=False)])[0].agreed is False
    assert compare([seeded("tau:10", 0, 0.5), seeded("tau:10", 1, 0.5, agreed=None)])[0].agreed is None
