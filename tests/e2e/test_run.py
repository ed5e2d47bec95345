"""``gossipx run`` with the built-in task: real processes, real sockets."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import socket
from collections.abc import Iterator

import pytest
import torch
from click.testing import CliRunner
from forks.client import readable
from ports import address
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gossipx import figures
from gossipx.cli import main
from gossipx.metrics import Summary
from gossipx.settings import files
from runs import LONG, Folder, Run, agree, children, differences, folder

BRIEF = ("--policy", "tau:5", "--iterations", "40", "--eval-interval", "0")
PER_PEER = [
    "retrievals",
    "bytes_received",
    "test_accuracy",
    "test_accuracy_before_finish",
    "finish_bytes",
    "blocked_seconds",
    "skipped",
    "failed",
]
TAGS = {
    "train/loss",
    "test/accuracy",
    "test/loss",
    "sync/delta",
    "sync/delta_difference",
    "sync/consensus_distance",
    "sync/retrievals",
    "comm/bytes_received",
    "comm/pull_seconds",
    "comm/staleness",
    "time/blocked_fraction",
    "time/train_seconds",
    "retrieval/delta",
    "retrieval/distance",
}


@pytest.fixture(scope="module")
def four_that_ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run of four peers that ended successfully."""
    with folder(tmp_path_factory.mktemp("four"), 4) as here:
        options = ("--policy", "tau:5", "--iterations", "40", "--eval-interval", "20", "--distance-interval", "20")
        yield here.run(*options)


# --- what a run leaves --------------------------------------------------------------------------------


def test_the_summary_has_the_keys_and_figures_that_are_relied_on(four_that_ended: Run) -> None:
    """tau:5 fires 8 times in 40 iterations; the last pull may be incomplete when training ends."""
    summary = four_that_ended.summary
    assert summary.keys() == {field.name for field in dataclasses.fields(Summary)} - {"figures"} | {*figures.PER_PEER}
    assert [len(summary[key]) for key in PER_PEER] == [4] * len(PER_PEER)
    constant = {key: summary[key] for key in ("name", "policy", "codec", "seed", "peers", "iterations", "lost")}
    wanted = {"name": "x", "policy": "tau:5", "codec": "none", "seed": 0, "peers": 4, "iterations": 40, "lost": []}
    assert constant == wanted
    assert 0 < max(summary["blocked_seconds"]) < summary["wall_seconds"]
    model = sum(tensor.nbytes for tensor in four_that_ended.model(0).values())
    kept = ("retrievals", "skipped", "failed", "bytes_received", "finish_bytes")
    for retrievals, skipped, failed, received, finish in zip(*(summary[key] for key in kept), strict=True):
        assert 8 - retrievals - skipped - failed in (0, 1), summary
        # Two rounds among four; the last pull may arrive in the finish, and its bytes are counted there.
        assert received + finish > (retrievals + 2) * model * 0.99 and finish > 2 * model * 0.99
        assert received > (retrievals - 1) * model * 0.99


def test_peers_agree_after_the_finish_and_not_before(four_that_ended: Run) -> None:
    summary = four_that_ended.summary
    assert len(set(summary["test_accuracy_before_finish"])) > 1
    assert set(summary["test_accuracy"]) == {summary["consensus_accuracy"]}
    assert 0 < summary["consensus_loss"] == summary["test_loss"][0] < math.log(10)
    assert None not in summary["test_loss_before_finish"]
    assert agree(four_that_ended, 4)


def test_the_effective_configuration_is_written_and_reads_back(four_that_ended: Run) -> None:
    config = four_that_ended.directory / "config.toml"
    settings = files.resolve(files.load(config))
    assert (settings.run.iterations, settings.run.eval_interval, settings.decides) == (40, 20, "tau:5")
    assert settings.task.batch_size == 32 and settings.task.lr == 0.01  # lenet's preset
    assert files.dump(settings) == config.read_text()


