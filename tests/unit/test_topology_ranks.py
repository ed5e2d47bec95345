"""Computed sequences of ranks behave like the tuples that they stand for."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipx.topology import Topology, topology_from
from gossipx.topology.ranks import AllBut, Rotated, Without, added_to, position_of
from gossipx.topology.schedules import SCHEDULES, schedule_from

GRAPHS = ["full", "ring", "star", "exponential", "erdos-renyi:p=0.5", "hierarchical:sites=3", "bipartite"]
sizes = st.integers(1, 30)


def check_alike(view: Sequence[int], stored: tuple[int, ...]) -> None:
    """Check that a view reads like the tuple ``stored``."""
    assert view == stored and stored == view and hash(view) == hash(stored) and repr(view) == repr(stored)
    assert (len(view), tuple(view), bool(view)) == (len(stored), stored, bool(stored))
    assert [view[at] for at in range(-len(stored), len(stored))] == [*stored, *stored]
    assert view[1:-1] == stored[1:-1] and view[::-2] == stored[::-2]
    for rank in range(-1, 40):
        assert (rank in view) == (rank in stored)
    for at in (len(stored), -len(stored) - 1):
        with pytest.raises(IndexError):
            view[at]


@given(rank=st.integers(0, 35), size=sizes)
def test_all_but_one(rank: int, size: int) -> None:
    check_alike(AllBut(rank, size), tuple(other for other in range(size) if other != rank))
    assert AllBut(rank, size) != tuple(range(size + 1))


@given(graph=st.builds(topology_from, st.sampled_from(GRAPHS), sizes, st.integers(0, 9)), data=st.data())
def test_without_some_draws_what_the_list_draws(graph: Topology, data: st.DataObject) -> None:
    """From the same random stream, also when drawing continues, and for every schedule."""
    rank, seed = data.draw(st.integers(0, graph.size - 1)), data.draw(st.integers(0, 99))
    others = graph.neighbours[rank]
    excluded = data.draw(st.sets(st.integers(0, graph.size + 3)))
    view, stored = Without(others, excluded), [other for other in others if other not in excluded]
    check_alike(view, tuple(stored))
    plan = schedule_from(data.draw(st.sampled_from([*SCHEDULES, "inner-outer:outer=0.5"])), graph)
    rates = {other: data.draw(st.floats(0, 1e9)) for other in others if data.draw(st.booleans())}
    one, other = random.Random(seed), random.Random(seed)
    for number in range(8):
        assert plan.partner(rank, number, view, one, rates) == plan.partner(rank, number, stored, other, rates)
    assert one.getstate() == other.getstate()


@given(graph=st.builds(topology_from, st.sampled_from(GRAPHS), sizes), data=st.data())
def test_neighbours_in_turn_begin_with_the_next_rank(graph: Topology, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, graph.size - 1))
    others = graph.neighbours[rank]
    in_turn = graph.in_turn(rank)
    assert isinstance(in_turn, Rotated)
    check_alike(in_turn, tuple(sorted(others, key=lambda other: (other - rank) % graph.size)))


@given(ranks=st.sets(st.integers(0, 30)), rank=st.integers(0, 31), own=st.integers(0, 12), size=st.integers(0, 10))
def test_positions_and_further_ranks(ranks: set[int], rank: int, own: int, size: int) -> None:
    for some in (tuple(sorted(ranks)), AllBut(own, size), Without(AllBut(own, size), ranks)):
        assert position_of(rank, some) == (tuple(some).index(rank) if rank in tuple(some) else None)
        if rank != own:
            assert added_to(some, rank) == tuple(sorted({*some, rank}))


@pytest.mark.parametrize("own", [0, 3, 5, 7])
def test_a_full_graph_stays_a_view_as_peers_join(own: int) -> None:
    """In a run of five peers; a peer above rank 4 joins it itself."""
    ranks: Sequence[int] = AllBut(own, 5)
    for rank in range(5, 12):
        ranks = ranks if rank == own else added_to(ranks, rank)
    assert isinstance(ranks, AllBut) and ranks == tuple(rank for rank in range(12) if rank != own)


def test_a_full_graph_of_ten_thousand_is_not_stored() -> None:
    """Its 10⁸ edges would take gigabytes."""
    graph = topology_from("full", 10_000)
    assert all(isinstance(others, AllBut) for others in graph.neighbours) and not graph.directed
    turns = schedule_from("static", graph)
    assert [turns.partner(9_998, number, graph.neighbours[9_998], random.Random(0), {}) for number in range(3)] == [
        9_999,
        0,
        1,
    ]


def test_the_full_graphs_fingerprint_is_that_of_its_edges() -> None:
    """A file may list them: peers with the generator and peers with the file have the same graph."""
    full = topology_from("full", 4)
    listed = Topology("own", tuple(map(tuple, full.neighbours)))
    assert full.fingerprint() == listed.fingerprint()
    assert full.neighbours == listed.neighbours
