"""Which neighbour each peer pulls from, with what weight, and the limit of repeated rounds."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gossipx.errors import UsageError
from gossipx.topology import RoundPart, Topology, analysis, part_in_round, topology_from, wave_rounds
from gossipx.topology.analysis import LARGEST, TOLERANCE, analyse, most_rounds, rounds_to_consensus, spectral_gap
from gossipx.topology.schedules import SCHEDULES, Schedule, check_schedule, schedule_from, schedule_spec
from gossipx.topology.weights import all_shares, check_weights, mixing_matrix, shares

GRAPHS = ["full", "ring", "star", "grid", "hypercube", "exponential", "regular", "erdos-renyi:p=0.2", "hierarchical"]
graphs = st.builds(topology_from, st.sampled_from(GRAPHS), st.integers(1, 40), st.integers(0, 9))
schedules = st.sampled_from([*SCHEDULES, "inner-outer:outer=0.5"])
DIGRAPH = Topology("own", ((1, 2), (2,), (0, 3), (0,)))


def test_a_schedule_is_told_alike_however_it_is_spelt() -> None:
    graph = topology_from("hierarchical:sites=2", 6)
    spelt = ["inner-outer", "inner-outer:0.1", " inner-outer: outer=.1\n", "inner-outer:outer=0.10"]
    assert {schedule_spec(spec, schedule_from(spec, graph)) for spec in spelt} == {"inner-outer outer=0.1"}
    assert schedule_spec("inner-outer:0.2", schedule_from("inner-outer:0.2", graph)) == "inner-outer outer=0.2"
    plain = {None: "random", "static": "static", "one-peer": "one-peer"}
    assert {spec: schedule_spec(spec, schedule_from(spec, graph)) for spec in plain} == plain


def row(schedule: Schedule, number: int) -> list[int | None]:
    """Return every peer's partner in a round, if all are available."""
    neighbours, rng = schedule.topology.neighbours, random.Random(number)
    return [schedule.partner(rank, number, others, rng, {}) for rank, others in enumerate(neighbours)]


def counted(schedule: Schedule, rank: int, rounds: int, rates: dict[int, float] | None = None) -> dict[int, float]:
    """Return how often ``rank`` chose each neighbour in that many rounds."""
    rng, others = random.Random(1), schedule.topology.neighbours[rank]
    drawn = Counter(schedule.partner(rank, number, others, rng, rates or {}) for number in range(rounds))
    return {other: count / rounds for other, count in drawn.items() if other is not None}


@given(graph=graphs, spec=schedules, seed=st.integers(0, 99), data=st.data())
def test_a_partner_is_one_that_may_be_asked(graph: Topology, spec: str, seed: int, data: st.DataObject) -> None:
    schedule = schedule_from(spec, graph)
    rank = data.draw(st.integers(0, graph.size - 1))
    others = graph.neighbours[rank]
    candidates = [other for other in others if data.draw(st.booleans())]
    rates = {other: data.draw(st.floats(0, 1e9)) for other in others if data.draw(st.booleans())}
    for number in range(5):
        first = schedule.partner(rank, number, candidates, random.Random(seed), rates)
        again = schedule.partner(rank, number, candidates, random.Random(seed), rates)
        assert (first in candidates or first is None) and first == again, "the decision must be pure"
        if spec != "one-peer":
            assert (first is None) == (not candidates), "a peer is idle only without candidates"


@given(graph=graphs, spec=schedules)
def test_frequencies_are_of_neighbours_and_add_up(graph: Topology, spec: str) -> None:
    schedule = schedule_from(spec, graph)
    for rank, others in enumerate(graph.neighbours):
        often = schedule.frequency(rank)
        assert set(often) == set(others), "every neighbour is chosen"
        assert sum(often.values()) == pytest.approx(float(len(others) > 0)) or spec == "one-peer"
        assert sum(often.values()) <= 1 + 1e-9


