"""A peer of several processes: DDP or FSDP2 inside a host, and gossip between hosts.

All ranks of a DDP group always have bitwise equal models; each process of an FSDP group exchanges its shards with its
counterparts.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import shells
import torch
from ports import free_ports
from torch import nn

from gossipx.optimizers import muon
from runs import Folder, Process, all_end, folder

HEAD = """
import torch.distributed as dist

PEER, RANK, PORT, HOW = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
os.chdir(FOLDER)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{PORT}", rank=RANK, world_size=2)
torch.manual_seed(PEER)
torch.set_num_threads(1)


def batch(number):
    generator = torch.Generator().manual_seed(1000 * PEER + 10 * number + RANK)
    return torch.randn(8, 4, generator=generator)


def report(**told):
    (FOLDER / f"{PEER}-{RANK}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


"""
DDP = (
    HEAD
    + """
import hashlib

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from gossipx.integrations import ddp

os.environ.update(RANK=str(RANK), WORLD_SIZE="2")  # as torchrun has it: they are of the group, not of the peers
module = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
model = DistributedDataParallel(module, gradient_as_bucket_view=True)
if PEER == 1:  # one group encodes the gradients that its ranks exchange, the other does not
    model.register_comm_hook(None, fp16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)


def bits():
    with torch.no_grad():
        return hashlib.sha256(torch.cat([tensor.flatten() for tensor in module.parameters()]).numpy()).hexdigest()


def backward(factor=1.0):
    scaler.scale((model(batch(10 * RANK + peer.iteration)) - PEER).square().mean() * factor).backward()


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
report(
    began=began, seen=seen, ended=bits(), retrievals=retrievals, iteration=peer.iteration,
    place=[peer.rank, peer.size], shared=shared, kept=kept.get("iteration"),
    own=len({tensor.untyped_storage().data_ptr() for tensor in module.parameters()}),
)
"""
)
FSDP = (
    HEAD
    + """
from torch.distributed.fsdp import fully_shard

from gossipx.integrations import fsdp

module = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.LayerNorm(5), nn.Linear(5, 1))  # some rank 1 shards are empty
fully_shard(module[0])
fully_shard(module)
if HOW == "muon":
    optimizer = gossipx.optimizers.muon(module, 0.02)
else:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
settings = {"blocking": True, "peer_timeout": 20, "name": HOW, "policy": "tau:3"}
settings |= {"policy": "never"} if HOW in ("apart", "muon") else {}


def whole():
    return [value.item() for tensor in module.parameters() for value in tensor.detach().full_tensor().flatten()]


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
report(
    began=began, own=own, ended=whole(), mixes=seen, iteration=peer.iteration, place=[peer.rank, peer.size],
    directory=str(peer.directory), retrievals=peer._peer._role.sync.retrievals,
)
"""
)
PLACES = [(peer, rank) for peer in range(2) for rank in range(2)]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Folder]:
    """A folder for two peers of two processes, whose ports are free: rank 1 listens two above its line's."""
    first = shells.first_port()
    with folder(tmp_path, 2) as made:
        made.hosts.write_text(f"127.0.0.1:{first}\n127.0.0.1:{first + 1}\n")
        yield made


def start(two: Folder, text: str, how: str) -> dict[tuple[int, int], Process]:
    """Start the processes, and return them by peer and rank in the group."""
    script, ports = two.script(text), free_ports(2)
    return {
        (peer, rank): two.start(script, two.path, str(peer), str(rank), str(ports[peer]), how, fresh=text is FSDP)
        for peer, rank in PLACES
    }


def told(two: Folder, text: str, how: str) -> dict[tuple[int, int], Any]:
    all_end(start(two, text, how).values())
    return {(peer, rank): two.told(f"{peer}-{rank}") for peer, rank in PLACES}


# --- DDP ----------------------------------------------------------------------------------------------


@pytest.mark.fault(49)
def test_all_ranks_of_a_group_have_the_same_bits(two: Folder) -> None:
    here = told(two, DDP, "given")
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
    running = start(two, DDP, "killed")
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


# --- FSDP ---------------------------------------------------------------------------------------------


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def trained_alone(peer: int, began: list[float], made: Callable[[nn.Module], torch.optim.Optimizer]) -> list[float]:
    """Return the weights that one process without FSDP and gossip gets from the batches of both ranks of a peer."""
    module = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.LayerNorm(5), nn.Linear(5, 1))
    nn.utils.vector_to_parameters(torch.tensor(began), module.parameters())
    optimizer = made(module)
    for number in range(12):
        draws = [torch.Generator().manual_seed(1000 * peer + 10 * number + rank) for rank in range(2)]
        batch = torch.cat([torch.randn(8, 4, generator=draw) for draw in draws])
        optimizer.zero_grad()
        (module(batch) - peer).square().mean().backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(module.parameters()).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "error"), [("apart", 1e-5), ("muon", 5e-3)])
def test_groups_that_average_at_the_end_equal_a_reference(two: Folder, how: str, error: float) -> None:
    """The finish gives the mean of what each group would have trained without gossipx.

    Muon's step is that of the whole matrix, of which a rank has three rows and the other two; it is computed in
    bfloat16.
    """
    if how == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    here, made = told(two, FSDP, how), functools.partial(muon, lr=0.02) if how == "muon" else sgd
    alone = [trained_alone(peer, here[0, 0]["began"], made) for peer in range(2)]
    for (peer, _), one in here.items():
        assert one["began"] == here[0, 0]["began"]
        assert one["own"] == pytest.approx(alone[peer], abs=error)
        mean = [(a + b) / 2 for a, b in zip(*alone, strict=True)]
        assert one["ended"] == pytest.approx(mean, abs=error)
    assert alone[0] != pytest.approx(alone[1], abs=1e-2)


@pytest.mark.slow
def test_each_process_pulls_the_shards_of_its_counterpart(two: Folder) -> None:
    here = told(two, FSDP, "pulled")
    for (peer, rank), one in here.items():
        assert one["iteration"] == 12 and one["place"] == [peer, 2] and one["retrievals"] >= 3
        own = two.path / "runs" / "pulled" / ("" if rank == 0 else "shards-01") / f"peer-{peer:02d}"
        assert one["directory"] == str(own)
        assert one["mixes"][-1] > one["mixes"][0]
        assert one["ended"] == pytest.approx(here[0, 0]["ended"], abs=1e-6)
        assert one["own"] == here[peer, 0]["own"], "the ranks of a group have one model"
        assert one["own"] != pytest.approx(trained_alone(peer, one["began"], sgd), abs=1e-3)


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


# --- both ---------------------------------------------------------------------------------------------


@pytest.mark.fault(53)
@pytest.mark.slow
@pytest.mark.parametrize(("text", "asked"), [(DDP, PLACES), (FSDP, [(0, 0), (1, 1)])], ids=["ddp", "fsdp"])
def test_a_group_leaves_in_order(two: Folder, text: str, asked: list[tuple[int, int]]) -> None:
    """When torchrun asks all processes of a DDP group to, in any order; an FSDP group when one is asked."""
    running = start(two, text, "stopped")
    for process in running.values():
        process.line("trains")
    for place in reversed(asked):
        running[place].signal(signal.SIGTERM)
    assert not any("Traceback" in ended.errors for ended in all_end(running.values()))
    shards = [""] if text is DDP else ["", "shards-01"]  # also of the rank that no signal reached
    for run in (two.path / "runs" / "stopped" / part for part in shards):
        assert [(run / f"peer-{peer:02d}" / "model.safetensors").exists() for peer in range(2)] == [True, True]
