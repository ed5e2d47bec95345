"""Weights and mixing matrices: which are doubly stochastic, and the limit of repeated rounds."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gossipx.errors import UsageError
from gossipx.topology import Topology, analysis, topology_from
from gossipx.topology.analysis import (
    LARGEST,
    ROUNDS,
    TOLERANCE,
    analyse,
    most_rounds,
    rounds_to_consensus,
    spectral_gap,
)
from gossipx.topology.schedules import SCHEDULES, schedule_from
from gossipx.topology.weights import all_shares, check_weights, mixing_matrix, shares

NAMES = [
    "full",
    "ring",
    "star",
    "grid",
    "hypercube",
    "expander",
    "erdos-renyi:p=0.2",
    "hierarchical:sites=3",
    "bipartite",
]
undirected = st.builds(topology_from, st.sampled_from(NAMES), st.integers(1, 24), st.integers(0, 9))
specs = st.sampled_from(list(SCHEDULES))
DIGRAPH = Topology("own", ((1, 2), (2,), (0, 3), (0,)), edge_shares={(0, 1): 0.5})


def with_shares(graph: Topology, seed: int) -> Topology:
    """Return the topology with a weight on every edge, equal in both directions."""
    rng = np.random.default_rng(seed)
    pairs = [(one, other) for one, others in enumerate(graph.neighbours) for other in others if one < other]
    given_ = {pair: float(rng.uniform(0.1, 1)) for pair in pairs}
    return Topology(graph.name, graph.neighbours, edge_shares={**given_, **{(b, a): s for (a, b), s in given_.items()}})


@given(graph=st.one_of(undirected, st.just(DIGRAPH)), spec=specs, beta=st.floats(0, 1))
def test_a_mixing_matrix_averages(graph: Topology, spec: str, beta: float) -> None:
    matrix = mixing_matrix("uniform", schedule_from(spec, graph), beta)
    assert (matrix >= -1e-12).all()
    np.testing.assert_allclose(matrix.sum(1), 1)
    others = {(i, int(j)) for i, row in enumerate(matrix) for j in np.flatnonzero(row) if i != j}
    assert others <= {(i, j) for i, neighbours in enumerate(graph.neighbours) for j in neighbours}


@given(graph=undirected, spec=specs, weighted=st.booleans(), beta=st.floats(0, 1))
def test_metropolis_keeps_the_mean(graph: Topology, spec: str, weighted: bool, beta: float) -> None:
    """Metropolis matrices are doubly stochastic and symmetric: detailed balance (Hastings 1970, section 2.1)."""
    matrix = mixing_matrix("metropolis", schedule_from(spec, with_shares(graph, 1) if weighted else graph), beta)
    np.testing.assert_allclose(matrix.sum(0), 1)
    np.testing.assert_allclose(matrix.sum(1), 1)
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-12)
    assert (matrix >= -1e-12).all()


@given(graph=undirected)
def test_metropolis_of_random_neighbours_goes_by_degrees(graph: Topology) -> None:
    """β = 1: W_ij = min(1/d_i, 1/d_j), Metropolis' chain on the graph."""
    degrees = [len(others) for others in graph.neighbours]
    schedule = schedule_from("random", graph)
    matrix = mixing_matrix("metropolis", schedule, beta=1)
    for rank, others in enumerate(graph.neighbours):
        for other in others:
            assert matrix[rank, other] == pytest.approx(1 / max(degrees[rank], degrees[other]))
            assert shares("metropolis", schedule, rank)[other] == pytest.approx(min(1, degrees[rank] / degrees[other]))


def test_uniform_shares_are_the_edges_own() -> None:
    assert shares("uniform", schedule_from("random", DIGRAPH), 0) == {1: 0.5, 2: 1.0}
    assert shares("uniform", schedule_from("random", DIGRAPH), 1, pushed=True) == {0: 0.5}
    assert shares("uniform", schedule_from("random", topology_from("full", 10_000)), 1) == {}, "all are 1"


def test_metropolis_needs_edges_both_ways() -> None:
    with pytest.raises(UsageError, match="--weights metropolis needs an undirected graph, and 'own' is directed"):
        shares("metropolis", schedule_from("random", DIGRAPH), 0)