@pytest.mark.parametrize("spec", [*SCHEDULES, "inner-outer:outer=0.4"])
@pytest.mark.parametrize("graph", ["hierarchical:sites=3", "exponential", "star"])
def test_frequencies_are_what_is_drawn(spec: str, graph: str) -> None:
    schedule = schedule_from(spec, topology_from(graph, 12))
    for rank in (0, 5):
        drawn = counted(schedule, rank, 6000)
        assert drawn == pytest.approx(schedule.frequency(rank), abs=0.03)


# --- static ---------------------------------------------------------------------------------------


def test_static_passes_over_who_may_not_be_asked() -> None:
    schedule = schedule_from("static", topology_from("full", 4))
    asked = [schedule.partner(0, number, [1, 3], random.Random(0), {}) for number in range(4)]
    assert asked == [1, 3, 3, 1]


# --- one-peer -------------------------------------------------------------------------------------


@given(graph=graphs)
def test_one_peer_rounds_are_matchings_that_use_every_edge(graph: Topology) -> None:
    """Undirected edges give pairs that pull from each other; over directed ones no peer is pulled from twice."""
    schedule = schedule_from("one-peer", graph)
    rounds = len(schedule.turns[0])
    degree = max(map(len, graph.neighbours))
    used = set()
    for number in range(rounds):
        partners = row(schedule, number)
        asked = [other for other in partners if other is not None]
        assert asked and len(asked) == len(set(asked))
        if not graph.directed:
            assert all(partners[other] == rank for rank, other in enumerate(partners) if other is not None)
        used |= {(rank, other) for rank, other in enumerate(partners) if other is not None}
    assert used == {(rank, other) for rank, others in enumerate(graph.neighbours) for other in others}
    assert rounds <= max(2 * degree - 1, 0) or graph.directed
    assert row(schedule, rounds) == row(schedule, 0)


@given(bits=st.integers(1, 6))
def test_one_peer_of_a_hypercube_is_one_dimension_a_round(bits: int) -> None:
    schedule = schedule_from("one-peer", topology_from("hypercube", 2**bits))
    for number in range(bits):
        assert row(schedule, number) == [rank ^ (1 << number) for rank in range(2**bits)]


def test_one_peer_goes_on_with_the_next_where_the_partner_is_gone_and_rests_where_it_has_none() -> None:
    schedule = schedule_from("one-peer", topology_from("star", 3))
    assert [row(schedule, number) for number in range(2)] == [[1, 0, None], [2, None, 0]]
    assert schedule.partner(0, 0, [2], random.Random(0), {}) == 2
    assert schedule.partner(1, 1, [0], random.Random(0), {}) is None


def test_one_peer_over_any_digraph() -> None:
    schedule = schedule_from("one-peer", DIGRAPH)
    assert [row(schedule, number) for number in range(2)] == [[1, 2, 3, 0], [2, None, 0, None]]


# --- inner-outer, bandwidth-aware -----------------------------------------------------------------


def test_inner_outer_leaves_its_site_now_and_then() -> None:
    graph = topology_from("hierarchical:sites=2", 8)
    drawn = counted(schedule_from("inner-outer:outer=0.2", graph), 1, 5000)
    assert drawn == pytest.approx({0: 0.8 / 3, 2: 0.8 / 3, 3: 0.8 / 3, 5: 0.2}, abs=0.03)


@pytest.mark.parametrize(("candidates", "asked"), [([5], {5}), ([2, 3], {2, 3})])
def test_inner_outer_takes_what_there_is(candidates: list[int], asked: set[int]) -> None:
    schedule, rng = schedule_from("inner-outer", topology_from("hierarchical:sites=2", 8)), random.Random(0)
    assert {schedule.partner(1, number, candidates, rng, {}) for number in range(50)} == asked


def test_inner_outer_without_sites_is_random() -> None:
    ring = topology_from("ring", 5)
    assert schedule_from("inner-outer", ring).frequency(0) == schedule_from("random", ring).frequency(0)


