"""Schedules: the order in which a peer pulls from its neighbours.

A schedule is an immutable value and a pure function of its inputs. A peer's *round* is the number of pulls that it has
started so far. Each peer counts its own rounds, so peers that pull at the same rate are in the same round.
"""

from __future__ import annotations

import abc
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import final

from gossipx import specs
from gossipx.topology.graphs import Topology

DEFAULT = "random"
"""Gossip as in the paper (Algorithm 2, line 4)."""


@dataclass(frozen=True)
class Schedule(abc.ABC):
    """A rule that chooses the neighbour for each pull (or push, in runs that push).

    Attributes:
        topology: the graph of the run.
    """

    topology: Topology

    @abc.abstractmethod
    def partner(
        self, rank: int, round: int, candidates: Sequence[int], rng: random.Random, rates: Mapping[int, float]
    ) -> int | None:
        """Choose the peer that ``rank`` pulls from.

        Args:
            rank: the peer that pulls.
            round: the peer's round, from 0.
            candidates: its neighbours that are available now, ascending.
            rng: the peer's own generator.
            rates: measured models per second received from (pushes: sent to) each rank; ranks may be missing.

        Returns:
            One of ``candidates``, or None if they are empty or the peer is idle in this round.
        """

    @abc.abstractmethod
    def frequency(self, rank: int) -> dict[int, float]:
        """Return the long-run fraction of rounds in which ``rank`` pulls from each neighbour, if all are available."""


@final
@dataclass(frozen=True)
class RandomNeighbour(Schedule):
    """A random neighbour, all with equal probability (Algorithm 2, line 4)."""

    def partner(
        self, rank: int, round: int, candidates: Sequence[int], rng: random.Random, rates: Mapping[int, float]
    ) -> int | None:
        return rng.choice(candidates) if candidates else None

    def frequency(self, rank: int) -> dict[int, float]:
        return _uniform(self.topology.neighbours[rank], 1.0)


@final
@dataclass(frozen=True)
class InTurn(Schedule):
    """A fixed periodic order; a neighbour that is not available is skipped.

    Attributes:
        turns: for each rank, its partners in rounds 0, 1, … of a period; None: it is idle in that round.
    """

    turns: Sequence[Sequence[int | None]]

    def partner(
        self, rank: int, round: int, candidates: Sequence[int], rng: random.Random, rates: Mapping[int, float]
    ) -> int | None:
        turns = self.turns[rank]
        if not turns or turns[round % len(turns)] is None:
            return None
        following = (turns[(round + k) % len(turns)] for k in range(len(turns)))
        return next((other for other in following if other in candidates), None)

    def frequency(self, rank: int) -> dict[int, float]:
        turns = self.turns[rank]
        return {other: count / len(turns) for other, count in Counter(turns).items() if other is not None}


@final
@dataclass(frozen=True)
class InnerOuter(Schedule):
    """A random neighbour in the same site or, less often, in another; without sites all peers are in one.

    Attributes:
        outer: probability of another site, if neighbours of both kinds are available.
    """

    outer: float

    def partner(
        self, rank: int, round: int, candidates: Sequence[int], rng: random.Random, rates: Mapping[int, float]
    ) -> int | None:
        inside, outside = self._by_site(rank, candidates) if self.topology.sites else ([], [])
        if inside and outside:
            return rng.choice(outside if rng.random() < self.outer else inside)
        return rng.choice(candidates) if candidates else None

    def frequency(self, rank: int) -> dict[int, float]:
        neighbours = self.topology.neighbours[rank]
        inside, outside = self._by_site(rank, neighbours) if self.topology.sites else ([], [])
        if not (inside and outside):
            return _uniform(neighbours, 1.0)
        return {**_uniform(inside, 1 - self.outer), **_uniform(outside, self.outer)}

    def _by_site(self, rank: int, others: Sequence[int]) -> tuple[list[int], list[int]]:
        sites = self.topology.sites
        inside = [other for other in others if sites[other] == sites[rank]]
        return inside, [other for other in others if sites[other] != sites[rank]]