def test_every_peer_writes_the_tags_that_are_relied_on(four_that_ended: Run) -> None:
    for rank in range(4):
        board = EventAccumulator(str(four_that_ended.directory / f"peer-{rank:02d}")).Reload()
        declared = {figure.where.tag for figure in figures.FIGURES}
        assert declared >= set(board.Tags()["scalars"]) >= TAGS, rank
        assert "test/bits_per_character" not in board.Tags()["scalars"]
        assert "custom_scalars__config__" in board.Tags()["tensors"]
        retrievals = [event.value for event in board.Scalars("sync/retrievals")]
        assert retrievals == sorted(retrievals) and retrievals[-1] <= 8
        assert [event.step for event in board.Scalars("sync/delta")] == [10, 20, 30, 40]


# --- variants -----------------------------------------------------------------------------------------


def test_without_a_finish_models_stay_apart_and_blocking_pulls_are_all_done(three: Folder) -> None:
    # A peer that left early could not answer the last pulls of the others.
    script = three.script(
        """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with gossipx.join(model, optimizer, evaluate=lambda model: float(model.bias.detach().sigmoid())) as peer:
    train(peer, model, optimizer, 40)
    while not all_have(peer, "trained", True, range(peer.size)):
        os.sched_yield()
"""
    )
    run = three.run("--policy", "tau:5", "--finish", "none", "--blocking", script, three.path)
    summary = run.summary
    assert summary["retrievals"] == [8, 8, 8] and summary["skipped"] == [0, 0, 0]
    assert max(summary["finish_bytes"]) < 10_000  # some requests, no model
    assert summary["test_accuracy"] == summary["test_accuracy_before_finish"]
    # Two that pulled each other's model in their last pulls hold the same mean; the third has another.
    assert max(max(differences(run.model(0), run.model(rank)).values()) for rank in (1, 2)) > 1e-4
    assert summary["consensus_accuracy"] is not None

    started = ("--policy", "drift:distance=0.05", "--blocking", "--iterations", "20", "--init", "own", "--overwrite")
    again = three.run(*started)
    assert again.summary["iterations"] == 20 and min(again.summary["retrievals"]) > 0
    assert agree(again, 3)


@pytest.mark.slow
def test_seeds_are_run_and_compared(two: Folder) -> None:
    started = two.start_run("--seeds", "0,3", "--iterations", "20", "--eval-interval", "0", "--policy", "tau:5")
    ended = started.end(code=0)
    paths = [str(two.path / name) for name in ("x-seed0", "x-seed3")]
    assert f"compare the seeds: gossipx compare {' '.join(paths)}" in ended.output
    [row] = json.loads(CliRunner().invoke(main, ["compare", *paths, "--json"]).stdout)
    assert (row["name"], row["seeds"]) == ("x", [0, 3]) and row["intervals"]["accuracy"] > 0
    table = CliRunner().invoke(main, ["compare", *paths]).stdout
    assert "x, 2 seeds" in table and " ± " in table


def test_training_ends_after_its_seconds(two: Folder) -> None:
    """And the number of iterations is the one that was reached; a limit of iterations may come first."""
    run = two.run("--seconds", "1", "--eval-interval", "0", "--policy", "tau:50")
    assert all(seconds >= 1.0 for seconds in run.summary["train_seconds"])
    assert 1 < run.summary["iterations"] < 1_000_000
    short = two.run("--seconds", "600", "--iterations", "5", "--eval-interval", "0", name="short")
    assert short.summary["iterations"] == 5


# --- faults -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "deaf",
    [
        pytest.param("queue.Queue().get()", id="waits", marks=pytest.mark.slow),
        pytest.param("signal.signal(signal.SIGINT, signal.SIG_IGN)", id="ignores"),
    ],
)
def test_no_peer_outlives_a_run_that_is_killed(two: Folder, deaf: str) -> None:
    """Even if its script ignores interrupts, or while it waits; in training: test_stop."""
    script = f"""
import queue
model = nn.Linear(4, 50)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
with gossipx.join(model, optimizer) as peer:
    train(peer, model, optimizer, 20)
    print("so far", flush=True)
    {deaf}
    while True:
        train(peer, model, optimizer, peer.iteration + 1)
        signal.sigtimedwait([], 0.001)
"""
    run = two.start_run("--peer-timeout", "2", two.script(script), two.path)
    for _ in two.names:
        run.line("so far")
    peers = children(run.pid)
    assert len(peers) == 2
    ends = [os.pidfd_open(pid) for pid in peers.values()]
    os.kill(run.pid, signal.SIGKILL)
    for end in ends:
        assert readable(end, LONG), "a peer outlives its run"
        os.close(end)


