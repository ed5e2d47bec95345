"""Weights: factors on the mixing share of each edge, and the mixing matrices that result.

Row i of a mixing matrix holds the weights of all models in peer i's model after a round; rows sum to 1. If all columns
also sum to 1, the mean of all models is kept. In push-sum, column i says how peer i's mass is distributed, and columns
sum to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from gossipx.errors import UsageError
from gossipx.topology.graphs import Topology
from gossipx.topology.schedules import Schedule

Weights = Literal["uniform", "metropolis", "push-sum"]
Matrix = np.ndarray[Any, np.dtype[np.float64]]


def check_weights(weights: Weights, topology: Topology) -> None:
    """Check that ``weights`` fit the graph.

    Raises:
        UsageError: metropolis on a directed graph, or push-sum on a graph with edge weights.
    """
    if weights not in get_args(Weights):
        raise UsageError(f"unknown weights '{weights}': one of {', '.join(get_args(Weights))}")
    if weights == "metropolis" and topology.directed:
        raise UsageError(f"--weights metropolis needs an undirected graph, and '{topology.name}' is directed")
    if weights == "push-sum" and topology.edge_shares:
        raise UsageError(f"--weights push-sum cannot use edge weights, and '{topology.name}' has some")


def shares(weights: Weights, schedule: Schedule, rank: int, pushed: bool = False) -> dict[int, float]:
    """Return, by source rank, the factor from 0 to 1 on the mixing share β when ``rank`` mixes that peer's model.

    It is 1 for ranks that are missing. ``uniform`` and push-sum: the weight of the edge, by default 1. ``metropolis``:
    that times min(1, q_ji / q_ij), where q_ij is the frequency of pulls of i from j. This is Hastings' acceptance rule
    (Biometrika 57, 1970), under which the stationary distribution is uniform. For random neighbours, q_ij = 1 / d_i, it
    is Metropolis' min(1, d_i / d_j): the expected share over an edge is β / max(d_i, d_j) in both directions, and the
    mean of all models is kept. Schedules that use measured rates are treated as if all rates were equal.

    Args:
        pushed: models are pushed to ``rank`` over its incoming edges; otherwise it pulls over its outgoing edges.

    Raises:
        UsageError: as :func:`check_weights`.
    """
    check_weights(weights, schedule.topology)
    return _shares(weights, schedule.topology, rank, schedule.frequency, pushed)


def all_shares(weights: Weights, schedule: Schedule) -> list[dict[int, float]]:
    """Return the :func:`shares` of every rank, in time linear in the number of edges.

    Raises:
        UsageError: as :func:`check_weights`.
    """
    check_weights(weights, schedule.topology)
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
        return {source: share for (source, receiver), share in topology.edge_shares.items() if receiver == rank}
    if weights != "metropolis" and not topology.edge_shares:
        return {}
    own = {other: topology.edge_shares.get((rank, other), 1.0) for other in topology.neighbours[rank]}
    if weights != "metropolis":
        return own
    often = frequency(rank)
    return {
        other: share * min(1.0, frequency(other).get(rank, 0.0) / often[other]) if often.get(other) else share
        for other, share in own.items()
    }


def mixing_matrix(weights: Weights, schedule: Schedule, beta: float = 0.5) -> Matrix:
    """Return the expected matrix [size, size] of a round in which every peer pulls once; rows sum to 1.

    W_ij = β · q_ij · share_ij for j ≠ i, with q and shares as in :func:`shares`, and W_ii = 1 − Σ_j W_ij.

    For push-sum every peer pushes half of its mass, and column i is the distribution of peer i's. So columns sum to 1,
    which keeps the total mass (Kempe, Dobra, Gehrke, "Gossip-Based Computation of Aggregate Information", 2003,
    Protocol Push-Sum).

    Args:
        beta: the mixing share β.

    Raises:
        UsageError: as :func:`check_weights`.
    """
    size, pushes = schedule.topology.size, weights == "push-sum"
    factors: Sequence[Mapping[int, float]] = [{}] * size if pushes else all_shares(weights, schedule)
    matrix = np.zeros((size, size))
    for rank, factor in enumerate(factors):
        for other, often in schedule.frequency(rank).items():
            matrix[rank, other] = (0.5 if pushes else beta) * often * factor.get(other, 1.0)
        matrix[rank, rank] = 1.0 - matrix[rank].sum()
    return matrix.T if pushes else matrix
