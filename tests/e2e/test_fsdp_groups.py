"""FSDP2 inside a host and gossip between hosts: each process exchanges its shards with its counterparts."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import shells
import torch
from ports import free_ports
from torch import nn

from runs import Folder, Process, folder

HEAD = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from gossipx.integrations import fsdp

PEER, RANK, PORT, HOW = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
os.chdir(FOLDER)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{PORT}", rank=RANK, world_size=2)
torch.manual_seed(PEER)
torch.set_num_threads(1)
module = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.LayerNorm(5), nn.Linear(5, 1))  # some rank 1 shards are empty
"""
SCRIPT = (
    HEAD
    + """
fully_shard(module[0])
fully_shard(module)
optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
settings = {"blocking": True, "peer_timeout": 20, "name": HOW, "policy": "never" if HOW == "apart" else "tau:3"}


def whole():
    return [value.item() for tensor in module.parameters() for value in tensor.detach().full_tensor().flatten()]


def batch(number):
    generator = torch.Generator().manual_seed(1000 * PEER + 10 * number + RANK)
    return torch.randn(8, 4, generator=generator)


seen = []
with fsdp.join(module, optimizer, peers="hosts.txt", rank=PEER, **settings) as peer:
    began = whole()
    for number in range(10**9 if HOW == "stopped" else 12):
        optimizer.zero_grad()
        (module(batch(number)) - PEER).square().mean().backward()
        optimizer.step()
        seen.append(peer._peer.mixes)
        if number == 5:
            print("trains", flush=True)
    own = whole()
told = {"began": began, "own": own, "ended": whole(), "mixes": seen, "iteration": peer.iteration}
told["place"], told["directory"] = [peer.rank, peer.size], str(peer.directory)
told["retrievals"] = peer._peer._role.sync.retrievals
(FOLDER / f"{PEER}-{RANK}.json").write_text(json.dumps(told))
dist.destroy_process_group()
"""
)
PLACES = [(peer, rank) for peer in range(2) for rank in range(2)]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Folder]:
    """A folder for two peers of two processes, whose ports are free: rank 1 listens two above its line's."""
    with folder(tmp_path, 2) as made, shells.ports() as first:
        made.hosts.write_text(f"127.0.0.1:{first}\n127.0.0.1:{first + 1}\n")
        yield made


def start(two: Folder, how: str, text: str = SCRIPT) -> dict[tuple[int, int], Process]:
    script, ports = two.script(text), free_ports(2)
    return {
        (peer, rank): two.start(script, two.path, str(peer), str(rank), str(ports[peer]), how, fresh=True)
        for peer, rank in PLACES
    }


def told(two: Folder, how: str) -> dict[tuple[int, int], Any]:
    for process in start(two, how).values():
        ended = process.end()
        assert ended.code == 0, ended.shown
    return {place: json.loads((two.path / f"{place[0]}-{place[1]}.json").read_text()) for place in PLACES}


def trained_alone(peer: int, began: list[float]) -> list[float]:
    """Return the weights that one process without FSDP and gossip gets from the batches of both ranks of a peer."""
    module = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.LayerNorm(5), nn.Linear(5, 1))
    nn.utils.vector_to_parameters(torch.tensor(began), module.parameters())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for number in range(12):
        draws = [torch.Generator().manual_seed(1000 * peer + 10 * number + rank) for rank in range(2)]
        batch = torch.cat([torch.randn(8, 4, generator=draw) for draw in draws])
        optimizer.zero_grad()
        (module(batch) - peer).square().mean().backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(module.parameters()).tolist()


@pytest.mark.slow
def test_groups_that_average_at_the_end_equal_a_reference(two: Folder) -> None:
    """The finish gives the mean of what each group would have trained without gossipx."""
    here = told(two, "apart")
    alone = [trained_alone(peer, here[0, 0]["began"]) for peer in range(2)]
    for (peer, _), one in here.items():
        assert one["began"] == here[0, 0]["began"]
        assert one["own"] == pytest.approx(alone[peer], abs=1e-5)
        mean = [(a + b) / 2 for a, b in zip(*alone, strict=True)]
        assert one["ended"] == pytest.approx(mean, abs=1e-5)
    assert alone[0] != pytest.approx(alone[1], abs=1e-2)


@pytest.mark.slow
def test_each_process_pulls_the_shards_of_its_counterpart(two: Folder) -> None:
    here = told(two, "pulled")
    for (peer, rank), one in here.items():
        assert one["iteration"] == 12 and one["place"] == [peer, 2] and one["retrievals"] >= 3
        own = two.path / "runs" / "pulled" / ("" if rank == 0 else "shards-01") / f"peer-{peer:02d}"
        assert one["directory"] == str(own)
        assert one["mixes"][-1] > one["mixes"][0]
        assert one["ended"] == pytest.approx(here[0, 0]["ended"], abs=1e-6)
        assert one["own"] == here[peer, 0]["own"], "the ranks of a group have one model"
        assert one["own"] != pytest.approx(trained_alone(peer, one["began"]), abs=1e-3)


@pytest.mark.slow
@pytest.mark.fault(53)
def test_a_group_leaves_when_one_process_is_asked_to(two: Folder) -> None:
    running = start(two, "stopped")
    for process in running.values():
        process.line("trains")
    for peer in range(2):
        running[peer, peer].signal(signal.SIGTERM)
    for process in running.values():
        ended = process.end()
        assert ended.code == 0 and "Traceback" not in ended.errors, ended.shown


REFUSED = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from gossipx.integrations import fsdp

os.chdir(FOLDER)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=0, world_size=1)
mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
told = []


def refused(join, shard, kind=torch.optim.SGD):
    module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1))
    shard(module)
    try:
        join(module, kind(module.parameters(), lr=0.1), peers="hosts.txt", rank=0)
    except gossipx.errors.UsageError as error:
        told.append(str(error))


class ScheduleFree(torch.optim.SGD):
    def __init__(self, parameters, lr):
        super().__init__([{"params": list(parameters), "train_mode": False}], lr)


refused(gossipx.join, fully_shard)
refused(fsdp.join, lambda module: fully_shard(module[0]))
refused(fsdp.join, lambda module: fully_shard(module, mesh=mesh))
refused(fsdp.join, fully_shard, ScheduleFree)
dist.destroy_process_group()
(FOLDER / "told.json").write_text(json.dumps(told))
"""


def test_what_cannot_be_joined_is_refused_with_the_reason(two: Folder) -> None:
    ended = two.start(two.script(REFUSED), two.path, str(free_ports(1)[0]), fresh=True).end()
    assert ended.code == 0, ended.shown
    assert two.told("told") == [
        "parameter '0.weight' cannot be joined: it is sharded (FSDP or DTensor), so no process has all of it: with"
        " fully_shard use gossipx.integrations.fsdp.join, else join a replicated model",
        "parameter '1.weight' is not sharded: apply fully_shard to the whole model before joining",
        "parameter '0.weight' has the placements (Replicate(), Shard(dim=0)) on a mesh (1, 1): gossip needs fully_shard"
        " over one dimension with all 1 processes of the group",
        "ScheduleFree has a second set of weights, which FSDP groups do not exchange: use another optimizer",
    ]
