"""A small real problem for runs in virtual time: SGD pulls each peer towards a target of its own."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transcripts import LoggedWorld

from gossipx import codecs, mixing, outer, policies, topology
from gossipx.compression import Coded, ModelCodec, WaveCodec
from gossipx.hub import ElasticExchange
from gossipx.model.arena import ParameterArena
from gossipx.peer import PeerRole
from gossipx.protocol.effects import ReportEntry
from gossipx.protocol.events import Restored
from gossipx.settings import files
from gossipx.settings.modes import Elastic
from gossipx.sim import Network, SimPeer
from gossipx.sync import SyncManager
from gossipx.topology import schedules
from gossipx.topology.weights import shares

SIZE = 16
"""Trained values of the model: 64 bytes of float32."""
TIMEOUT = 10.0
"""peer_timeout of these runs, in virtual seconds."""
ITERATIONS = 20


class Point(nn.Module):
    """A point in a space of ``size`` dimensions, with the loss ½‖x − target‖²."""

    def __init__(self, rank: int, size: int = SIZE):
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.x = nn.Parameter(torch.randn(size, generator=generator))
        self.target = torch.randn(size, generator=generator)

    def forward(self) -> Tensor:
        return 0.5 * (self.x - self.target).square().sum()


def sgd(module: nn.Module, lr: float = 0.05) -> None:
    """Do one step of plain SGD."""
    module.zero_grad()
    module().backward()
    torch.optim.SGD(module.parameters(), lr=lr).step()


def alone(rank: int, steps: int, begin: Tensor | None = None) -> Tensor:
    """Return the weights after ``steps`` steps without any exchange, as float64."""
    module = Point(rank)
    if begin is not None:
        module.x.data.copy_(begin)
    for _ in range(steps):
        sgd(module)
    return module.x.detach().double()


@functools.cache
def _graph(name: str, size: int) -> topology.Topology:
    return topology.topology_from(name, size)


_config = functools.cache(lambda **settings: files.resolve(settings))


def make(
    rank: int,
    size: int,
    incarnation: int = 0,
    policy: Any = "tau:5",
    iterations: int = ITERATIONS,
    compute: float = 1.0,
    graph: str | topology.Topology = "full",
    schedule: str = "random",
    weights: Any = "uniform",
    mix: str = "average",
    module: nn.Module | None = None,
    draws: int = 1000,
    gradient_step: Callable[[SimPeer], None] = lambda peer: sgd(peer.module),
    hub: Elastic | None = None,
    codec: str = "none",
    references: int = 8,
    across: str = "none",
    entry: ReportEntry | None = None,
    model_timeout: float = 0.0,
    why_closed: str = "",
    **settings: Any,
) -> SimPeer:
    """Return one peer, not started.

    Args:
        draws: seeds its generator.
        across: its outer optimizer.
        entry: with which it was admitted to a run of ``size`` peers under way.
    """
    graph = _graph(graph, size) if isinstance(graph, str) else graph
    joined = () if entry is None else entry.joined
    plan = schedules.schedule_from(schedule, graph)
    role = PeerRole(
        rank,
        size,
        SyncManager(policies.parse(policy), seed=rank),
        graph,
        random.Random(draws + rank),
        incarnation,
        mixing.mixing_from(mix),
        _config(**{"peer_timeout": TIMEOUT, **({} if weights == "uniform" else {"weights": weights}), **settings}),
        plan,
        {} if joined else shares(weights, plan, rank, pushed=settings.get("mode") == "push"),
        None if hub is None else functools.partial(ElasticExchange, settings=hub, hub=int(hub.hub)),
        joined,
        model_timeout,
        why_closed,
    )
    role.members.count_as_lost(() if entry is None else entry.lost)
    iterations = 0 if hub is not None and int(hub.hub) == rank and hub.hub_only else iterations
    module = module or Point(rank, SIZE * settings.get("fragments", 1))
    arena = ParameterArena(module, fragments=settings.get("fragments", 1))
    made = SimPeer(role, module, gradient_step, iterations, lambda: compute, arena)
    _add_codecs(made, codec, across, mix, references, settings)
    if settings.get("init", "first") == "first":
        made.begin_codec()
    return made


def _add_codecs(made: SimPeer, codec: str, across: str, mix: str, references: int, settings: dict[str, Any]) -> None:
    rule, arena = outer.outer_from(across), made.arena
    if settings.get("exchange") == "waves":
        kind = None if codec == "none" else codecs.parse(codec)
        nesterov = rule if isinstance(rule, outer.Nesterov) else None
        for one in [fragment.number for fragment in arena.fragments]:
            made.driver.waves.codecs[one] = WaveCodec(kind, arena, made.rank, nesterov, seed=made.rank, fragment=one)
    elif codec != "none":
        made.driver.models.codec = _coded(codec, arena, made.role, mix, references, settings)
    if isinstance(rule, outer.Momentum):
        arena.use_outer(rule)


def _coded(
    codec: str, arena: ParameterArena, role: PeerRole, mix: str, references: int, settings: dict[str, Any]
) -> Coded:
    """Return the codec of a peer's models."""
    public = mixing.mixing_from(mix).uses_public_copies
    numbers = [fragment.number for fragment in arena.fragments]
    in_pairs = public and settings.get("mode") == "pushpull"
    one = functools.partial(
        ModelCodec, codecs.parse(codec), arena, references, seed=role.rank, public=public and not in_pairs
    )
    return Coded([one(fragment=number) for number in numbers], in_pairs)


