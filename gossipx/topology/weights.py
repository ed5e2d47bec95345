"""Weights: what part of the mixing's share is taken over each edge, and the matrices that this amounts to.

Row i of a mixing matrix says what peer i's model is made of after a round. If a row sums to 1 it is an average; if all
columns do, too, the mean of all models is kept.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np

from gossipx.errors import UsageError
from gossipx.topology.graphs import Topology
from gossipx.topology.schedules import Schedule

Weights = Literal["uniform", "metropolis"]
Matrix = np.ndarray[Any, np.dtype[np.float64]]


def check(weights: Weights, topology: Topology) -> None:
    """See that ``weights`` fit the graph.

    Raises:
        UsageError: metropolis where an edge goes one way only.
    """
    if weights not in get_args(Weights):
        raise UsageError(f"unknown weights '{weights}': one of {', '.join(get_args(Weights))}")
    if weights == "metropolis" and topology.directed:
        raise UsageError(f"--weights metropolis needs edges that go both ways, and '{topology.name}' is directed")


def shares(weights: Weights, schedule: Schedule, rank: int) -> dict[int, float]:
    """What the mixing's share β is multiplied by when ``rank`` takes a neighbour's model, from 0 to 1.

    ``uniform``: the edge's own weight, 1 where it has none. ``metropolis``: that times min(1, q_ji / q_ij), where q_ij
    is how often i turns to j: Hastings' rule (Biometrika 57, 1970) of what part of the proposals to take so that all
    states are alike in the long run. For a random neighbour, q_ij = 1 / d_i, it is Metropolis' min(1, d_i / d_j): the
    expected share over an edge is β / max(d_i, d_j) from both its ends, and the mean of all models is kept. A schedule
    that draws by measured rates is taken as if all were equal.

    Raises:
        UsageError: as :func:`check`.
    """
    topology = schedule.topology
    check(weights, topology)
    own = {other: topology.edge_shares.get((rank, other), 1.0) for other in topology.neighbours[rank]}
    if weights == "uniform":
        return own
    often = schedule.frequency(rank)
    return {
        other: share * min(1.0, schedule.frequency(other).get(rank, 0.0) / often[other]) if often.get(other) else share
        for other, share in own.items()
    }


def mixing_matrix(weights: Weights, schedule: Schedule, beta: float = 0.5) -> Matrix:
    """The expected matrix of one round in which every peer pulls once. [size, size], rows sum to 1.

    W_ij = β · q_ij · share_ij for j ≠ i, with q and shares as in :func:`shares`; W_ii is what is left of 1.

    Args:
        beta: the mixing's share.

    Raises:
        UsageError: as :func:`check`.
    """
    size = schedule.topology.size
    matrix = np.zeros((size, size))
    for rank in range(size):
        factor = shares(weights, schedule, rank)
        for other, often in schedule.frequency(rank).items():
            matrix[rank, other] = beta * often * factor[other]
        matrix[rank, rank] = 1.0 - matrix[rank].sum()
    return matrix


def push_sum_shares(topology: Topology, rank: int) -> dict[int, float]:
    """How ``rank`` deals out its mass if it pushes to all neighbours at once: to each, and to itself. They sum to 1.

    Each neighbour gets as much as it keeps, times the edge's weight: 1 / (1 + d) without such weights (Kempe, Dobra,
    Gehrke, "Gossip-Based Computation of Aggregate Information", 2003: any shares that sum to 1 will do).
    """
    parts = {rank: 1.0, **{other: topology.edge_shares.get((rank, other), 1.0) for other in topology.neighbours[rank]}}
    whole = sum(parts.values())
    return {other: part / whole for other, part in parts.items()}


def push_sum_matrix(topology: Topology) -> Matrix:
    """Column i says where the mass of peer i goes. [size, size], columns sum to 1: the sum over all peers is kept."""
    matrix = np.zeros((topology.size, topology.size))
    for rank in range(topology.size):
        for other, part in push_sum_shares(topology, rank).items():
            matrix[other, rank] = part
    return matrix