@given(size=st.integers(4, 60), base=st.integers(2, 4))
def test_one_peer_of_an_exponential_graph_is_one_hop_a_round(size: int, base: int) -> None:
    """Ying et al. 2021, section 4: in round k every peer pulls from the peer base^k ranks ahead."""
    graph = topology_from(f"exponential:base={base}", size)
    if graph.directed:
        schedule = schedule_from("one-peer", graph)
        hops = [base**k for k in range(size) if base**k < size]
        rounds = [[(rank + hop) % size for rank in range(size)] for hop in hops]
        assert [row(schedule, number) for number in range(len(hops))] == rounds
        assert len(schedule.turns[0]) == len(hops)


@pytest.mark.parametrize(
    ("rates", "shares"),
    [
        ({1: 1.0, 2: 3.0, 3: 4.0}, (1 / 8, 3 / 8, 4 / 8)),
        ({1: 1.0, 2: 3.0, 3: 0.0}, (1 / 6, 3 / 6, 2 / 6)),
        ({}, (1 / 3,) * 3),
    ],
)
def test_bandwidth_aware_draws_by_rate(rates: dict[int, float], shares: tuple[float, ...]) -> None:
    """Unknown and invalid rates count as average."""
    drawn = counted(schedule_from("bandwidth-aware", topology_from("full", 4)), 0, 8000, rates)
    assert drawn == pytest.approx(dict(enumerate(shares, 1)), abs=0.03)


# --- by name --------------------------------------------------------------------------------------


def test_the_topologys_own_schedule_is_the_default() -> None:
    graph = topology_from("one-peer-exponential", 8)
    assert schedule_from(None, graph) == schedule_from("one-peer", graph)
    assert schedule_from("random", graph) != schedule_from("one-peer", graph)
    assert schedule_from(None, topology_from("ring", 8)) == schedule_from("random", topology_from("ring", 8))


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("onepeer", "unknown schedule 'onepeer' (did you mean 'one-peer'?): one of bandwidth-aware, inner-outer"),
        ("inner-outer:outer=2", "outer must be a probability"),
        ("static:3", "'static' takes no keys"),
    ],
)
def test_what_a_wrong_schedule_is_told(spec: str, told: str) -> None:
    for refuse in (check_schedule, lambda given: schedule_from(given, topology_from("ring", 4))):
        with pytest.raises(UsageError) as raised:
            refuse(spec)
        assert told in str(raised.value)


# --- the pairs of peers in each round of a wave ---------------------------------------------------


SIZES = range(1, 131)


def parts(size: int) -> list[dict[int, RoundPart]]:
    """Return the parts by round and position."""
    found = []
    for number in range(wave_rounds(size)):
        row = {position: part_in_round(position, number, size) for position in range(size)}
        found.append({position: part for position, part in row.items() if part})
    return found


@pytest.mark.parametrize(
    ("size", "rounds"), [(1, 0), (2, 1), (3, 3), (4, 2), (5, 4), (7, 4), (8, 3), (9, 5), (100, 8), (128, 7)]
)
def test_number_of_rounds(size: int, rounds: int):
    assert wave_rounds(size) == rounds


def test_partners_mean_each_other():
    for size in SIZES:
        for row in parts(size):
            for position, part in row.items():
                other = row[part.partner]
                assert other.partner == position != part.partner
                assert (other.receives, other.sends) == (part.sends, part.receives)
                assert part.receives or part.sends


def test_all_end_with_the_exact_mean():
    """Simulate the last wave: averages are weighted by the number of models that they contain."""
    rng = np.random.default_rng(1)
    for size in SIZES:
        begin = rng.normal(size=(size, 3))
        models, weights = begin.copy(), np.ones(size)
        for row in parts(size):
            models_then, weights_then = models.copy(), weights.copy()
            for position, part in row.items():
                if not part.receives:
                    continue
                theirs, weight = models_then[part.partner], weights_then[part.partner]
                own = 0 if part.replaces else weights_then[position]
                models[position] = (own * models_then[position] + weight * theirs) / (own + weight)
                weights[position] = own + weight
        np.testing.assert_allclose(models, np.broadcast_to(begin.mean(0), (size, 3)), rtol=0, atol=1e-14)
        assert set(weights) == {float(size)}


# --- weights and mixing matrices --------------------------------------------------------------------


