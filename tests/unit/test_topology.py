"""Graph generators."""

from __future__ import annotations

import math
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from gossipx.errors import UsageError
from gossipx.topology import Topology, topology_from
from gossipx.topology.generators import GENERATORS

SPECS = [
    *(name for name in GENERATORS if name != "erdos-renyi"),
    "erdos-renyi:p=0",
    "erdos-renyi:p=0.2",
    "exponential:base=3",
    "regular:degree=3",
    "regular:degree=7",
    "small-world:degree=2,p=1",
    "hierarchical:sites=1",
    "hierarchical:sites=5",
]
sizes = st.integers(1, 70)
seeds = st.integers(0, 2**32 - 1)


def graph(topology: Topology) -> nx.DiGraph:
    made = nx.DiGraph()
    made.add_nodes_from(range(topology.size))
    made.add_edges_from((one, other) for one, others in enumerate(topology.neighbours) for other in others)
    return made


def test_all_generators_are_tested() -> None:
    assert {spec.partition(":")[0] for spec in SPECS} == set(GENERATORS)


@pytest.mark.parametrize("spec", SPECS)
@examples(100, few=6)
@given(size=sizes, seed=seeds)
def test_every_generator_fits_every_number_of_peers(spec: str, size: int, seed: int) -> None:
    """Every graph is simple, strongly connected, has the ranks as nodes, and depends on the seed only."""
    made = topology_from(spec, size, seed)
    assert len(made.neighbours) == made.size == size and made.name == spec
    for rank, others in enumerate(made.neighbours):
        assert rank not in others and set(others) <= set(range(size)) and list(others) == sorted(set(others))
    assert nx.is_strongly_connected(graph(made))
    assert len(made.islands()) == 1
    assert made.directed == (graph(made).reverse().edges != graph(made).edges)
    assert topology_from(spec, size, seed) == made


@pytest.mark.parametrize("spec", ["regular", "small-world:p=0.5", "erdos-renyi:p=0.3"])
def test_another_seed_is_another_graph(spec: str) -> None:
    assert len({topology_from(spec, 30, seed).neighbours for seed in range(5)}) == 5


@pytest.mark.parametrize(
    ("name", "size", "neighbours"),
    [
        ("full", 1, ((),)),
        ("full", 3, ((1, 2), (0, 2), (0, 1))),
        ("ring", 1, ((),)),
        ("ring", 2, ((1,), (0,))),
        ("ring", 4, ((1, 3), (0, 2), (1, 3), (0, 2))),
        ("star", 1, ((),)),
        ("star", 4, ((1, 2, 3), (0,), (0,), (0,))),
        ("grid", 5, ((1, 3), (0, 2, 4), (1,), (0, 4), (1, 3))),
        ("torus", 5, ((1, 2, 3), (0, 2, 4), (0, 1), (0, 4), (1, 3))),
        ("hypercube", 6, ((1, 2, 4), (0, 3, 5), (0, 3), (1, 2), (0, 5), (1, 4))),
        ("exponential", 6, ((1, 2, 4), (2, 3, 5), (0, 3, 4), (1, 4, 5), (0, 2, 5), (0, 1, 3))),
        ("exponential:base=3", 4, ((1, 3), (0, 2), (1, 3), (0, 2))),
        ("hierarchical:sites=2", 5, ((1, 2), (0, 3), (0, 3, 4), (1, 2, 4), (2, 3))),
        ("bipartite", 5, ((3, 4), (3, 4), (3, 4), (0, 1, 2), (0, 1, 2))),
    ],
)
def test_graphs_by_name(name: str, size: int, neighbours: tuple[tuple[int, ...], ...]) -> None:
    assert topology_from(name, size).neighbours == neighbours


@pytest.mark.parametrize(
    ("name", "size", "known"),
    [
        ("grid", 12, nx.grid_2d_graph(3, 4)),
        ("torus", 12, nx.grid_2d_graph(3, 4, periodic=True)),
        ("hypercube", 16, nx.hypercube_graph(4)),
        ("small-world:degree=4,p=0", 9, nx.circulant_graph(9, [1, 2])),
    ],
)
def test_graphs_are_those_that_have_the_name(name: str, size: int, known: nx.Graph) -> None:
    assert nx.is_isomorphic(graph(topology_from(name, size)).to_undirected(), known)