def resume(made: LoggedWorld, rank: int, size: int, done: int | None, at: float = 0.0, **options: Any) -> None:
    """Start a peer of a run that resumes, from its checkpoint of iteration ``done``, or without a checkpoint."""

    def one(incarnation: int) -> SimPeer:
        peer = make(rank, size, incarnation, **options)
        peer.resumed = done is not None
        if done is not None:
            peer.arena.set_boundary(done)
            peer.role.handle(Restored(done, peer.role.sync.state_dict()), 0.0)
        return peer

    made.start(rank, one, at)


def maker(rank: int, size: int, **options: Any) -> Callable[[int], SimPeer]:
    """Return a function from an incarnation to peer ``rank``."""
    return lambda incarnation: make(rank, size, incarnation, **options)


def world(
    size: int,
    seed: int = 0,
    network: Network | None = None,
    slow: dict[int, float] | None = None,
    absent: Iterable[int] = (),
    starters: Iterable[int] | None = None,
    by_rank: dict[int, dict[str, Any]] | None = None,
    **options: Any,
) -> LoggedWorld:
    """Return a world in which ``size`` peers start at 0.

    Args:
        slow: seconds per step, by rank.
        absent: ranks that never start.
        starters: ranks that begin exchanges (None: all); the policy of the others is "never".
        by_rank: options of single peers.
    """
    made = LoggedWorld(seed, network)
    for rank in set(range(size)) - set(absent):
        own = {"compute": (slow or {}).get(rank, options.get("compute", 1.0))}
        if starters is not None and rank not in starters:
            own["policy"] = "never"
        made.start(rank, maker(rank, size, **{**options, **own, **(by_rank or {}).get(rank, {})}))
    return made


def bound(size: int, iterations: int = ITERATIONS, compute: float = 1.0, waits: float = 0.0) -> float:
    """Return the virtual seconds within which any run ends, whatever fails: each wait for others is peer_timeout at
    most.

    The waits are three for joining (the initial model, requested twice, and START), the finish and its rounds, the
    final figures, and ``waits`` more for blocked pulls and restarts.
    """
    rounds = topology.wave_rounds(size)
    return iterations * compute + TIMEOUT * (3 + 1 + rounds + 1 + waits)


def models(made: LoggedWorld, ranks: Iterable[int] | None = None) -> Tensor:
    """Return the weights of the peers, one row each."""
    return torch.stack([made.peers[rank].weights() for rank in (ranks if ranks is not None else sorted(made.peers))])


def before(made: LoggedWorld, ranks: Iterable[int] | None = None) -> Tensor:
    """Return the weights of the peers as they entered the finish, one row each."""
    return torch.stack([made.before_finish[rank] for rank in (ranks if ranks is not None else sorted(made.peers))])


def spread(rows: Tensor) -> float:
    """Return the distance of the models from their mean, relative to it: the root mean square of Eq. 8."""
    mean = rows.mean(0)
    return float((rows - mean).square().sum(1).mean().sqrt() / mean.norm())


def until(made: LoggedWorld, rank: int, what: str, limit: float = 1000.0) -> LoggedWorld:
    """Run until the log has an entry ``what`` of ``rank``."""
    seen = 0

    def said() -> bool:
        nonlocal seen
        new, seen = made.log[seen:], len(made.log)
        return any(entry.rank == rank and entry.what.startswith(what) for entry in new)

    made.run(limit, until=said)
    assert made.lines(rank, what), f"peer {rank} never {what}"
    return made


def within(rows: Tensor, hull: Tensor) -> bool:
    """Return whether each value is between the minimum and maximum of ``hull``, like every average of its rows."""
    return bool(((rows >= hull.amin(0) - 1e-5) & (rows <= hull.amax(0) + 1e-5)).all())


def ended(made: LoggedWorld, limit: float) -> LoggedWorld:
    """Run, and assert that every peer ends in time."""
    assert limit < math.inf
    done = made.run(limit)
    running = [rank for rank, peer in made.peers.items() if peer.down_since is None]
    assert done, f"peers {running} still run at {made.now} s:\n" + "\n".join(map(str, made.log[-30:]))
    return made