NAMES = [*(name for name in GRAPHS if name != "exponential"), "expander", "hierarchical:sites=3", "bipartite"]
undirected = st.builds(topology_from, st.sampled_from(NAMES), st.integers(1, 24), st.integers(0, 9))
specs = st.sampled_from(list(SCHEDULES))
WEIGHTED = dataclasses.replace(DIGRAPH, edge_shares={(0, 1): 0.5})


def with_shares(graph: Topology, seed: int) -> Topology:
    """Return the topology with a weight on every edge, equal in both directions."""
    rng = np.random.default_rng(seed)
    pairs = [(one, other) for one, others in enumerate(graph.neighbours) for other in others if one < other]
    given_ = {pair: float(rng.uniform(0.1, 1)) for pair in pairs}
    return Topology(graph.name, graph.neighbours, edge_shares={**given_, **{(b, a): s for (a, b), s in given_.items()}})


@given(graph=st.one_of(undirected, st.just(WEIGHTED)), spec=specs, beta=st.floats(0, 1))
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
    assert shares("uniform", schedule_from("random", WEIGHTED), 0) == {1: 0.5, 2: 1.0}
    assert shares("uniform", schedule_from("random", WEIGHTED), 1, pushed=True) == {0: 0.5}
    assert shares("uniform", schedule_from("random", topology_from("full", 10_000)), 1) == {}, "all are 1"


def test_metropolis_needs_edges_both_ways() -> None:
    with pytest.raises(UsageError, match="--weights metropolis needs an undirected graph, and 'own' is directed"):
        shares("metropolis", schedule_from("random", WEIGHTED), 0)


@given(graph=st.one_of(undirected, st.just(WEIGHTED)), spec=specs, weights=st.sampled_from(["uniform", "metropolis"]))
def test_the_shares_of_all_are_those_of_each(graph: Topology, spec: str, weights: str) -> None:
    assume(weights == "uniform" or not graph.directed)
    schedule = schedule_from(spec, graph)
    assert all_shares(weights, schedule) == [shares(weights, schedule, rank) for rank in range(graph.size)]


# --- push-sum -------------------------------------------------------------------------------------


@given(graph=undirected | st.just(WEIGHTED) | st.builds(topology_from, st.just("exponential"), st.integers(1, 24)))
def test_push_sum_keeps_the_sum(graph: Topology) -> None:
    """Kempe et al. 2003, Proposition 2.2 (mass conservation): columns sum to 1."""
    matrix = mixing_matrix("push-sum", schedule_from("random", graph))
    np.testing.assert_allclose(matrix.sum(0), 1)
    assert (matrix.diagonal() > 0).all()
    for rank, others in enumerate(graph.neighbours):
        assert {int(j) for j in np.flatnonzero(matrix[:, rank])} == {rank, *others}


def test_push_sum_has_no_use_for_the_edges_weights() -> None:
    with pytest.raises(UsageError, match=r"--weights push-sum cannot use edge weights, and 'own' has some"):
        check_weights("push-sum", WEIGHTED)


def test_push_sum_brings_a_directed_graph_to_the_mean_in_finite_rounds() -> None:
    """Uniform pulls on this graph converge to another value; push-sum keeps the mean."""
    pulled, pushed = analyse(DIGRAPH), analyse(DIGRAPH, weights="push-sum")
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
    assert most_rounds(655) == analysis.ROUNDS > most_rounds(656) > most_rounds(LARGEST) == 4096
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
    found = analyse(WEIGHTED)
    assert found.directed and found.strongly_connected and not found.keeps_mean and found.edges == 6
    assert found.warnings[0].startswith("a directed graph with uniform weights does not keep the mean")


def test_a_graph_in_parts_is_told_of() -> None:
    found = analyse(Topology("own", ((1,), (0,), (3,), (2,))))
    assert spectral_gap(np.ones((1, 1))) == 1
    assert not found.strongly_connected and found.spectral_gap == 0 and found.rounds_to_consensus is None
    assert found.warnings == ("not strongly connected: 2 parts never become equal, and a run refuses the graph",)
