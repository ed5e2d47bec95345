"""Schedules: which neighbour each peer pulls from."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipx.errors import UsageError
from gossipx.topology import RoundPart, Topology, part_in_round, topology_from, wave_rounds
from gossipx.topology.schedules import SCHEDULES, Schedule, check_schedule, schedule_from, schedule_spec

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
        assert first in candidates or first is None
        assert first == schedule.partner(rank, number, candidates, random.Random(seed), rates), (
            "the decision must be pure"
        )
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
    assert schedule_from("inner-outer", topology_from("ring", 5)).frequency(0) == schedule_from(
        "random", topology_from("ring", 5)
    ).frequency(0)


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