@pytest.mark.fault(33)
def test_a_port_in_use_is_named(two: Folder) -> None:
    port = int(two.names[0].partition(":")[2])
    with socket.socket() as taken:
        taken.bind((address(), port))
        taken.listen()
        ended = two.start_run(*BRIEF).end(code=1)
    assert f"{port}" in ended.shown and "in use" in ended.shown, ended.shown


def test_a_data_file_that_is_not_the_published_one_is_named(two: Folder) -> None:
    data = two.path / "data"
    data.mkdir()
    for name in ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"):
        (data / name).write_bytes(b"not it")
    assert "train-images-idx3-ubyte.gz: its md5 is" in two.refused(*BRIEF, "--data-dir", "data")


# --- ``gossipx run --dry-run`` compared with real runs: the predicted traffic is the measured traffic --


ITERATIONS = 60


@pytest.mark.parametrize("codec", ["none", pytest.param("int8", marks=pytest.mark.slow)])
def test_tau_sends_what_the_dry_run_predicts(three: Folder, codec: str) -> None:
    """Three peers receive and send different amounts. With --blocking no decision is skipped."""
    brief = f"--iterations {ITERATIONS} --batch-size 8 --eval-interval 0 --no-save-model"
    options = (*brief.split(), "--policy", "tau:10", "--codec", codec, "--blocking")
    told = json.loads(three.start_run(*options, "--dry-run", "--json").end(code=0).output)
    assert not (three.path / "x").exists()
    summary = three.run(*options).summary
    (row,) = told["traffic"]
    assert summary["retrievals"] == [row["exchanges"]] * 3 == [ITERATIONS / 10] * 3
    # Count all received bytes, as the last pull may arrive in the finish. They include headers and control messages.
    received = sum(summary["bytes_received"]) + sum(summary["finish_bytes"])
    expected = 3 * (row["received_bytes"] + told["finish_bytes"])
    assert expected <= received <= 1.02 * expected


# --- The built-in tasks and models besides LeNet on Fashion-MNIST, by ``gossipx run`` in real processes


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_figure_of_text_is_its_loss(two: Folder, optimizer: str) -> None:
    if optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    options = ("--task", "text", "--partition", "contiguous", "--policy", "tau:5", "--blocking")
    run = two.run(*options, "--optimizer", optimizer, "--iterations", "20", "--eval-interval", "10")
    summary = run.summary
    assert (summary["task"], summary["model"], summary["partition"]) == ("text", "transformer", "contiguous")
    assert summary["retrievals"] == [4, 4] and agree(run, 2)
    assert summary["test_accuracy"] == summary["test_accuracy_before_finish"] == [None, None]
    assert summary["consensus_accuracy"] is None
    assert len(set(summary["test_loss_before_finish"])) == 2
    for when in ("", "_before_finish"):
        in_bits = [one / math.log(2) for one in summary[f"test_loss{when}"]]
        assert summary[f"test_bits_per_character{when}"] == pytest.approx(in_bits)
    assert summary["test_loss"] == [summary["consensus_loss"]] * 2
    assert summary["consensus_loss"] < math.log(64) - 1, "equal probabilities of 64 characters lose ln 64 nats"
    for rank in (0, 1):
        board = EventAccumulator(str(run.directory / f"peer-{rank:02d}")).Reload()
        assert "test/accuracy" not in board.Tags()["scalars"]
        loss, bits = (board.Scalars(f"test/{name}") for name in ("loss", "bits_per_character"))
        assert loss[0].step == 10 and loss[-1].value == pytest.approx(summary["test_loss_before_finish"][rank])
        (after,) = board.Scalars("test/loss_after_finish")
        assert after.value == pytest.approx(summary["test_loss"][rank])
        assert [one.value for one in bits] == pytest.approx([one.value / math.log(2) for one in loss])
    assert f" test loss {summary['test_loss'][0]:.3f} " in run.ended.output