@final
@dataclass(frozen=True)
class BandwidthAware(Schedule):
    """A random neighbour, with a probability proportional to its measured rate; uniform while no rate is known.

    A neighbour of unknown rate counts with the mean of the known rates, so that its rate gets measured.
    """

    def partner(
        self, rank: int, round: int, candidates: Sequence[int], rng: random.Random, rates: Mapping[int, float]
    ) -> int | None:
        if not candidates:
            return None
        measured = {other: rates[other] for other in sorted(rates) if other in candidates}
        known = {other: rate for other, rate in measured.items() if 0 < rate < math.inf}
        if not known:
            return rng.choices(candidates)[0]
        mean = sum(known.values()) / len(known)
        return rng.choices(candidates, [known.get(other, mean) for other in candidates])[0]

    def frequency(self, rank: int) -> dict[int, float]:
        return _uniform(self.topology.neighbours[rank], 1.0)


def _uniform(others: Sequence[int], mass: float) -> dict[int, float]:
    return {other: mass / len(others) for other in others}


# --- by name: `gossipx topology list` shows the first line of each docstring ---------------------------------------

Maker = Callable[[Topology], Schedule]


def random_neighbour() -> Maker:
    """A random neighbour."""
    return RandomNeighbour


def static() -> Maker:
    """All neighbours in turn, beginning with the next higher rank."""
    return lambda topology: InTurn(topology, tuple(topology.in_turn(rank) for rank in range(topology.size)))


def one_peer() -> Maker:
    """Disjoint pairs in each round; over directed edges each peer is pulled from at most once."""
    return lambda topology: InTurn(topology, _matchings(topology))


def inner_outer(outer: float = 0.1) -> Maker:
    """A random neighbour on the same machine or site, or with probability outer on another one."""
    if not 0 <= outer <= 1:
        raise ValueError("outer must be a probability, from 0 to 1")
    return lambda topology: InnerOuter(topology, outer)


def bandwidth_aware() -> Maker:
    """A random neighbour, with a probability proportional to the measured rate of models from (pushes: to) it."""
    return BandwidthAware


SCHEDULES: dict[str, Callable[..., Maker]] = {
    "random": random_neighbour,
    "static": static,
    "one-peer": one_peer,
    "inner-outer": inner_outer,
    "bandwidth-aware": bandwidth_aware,
}


def check_schedule(spec: str) -> None:
    """Check the spec of a schedule, before there is a graph.

    Raises:
        UsageError: an unknown schedule or key, or a bad value.
    """
    specs.build(spec, SCHEDULES, "schedule")


def schedule_from(spec: str | None, topology: Topology) -> Schedule:
    """Return the schedule that ``spec`` names; None: the one that the topology's file sets, or :data:`DEFAULT`.

    Raises:
        UsageError: as :func:`check_schedule`.
    """
    return specs.build(spec or topology.schedule or DEFAULT, SCHEDULES, "schedule")(topology)


def schedule_spec(spec: str | None, schedule: Schedule) -> str:
    """Return a canonical description of a schedule parsed from ``spec``, the same for all spellings of the spec."""
    name = (spec or schedule.topology.schedule or DEFAULT).partition(":")[0].strip()
    values = {field.name: getattr(schedule, field.name) for field in fields(schedule)}
    return " ".join([name, *(f"{key}={value}" for key, value in values.items() if isinstance(value, float))])


def _matchings(topology: Topology) -> tuple[tuple[int | None, ...], ...]:
    """Divide the edges into rounds with at most one pull per peer; return the partners by rank and round.

    Each round is a maximal matching of the remaining edges; a directed edge matches a puller with a source. There are
    at most 2d − 1 rounds for degree d. Because nearer ranks are first, a hypercube of 2^k peers has one round per
    dimension, and an exponential graph of any size one per hop distance: the one-peer exponential graph (Ying et al.
    2021, Eq. 7).
    """
    size, directed = topology.size, topology.directed
    import networkx as nx  # only for this schedule

    remaining = nx.empty_graph(size)  # adds the nodes in order, so that each matching visits pullers by rank
    for rank in range(size):
        for other in topology.in_turn(rank):
            remaining.add_edge(rank, other + size if directed else other)  # size + j is j in its role as a source
    turns: list[list[int | None]] = [[] for _ in range(size)]
    while remaining.number_of_edges():
        pairs = nx.maximal_matching(remaining)
        remaining.remove_edges_from(pairs)
        partner_of = {one: other for pair in pairs for one, other in (pair, pair[::-1])}
        for rank, row in enumerate(turns):
            row.append(partner_of[rank] % size if rank in partner_of else None)
    return tuple(map(tuple, turns))
