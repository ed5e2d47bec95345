"""Training of a custom model around a parameter server in virtual time, evaluated at moments of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from _simulated import Tables, written
from torch import Tensor, nn
from torch.nn import functional

from gossipx.assembly.peer import build_arena
from gossipx.assembly.role import build_role
from gossipx.assembly.server import Parts, serve
from gossipx.assembly.settings import effective_config
from gossipx.launch.simulation.peers import ANY_NUMBER
from gossipx.launch.simulation.plan import Plan, network_of, plan_of
from gossipx.sim import SimPeer, World

Samples = tuple[Tensor, Tensor]
EVENTS = 1000


@dataclass(frozen=True)
class Work:
    """The model and data to train.

    Attributes:
        module: makes the model; all peers start from the same weights.
        batch: returns the next batch of a rank.
        rate: of SGD without momentum.
    """

    module: Callable[[], nn.Module]
    batch: Callable[[int], Samples]
    rate: float


def train(tables: Tables, work: Work, moments: Sequence[float], judge: Callable[[nn.Module], None]) -> int:
    """Run a scenario with a parameter server, and return the number of gradients.

    Args:
        tables: the scenario, with ``seconds`` in ``[run]``.
        moments: seconds at which ``judge`` is called with the model of a worker without delays, as it was last pulled.
    """
    scenario = written(tables)
    config = effective_config(scenario.config, scenario.simulation.peers, has_script=False)
    plan = plan_of(scenario, config, Parts())
    world: World[SimPeer] = World(config.run.seed, network_of(scenario.network, plan.size, config.run.seed))
    for rank in range(plan.size):
        world.start(rank, lambda number, rank=rank: _peer(plan, rank, work))  # type: ignore[misc]
    undelayed = min(set(range(1, plan.size)) - plan.times.delayed)
    for moment in moments:
        world.at(moment, lambda: judge(world.peers[undelayed].module))
    while world.advance(EVENTS):
        pass
    return sum(peer.step for rank, peer in world.peers.items() if rank)


def _peer(plan: Plan, rank: int, work: Work) -> SimPeer:
    config = plan.config
    torch.manual_seed(config.run.seed)
    module = work.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=work.rate)
    served = serve(config, plan.names, rank, module, optimizer, Parts(), ANY_NUMBER)
    assert served is not None
    arena = build_arena(config, rank, True, module)
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
        inputs, labels = work.batch(rank)
        optimizer.zero_grad()
        functional.cross_entropy(module(inputs), labels).backward()  # type: ignore[no-untyped-call]

    iterations = config.run.iterations if role.trains else 0
    peer = SimPeer(role, module, step, iterations, plan.times.of(rank), arena, lambda _: served.table_store)
    peer.seconds = config.run.seconds
    return peer
