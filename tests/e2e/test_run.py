"""``gossipx run`` with the built-in task: real processes, real sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forks.client import readable
from ports import address

from gossipx import figures
from gossipx.metrics import Summary
from gossipx.settings import files
from runs import LONG, Folder, Run, children, differences, folder, is_running, open_files

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


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Callable[[int], Folder]]:
    """Return a function that creates the test's folder for a number of peers."""
    made: list[Folder] = []

    def make(peers: int) -> Folder:
        made.append(Folder(tmp_path, peers))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Folder, Run]]:
    """A run of four peers that ended successfully."""
    with folder(tmp_path_factory.mktemp("four"), 4) as here:
        options = ("--policy", "tau:5", "--iterations", "40", "--eval-interval", "20", "--distance-interval", "20")
        yield here, here.run(*options)


# --- what a run leaves --------------------------------------------------------------------------------


def test_the_summary_has_the_keys_that_are_relied_on(four: tuple[Folder, Run]) -> None:
    summary = four[1].summary
    assert summary.keys() == {field.name for field in dataclasses.fields(Summary)} - {"figures"} | {*figures.PER_PEER}
    assert [len(summary[key]) for key in PER_PEER] == [4] * len(PER_PEER)
    constant = {key: summary[key] for key in ("name", "policy", "codec", "seed", "peers", "iterations", "lost")}
    wanted = {"name": "x", "policy": "tau:5", "codec": "none", "seed": 0, "peers": 4, "iterations": 40, "lost": []}
    assert constant == wanted
    assert 0 < max(summary["blocked_seconds"]) < summary["wall_seconds"]


def test_retrievals_are_those_that_the_policy_asks_for(four: tuple[Folder, Run]) -> None:
    """tau:5 fires 8 times in 40 iterations; the last pull may be incomplete when training ends."""
    summary = four[1].summary
    counts = zip(summary["retrievals"], summary["skipped"], summary["failed"], strict=True)
    open_pulls = [8 - sum(of_one) for of_one in counts]
    assert all(pulls in (0, 1) for pulls in open_pulls), summary
    model = sum(tensor.nbytes for tensor in four[1].model(0).values())
    for received, retrievals, finish in zip(
        summary["bytes_received"], summary["retrievals"], summary["finish_bytes"], strict=True
    ):
        # Two rounds among four; the last pull may arrive in the finish, and its bytes are counted there.
        assert received + finish > (retrievals + 2) * model * 0.99 and finish > 2 * model * 0.99
        assert received > (retrievals - 1) * model * 0.99


def test_peers_agree_after_the_finish_and_not_before(four: tuple[Folder, Run]) -> None:
    run = four[1]
    assert len(set(run.summary["test_accuracy_before_finish"])) > 1
    assert set(run.summary["test_accuracy"]) == {run.summary["consensus_accuracy"]}
    assert all(max(differences(run.model(0), run.model(rank)).values()) <= 1e-6 for rank in (1, 2, 3))


def test_the_effective_configuration_is_written_and_reads_back(four: tuple[Folder, Run]) -> None:
    settings = files.resolve(files.load(four[1].directory / "config.toml"))
    assert (settings.run.iterations, settings.run.eval_interval, settings.decides) == (40, 20, "tau:5")
    assert settings.task.batch_size == 32 and settings.task.base_lr == 0.01  # lenet's preset
    assert files.resolve(files.load(four[1].directory / "config.toml")) == settings
    written = (four[1].directory / "config.toml").read_text()
    assert files.dump(settings) == written


def test_every_peer_writes_the_tags_that_are_relied_on(four: tuple[Folder, Run]) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for rank in range(4):
        board = accumulators.EventAccumulator(str(four[1].directory / f"peer-{rank:02d}"))
        board.Reload()
        assert set(board.Tags()["scalars"]) >= TAGS, rank
        assert "custom_scalars__config__" in board.Tags()["tensors"]
        retrievals = [event.value for event in board.Scalars("sync/retrievals")]
        assert retrievals == sorted(retrievals) and retrievals[-1] <= 8
        assert [event.step for event in board.Scalars("sync/delta")] == [10, 20, 30, 40]


def test_progress_shows_every_peer(four: tuple[Folder, Run]) -> None:
    here, run = four
    assert all(f"{name} done 40/40" in run.ended.output for name in here.names), run.ended.shown


def test_a_name_in_use_is_refused(four: tuple[Folder, Run]) -> None:
    here, _ = four
    assert "a run 'x' already exists: give another --name, or --overwrite" in here.refused(*BRIEF)
    assert (here.path / "x" / "summary.json").exists()


# --- variants -----------------------------------------------------------------------------------------


