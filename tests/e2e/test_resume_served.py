"""``gossipx run --resume`` of runs with a parameter server or a hub, in real processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
from resuming import resumed
from seeds import some

from gossipx.checkpoint import Store, unpack
from gossipx.runtime.checkpoints import store_of
from runs import LONG, Folder, Process, children, differences, is_running, kill_processes

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
    ("options", "damaged"),
    [((), False), (("--servers-only",), False), (("--push-codec", "3lc:1.75"), False), ((), True)],
    ids=["servers train", "servers only", "codec", "damaged shard"],
)
@pytest.mark.fault(29, 30, 39)
def test_bsp_resumes_bit_for_bit(three: Folder, options: tuple[str, ...], damaged: bool) -> None:
    """Workers and shards resume from one iteration, and from there on every sum is the same.

    So is a worker's error feedback. A damaged shard is named, and the iteration before is used.
    """
    servers = ("--servers", "0,1", *options)
    script = three.script(TOY)
    whole = three.run(*BRIEF, *servers, script, three.path, "150", "2", "whole", name="whole")
    process = three.start_run(*BRIEF, *servers, script, three.path, "150", "2", "cut", name="cut")
    killed_after(three, process, 60, shards=2)
    (three.path / "resumes").touch()
    file = max((three.path / "cut/shard-00/checkpoints").iterdir()) / "tables.safetensors"
    if damaged:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    cut = resumed(three, name="cut")
    lines = cut.ended.errors.splitlines()
    named = [line for line in lines if str(file.relative_to(three.path)) in line and "it was altered" in line]
    assert len(named) == damaged, cut.ended.shown
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
def test_a_run_resumes_with_its_last_servers(three: Folder) -> None:
    """The servers were changed during the run: its three shards resume as three shards, bit for bit."""
    options = (*BRIEF, "--servers", "0", "--placement", "sliced", three.script(CHANGES), three.path)
    process = three.start_run(*options, name="cut")
    killed_after(three, process, 80, shards=3)
    (three.path / "goes-on").touch()
    resumed(three, name="cut")
    assert 'servers = "1,2,0"' in (three.path / "cut" / "config.toml").read_text()
    cut = [three.told(rank)["values"] for rank in range(3)]
    three.run(*options, name="whole")
    assert [three.told(rank)["values"] for rank in range(3)] == cut


@pytest.mark.parametrize("servers", some([("0,1",), ("0", "--servers-only")], ("0,1",)))
def test_sigterm_keeps_shards_without_checkpoint_every(three: Folder, servers: tuple[str, ...]) -> None:
    """Its tables and momenta are restored, wherever each worker was."""
    options = (*WITHOUT_CHECKPOINTS, "--servers", *servers)
    process = three.start_run(*options, "--iterations", "100000", name="cut")
    process.line(rf"{three.names[-1]} train [1-9]\d+/")
    os.kill(process.pid, signal.SIGTERM)
    process.end()
    kept = {path.parent.name: Store(path).find() for path in (three.path / "cut").glob("shard-*/checkpoints")}
    assert kept and all(clock is not None and clock > 0 for clock in kept.values()), kept
    trained = [one for rank in (1, 2) if (one := store_of(three.path / "cut", rank).find()) is not None]
    until = str(max(trained) + 50)
    again = resumed(three, "--iterations", until, name="cut")
    assert "no checkpoint" not in again.ended.shown and again.summary["iterations"] == int(until)


def hub_of(store: Store) -> dict[str, Any]:
    """Return the hub's state in the newest checkpoint; empty if it has no state."""
    found = store.load()
    return {} if found is None else unpack(found.parts["hub"])


@pytest.mark.parametrize("only", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.fault(38)
def test_a_hub_resumes_with_its_centre(three: Folder, only: bool) -> None:
    options = ("--hub", "0", "--policy", "tau:5", "--iterations", "400", *(["--hub-only"] if only else []))
    process = three.start_run(*WITHOUT_CHECKPOINTS, "--checkpoint-every", "20", *options, name="cut")
    store = Store(three.path / "cut" / "peer-00" / "checkpoints")
    by, ended = time.monotonic() + LONG, threading.Event()
    while not (kept := hub_of(store)) or kept["exchanges"] < 8 or kept["step"] < 35:
        assert time.monotonic() < by and is_running(process.pid), process.end().shown
        ended.wait(0.01)
    process.kill()
    process.end()
    kept = hub_of(store)
    cut = resumed(three, name="cut")
    assert cut.summary["merged_by_hub"][0] > kept["exchanges"] + 20, "its count continues"
    assert max(differences(cut.model(0), cut.model(1)).values()) == 0
    assert cut.summary["test_accuracy"][1] > 0.7
