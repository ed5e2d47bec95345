"""Workers of a parameter server in virtual time that train any module, with any times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from _virtual_server import Samples, Work
from _virtual_server import train as serve
from torch import nn
from torch.optim import Optimizer

from gossipx.parts import Parts, Pull, State, SyncModel, View
from gossipx.sim import SimPeer


@dataclass(frozen=True)
class Stale(SyncModel):
    """SSP of which a worker pulls only tables that are too old.

    Attributes:
        staleness: s.
        gathers: whether it also pushes only then, as in the Modularized Parameter Server, Code 4.4; if not, it pushes
            in each iteration.
    """

    staleness: int
    gathers: bool = False

    def pushes(self, progress: int, fetched: int) -> bool:
        return not self.gathers or self.fetches(progress, fetched)

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
    optimizer: Callable[[Any], Optimizer]
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
    **given: Any,
) -> Outcome:
    """Train with a parameter server; ranks below ``servers`` only serve.

    Args:
        seconds_of: returns, by number of the worker, the function that returns the seconds of its next iteration.
        given: settings of the server.
    """
    draws = [torch.Generator().manual_seed(seed * 1000 + rank) for rank in range(servers + workers)]

    def batch(rank: int) -> Samples:
        chosen = torch.randint(0, len(problem.train[1]), (problem.batch,), generator=draws[rank])
        return problem.train[0][chosen], problem.train[1][chosen]

    def before(peer: SimPeer, optimizer: Optimizer, batch: Samples) -> None:
        iteration = peer.arena.step + 1
        problem.seen(peer.rank, iteration, peer.module, batch)
        if problem.rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = problem.rate(iteration)

    tables = {
        "simulation": {"peers": servers + workers},
        "run": {"iterations": iterations, "seed": seed},
        "server": {"servers": ",".join(map(str, range(servers))), "servers_only": True, **given},
        "sync": {"finish": "none"},
        "compute": {"seconds": 1.0},  # replaced below
        "network": {"preset": "1gbit"},
        "exchange": {"peer_timeout": 3600.0},
    }
    work = Work(problem.model, batch, problem.optimizer, before, lambda rank: seconds_of(rank - servers))
    peers = serve(tables, work, parts)
    taken = [float(peer.trained[1] or 0) - float(peer.trained[0] or 0) for peer in peers[servers:]]
    dprs = sum(peer.role.server.delayed_pulls for peer in peers[:servers])
    return Outcome(fmean(taken), dprs, [peer.module for peer in peers[servers:]])