def test_without_a_finish_models_stay_apart_and_blocking_pulls_are_all_done(place: Any) -> None:
    here = place(3)
    # A peer that left early could not answer the last pulls of the others.
    script = here.script(
        """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with gossipx.join(model, optimizer, evaluate=lambda model: float(model.bias.detach().sigmoid())) as peer:
    train(peer, model, optimizer, 40)
    while not all_have(peer, "trained", True, range(peer.size)):
        os.sched_yield()
"""
    )
    run = here.run("--policy", "tau:5", "--finish", "none", "--blocking", script, here.path)
    summary = run.summary
    assert summary["retrievals"] == [8, 8, 8] and summary["skipped"] == [0, 0, 0]
    assert max(summary["finish_bytes"]) < 10_000  # some requests, no model
    assert summary["test_accuracy"] == summary["test_accuracy_before_finish"]
    assert max(differences(run.model(0), run.model(1)).values()) > 1e-4
    assert summary["consensus_accuracy"] is not None

    again = here.run(
        "--policy", "drift:distance=0.05", "--blocking", "--iterations", "20", "--init", "own", "--overwrite"
    )
    assert again.summary["iterations"] == 20 and min(again.summary["retrievals"]) > 0
    assert max(differences(again.model(0), again.model(2)).values()) <= 1e-6


def test_one_peer_alone(place: Any) -> None:
    run = place(1).run("--policy", "tau:5", "--iterations", "20")
    assert run.summary["retrievals"] == [0] and run.summary["lost"] == []
    assert run.summary["consensus_accuracy"] == run.summary["test_accuracy"][0] is not None


def test_settings_from_a_file_and_the_command_line_wins(place: Any) -> None:
    here = place(2)
    (here.path / "run.toml").write_text(
        '[run]\niterations = 30\nseed = 7\n[task]\nlr_steps = [0.5]\n[sync]\npolicy = "drift:distance=0.5"\n'
    )
    run = here.run("--config", "run.toml", "--iterations", "20", "--partition", "dirichlet:alpha=0.3")
    assert run.summary["iterations"] == 20 and run.summary["seed"] == 7
    assert run.summary["policy"] == "drift:distance=0.5"
    written = files.resolve(files.load(run.directory / "config.toml"))
    assert written.task.lr_steps == (0.5,) and written.task.partition == "dirichlet:alpha=0.3"


# --- faults -------------------------------------------------------------------------------------------


def training(here: Folder, *options: str) -> tuple[Any, dict[int, int]]:
    """A long run in progress, and its peers' processes by rank."""
    run = here.start_run("--policy", "tau:5", "--batch-size", "8", "--eval-interval", "0", *options)
    run.line(".*".join(rf"{name} train \d+/" for name in here.names))
    return run, children(run.pid)


def test_a_peer_killed_in_mid_run_is_named_and_the_others_finish(place: Any) -> None:
    """[1, 2, 32]"""
    here = place(3)
    run, peers = training(here, "--iterations", "800", "--peer-timeout", "10")
    os.kill(peers[1], signal.SIGKILL)
    ended = run.end()
    assert ended.code == 0, ended.shown
    assert f"peer {here.names[1]} is lost: killed by SIGKILL" in ended.output, ended.shown
    run = Run(here.path / "x", ended)
    assert run.summary["lost"] == [here.names[1]]
    assert [value is None for value in run.summary["test_accuracy"]] == [False, True, False]
    assert run.summary["consensus_accuracy"] == run.summary["test_accuracy"][0] == run.summary["test_accuracy"][2]
    assert max(differences(run.model(0), run.model(2)).values()) <= 1e-6


@pytest.mark.slow
@pytest.mark.fault(4)
def test_a_peer_that_leaves_keeps_its_model_and_the_others_finish(place: Any) -> None:
    here = place(3)
    run, peers = training(here, "--iterations", "800")
    os.kill(peers[0], signal.SIGTERM)
    ended = run.end()
    assert ended.code == 0, ended.shown
    assert "is lost:" not in ended.output and f"{here.names[0]} left" in ended.output, ended.shown
    run = Run(here.path / "x", ended)
    assert run.summary["lost"] == [here.names[0]]  # it did not finish
    assert run.model(0).keys() == run.model(1).keys()
    assert max(differences(run.model(1), run.model(2)).values()) <= 1e-6
    assert run.summary["consensus_accuracy"] == run.summary["test_accuracy"][1]


@pytest.mark.fault(4)
def test_sigterm_to_the_run_asks_all_to_leave(place: Any) -> None:
    here = place(2)
    run, peers = training(here, "--iterations", "100000", "--peer-timeout", "10")
    run.signal(signal.SIGTERM)
    ended = run.end()
    assert ended.code == 0 and "Traceback" not in ended.output + ended.errors, ended.shown
    assert not any(is_running(pid) for pid in peers.values())
    assert all((here.path / "x" / f"peer-{rank:02d}" / "model.safetensors").exists() for rank in (0, 1))


