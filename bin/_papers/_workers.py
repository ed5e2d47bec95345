"""Workers of a parameter server in virtual time that train any module, with any times: what no scenario can name.

The peers are those of ``gossipx simulate``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from _bench.simulated import Tables, written
from _bench.tasks import Samples, Task
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

from gossipx.assembly.peer import build_arena
from gossipx.assembly.presets import effective_config
from gossipx.assembly.role import build_role
from gossipx.assembly.server import serve
from gossipx.launch.simulation.peers import ANY_NUMBER
from gossipx.launch.simulation.plan import Plan, network_of, plan_of
from gossipx.parts import Parts, Pull, State, SyncModel, View
from gossipx.sim import SimPeer, World

EVENTS = 1000


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
        task: the model, which all workers start with the same values of, and the data.
        batch: samples of a worker's batch.
        optimizer: makes the optimizer of some parameters.
        rate: learning rate at a worker's iteration, from 1 on; None: the optimizer's own.
        seen: called with the rank, the iteration from 1 on, the module and the batch, before its gradient is computed.
        draw: returns the next batch of a rank; None: random ones of all samples.
    """

    name: str
    task: Task
    batch: int
    optimizer: Callable[[Any], Optimizer]
    rate: Callable[[int], float] | None = None
    seen: Callable[[int, int, nn.Module, Samples], None] = lambda rank, iteration, module, batch: None
    draw: Callable[[int], Samples] | None = None

    def draws(self, seed: int) -> Callable[[int], Samples]:
        """Return what draws the next batch of a rank."""
        generators: dict[int, torch.Generator] = {}

        def draw(rank: int) -> Samples:
            own = generators.setdefault(rank, torch.Generator().manual_seed(seed * 1000 + rank))
            chosen = torch.randint(0, len(self.task.train[1]), (self.batch,), generator=own)
            return self.task.train[0][chosen], self.task.train[1][chosen]

        return self.draw or draw


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run: mean training time of the workers in virtual seconds, delayed pulls of all workers at all
    shards, and the workers' modules at the end of training."""

    seconds: float
    dprs: int
    models: Sequence[nn.Module] = field(repr=False)

    def accuracy(self, task: Task) -> float:
        """Return the mean accuracy of the workers' models, of 1."""
        return fmean(task.scores(model, len(task.test[1]))["accuracy"] for model in self.models)


SecondsOf = Callable[[int], Callable[[], float]]
"""Returns, by number, the function that returns the seconds of the next iteration."""


def train(
    problem: Problem,
    workers: int,
    servers: int,
    iterations: int,
    seconds_of: SecondsOf,
    seed: int = 0,
    parts: Parts | None = None,
    **given: Any,
) -> Outcome:
    """Train with a parameter server; ranks below ``servers`` only serve. ``given`` are settings of the server."""
    tables = {
        "simulation": {"peers": servers + workers},
        "run": {"iterations": iterations, "seed": seed},
        "server": {"servers": ",".join(map(str, range(servers))), "servers_only": True, **given},
        "sync": {"finish": "none"},
        "compute": {"seconds": 1.0},  # replaced by seconds_of
        "network": {"preset": "1gbit"},
        "exchange": {"peer_timeout": 3600.0},
    }
    peers = run_peers(tables, problem, parts, lambda rank: seconds_of(rank - servers))
    taken = [float(peer.trained[1] or 0) - float(peer.trained[0] or 0) for peer in peers[servers:]]
    dprs = sum(peer.role.server.delayed_pulls for peer in peers[:servers])
    return Outcome(fmean(taken), dprs, [peer.module for peer in peers[servers:]])


def run_peers(
    tables: Tables,
    problem: Problem,
    parts: Parts | None = None,
    seconds_of: SecondsOf | None = None,
    moments: Sequence[float] = (),
    judge: Callable[[nn.Module], None] = lambda module: None,
) -> list[SimPeer]:
    """Run a scenario with a parameter server, and return its peers by rank.

    Args:
        tables: the scenario.
        problem: what the workers train.
        parts: of the server.
        seconds_of: the seconds of iterations by rank; None: the scenario's.
        moments: seconds at which ``judge`` is called with the model of a worker without delays, as it was last pulled.

    Raises:
        RuntimeError: a peer ended for another reason than that its training was complete.
    """
    scenario = written(tables)
    config = effective_config(scenario.config, scenario.simulation.peers, has_script=False)
    plan = plan_of(scenario, config, Parts())
    world: World[SimPeer] = World(config.run.seed, network_of(scenario.network, plan.size, config.run.seed))
    draw = problem.draws(config.run.seed)
    for rank in range(plan.size):
        seconds = plan.times.of(rank) if seconds_of is None else seconds_of(rank)
        world.start(rank, functools.partial(_peer, plan, rank, problem, draw, parts or Parts(), seconds))
    undelayed = min(set(range(1, plan.size)) - plan.times.delayed, default=0)
    for moment in moments:
        world.at(moment, lambda: judge(world.peers[undelayed].module))
    while world.advance(EVENTS):
        pass
    peers = [world.peers[rank] for rank in range(plan.size)]
    if reasons := [peer.reason for peer in peers if peer.reason]:
        raise RuntimeError(f"the run did not end well: {reasons}")
    return peers


def _peer(
    plan: Plan,
    rank: int,
    problem: Problem,
    draw: Callable[[int], Samples],
    parts: Parts,
    seconds: Callable[[], float],
    number: int,
) -> SimPeer:
    config = plan.config
    torch.manual_seed(config.run.seed)
    module = problem.task.model()
    optimizer = problem.optimizer(module.parameters())
    served = serve(config, plan.names, rank, module, [optimizer], parts, ANY_NUMBER)
    assert served is not None
    arena = build_arena(config, rank, module)
    role = build_role(
        config,
        rank,
        plan.size,
        plan.schedule,
        model_bytes=arena.nbytes(),
        incarnation=rank + 1,
        why_closed="",
        server_plan=served.plan,
    )

    def step(peer: SimPeer) -> None:
        batch, iteration = draw(rank), peer.arena.step + 1
        problem.seen(rank, iteration, module, batch)
        if problem.rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = problem.rate(iteration)
        optimizer.zero_grad()
        functional.cross_entropy(module(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]

    iterations = config.run.iterations if role.trains else 0
    peer = SimPeer(role, module, step, iterations, seconds, arena, served.table_store)
    peer.seconds = config.run.seconds
    return peer
