"""Training of a custom model around a parameter server in virtual time: what no scenario can name.

The peers are those of ``gossipx simulate``. A worker's batches, its optimizer, the parts of the server and, if wanted,
the seconds of each iteration are given as Python objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _bench.simulated import Tables, written
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from gossipx.assembly.peer import build_arena
from gossipx.assembly.presets import effective_config
from gossipx.assembly.role import build_role
from gossipx.assembly.server import Parts, serve
from gossipx.launch.simulation.peers import ANY_NUMBER
from gossipx.launch.simulation.plan import Plan, network_of, plan_of
from gossipx.sim import SimPeer, World

Samples = tuple[Tensor, Tensor]
EVENTS = 1000


@dataclass(frozen=True)
class Work:
    """The training of the workers.

    Attributes:
        module: makes the model; all peers start from the same weights.
        batch: returns the next batch of a rank.
        optimizer: makes the optimizer of some parameters.
        before: called with the peer, its optimizer and the batch before each gradient.
        seconds: returns, by rank, the function that returns the seconds of its next iteration; None: the scenario's.
    """

    module: Callable[[], nn.Module]
    batch: Callable[[int], Samples]
    optimizer: Callable[[Any], Optimizer]
    before: Callable[[SimPeer, Optimizer, Samples], None] = lambda peer, optimizer, batch: None
    seconds: Callable[[int], Callable[[], float]] | None = None


def train(
    tables: Tables,
    work: Work,
    parts: Parts | None = None,
    moments: Sequence[float] = (),
    judge: Callable[[nn.Module], None] = lambda module: None,
) -> list[SimPeer]:
    """Run a scenario with a parameter server.

    Args:
        tables: the scenario.
        parts: of the server.
        moments: seconds at which ``judge`` is called with the model of a worker without delays, as it was last pulled.

    Returns:
        The peers by rank.

    Raises:
        RuntimeError: a peer ended for another reason than that its training was complete.
    """
    scenario = written(tables)
    config = effective_config(scenario.config, scenario.simulation.peers, has_script=False)
    plan = plan_of(scenario, config, Parts())
    world: World[SimPeer] = World(config.run.seed, network_of(scenario.network, plan.size, config.run.seed))
    for rank in range(plan.size):
        world.start(rank, lambda number, rank=rank: _peer(plan, rank, work, parts or Parts()))  # type: ignore[misc]
    if moments:
        undelayed = min(set(range(1, plan.size)) - plan.times.delayed)
        for moment in moments:
            world.at(moment, lambda: judge(world.peers[undelayed].module))
    while world.advance(EVENTS):
        pass
    peers = [world.peers[rank] for rank in range(plan.size)]
    if reasons := [peer.reason for peer in peers if peer.reason]:
        raise RuntimeError(f"the run did not end well: {reasons}")
    return peers


def _peer(plan: Plan, rank: int, work: Work, parts: Parts) -> SimPeer:
    config = plan.config
    torch.manual_seed(config.run.seed)
    module = work.module()
    optimizer = work.optimizer(module.parameters())
    served = serve(config, plan.names, rank, module, [optimizer], parts, ANY_NUMBER)
    assert served is not None
    arena = build_arena(config, rank, module)
    role = build_role(
        config,
        rank,
        plan.size,
        plan.turns,
        model_bytes=arena.nbytes(),
        incarnation=rank + 1,
        closed="",
        served=(served.settings, served.clocks),
    )

    def step(peer: SimPeer) -> None:
        batch = work.batch(rank)
        work.before(peer, optimizer, batch)
        optimizer.zero_grad()
        functional.cross_entropy(module(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]

    iterations = config.run.iterations if role.trains else 0
    seconds = plan.times.of(rank) if work.seconds is None else work.seconds(rank)
    peer = SimPeer(role, module, step, iterations, seconds, arena, lambda _: served.table_store)
    peer.seconds = config.run.seconds
    return peer
