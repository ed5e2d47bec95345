"""Schedules: which neighbour's turn it is.

A schedule is an immutable value that decides purely. A peer's *round* is the number of pulls that it has wanted so far;
peers count for themselves, and those that pull at the same pace are in the same round.
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
"""Gossip as in the paper: Algorithm 2, line 4."""


@dataclass(frozen=True)
class Schedule(abc.ABC):
    """Says whom a peer turns to.

    Attributes:
        topology: of the run.
    """

    topology: Topology

    @abc.abstractmethod
    def partner(
        self, rank: int, round: int, candidates: Sequence[int], rng: random.Random, rates: Mapping[int, float]
    ) -> int | None:
        """Whom ``rank`` pulls from.

        Args:
            round: from 0.
            candidates: those of its neighbours that may be asked now, ascending.
            rng: the peer's own generator.
            rates: models a second that came from each rank, or (pushes) went to it; may lack any, or all.

        Returns:
            One of ``candidates``, or None: nobody can be asked, or it rests in this round.
        """

    @abc.abstractmethod
    def frequency(self, rank: int) -> dict[int, float]:
        """In what part of its rounds ``rank`` turns to each neighbour, in the long run, if all may be asked always."""


@final
@dataclass(frozen=True)
class Random(Schedule):
    """A random neighbour, all alike (Algorithm 2, line 4)."""

    def partner(
        self, rank: int, round: int, candidates: Sequence[int], rng: random.Random, rates: Mapping[int, float]
    ) -> int | None:
        return rng.choice(candidates) if candidates else None

    def frequency(self, rank: int) -> dict[int, float]:
        return _alike(self.topology.neighbours[rank], 1.0)


@final
@dataclass(frozen=True)
class InTurn(Schedule):
    """One after the other, round and round; one that may not be asked is passed over for the next.

    Attributes:
        turns: for each rank, whom it turns to in rounds 0, 1, …, and then from 0 again; None: it rests.
    """

    turns: tuple[tuple[int | None, ...], ...]

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
    """A random neighbour of one's own site, and now and then one of another; without sites all are one.

    Attributes:
        outer: probability of another site's, where both kinds may be asked.
    """

    outer: float

    def partner(
        self, rank: int, round: int, candidates: Sequence[int], rng: random.Random, rates: Mapping[int, float]
    ) -> int | None:
        inside, outside = self._by_site(rank, candidates)
        if inside and outside:
            return rng.choice(outside if rng.random() < self.outer else inside)
        return rng.choice(candidates) if candidates else None

    def frequency(self, rank: int) -> dict[int, float]:
        neighbours = self.topology.neighbours[rank]
        inside, outside = self._by_site(rank, neighbours)
        if not (inside and outside):
            return _alike(neighbours, 1.0)
        return {**_alike(inside, 1 - self.outer), **_alike(outside, self.outer)}

    def _by_site(self, rank: int, others: Sequence[int]) -> tuple[list[int], list[int]]:
        sites = self.topology.sites or (0,) * self.topology.size
        inside = [other for other in others if sites[other] == sites[rank]]
        return inside, [other for other in others if sites[other] != sites[rank]]


@final
@dataclass(frozen=True)
class BandwidthAware(Schedule):
    """A random neighbour, each as likely as it is fast; all alike as long as no rate is known.

    One whose rate is not known yet counts as fast as the others are on average, so that it gets to be known.
    """

    def partner(
        self, rank: int, round: int, candidates: Sequence[int], rng: random.Random, rates: Mapping[int, float]
    ) -> int | None:
        if not candidates:
            return None
        known = {other: rates[other] for other in candidates if 0 < rates.get(other, 0.0) < math.inf} if rates else {}
        if not known:
            return rng.choices(candidates)[0]
        mean = sum(known.values()) / len(known)
        return rng.choices(candidates, [known.get(other, mean) for other in candidates])[0]

    def frequency(self, rank: int) -> dict[int, float]:
        return _alike(self.topology.neighbours[rank], 1.0)


def _alike(others: Sequence[int], mass: float) -> dict[int, float]:
    return {other: mass / len(others) for other in others}


# --- by name: each one's first line is what `gossipx topology list` says of it -------------------------------------

Maker = Callable[[Topology], Schedule]


def drawn() -> Maker:
    """A random neighbour."""
    return Random


def static() -> Maker:
    """All neighbours in turn, beginning with the next higher rank."""
    return lambda topology: InTurn(topology, tuple(topology.in_turn(rank) for rank in range(topology.size)))


def one_peer() -> Maker:
    """In each round pairs that pull from each other; over directed edges each is pulled from once at most."""
    return lambda topology: InTurn(topology, _matchings(topology))


def inner_outer(outer: float = 0.1) -> Maker:
    """A random neighbour of one's own machine or site, and with probability outer one of another."""
    if not 0 <= outer <= 1:
        raise ValueError("outer is a probability, from 0 to 1")
    return lambda topology: InnerOuter(topology, outer)


def bandwidth_aware() -> Maker:
    """A random neighbour, each as likely as models came from it, or (pushes) went to it, fast."""
    return BandwidthAware


SCHEDULES: dict[str, Callable[..., Maker]] = {
    "random": drawn,
    "static": static,
    "one-peer": one_peer,
    "inner-outer": inner_outer,
    "bandwidth-aware": bandwidth_aware,
}


def check(spec: str) -> None:
    """See that ``spec`` is a schedule's, before there is a graph.

    Raises:
        UsageError: an unknown schedule or key, or a bad value.
    """
    specs.build(spec, SCHEDULES, "schedule")


def parse(spec: str | None, topology: Topology) -> Schedule:
    """The schedule that ``spec`` means; None: the one that the topology's file asks for, or :data:`DEFAULT`.

    Raises:
        UsageError: as :func:`check`.
    """
    return specs.build(spec or topology.schedule or DEFAULT, SCHEDULES, "schedule")(topology)


def told(spec: str | None, made: Schedule) -> str:
    """What ``spec``, of which ``made`` was parsed, says: the same however it is spelt."""
    name = (spec or made.topology.schedule or DEFAULT).partition(":")[0].strip()
    values = {one.name: getattr(made, one.name) for one in fields(made)}
    return " ".join([name, *(f"{key}={value}" for key, value in values.items() if isinstance(value, float))])


def _matchings(topology: Topology) -> tuple[tuple[int | None, ...], ...]:
    """The graph's edges dealt out into rounds in which every peer turns to one other at most, by rank and round.

    Each round is a maximal matching of the edges that are left: of pairs, or over directed edges of who pulls with who
    is pulled from. At most 2d − 1 rounds for degree d, and as few as there are dimensions or hops for 2^k peers of a
    hypercube, and any number of an exponential graph, because nearer ranks come first: these are the rounds of the
    one-peer exponential graph (Ying et al. 2021, Eq. 7).
    """
    size, directed = topology.size, topology.directed
    import networkx as nx  # only for this schedule

    left = nx.empty_graph(size)  # so that each matching looks at who pulls in the order of ranks
    for rank in range(size):
        for other in topology.in_turn(rank):
            left.add_edge(rank, other + size if directed else other)  # size + j stands for j as it is pulled from
    turns: list[list[int | None]] = [[] for _ in range(size)]
    while left.number_of_edges():
        pairs = nx.maximal_matching(left)
        left.remove_edges_from(pairs)
        met = {one: other for pair in pairs for one, other in (pair, pair[::-1])}
        for rank, row in enumerate(turns):
            row.append(met[rank] % size if rank in met else None)
    return tuple(map(tuple, turns))