@pytest.mark.parametrize(
    "deaf",
    [
        pytest.param("", id="trains"),
        pytest.param("queue.Queue().get()", id="waits", marks=pytest.mark.slow),
        pytest.param("signal.signal(signal.SIGINT, signal.SIG_IGN)", id="ignores"),
    ],
)
def test_no_peer_outlives_a_run_that_is_killed(place: Any, deaf: str) -> None:
    """Even if its script ignores interrupts, and while it waits."""
    here = place(2)
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
    run = here.start_run("--peer-timeout", "2", here.script(script), here.path)
    for _ in here.names:
        run.line("so far")
    peers = children(run.pid)
    assert len(peers) == 2
    ends = [os.pidfd_open(pid) for pid in peers.values()]
    os.kill(run.pid, signal.SIGKILL)
    for end in ends:
        assert readable(end, LONG), "a peer outlives its run"
        os.close(end)


@pytest.mark.fault(33)
def test_a_port_in_use_is_named(place: Any) -> None:
    here = place(1)
    port = int(here.names[0].partition(":")[2])
    with socket.socket() as taken:
        taken.bind((address(), port))
        taken.listen()
        ended = here.start_run(*BRIEF).end()
    assert ended.code == 1, ended.shown
    assert "Traceback" not in ended.output + ended.errors and f"{port}" in ended.output + ended.errors, ended.shown
    assert "in use" in ended.output + ended.errors, ended.shown


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--policy", "adaptve"), "adaptive"),
        (("--partition", "dirichlet:alpha=-1"), "alpha"),
        (("--topology", "rnig"), "ring"),
        (("--model", "lenet5"), "lenet"),
        (("--task", "mnist"), "--data-dir"),
        (("--task", "mnst"), "mnist"),
        (("--data-dir", "/nonexistent"), "/nonexistent"),
        (("--config", "missing.toml"), "missing.toml"),
    ],
)
def test_bad_settings_are_refused_in_one_line(place: Any, options: tuple[str, ...], told: str) -> None:
    assert told in place(2).refused(*BRIEF, *options)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "hosts.txt: hosts file not found"),
        ("# nobody\n", "hosts.txt:1: no peers"),
        ("127.0.0.1:29500\n127.0.0.1:29500\n", "hosts.txt:2: "),
        ("127.0.0.1:29500 slot=2\n", "hosts.txt:1: 'slot=2'"),
        ("no-such-host.invalid:29500\n", "hosts.txt:1: host 'no-such-host.invalid' does not resolve"),
        ("192.0.2.1:29500\n", "hosts.txt: no line is this machine"),
    ],
)
def test_a_bad_hosts_file_is_refused_with_its_line(place: Any, content: str | None, told: str) -> None:
    """[34, 35]"""
    here = place(1)
    here.hosts.unlink()
    if content is not None:
        here.hosts.write_text(content)
    assert told in here.refused(*BRIEF)


def test_a_data_file_that_is_not_the_published_one_is_named(place: Any) -> None:
    here = place(2)
    data = here.path / "data"
    data.mkdir()
    for name in ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"):
        (data / name).write_bytes(b"not it")
    line = here.refused(*BRIEF, "--data-dir", "data")
    assert "train-images-idx3-ubyte.gz: its md5 is" in line


# --- strangers --------------------------------------------------------------------------------------


IN_THE_CROWD = """
model = nn.Linear(4, 50)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with gossipx.join(model, optimizer) as peer:
    train(peer, model, optimizer, 5)
    print("trains", flush=True)
    while not (FOLDER / "crowd").exists():
        train(peer, model, optimizer, peer.iteration + 5)
    before = peer.iteration
    train(peer, model, optimizer, before + 200)
tell(peer, before=before, after=peer.iteration)
"""


@pytest.mark.slow
@pytest.mark.fault(25)
def test_a_thousand_idle_connections_cost_training_no_step_and_no_model(tmp_path: Path) -> None:
    with folder(tmp_path, 2) as here, open_files(2000), contextlib.ExitStack() as crowd:
        script = here.script(IN_THE_CROWD)
        run = here.start_run("--policy", "tau:5", "--blocking", "--peer-timeout", "20", script, tmp_path)
        for _ in range(2):
            run.line("trains")
        host, port = here.names[0].split(":")
        connections = [crowd.enter_context(socket.create_connection((host, int(port)))) for _ in range(1000)]
        (tmp_path / "crowd").touch()
        ended = run.end()
        assert ended.code == 0, ended.shown
        told = ended.output + ended.errors
        assert told.count("connections are open: closing those without a finished handshake") >= 1, ended.shown
        for idle in connections:
            with contextlib.suppress(ConnectionResetError):  # the run ended before it accepted this connection
                assert idle.recv(1) == b""
        summary = Run(tmp_path / "x", ended).summary
        assert summary["lost"] == []
        for rank in (0, 1):
            steps = here.told(rank)
            assert steps["after"] == steps["before"] + 200
            assert summary["retrievals"][rank] == steps["after"] // 5, "each decision to pull has brought a model"
