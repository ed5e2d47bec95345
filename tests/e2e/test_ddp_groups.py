"""DDP inside a host and gossip between hosts: all ranks of a group always have bitwise equal models."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ports import free_ports

from runs import Folder, Process, folder

SCRIPT = """
import contextlib
import hashlib

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from gossipx.integrations import ddp

PEER, RANK, PORT, HOW = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
os.chdir(FOLDER)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{PORT}", rank=RANK, world_size=2)
os.environ.update(RANK=str(RANK), WORLD_SIZE="2")  # as torchrun has it: they are of the group, not of the peers
torch.manual_seed(PEER)
torch.set_num_threads(1)
module = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
model = DistributedDataParallel(module, gradient_as_bucket_view=True)
if PEER == 1:  # one group encodes the gradients that its ranks exchange, the other does not
    model.register_comm_hook(None, fp16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)


def bits():
    with torch.no_grad():
        return hashlib.sha256(torch.cat([tensor.flatten() for tensor in module.parameters()]).numpy()).hexdigest()


def batch():
    generator = torch.Generator().manual_seed(1000 * PEER + 10 * RANK + peer.iteration)
    return torch.randn(8, 4, generator=generator)


def backward(factor=1.0):
    scaler.scale((model(batch()) - PEER).square().mean() * factor).backward()


seen = []
settings = {"blocking": True, "peer_timeout": 2 if HOW == "killed" else 20, "name": HOW}
settings["min_peers"] = 1 if HOW == "stopped" else 2
with ddp.join(model, optimizer, peers="hosts.txt", rank=PEER, policy="tau:3", **settings) as peer:
    began = bits()
    shared = [int(index) for index in ddp.shard(list(range(10)), peers="hosts.txt", rank=PEER).indices]
    for number in range(10**9 if HOW in ("killed", "stopped") else 12):
        optimizer.zero_grad()
        with model.no_sync():
            backward()
        backward(float("inf") if number == 6 else 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append(bits())
        if number == 4 and HOW == "given":
            for parameter in module.parameters():
                parameter.data = parameter.data.clone()  # other memory, on all ranks
        if number == 5:
            print("trains", flush=True)
    retrievals = peer._peer._role.sync.retrievals if RANK == 0 else None
    kept = peer.state_dict()
(FOLDER / f"{PEER}-{RANK}.json").write_text(json.dumps({
    "began": began, "seen": seen, "ended": bits(), "retrievals": retrievals, "iteration": peer.iteration,
    "place": [peer.rank, peer.size], "shared": shared, "kept": kept.get("iteration"),
    "own": len({tensor.untyped_storage().data_ptr() for tensor in module.parameters()}),
}))
dist.destroy_process_group()
"""


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Folder]:
    """A folder for two peers, each a group of two processes."""
    with folder(tmp_path, 2) as made:
        yield made


def start(two: Folder, how: str) -> dict[tuple[int, int], Process]:
    """Start the processes, and return them by peer and rank in the group."""
    script, ports = two.script(SCRIPT), free_ports(2)
    places = [(peer, rank) for peer in range(2) for rank in range(2)]
    return {
        (peer, rank): two.start(script, two.path, str(peer), str(rank), str(ports[peer]), how) for peer, rank in places
    }


def told(two: Folder, how: str) -> dict[tuple[int, int], Any]:
    for process in start(two, how).values():
        ended = process.end()
        assert ended.code == 0, ended.shown
    places = [(peer, rank) for peer in range(2) for rank in range(2)]
    return {place: json.loads((two.path / f"{place[0]}-{place[1]}.json").read_text()) for place in places}


@pytest.mark.fault(49)
def test_all_ranks_of_a_group_have_the_same_bits(two: Folder) -> None:
    here = told(two, "given")
    assert len({one["began"] for one in here.values()}) == 1  # all four start with one peer's weights
    for peer in range(2):
        one, other = here[peer, 0], here[peer, 1]
        assert one["seen"] == other["seen"] and len(set(one["seen"])) >= 11
        assert one["retrievals"] == 3 and one["kept"] == 11 and other["kept"] is None
        # Both accumulate over two backward passes, and GradScaler skips one of twelve steps.
        assert one["iteration"] == other["iteration"] == 11
        assert one["place"] == other["place"] == [peer, 2] and one["shared"] == other["shared"]
        assert one["ended"] == other["ended"] and one["own"] == other["own"] == 6
    assert here[0, 0]["seen"] != here[1, 0]["seen"]
    assert sorted(here[0, 0]["shared"] + here[1, 0]["shared"]) == list(range(10))


@pytest.mark.slow
def test_no_rank_outlives_its_group(two: Folder) -> None:
    """If rank 0 of a group is killed, its other rank ends; the other peer is then alone, and both its ranks end."""
    running = start(two, "killed")
    for process in running.values():
        process.line("trains")
    running[1, 0].signal(signal.SIGKILL)
    ended = {place: process.end(60) for place, process in running.items()}
    assert ended[1, 1].code == 1, ended[1, 1].shown
    for rank in range(2):
        assert ended[0, rank].code == 4, ended[0, rank].shown
    assert "peers left" in ended[0, 0].errors, ended[0, 0].shown
    assert "rank 0 of this group ended" in ended[0, 1].errors, ended[0, 1].shown
    assert "peers left" in ended[0, 1].errors, ended[0, 1].shown


@pytest.mark.fault(53)
@pytest.mark.slow
def test_a_group_whose_launcher_is_terminated_leaves_in_order(two: Folder) -> None:
    """torchrun sends SIGTERM to all processes: rank 0 decides when the group leaves."""
    running = start(two, "stopped")
    for process in running.values():
        process.line("trains")
    for _, process in sorted(running.items(), reverse=True):
        process.signal(signal.SIGTERM)
    for process in running.values():
        ended = process.end()
        assert ended.code == 0 and "Traceback" not in ended.errors, ended.shown
    for peer in range(2):
        assert (two.path / "runs" / "stopped" / f"peer-{peer:02d}" / "model.safetensors").exists()
