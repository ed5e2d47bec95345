"""Weights: what part of the mixing's share is taken over each edge, and the matrices that this amounts to.

Row i of a mixing matrix says what peer i's model is made of after a round. If a row sums to 1 it is an average; if all
columns do, too, the mean of all models is kept. Push-sum's columns sum to 1: each says where a peer's mass goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import numpy as np

from gossipx.errors import UsageError
from gossipx.topology.graphs import Topology
from gossipx.topology.schedules import Schedule

Weights = Literal["uniform", "metropolis", "push-sum"]
Matrix = np.ndarray[Any, np.dtype[np.float64]]


def check(weights: Weights, topology: Topology) -> None:
    """See that ``weights`` fit the graph.

    Raises:
        UsageError: metropolis where an edge goes one way only; push-sum where edges have weights of their own.
    """
    if weights not in get_args(Weights):
        raise UsageError(f"unknown weights '{weights}': one of {', '.join(get_args(Weights))}")
    if weights == "metropolis" and topology.directed:
        raise UsageError(f"--weights metropolis needs edges that go both ways, and '{topology.name}' is directed")
    if weights == "push-sum" and topology.edge_shares:
        raise UsageError(f"--weights push-sum gives half of a peer's own, and '{topology.name}' gives edges weights")


def shares(weights: Weights, schedule: Schedule, rank: int, pushed: bool = False) -> dict[int, float]:
    """What the mixing's share β is multiplied by when ``rank`` takes another peer's model, by that peer; from 0 to 1.

    ``uniform``: the edge's own weight, 1 where it has none, as it is with push-sum. ``metropolis``: that times
    min(1, q_ji / q_ij), where q_ij is how often i turns to j: Hastings' rule (Biometrika 57, 1970) of what part of the
    proposals to take so that all states are alike in the long run. For a random neighbour, q_ij = 1 / d_i, it is
    Metropolis' min(1, d_i / d_j): the expected share over an edge is β / max(d_i, d_j) from both its ends, and the mean
    of all models is kept. A schedule that draws by measured rates is taken as if all were equal.

    Args:
        pushed: models come from those whose neighbour ``rank`` is, who push them; else from ``rank``'s own neighbours.

    Raises:
        UsageError: as :func:`check`.
    """
    check(weights, schedule.topology)
    return _shares(weights, schedule.topology, rank, schedule.frequency, pushed)


def all_shares(weights: Weights, schedule: Schedule) -> list[dict[int, float]]:
    """The :func:`shares` of every rank, at no more than the cost of one look at each edge.

    Raises:
        UsageError: as :func:`check`.
    """
    check(weights, schedule.topology)
    size = schedule.topology.size
    often = [schedule.frequency(rank) for rank in range(size)]
    return [_shares(weights, schedule.topology, rank, often.__getitem__) for rank in range(size)]


def _shares(
    weights: Weights,
    topology: Topology,
    rank: int,
    frequency: Callable[[int], Mapping[int, float]],
    pushed: bool = False,
) -> dict[int, float]:
    if pushed:
        return {source: share for (source, taker), share in topology.edge_shares.items() if taker == rank}
    own = {other: topology.edge_shares.get((rank, other), 1.0) for other in topology.neighbours[rank]}
    if weights != "metropolis":
        return own
    often = frequency(rank)
    return {
        other: share * min(1.0, frequency(other).get(rank, 0.0) / often[other]) if often.get(other) else share
        for other, share in own.items()
    }


def mixing_matrix(weights: Weights, schedule: Schedule, beta: float = 0.5) -> Matrix:
    """The expected matrix of one round in which every peer pulls once. [size, size], rows sum to 1.

    W_ij = β · q_ij · share_ij for j ≠ i, with q and shares as in :func:`shares`; W_ii is what is left of 1. With
    push-sum that of :func:`push_sum_matrix`.

    Args:
        beta: the mixing's share.

    Raises:
        UsageError: as :func:`check`.
    """
    if weights == "push-sum":
        return push_sum_matrix(schedule)
    size = schedule.topology.size
    matrix = np.zeros((size, size))
    for rank, factor in enumerate(all_shares(weights, schedule)):
        for other, often in schedule.frequency(rank).items():
            matrix[rank, other] = beta * often * factor[other]
        matrix[rank, rank] = 1.0 - matrix[rank].sum()
    return matrix


def push_sum_matrix(schedule: Schedule) -> Matrix:
    """Column i says where the mass of peer i goes in a round in which every peer pushes half of it, in expectation.

    [size, size], columns sum to 1: the sum over all peers is kept (Kempe, Dobra, Gehrke, "Gossip-Based Computation of
    Aggregate Information", 2003, Protocol Push-Sum).
    """
    size = schedule.topology.size
    matrix = np.zeros((size, size))
    for rank in range(size):
        for other, often in schedule.frequency(rank).items():
            matrix[other, rank] = often / 2
        matrix[rank, rank] = 1.0 - matrix[:, rank].sum()
    return matrix
