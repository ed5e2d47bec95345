"""Simulated runs of a small real model with a parameter server, built like real ones."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import toy
from torch import Tensor, nn
from transcripts import LoggedWorld

from gossipx import policies, topology
from gossipx.assembly.server import Parts, serve
from gossipx.model.arena import ParameterArena
from gossipx.optimizers import MuonAdamW
from gossipx.peer import PeerRole
from gossipx.protocol.messages import Stage
from gossipx.server.mode import ServerMode
from gossipx.server.shard import Shard
from gossipx.settings import files
from gossipx.sim import Network, SimPeer
from gossipx.sync import SyncManager

BATCH, FEATURES = 6, 5
ITERATIONS = 12
SYNCS = ["bsp", "asp", "ssp:staleness=1", "drop:n=2", "pssp:staleness=1,p=0.5", "hybrid:step=4", "dsps:staleness=1"]


class Net(nn.Module):
    """A model with tensors of many sizes, one empty and one without a gradient; float64 keeps sums exact enough."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))

        self.first, self.bias = made(FEATURES, 9), made(9)
        self.nothing = made(0)
        self.unused = made(3)
        self.last = made(9)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first + self.bias) @ self.last + self.nothing.sum()


def batch(rank: int, iteration: int) -> tuple[Tensor, Tensor]:
    """Return the batch of a worker in an iteration."""
    generator = torch.Generator().manual_seed(1000 * rank + iteration)
    x = torch.randn(BATCH, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.sin(x.sum(1))


def gradients(module: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Compute the gradient of the mean loss over all samples."""
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    module.zero_grad()
    (module(x) - y).square().mean().backward()


Optimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def muon(parameters: Any) -> torch.optim.Optimizer:
    """The first tensor of the net is a matrix, and the only one."""
    matrix, *rest = sorted(parameters, key=lambda one: -one.ndim)
    return MuonAdamW([{"params": [matrix], "kind": "muon", "momentum": 0.8}, {"params": rest, "lr": 0.01}], lr=0.05)


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def make(
    rank: int,
    size: int,
    incarnation: int = 0,
    iterations: int = ITERATIONS,
    compute: float = 1.0,
    optimizer: Optimizer = sgd,
    module: Callable[[], nn.Module] = Net,
    parts: Parts | None = None,
    blocking: bool = False,
    min_peers: int = 1,
    **given: Any,
) -> SimPeer:
    """Return a peer of a run with servers that is not started; ``given`` are settings of ``gossipx run``."""
    made = module()
    resolved = files.resolve(
        {"servers": "0", "bucket": 100, "peer_timeout": toy.TIMEOUT, "min_peers": min_peers, **given}
    )
    served = serve(
        resolved, [str(one) for one in range(size)], rank, made, [optimizer(made.parameters())], parts or Parts()
    )
    assert served is not None
    store = served.table_store
    store._places = store._places_of_records = threading.BoundedSemaphore(1000)  # virtual time cannot wait for a place
    graph = topology.topology_from("full", size)
    role = PeerRole(
        rank,
        size,
        SyncManager(policies.parse("never")),
        graph,
        random.Random(rank),
        incarnation,
        settings=resolved,
        exchange_of=lambda context, pulls: ServerMode(context, pulls, served.plan),
    )
    if not role.trains:
        iterations = 0
    return SimPeer(role, made, step, iterations, lambda: compute, ParameterArena(made), store)


def step(peer: SimPeer) -> None:
    """Compute the gradient of the worker's batch."""
    gradients(peer.module, [batch(peer.rank, peer.arena.step)])


def world(
    size: int,
    seed: int = 0,
    network: Network | None = None,
    slow: dict[int, float] | None = None,
    absent: Sequence[int] = (),
    **options: Any,
) -> LoggedWorld:
    """Return a world in which ``size`` peers start at 0; ``slow`` has seconds per step."""
    made = LoggedWorld(seed, network or Network(delay=0.01))
    for rank in set(range(size)) - set(absent):
        made.start(rank, maker(rank, size, **{**options, "seed": seed, "compute": (slow or {}).get(rank, 1.0)}))
    return made


def maker(rank: int, size: int, **options: Any) -> Callable[[int], SimPeer]:
    """Return a function that makes the peer ``rank``, given its incarnation."""
    return lambda incarnation: make(rank, size, incarnation, **options)


def values(module: nn.Module) -> Tensor:
    """Return all parameters, concatenated."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def models(made: LoggedWorld) -> Tensor:
    """Return the parameters of all peers, a row each."""
    return torch.stack([values(peer.module) for peer in made.peers.values()])


def joined(
    workers: Sequence[int] | Callable[[int], Sequence[int]], iterations: int = ITERATIONS, optimizer: Optimizer = sgd
) -> Tensor:
    """Return the result of one process that trains on all workers' batches; ``workers``: always, or by iteration."""
    module = Net()
    made = optimizer(module.parameters())
    for iteration in range(iterations):
        ranks = workers(iteration) if callable(workers) else workers
        gradients(module, [batch(rank, iteration) for rank in ranks])
        for parameter in module.parameters():  # servers get zeros for a missing gradient
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        made.step()
    return values(module)


def ended(made: LoggedWorld, limit: float = 1000.0) -> LoggedWorld:
    """Run, and check that every peer ended in time."""
    return toy.ended(made, limit)


def shards(made: LoggedWorld) -> dict[int, Shard]:
    """Return all shards, by their indices."""
    return {index: shard for rank in made.peers for index, shard in mode(made, rank).shards.items()}


def mode(made: LoggedWorld, rank: int) -> ServerMode:
    exchange = made.peers[rank].role.exchange
    assert isinstance(exchange, ServerMode)
    return exchange


def clocks(made: LoggedWorld) -> dict[int, int]:
    """Return V_train of each shard."""
    return {index: shard.clock.clock for index, shard in shards(made).items()}


def check_lead(made: LoggedWorld, staleness: int, slowest: int) -> None:
    """Check that no worker was further ahead of the slowest than SSP allows."""
    done = dict.fromkeys(made.peers, 0)
    for entry in made.log:
        if entry.what.startswith("step "):
            done[entry.rank] += 1
            # A worker that computes iteration i (from 0) has tables of a clock above i − 1 − s.
            assert done[entry.rank] - 2 < done[slowest] + staleness or entry.rank == slowest


def pushes(made: LoggedWorld) -> set[int]:
    """Return how many pushes each shard has counted."""
    return {shard.clock.counts.gradients + shard.clock.counts.late for shard in shards(made).values()}


def done(made: LoggedWorld, ranks: Sequence[int], iterations: int = ITERATIONS, alike: bool = True) -> None:
    """Check that these workers have finished their iterations, and all have the servers' values.

    Except with bsp, a buffered gradient may be applied during the last pulls: ``alike`` is then False.
    """
    for rank in ranks:
        assert made.peers[rank].arena.step == iterations, (rank, made.peers[rank].arena.step)
        assert made.peers[rank].role.stage is Stage.DONE
    if alike:
        rows = torch.stack([values(made.peers[rank].module) for rank in ranks])
        torch.testing.assert_close(rows, rows[:1].expand(len(rows), -1), rtol=0, atol=0)
