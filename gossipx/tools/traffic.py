"""What a run is expected to send: how often its policy fires, and what goes where then. Pure arithmetic.

Models are counted as a matrix [receiver, sender]: how many go from peer to peer when the policy of each has fired
once, in the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gossipx.assembly.graph import build_schedule
from gossipx.config.settings import RunConfig
from gossipx.policies import Adaptive, Never, Policy, Random, Tau
from gossipx.server import placement
from gossipx.server.placement import Table, bytes_by_server, checked
from gossipx.topology import agreement_meeting, agreement_rounds
from gossipx.topology.analysis import traffic_of
from gossipx.topology.weights import Matrix

PAPERS_PERIOD, PAPERS_TAU = 10, 5000
PAPERS_ADAPTIVE = {"alexnet": 365, "googlenet": 532, "convnet": 250}
"""Adaptive Communication, Table II: retrievals by model, where tau:10 has 5,000; at the thresholds of section VI."""

PAPERS_THRESHOLDS = (0.025, 0.02, 0.01)
"""... which are these. Of others the paper says nothing."""


@dataclass(frozen=True)
class Count:
    """How often a policy fires at one peer.

    Attributes:
        known: what that is known from.
        least, most: the same where it is known.
    """

    known: str
    least: float
    most: float


@dataclass(frozen=True)
class ObservedRetrievals:
    """What runs of the same task under the same policy have done.

    Attributes:
        runs: their names.
        least, most: retrievals an iteration, means of peers.
    """

    runs: tuple[str, ...]
    least: float
    most: float


def counts(policy: Policy, iterations: int, model: str | None, seen: ObservedRetrievals | None) -> list[Count]:
    """How often a policy fires: one count where that is settled before a run, else all that may be said of it.

    Each is a decision: one that falls while an exchange is still under way is skipped.

    Args:
        model: the built-in one that is trained; None: a user's.
        seen: of runs that have ended; None: there is none.
    """
    warmup, silence = min(policy.warmup, iterations), policy.max_silence
    after = iterations - warmup
    forced = after // silence if silence else 0
    settled = _settled(policy, iterations, warmup)
    if settled is not None:
        known, often = settled
        if not silence:
            return [Count(known, often, often)]
        return [Count("bounds, by max_silence", max(often, forced), min(after, often + forced + 1))]
    found = []
    if seen is not None:
        known = f"as in {', '.join(seen.runs)}"
        found.append(_within(known, seen.least * iterations, seen.most * iterations, forced, after))
    elif isinstance(policy, Adaptive) and policy.threshold in PAPERS_THRESHOLDS and not policy.relative:
        papers = [PAPERS_ADAPTIVE[model]] if model in PAPERS_ADAPTIVE else sorted(PAPERS_ADAPTIVE.values())
        share = iterations / PAPERS_PERIOD / PAPERS_TAU
        told = " to ".join(str(papers[place]) for place in sorted({0, len(papers) - 1}))
        known = f"Table II, {told} of {PAPERS_TAU}"
        found.append(_within(known, papers[0] * share, papers[-1] * share, forced, after))
    return [*found, Count("at least, at most", forced, after)]


def _within(known: str, least: float, most: float, forced: float, after: float) -> Count:
    """What is expected, kept to what is sure."""
    return Count(known, min(max(least, forced), after), min(max(most, forced), after))


def _settled(policy: Policy, iterations: int, warmup: int) -> tuple[str, float] | None:
    match policy:
        case Never():
            return "exact", 0.0
        case Tau(period=period):
            return "exact", float(iterations // period - warmup // period)
        case Random(p=p):
            return "expected", p * (iterations - warmup)
    return None  # it looks at the weights, or is a user's own


def gossip(settings: RunConfig, hosts: Sequence[str]) -> Matrix:
    """Models that go from peer (column) to peer (row) when each has fired once: [size, size].

    Args:
        hosts: by rank.
    """
    sync, size = settings.sync, len(hosts)
    if sync.exchange == "waves":
        return agreement(size)
    pulled = traffic_of(build_schedule(settings, size, hosts))
    return {"push": pulled.T, "pushpull": pulled + pulled.T}.get(sync.mode, pulled)


def agreement(size: int) -> Matrix:
    """Models of one agreement of all peers, as a wave and the finish are: [size, size]."""
    models = np.zeros((size, size))
    for rank in range(size):
        for number in range(agreement_rounds(size)):
            meeting = agreement_meeting(rank, number, size)
            if meeting is not None and meeting.takes:
                models[rank, meeting.partner] += 1
    return models


def around_hub(hub: int, size: int) -> Matrix:
    """Each other peer brings its model, and is given the centre: [size, size]."""
    models = np.zeros((size, size))
    models[hub, :] = models[:, hub] = 1
    models[hub, hub] = 0
    return models


def by_servers(
    settings: RunConfig, servers: Sequence[int], tables: Sequence[Table], size: int, pushed: float, pulled: float
) -> Matrix:
    """Each worker pushes all gradients and pulls all tables, but for those that it holds: [size, size].

    Args:
        servers: ranks, by shard.
        tables: of the model; none: they are not known, and taken to lie evenly.
        pushed, pulled: what the codecs leave of gradients and of tables, as a factor.
    """
    loads = [1.0] * len(servers)
    if tables:
        strategy = placement.parse(settings.server.placement)
        loads = [float(load) for load in bytes_by_server(checked(strategy, tables, len(servers)), 1)]
    models = np.zeros((size, size))
    for server, load in zip(servers, loads, strict=True):
        for worker in range(size):
            if worker != server and not (settings.server.servers_only and worker in servers):
                models[server, worker] += pushed * load / sum(loads)
                models[worker, server] += pulled * load / sum(loads)
    return models


def link_seconds(sent: Matrix, machines: Sequence[int], link: float, max_rate: float | None) -> float:
    """How long the machine is busy that takes longest, in the busier direction of its link.

    Args:
        sent: bytes, [receiver, sender].
        machines: by rank; what stays on one does not need the link.
        link: bytes a second of a machine.
        max_rate: the same of a peer that sends; None: as fast as the link.
    """
    of = np.array(machines)
    crossing = np.where(of[:, None] != of[None, :], sent, 0.0)
    busiest = max(float(np.bincount(of, weights=crossing.sum(axis)).max()) for axis in (0, 1))
    return max(busiest / link, 0.0 if max_rate is None else float(crossing.sum(0).max()) / max_rate)
