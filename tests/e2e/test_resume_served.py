"""``gossipx run --resume`` of runs with a parameter server or a hub, in real processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from resuming import resume, resumed

from gossipx.checkpoint import Store, unpack
from gossipx.runtime.checkpoints import store_of
from runs import LONG, Folder, Process, children, differences, folder, is_running, kill_processes, one_line

WITHOUT_CHECKPOINTS = ("--batch-size", "8", "--eval-interval", "0", "--log-interval", "1", "--peer-timeout", "10")
BRIEF = ("--log-interval", "1", "--peer-timeout", "10", "--checkpoint-every", "20")


TOY = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 200), nn.Tanh(), nn.Linear(200, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
with gossipx.join(model, optimizer) as peer:
    until, shards, name = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    owners = [f"peer-{peer.rank:02d}", *(f"shard-{shard:02d}" for shard in range(shards))]

    def waits_for(path):
        while not path.exists() and name == "cut" and not (FOLDER / "resumes").exists():
            signal.sigtimedwait([], 0.01)

    for at in (20, 40, 60):  # a checkpoint is skipped while the previous one is still being written
        train(peer, model, optimizer, at)
        for owner in owners:
            waits_for(FOLDER / "cut" / owner / "checkpoints" / f"{at:08d}" / "manifest.json")
    train(peer, model, optimizer, 70)
    waits_for(FOLDER / "resumes")
    train(peer, model, optimizer, until)
"""
"""A script whose run named ``cut`` waits at iteration 70, to be killed there."""


