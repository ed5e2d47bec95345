"""Workers of a parameter server in virtual time that train any module: what no scenario can name.

The peers are those of ``gossipx simulate``. A worker's batches, its optimizer, the parts of the server and the seconds
of each iteration are given as Python objects.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossipx import policies, topology
from gossipx.assembly.server import serve
from gossipx.config import files
from gossipx.parts import Parts, Pull, State, SyncModel, View
from gossipx.peer import PeerRole, PeerSettings
from gossipx.server.mode import ServerMode
from gossipx.sim import Network, SimPeer, World
from gossipx.sync import SyncManager

ANY_NUMBER = 2**20
"""Gradients that a server receives at a time: virtual time cannot wait for a place."""
TIMEOUT = 1e6
"""Virtual seconds: no worker is lost."""
Samples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Stale(SyncModel):
    """SSP of which a worker pulls only tables that are too old (Modularized Parameter Server, Code 4.4).

    Attributes:
        staleness: s.
    """

    staleness: int

    def fetches(self, progress: int, fetched: int) -> bool:
        return progress >= fetched + self.staleness

    def may_pull(self, state: State, view: View, pull: Pull) -> bool:
        return pull.progress < view.clock + self.staleness


@dataclass
class Problem:
    """The training problem of the workers.

    Attributes:
        name: the model and its data.
        model: makes the model, with the same values each time.
        train: inputs and labels; each worker draws its batches from all of them.
        test: inputs and labels on which the model is evaluated.
        batch: samples of a worker's batch.
        optimizer: makes the optimizer of some parameters.
        rate: learning rate at a worker's iteration, from 1 on; None: the optimizer's own.
        seen: called with the rank, the iteration from 1 on, the module and the batch, before its gradient is computed.
    """

    name: str
    model: Callable[[], nn.Module]
    train: Samples
    test: Samples
    batch: int
    optimizer: Callable[[Any], torch.optim.Optimizer]
    rate: Callable[[int], float] | None = None
    seen: Callable[[int, int, nn.Module, Samples], None] = lambda rank, iteration, module, batch: None


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        seconds: mean training time of the workers, in virtual seconds.
        dprs: delayed pulls of all workers at all shards.
        models: the workers' modules at the end of training.
    """

    seconds: float
    dprs: int
    models: Sequence[nn.Module] = field(repr=False)

    def accuracy(self, test: Samples) -> float:
        """Return the mean accuracy of the workers' models, of 1."""
        with torch.no_grad():
            return fmean(float((model(test[0]).argmax(1) == test[1]).float().mean()) for model in self.models)


def train(
    problem: Problem,
    workers: int,
    servers: int,
    iterations: int,
    seconds_of: Callable[[int], Callable[[], float]],
    seed: int = 0,
    parts: Parts | None = None,
    network: Network | None = None,
    **given: Any,
) -> Outcome:
    """Train with a parameter server; ranks below ``servers`` only serve.

    Args:
        seconds_of: returns, by number of the worker, the function that returns the seconds of its next iteration.
        given: settings of ``gossipx run``.
    """
    size = servers + workers
    settings = {
        "servers": ",".join(map(str, range(servers))),
        "servers_only": True,
        "finish": "none",
        "seed": seed,
        **given,
    }
    world = World(seed, network or Network(delay=1e-4))
    for rank in range(size):
        times = seconds_of(rank - servers) if rank >= servers else (lambda: 1.0)
        world.start(rank, _maker(problem, rank, size, iterations, times, seed, parts or Parts(), settings))
    while world.advance(20_000):
        pass
    peers = [world.peers[rank] for rank in range(size)]
    reasons = [peer.reason for peer in peers if peer.reason]
    if reasons or any(peer.trained[1] is None for peer in peers[servers:]):
        raise RuntimeError(f"the run did not end: {reasons}")
    taken = [float(peer.trained[1] or 0) - float(peer.trained[0] or 0) for peer in peers[servers:]]
    dprs = sum(peer.role.server.delayed_pulls for peer in peers[:servers])
    return Outcome(fmean(taken), dprs, [peer.module for peer in peers[servers:]])


def _maker(
    problem: Problem,
    rank: int,
    size: int,
    iterations: int,
    seconds: Callable[[], float],
    seed: int,
    parts: Parts,
    settings: dict[str, Any],
) -> Callable[[int], SimPeer]:
    draws = torch.Generator().manual_seed(seed * 1000 + rank)

    def step(peer: SimPeer) -> None:
        chosen = torch.randint(0, len(problem.train[1]), (problem.batch,), generator=draws)
        batch = problem.train[0][chosen], problem.train[1][chosen]
        problem.seen(rank, peer.arena.step + 1, peer.module, batch)
        if problem.rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = problem.rate(peer.arena.step + 1)
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(peer.module(batch[0]), batch[1]).backward()

    module = problem.model()
    optimizer = problem.optimizer(module.parameters())
    served = serve(
        files.resolve({}, settings), [str(one) for one in range(size)], rank, module, optimizer, parts, ANY_NUMBER
    )
    assert served is not None
    role = PeerRole(
        rank,
        size,
        SyncManager(policies.parse("never")),
        topology.load("full", size),
        random.Random(f"{seed} {rank}"),
        seed * size + rank + 1,
        settings=PeerSettings(peer_timeout=TIMEOUT, finish="none"),
        exchange_of=lambda context, pulls: ServerMode(context, pulls, served.settings, served.clocks),
    )
    peer = SimPeer(
        role, module, step, iterations if role.trains else 0, seconds, table_store_of=lambda _: served.table_store
    )
    peer.assembled = True
    return lambda number: peer
