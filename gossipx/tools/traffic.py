"""Expected traffic of a run: how often its peers exchange, and which peers send models to which. Pure arithmetic.

Traffic is a matrix [receiver, sender]: the mean number of models that travel when each peer exchanges once. A pair is
an exchange of both its peers, and a wave one of all, whichever peer's policy has fired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gossipx.assembly.graph import build_schedule
from gossipx.policies import Adaptive, Auto, Never, Policy, Random, Tau
from gossipx.server import placement
from gossipx.server.placement import Table, bytes_by_server, checked
from gossipx.settings.modes import Pairs, Pushes, Server, Waves
from gossipx.settings.sections import RunConfig
from gossipx.topology import part_in_round, wave_rounds
from gossipx.topology.analysis import traffic_of
from gossipx.topology.weights import Matrix

PAPERS_TAU, PAPERS_TAU_RETRIEVALS = 10, 5000
PAPERS_ADAPTIVE = {"alexnet": 365, "googlenet": 532, "convnet": 250}
"""Adaptive Communication, Table II: retrievals by model (tau:10 makes 5,000), at the thresholds of section VI."""

PAPERS_THRESHOLDS = (0.025, 0.02, 0.01)
"""The thresholds of section VI. The paper has no counts for others."""


@dataclass(frozen=True)
class Count:
    """The number of exchanges of one peer.

    Attributes:
        source: where the numbers come from, in words.
        least: lower bound.
        most: upper bound; equal to ``least`` if the number is known.
    """

    source: str
    least: float
    most: float


@dataclass(frozen=True)
class ObservedRetrievals:
    """Retrievals of earlier runs with the same task and policy.

    Attributes:
        runs: the runs' names.
        least, most: range over runs of the exchanges per iteration, mean over peers.
    """

    runs: tuple[str, ...]
    least: float
    most: float


def deciders(settings: RunConfig, size: int) -> int:
    """Return the number of peers whose policies begin the exchanges of one peer, on average.

    Args:
        settings: the run's settings.
        size: number of peers.
    """
    return size if isinstance(settings.mode, Waves) else min(size, 2) if isinstance(settings.mode, Pairs) else 1


def counts(
    policy: Policy, iterations: int, model: str | None, seen: ObservedRetrievals | None, deciders: int = 1
) -> list[Count]:
    """Return how often a peer exchanges: one count if it is known before the run, else estimates and bounds.

    A decision made while an exchange is still in progress is skipped at run time, and counted here.

    Args:
        policy: the policy.
        iterations: iterations of the run.
        model: the built-in model; None: a user's model.
        seen: retrievals of earlier runs; None: no such runs.
        deciders: see :func:`deciders`.
    """
    warmup, silence = min(policy.warmup, iterations), policy.max_silence
    after = iterations - warmup
    forced = after // silence if silence else 0
    predictable = _predictable(policy, iterations, warmup, deciders)
    if predictable is not None:
        source, decisions = predictable
        if not silence:
            return [Count(source, decisions, decisions)]
        # The silence during the warm-up counts too, so it may force one more pull at the end of the warm-up.
        return [Count("bounds, by max_silence", max(decisions, forced), min(after, decisions + forced + 1))]
    found = []
    if seen is not None:
        source = f"as in {', '.join(seen.runs)}"
        found.append(_within(source, seen.least * iterations, seen.most * iterations, forced, after))
    elif _is_papers(policy) and deciders == 1:
        papers = [PAPERS_ADAPTIVE[model]] if model in PAPERS_ADAPTIVE else sorted(PAPERS_ADAPTIVE.values())
        # The same share of the retrievals of tau:10 as in the paper's run.
        share = iterations / PAPERS_TAU / PAPERS_TAU_RETRIEVALS
        shown = " to ".join(str(papers[place]) for place in sorted({0, len(papers) - 1}))
        source = f"Table II, {shown} of {PAPERS_TAU_RETRIEVALS}"
        found.append(_within(source, papers[0] * share, papers[-1] * share, forced, after))
    most = min(after, deciders * (policy.most(iterations) + forced)) if isinstance(policy, Auto) else after
    return [*found, Count("at least, at most", forced, most)]


def _is_papers(policy: Policy) -> bool:
    if not isinstance(policy, Adaptive) or policy.relative or policy.of != "difference":
        return False
    return policy.threshold in PAPERS_THRESHOLDS


def _within(source: str, least: float, most: float, forced: float, after: float) -> Count:
    """Return an estimate, clamped to its bounds."""
    return Count(source, min(max(least, forced), after), min(max(most, forced), after))


def _predictable(policy: Policy, iterations: int, warmup: int, deciders: int) -> tuple[str, float] | None:
    """Return the source and the number of exchanges, without those that max_silence forces."""
    match policy:
        case Never():
            return "exact", 0.0
        case Tau(period=period):  # in pairs and waves it counts from the last one, whichever peer has begun it
            return "exact" if deciders == 1 else "expected", float(iterations // period - warmup // period)
        case Random(p=p):
            return "expected", min(1.0, deciders * p) * (iterations - warmup)
    return None  # depends on the weights, or is a custom policy


def gossip(settings: RunConfig, hosts: Sequence[str]) -> Matrix:
    """Return the models sent when each peer exchanges once: [receiver, sender].

    Args:
        settings: the run's settings.
        hosts: host names by rank.
    """
    mode, size = settings.mode, len(hosts)
    if isinstance(mode, Waves):  # with a codec, each peer receives the encoded change of every other
        return wave(size) if mode.codec == "none" else np.ones((size, size)) - np.eye(size)
    pulled = traffic_of(build_schedule(settings, size, hosts))
    return pulled.T if isinstance(mode, Pushes) else (pulled + pulled.T) / 2 if isinstance(mode, Pairs) else pulled


def wave(size: int) -> Matrix:
    """Return the models sent in one wave of all peers, such as the finish: [receiver, sender]."""
    models = np.zeros((size, size))
    for rank in range(size):
        for number in range(wave_rounds(size)):
            part = part_in_round(rank, number, size)
            if part is not None and part.receives:
                models[rank, part.partner] += 1
    return models


def around_hub(hub: int, size: int) -> Matrix:
    """Return the models sent when each other peer sends its model to the hub and receives the centre."""
    models = np.zeros((size, size))
    models[hub, :] = models[:, hub] = 1
    models[hub, hub] = 0
    return models


def with_servers(
    mode: Server, servers: Sequence[int], tables: Sequence[Table], size: int, pushed: float, pulled: float
) -> Matrix:
    """Return the models sent when each worker pushes all gradients and pulls all tables, except those of its own shard.

    Args:
        mode: of the run.
        servers: ranks by shard.
        tables: the model's tables; empty: unknown, assumed to be spread evenly.
        size: number of peers.
        pushed, pulled: encoded size of gradients and of tables, as a fraction of the plain size.
    """
    loads = [1.0] * len(servers)
    if tables:
        strategy = placement.placement_from(mode.placement)
        loads = [float(load) for load in bytes_by_server(checked(strategy, tables, len(servers)), 1)]
    models = np.zeros((size, size))
    for server, load in zip(servers, loads, strict=True):
        for worker in range(size):
            if worker != server and not (mode.servers_only and worker in servers):
                models[server, worker] += pushed * load / sum(loads)
                models[worker, server] += pulled * load / sum(loads)
    return models


def link_seconds(sent: Matrix, machines: Sequence[int], link: float, max_rate: float | None) -> float:
    """Return the seconds that the traffic between machines takes.

    They are those of the busiest machine's link in its busier direction, or those of the busiest sender at
    ``max_rate``, whichever is longer.

    Args:
        sent: bytes, [receiver, sender].
        machines: machine by rank; traffic within a machine does not use its link.
        link: rate of a machine's link, in bytes per second.
        max_rate: limit on a peer's sending rate, in bytes per second; None: no limit.
    """
    of = np.array(machines)
    crossing = np.where(of[:, None] != of[None, :], sent, 0.0)
    busiest = max(float(np.bincount(of, weights=crossing.sum(axis)).max()) for axis in (0, 1))
    return max(busiest / link, 0.0 if max_rate is None else float(crossing.sum(0).max()) / max_rate)