def test_a_fingerprint_tells_graphs_apart_and_not_their_names() -> None:
    ring = topology_from("ring", 5)
    assert ring.fingerprint() == replace(ring, name="mine", generator="", schedule="one-peer").fingerprint()
    others = [
        topology_from("ring", 6),
        topology_from("full", 5),
        replace(ring, edge_shares={(0, 1): 0.5}),
        replace(ring, sites=(0, 0, 0, 1, 1)),
    ]
    assert len({graph.fingerprint() for graph in (ring, *others)}) == 5
    assert ring.fingerprint().startswith("10 edges ")
    no_weights = replace(ring, edge_shares={(0, 1): 1, (1, 2): 1.0, (3, 3): 0.5})
    assert no_weights.fingerprint() == ring.fingerprint(), "1 is what is meant where none is given; (3, 3) is no edge"


def test_hops_are_exact_powers() -> None:
    """Logarithms would miss 5³: log(125, 5) is not 3."""
    assert math.log(125, 5) != 3
    assert topology_from("exponential:base=5", 300).neighbours[0] == (1, 5, 25, 125)
    assert topology_from("exponential", 2**12 + 1).neighbours[0] == tuple(2**k for k in range(13))


@given(size=sizes, seed=seeds, degree=st.integers(3, 9))
def test_regular_graphs_are_regular(size: int, seed: int, degree: int) -> None:
    degrees = {len(others) for others in topology_from(f"regular:degree={degree}", size, seed).neighbours}
    assert degrees == {min(degree + degree * size % 2, size - 1)}


@given(side=st.integers(2, 9))
def test_the_expander_is_margulis_graph_for_squares(side: int) -> None:
    known = nx.Graph(nx.convert_node_labels_to_integers(nx.margulis_gabber_galil_graph(side), ordering="sorted"))
    known.remove_edges_from(list(nx.selfloop_edges(known)))
    assert topology_from("expander", side**2).neighbours == tuple(tuple(sorted(known[rank])) for rank in range(side**2))


@given(size=sizes)
def test_the_expander_has_few_neighbours_and_short_ways(size: int) -> None:
    """Degree 8 for squares, and 16 for merged nodes. Paths are logarithmic in the size: it is an expander."""
    made = topology_from("expander", size)
    assert max(map(len, made.neighbours)) <= 16
    assert nx.diameter(graph(made)) <= 2 + math.log2(size)


@given(size=sizes, sites=st.integers(1, 8))
def test_sites_are_nearly_equal_and_each_peer_has_a_twin(size: int, sites: int) -> None:
    made = topology_from(f"hierarchical:sites={sites}", size)
    members = [[rank for rank in range(size) if made.sites[rank] == site] for site in range(min(sites, size))]
    assert [rank for site in members for rank in site] == list(range(size))
    assert max(map(len, members)) - min(map(len, members)) <= 1
    for rank, others in enumerate(made.neighbours):
        outside = [made.sites[other] for other in others if made.sites[other] != made.sites[rank]]
        assert len(outside) == len(set(outside)), "at most one twin per site"
        assert len(others) - len(outside) == len(members[made.sites[rank]]) - 1


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("exponential:base=1", "base must be at least 2"),
        ("regular:degree=2", "degree must be at least 3"),
        ("regular:degre=3", "unknown key 'degre' (did you mean 'degree'?); 'regular' takes degree=INTEGER"),
        ("small-world:3", "degree must be even"),
        ("small-world:p=1.5", "p must be a probability"),
        ("erdos-renyi", "a value is missing; 'erdos-renyi' takes p=NUMBER"),
        ("erdos-renyi:p=nan", "p must be a probability"),
        ("hierarchical:sites=0", "sites must be at least 1"),
        ("ring:2", "'ring' takes no keys"),
        ("rong", "unknown topology 'rong' (did you mean 'ring'?): one of bipartite, erdos-renyi"),
    ],
)
def test_what_a_wrong_spec_is_told(spec: str, told: str) -> None:
    with pytest.raises(UsageError) as raised:
        topology_from(spec, 8)
    assert told in str(raised.value) and "\n" not in str(raised.value)


def test_a_regular_graph_that_falls_in_two_is_drawn_again() -> None:
    """Eight peers with three neighbours each: for this seed, the first draw is two full graphs of four."""
    assert not nx.is_connected(nx.random_regular_graph(3, 8, seed=15))
    assert len(topology_from("regular:degree=3", 8, 15).islands()) == 1
