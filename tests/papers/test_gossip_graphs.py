"""Graphs and schedules, compared with the formulas of their papers.

B. Ying et al., Exponential Graph is Provably Efficient for Decentralized Deep Training (2021); S. Boyd, A. Ghosh,
B. Prabhakar, D. Shah, Randomized Gossip Algorithms (2006).
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from gossipx.topology import topology_from
from gossipx.topology.analysis import analyse, rounds_to_consensus, spectral_gap
from gossipx.topology.schedules import schedule_from
from gossipx.topology.weights import mixing_matrix

SIZES = range(4, 70)


@pytest.mark.parametrize("size", SIZES)
def test_spectral_gap_of_the_static_exponential_graph(size: int) -> None:
    """Ying, Proposition 1: with w_ij = 1/(τ + 1), τ = ⌈log2 n⌉, the gap is 2/(1 + τ) for even n, and more for odd."""
    tau = math.ceil(math.log2(size))
    schedule = schedule_from("random", topology_from("exponential", size))
    assert {len(others) for others in schedule.topology.neighbours} == {tau}
    gap = spectral_gap(mixing_matrix("uniform", schedule, beta=tau / (tau + 1)))
    bound = 2 / (1 + tau)
    assert gap == pytest.approx(bound) if size % 2 == 0 else gap > bound + 1e-6


@pytest.mark.parametrize("size", SIZES)
def test_one_peer_exponential_graphs_average_exactly_for_powers_of_two_alone(size: int) -> None:
    """Ying, Lemma 1: W_{τ−1} ⋯ W_0 = J/n if n is a power of two; gossipx warns of all others."""
    tau = math.ceil(math.log2(size))
    schedule = schedule_from("one-peer", topology_from("exponential", size))
    power = size == 2**tau
    assert (rounds_to_consensus(schedule, tolerance=1e-12) == tau) == power
    warned = [text for text in analyse(topology_from("exponential", size), "one-peer").warnings if "2^k peers" in text]
    assert bool(warned) == (not power)


@pytest.mark.parametrize("name", ["ring", "star", "torus", "hypercube", "regular", "hierarchical"])
def test_rounds_to_consensus_follow_the_second_eigenvalue(name: str) -> None:
    """Boyd, section III: the expected model of each peer approaches the mean of all as λ₂^t of the expected matrix."""
    schedule = schedule_from("random", topology_from(name, 12))
    matrix = mixing_matrix("metropolis", schedule)
    slowest = np.linalg.eigh(matrix)[1][:, -2]
    distance = np.linalg.norm(np.linalg.matrix_power(matrix, 30) @ slowest)
    assert distance == pytest.approx((1 - spectral_gap(matrix)) ** 30)