def killed_after(here: Folder, process: Process, iteration: int, shards: int = 1) -> None:
    """Kill the whole run at once, when each shard and the last peer, a worker, have a checkpoint of ``iteration``."""
    owners = [*(f"shard-{shard:02d}" for shard in range(shards)), f"peer-{len(here.names) - 1:02d}"]
    kept = [here.path / "cut" / owner / "checkpoints" for owner in owners]
    by = time.monotonic() + LONG
    ended = threading.Event()  # never set: limits each poll
    while not all(any(found >= iteration for found in Store(path).find_complete()) for path in kept):
        assert time.monotonic() < by and is_running(process.pid), process.end().shown
        ended.wait(0.01)
    kill_processes(*children(process.pid).values(), process.pid)
    process.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("--servers-only",), marks=pytest.mark.slow),
        pytest.param(("--push-codec", "3lc:1.75"), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.fault(29, 39)
def test_bsp_resumes_bit_for_bit(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Workers and shards resume from one iteration, and from there on every sum is the same.

    So is a worker's error feedback.
    """
    servers = ("--servers", "0,1", *options)
    with folder(tmp_path, 3) as here:
        script = here.script(TOY)
        whole = here.run(*BRIEF, *servers, script, tmp_path, "150", "2", "whole", name="whole")
        process = here.start_run(*BRIEF, *servers, script, tmp_path, "150", "2", "cut", name="cut")
        killed_after(here, process, 60, shards=2)
        (tmp_path / "resumes").touch()
        cut = resumed(here, name="cut")
    for rank in range(3):
        assert max(differences(whole.model(rank), cut.model(rank)).values()) == 0, rank
    assert whole.summary["iterations"] == cut.summary["iterations"] == 150


CHANGES = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 33), nn.Tanh(), nn.Linear(33, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
with gossipx.join(model, optimizer) as peer:
    while peer.iteration < 150:
        if peer.rank == 1 and peer.iteration == 30:
            peer.set_servers([0, 1, 2])
        while peer.iteration == 100 and not (FOLDER / "goes-on").exists():
            signal.sigtimedwait([], 0.01)
        train(peer, model, optimizer, peer.iteration + 1)
tell(peer, values=[float(one) for parameter in model.parameters() for one in parameter.detach().reshape(-1)])
"""


@pytest.mark.slow
def test_a_run_resumes_with_its_last_servers(tmp_path: Path) -> None:
    """The servers were changed during the run: its three shards resume as three shards, bit for bit."""
    with folder(tmp_path, 3) as here:
        script = here.script(CHANGES)
        process = here.start_run(*BRIEF, "--servers", "0", "--placement", "sliced", script, tmp_path, name="cut")
        killed_after(here, process, 80, shards=3)
        (tmp_path / "goes-on").touch()
        resumed(here, name="cut")
        assert 'servers = "1,2,0"' in (here.path / "cut" / "config.toml").read_text()
        cut = [here.told(rank)["values"] for rank in range(3)]
        here.run(*BRIEF, "--servers", "0", "--placement", "sliced", script, tmp_path, name="whole")
        assert [here.told(rank)["values"] for rank in range(3)] == cut


@pytest.mark.slow
@pytest.mark.fault(30)
def test_a_damaged_shard_is_named_and_the_iteration_before_is_used(tmp_path: Path) -> None:
    with folder(tmp_path, 2) as here:
        script = here.script(TOY)
        whole = here.run(*BRIEF, "--servers", "0", script, tmp_path, "100", "1", "whole", name="whole")
        process = here.start_run(*BRIEF, "--servers", "0", script, tmp_path, "100", "1", "cut", name="cut")
        killed_after(here, process, 60)
        (tmp_path / "resumes").touch()
        newest = max((here.path / "cut" / "shard-00" / "checkpoints").iterdir(), key=lambda path: int(path.name))
        file = newest / "tables.safetensors"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        cut = resumed(here, name="cut")
    named = [line for line in cut.ended.errors.splitlines() if str(file.relative_to(here.path)) in line]
    assert len(named) == 1 and "it was altered" in named[0], cut.ended.shown
    assert max(differences(whole.model(0), cut.model(0)).values()) == 0


@pytest.mark.parametrize(
    "servers",
    [
        pytest.param(("0",), marks=pytest.mark.slow),
        ("0,1",),
        pytest.param(("0", "--servers-only"), marks=pytest.mark.slow),
    ],
)
def test_sigterm_keeps_shards_without_checkpoint_every(tmp_path: Path, servers: tuple[str, ...]) -> None:
    """Its tables and momenta are restored, wherever each worker was."""
    options = (*WITHOUT_CHECKPOINTS, "--servers", *servers)
    with folder(tmp_path, 3) as here:
        process = here.start_run(*options, "--iterations", "100000", name="cut")
        process.line(rf"{here.names[-1]} train [1-9]\d+/")
        os.kill(process.pid, signal.SIGTERM)
        process.end()
        kept = {path.parent.name: Store(path).find() for path in (here.path / "cut").glob("shard-*/checkpoints")}
        assert kept and all(clock is not None and clock > 0 for clock in kept.values()), kept
        trained = [one for rank in (1, 2) if (one := store_of(here.path / "cut", rank).find()) is not None]
        until = str(max(trained) + 50)
        again = resumed(here, "--iterations", until, name="cut")
        assert "no checkpoint" not in again.ended.shown and again.summary["iterations"] == int(until)


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    with folder(tmp_path, 2) as here:
        here.run("--servers", "0", "--iterations", "5", "--eval-interval", "0", name="cut")
        again = resume(here, name="cut").end()
        assert "no peer has a complete checkpoint to resume from" in one_line(again, 2)


def hub_of(store: Store) -> dict[str, Any]:
    """Return the hub's state in the newest checkpoint; empty if it has no state."""
    found = store.load()
    return {} if found is None else unpack(found.parts["hub"])


@pytest.mark.parametrize("only", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.fault(38)
def test_a_hub_resumes_with_its_centre(tmp_path: Path, only: bool) -> None:
    with folder(tmp_path, 3) as here:
        options = ("--hub", "0", "--policy", "tau:5", "--iterations", "400", *(["--hub-only"] if only else []))
        process = here.start_run(*WITHOUT_CHECKPOINTS, "--checkpoint-every", "20", *options, name="cut")
        store = Store(here.path / "cut" / "peer-00" / "checkpoints")
        by, ended = time.monotonic() + LONG, threading.Event()
        while not (kept := hub_of(store)) or kept["exchanges"] < 8 or kept["step"] < 35:
            assert time.monotonic() < by and is_running(process.pid), process.end().shown
            ended.wait(0.01)
        process.kill()
        process.end()
        kept = hub_of(store)
        cut = resumed(here, name="cut")
    assert kept["exchanges"] >= 8 and kept["step"] >= 35
    assert cut.summary["merged_by_hub"][0] > kept["exchanges"] + 20, "its count continues"
    assert max(differences(cut.model(0), cut.model(1)).values()) == 0
    assert cut.summary["test_accuracy"][1] > 0.7