@given(graph=st.one_of(undirected, st.just(DIGRAPH)), spec=specs, weights=st.sampled_from(["uniform", "metropolis"]))
def test_the_shares_of_all_are_those_of_each(graph: Topology, spec: str, weights: str) -> None:
    assume(weights == "uniform" or not graph.directed)
    schedule = schedule_from(spec, graph)
    assert all_shares(weights, schedule) == [shares(weights, schedule, rank) for rank in range(graph.size)]


# --- push-sum -------------------------------------------------------------------------------------


@given(
    graph=st.one_of(undirected, st.just(DIGRAPH), st.builds(topology_from, st.just("exponential"), st.integers(1, 24)))
)
def test_push_sum_keeps_the_sum(graph: Topology) -> None:
    """Kempe et al. 2003, Proposition 2.2 (mass conservation): columns sum to 1."""
    matrix = mixing_matrix("push-sum", schedule_from("random", graph))
    np.testing.assert_allclose(matrix.sum(0), 1)
    assert (matrix.diagonal() > 0).all()
    for rank, others in enumerate(graph.neighbours):
        assert {int(j) for j in np.flatnonzero(matrix[:, rank])} == {rank, *others}


def test_push_sum_has_no_use_for_the_edges_weights() -> None:
    with pytest.raises(UsageError, match=r"--weights push-sum cannot use edge weights, and 'own' has some"):
        check_weights("push-sum", DIGRAPH)


def test_push_sum_brings_a_directed_graph_to_the_mean_in_finite_rounds() -> None:
    """Uniform pulls on this graph converge to another value; push-sum keeps the mean."""
    plain = dataclasses.replace(DIGRAPH, edge_shares={})
    pulled, pushed = analyse(plain), analyse(plain, weights="push-sum")
    assert not pulled.keeps_mean
    assert pushed.keeps_mean
    assert pushed.rounds_to_consensus is not None
    assert not any("mean" in warning for warning in pushed.warnings)


# --- analysis -------------------------------------------------------------------------------------


@given(size=st.integers(2, 30))
def test_the_spectral_gap_of_a_full_graph(size: int) -> None:
    """W = (1 − β) I + β (J − I) / (n − 1): λ₂ = 1 − β − β / (n − 1)."""
    gap = analyse(topology_from("full", size)).spectral_gap
    assert gap == pytest.approx(1 - abs(0.5 - 0.5 / (size - 1)))


@given(size=st.integers(3, 30))
def test_the_spectral_gap_of_a_ring(size: int) -> None:
    """λ_k = 1 − β + β cos(2πk / n)."""
    assert analyse(topology_from("ring", size)).spectral_gap == pytest.approx(0.5 - 0.5 * np.cos(2 * np.pi / size))


def test_the_gap_of_two_parts_is_none() -> None:
    assert spectral_gap(np.eye(2)) == 0 and spectral_gap(np.ones((1, 1))) == 1


@given(graph=undirected, spec=specs, seed=st.integers(0, 3))
def test_after_so_many_rounds_models_are_equal(graph: Topology, spec: str, seed: int) -> None:
    """A looser tolerance never takes more rounds than a stricter one."""
    found = analyse(graph, spec, "metropolis", seed=seed)
    assume(found.rounds_to_consensus is not None)
    rounds = found.rounds_to_consensus
    loose = rounds_to_consensus(schedule_from(spec, graph), "metropolis", 10 * TOLERANCE, seed)
    strict = rounds_to_consensus(schedule_from(spec, graph), "metropolis", TOLERANCE / 10, seed)
    assert loose is not None and loose <= rounds and (strict is None or rounds <= strict)


def test_rounds_of_a_schedule_without_draws_are_those_of_its_matrices() -> None:
    graph = topology_from("ring", 5)
    schedule = schedule_from("static", graph)
    product, count = np.eye(5), 0
    while np.linalg.norm(product - product.mean(0)) > TOLERANCE * 2:  # √(5 − 1): ‖I − J/5‖
        matrix = np.eye(5) / 2
        for rank in range(5):
            matrix[rank, schedule.turns[rank][count % 2]] += 0.5
        product, count = matrix @ product, count + 1
    assert rounds_to_consensus(schedule) == count > 5


def test_so_many_rounds_are_carried_out_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """For large graphs the work limit bounds the rounds, and the printed line states that bound."""
    ring = schedule_from("static", topology_from("ring", 40))
    needed = rounds_to_consensus(ring)
    assert most_rounds(655) == ROUNDS > most_rounds(656) > most_rounds(LARGEST) == 4096
    for most, found in ((needed, needed), (needed - 1, None)):
        monkeypatch.setattr(analysis, "WORK", most * 40**2)
        assert rounds_to_consensus(ring) == found
    told = analyse(topology_from("ring", 40), "static")
    assert (f"rounds until models are equal to {TOLERANCE:g}", f"more than {needed - 1}") in told.lines()
    assert told.warnings == (f"models are not equal within {needed - 1} rounds",)


def test_a_graph_too_large_is_refused() -> None:
    star = topology_from("star", LARGEST)
    assert analyse(star).rounds_to_consensus < 20
    with pytest.raises(UsageError, match=rf"^topology 'star' has 1025 peers: at most {LARGEST} peers can be checked"):
        analyse(topology_from("star", LARGEST + 1))


def test_all_figures_of_a_full_graph_of_many_come_at_once() -> None:
    """The time is linear in the number of edges; quadratic time would take minutes."""
    full = topology_from("full", 120)
    for schedule, weights in itertools.product(SCHEDULES, ["uniform", "metropolis", "push-sum"]):
        found = analyse(full, schedule, weights)
        assert found.rounds_to_consensus is not None and found.keeps_mean


def test_traffic_of_machines() -> None:
    """Two machines of two peers in a ring: one of each peer's two neighbours is on the other machine."""
    found = analyse(topology_from("ring", 4), slots=2)
    assert (found.messages_per_round, found.nics, found.messages_per_nic) == (4.0, 2, (2.0, 2.0))
    star = analyse(topology_from("star", 5), slots=2)
    assert star.nics == 3 and star.messages_per_nic == pytest.approx((2.5, 3.75))
    assert analyse(topology_from("full", 1)).messages_per_nic == (0.0, 0.0)


def test_slots_are_sites_where_there_are_none() -> None:
    inside = analyse(topology_from("full", 8), "inner-outer:outer=0.05", slots=4)
    assert inside.messages_per_nic == pytest.approx((8 * 0.05, 8 * 0.05)) and inside.warnings == ()
    assert "only one site" in analyse(topology_from("full", 8), "inner-outer").warnings[0]


@pytest.mark.parametrize(
    ("graph", "schedule", "weights", "told"),
    [
        ("exponential", "one-peer", "uniform", "averages exactly only with base 2 and 2^k peers"),
        ("star", "random", "uniform", "this graph with uniform weights does not keep the mean"),
        ("ring", "bandwidth-aware", "uniform", "assumes equal rates"),
    ],
)
def test_what_is_warned_of(graph: str, schedule: str, weights: str, told: str) -> None:
    [warning] = analyse(topology_from(graph, 6), schedule, weights).warnings
    assert told in warning


def test_what_is_not_warned_of() -> None:
    for graph, schedule, weights in [
        ("exponential", "one-peer", "uniform"),
        ("exponential", "random", "uniform"),
        ("star", "random", "metropolis"),
        ("star", "one-peer", "uniform"),
        ("hierarchical", "inner-outer", "uniform"),
    ]:
        assert analyse(topology_from(graph, 8), schedule, weights).warnings == ()
    assert analyse(topology_from("exponential:base=3", 8), "one-peer").warnings != ()


def test_a_digraph_that_loses_the_mean_is_told_of() -> None:
    found = analyse(DIGRAPH)
    assert found.directed and found.strongly_connected and not found.keeps_mean and found.edges == 6
    assert found.warnings[0].startswith("a directed graph with uniform weights does not keep the mean")


def test_a_graph_in_parts_is_told_of() -> None:
    found = analyse(Topology("own", ((1,), (0,), (3,), (2,))))
    assert not found.strongly_connected and found.spectral_gap == 0 and found.rounds_to_consensus is None
    assert found.warnings == ("not strongly connected: 2 parts never become equal, and a run refuses the graph",)
