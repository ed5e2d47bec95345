"""Topologies: graph generators, files, and the ranks of neighbours."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from gossipx.errors import UsageError
from gossipx.topology import Topology, shipped, topology_from
from gossipx.topology.analysis import analyse
from gossipx.topology.formats import MAX_EDGES
from gossipx.topology.generators import GENERATORS
from gossipx.topology.ranks import AllBut, Rotated, Without, added_to, position_of
from gossipx.topology.schedules import SCHEDULES, schedule_from

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


@pytest.mark.parametrize("spec", SPECS)
@examples(100, few=6)
@given(size=sizes, seed=seeds)
def test_every_generator_fits_every_number_of_peers(spec: str, size: int, seed: int) -> None:
    """Every graph is simple, strongly connected, has the ranks as nodes, and depends on the seed only."""
    assert {spec.partition(":")[0] for spec in SPECS} == set(GENERATORS)
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
        ("small-world:3", "degree must be even"),
        ("small-world:p=1.5", "p must be a probability"),
        ("erdos-renyi", "a value is missing; 'erdos-renyi' takes p=NUMBER"),
        ("erdos-renyi:p=nan", "p must be a probability"),
        ("hierarchical:sites=0", "sites must be at least 1"),
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


# --- files ------------------------------------------------------------------------------------------


HOUSE = Path(__file__).parents[2] / "topologies"
LINE = ((1,), (0, 2), (1, 3), (2,))
"""0 – 1 – 2 – 3."""


def read(place: Path, name: str, text: str, size: int | None = 4) -> Topology:
    (place / name).write_text(text, encoding="utf-8")
    return topology_from(str(place / name), size)


def refused(place: Path, name: str, text: str, size: int | None = 4) -> str:
    """Return the error message for a file, without its directory."""
    with pytest.raises(UsageError) as raised:
        read(place, name, text, size)
    told = str(raised.value)
    assert told.startswith(f"{place / name}:") and "\n" not in told
    return told.removeprefix(f"{place}/")


# --- well-formed files ----------------------------------------------------------------------------


def test_an_edge_list(tmp_path: Path) -> None:
    made = read(tmp_path, "line.edges", "\ufeff# a line of four\n0 1\n\n2 1  # both ways\n2 3\n3 3\n0 1\n")
    assert made.neighbours == LINE and not made.directed and made.edge_shares == {}


def test_an_edge_list_with_weights(tmp_path: Path) -> None:
    made = read(tmp_path, "line.txt", "0 1 0.5\n1 2\n2 3 1\n")
    assert made.neighbours == LINE
    assert made.edge_shares == {(0, 1): 0.5, (1, 0): 0.5, (2, 3): 1.0, (3, 2): 1.0}


def test_toml_with_a_generator(tmp_path: Path) -> None:
    text = "generator = 'hierarchical'\nparameters = { sites = 2 }\nschedule = 'inner-outer'\n"
    made, known = read(tmp_path, "two.toml", text, 6), topology_from("hierarchical:sites=2", 6)
    assert (made.neighbours, made.sites, made.generator) == (known.neighbours, known.sites, "hierarchical")
    assert made.schedule == "inner-outer" and made.name == str(tmp_path / "two.toml")


def test_toml_with_a_random_generator_takes_the_runs_seed(tmp_path: Path) -> None:
    read(tmp_path, "some.toml", "generator = 'regular'\n[parameters]\ndegree = 3\n", 20)
    made = [topology_from(str(tmp_path / "some.toml"), 20, seed).neighbours for seed in (1, 1, 2)]
    assert made[0] == made[1] == topology_from("regular:degree=3", 20, 1).neighbours != made[2]


def test_toml_with_edges_weights_and_sites(tmp_path: Path) -> None:
    made = read(tmp_path, "x.toml", "edges = [[0, 1], [1, 2, 0.25], [2, 3]]\nsites = [[0, 1], [3, 2]]\n", None)
    assert made.neighbours == LINE and made.sites == (0, 0, 2, 2)
    assert made.edge_shares == {(1, 2): 0.25, (2, 1): 0.25} and made.schedule is None and made.generator == ""


def test_an_edge_of_a_directed_graph_goes_from_who_pulls_to_who_is_pulled_from(tmp_path: Path) -> None:
    """And each direction may have a weight of its own."""
    text = "directed = true\nedges = [[0, 1, 0.5], [1, 2], [2, 0, 0.75], [0, 2, 0.25]]\n"
    made = read(tmp_path, "x.toml", text, None)
    assert made.neighbours == ((1, 2), (2,), (0,)) and made.directed
    assert made.edge_shares == {(0, 1): 0.5, (2, 0): 0.75, (0, 2): 0.25}


TWO_WEIGHTS = {
    "x.edges": ("0 1 0.5\n1 2\n\n1 0 0.25\n", "4: edge 0 1 has weight 0.25, and 0.5 on line 1: give it one"),
    "one.edges": ("0 1 0.5\n1 2\n0 1\n", "3: edge 0 1 has weight 1, and 0.5 on line 1: give it one"),
    "x.toml": (
        "\nedges = [[0, 1, 0.5], [1, 2], [1, 0, 0.25]]\n",
        "2: edge 0 1 has weight 0.25 in edge 3, and 0.5 in edge 1 of the file",
    ),
}


@pytest.mark.fault(78)
@pytest.mark.parametrize("name", TWO_WEIGHTS)
def test_two_weights_of_one_edge_are_refused_with_both_places(tmp_path: Path, name: str) -> None:
    """The last one was taken in silence."""
    text, told = TWO_WEIGHTS[name]
    assert refused(tmp_path, name, text, None).startswith(f"{name}:{told}")


@pytest.mark.fault(81)
def test_a_file_of_too_many_edges_is_refused_at_once(tmp_path: Path) -> None:
    """An edge list of 200,000 took a minute."""
    text = "".join(f"{rank % 300} {rank // 300 % 300}\n" for rank in range(MAX_EDGES + 1))
    told = f"{MAX_EDGES + 1} edges, and at most {MAX_EDGES} are read: name a generator"
    assert told in refused(tmp_path, "x.edges", text)


# --- malformed files ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0 1\n\n0 one\n", "graph.edges:3: not an edge list: give two ranks per line"),
        ("0\n", "graph.edges:1: not an edge list"),
        ("0 1 2 3\n", "graph.edges:1: not an edge list"),
        ("0 1\n1 4\n", "graph.edges: node 4 is not a rank in a run of 4 peers (0 to 3)"),
        ("0 1\n1 2\n2 3\n3 4\n", "graph.edges: its graph has 5 nodes and the run 4 peers: give a hosts file of"),
        ("0 1\n1 -2\n", "node -2 is not a rank"),
        ("0 1\n2 3\n", "peers [0, 1] have no path to the other peers"),
        ("0 1 nan\n1 2\n2 3\n", "weight nan must be above 0"),
        ("", "the graph has no edges"),
    ],
)
def test_what_a_wrong_edge_list_is_told(tmp_path: Path, text: str, told: str) -> None:
    assert told in refused(tmp_path, "graph.edges", text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("edges = [[0, 1]\n", "x.toml:1: not TOML"),
        ("\nedges = [[0, 1]]\n\nedge = 1\n", "x.toml:4: unknown key 'edge' (did you mean 'edges'?)"),
        ("", 'x.toml:1: give either generator = "ring" or edges = [[0, 1], [1, 2]], not both'),
        ("generator = 'ring'\nedges = [[0, 1]]\n", "x.toml:2: give either generator"),
        ("generator = 'rong'\n", "x.toml:1: unknown generator 'rong' (did you mean 'ring'?)"),
        ("generator = 3\n", "x.toml:1: generator: Expected `str | null`, got `int`"),
        ("# a\ngenerator = 'torus'\nparameters = { p = 1 }", "x.toml:2: generator 'torus:p=1': unknown key 'p'"),
        (
            "generator = 'ring'\nparameters = 3",
            "x.toml:2: parameters: Expected `object`, got `int`: give a table, such as",
        ),
        ("generator = 'ring'\ndirected = true", "x.toml:2: 'directed' cannot be used with a generator"),
        ("edges = [[0, 1]]\n[parameters]\n", "x.toml:2: 'parameters' cannot be used with edges"),
        ("edges = 3", "x.toml:1: edges: Expected `array | null`, got `int`: give two ranks and an"),
        ("edges = [[0, 1], [1, '2']]", "x.toml:1: edges[1][1]: Expected `int | float`, got `str`: give two ranks"),
        ("edges = [[0, 1, 1, 1]]", "x.toml:1: edges[0]: Expected `array` of length <= 3: give two ranks"),
        ("edges = [[0, true]]", "x.toml:1: edges[0][1]: Expected `int | float`, got `bool`"),
        ("edges = [[0, 1]]\ndirected = 1", "x.toml:2: directed: Expected `bool`, got `int`"),
        ("edges = [[0, 1]]\nsites = [0, 1]", "x.toml:2: sites[0]: Expected `array`, got `int`: give lists of ranks"),
        ("edges = [[0, 1]]\nsites = [[0], [5]]", "x.toml:2: site 1: 5 is not a rank with an edge"),
        ("edges = [[0, 1]]\nsites = [[0], [1, 0]]", "x.toml:2: rank 0 is in two sites"),
        ("edges = [[0, 1]]\nsites = [[0]]", "x.toml: some nodes have a site, and node 1 has none"),
        ("edges = [[0, 1]]\nschedule = 'onepeer'", "x.toml:2: unknown schedule 'onepeer' (did you mean 'one-peer'?)"),
        ("edges = [[0, 1, 2]]", "x.toml: edge 0 1: weight 2 must be above 0 and at most 1"),
        ("directed = true\nedges = [[0, 1]]", "x.toml: peers [0] lack a path to or from the other peers"),
    ],
)
def test_what_wrong_toml_is_told(tmp_path: Path, text: str, told: str) -> None:
    assert told in refused(tmp_path, "x.toml", text, 2)


@pytest.mark.parametrize("name", ["x.edges", "x.toml"])
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(UsageError, match="cannot read the topology: not UTF-8 text"):
        topology_from(str(tmp_path / name), 2)


def test_a_generator_needs_a_number_of_peers(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--size N"):
        topology_from("ring")
    (tmp_path / "x.toml").write_text("generator = 'ring'")
    with pytest.raises(UsageError, match="--size N"):
        topology_from(str(tmp_path / "x.toml"))


def test_a_graph_in_parts_may_be_looked_at(tmp_path: Path) -> None:
    (tmp_path / "x.edges").write_text("0 1\n2 3\n")
    assert topology_from(str(tmp_path / "x.edges"), 4, connected=False).islands() == [[0, 1], [2, 3]]


# --- files that come with gossipx ------------------------------------------------------------------


def test_shipped_files_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert set(shipped()) == {path.stem for path in HOUSE.iterdir() if path.name != "README.md"}
    assert {path.suffix for path in shipped().values()} == {".edges", ".toml"}
    assert topology_from("petersen-10", 10).neighbours == topology_from(str(HOUSE / "petersen-10.toml"), 10).neighbours


def test_files_of_ones_own_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("topologies").mkdir()
    Path("topologies/petersen-10.edges").write_text("0 1\n")
    assert topology_from("petersen-10").size == 2


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_shipped_file_makes_peers_agree(name: str) -> None:
    """Each file loads at its size, or at several, with its own schedule, and is listed in the README."""
    assert f"`{shipped()[name].name}`" in (HOUSE / "README.md").read_text(encoding="utf-8")
    sizes = [int(name.rpartition("-")[2])] if name[-1].isdigit() else [1, 2, 7, 8]
    for size in sizes:
        found = analyse(topology_from(name, size))
        assert found.strongly_connected and found.rounds_to_consensus is not None and found.size == size
    if name[-1].isdigit():
        assert topology_from(name).size == sizes[0]


# --- computed sequences of ranks behave like the tuples that they stand for -------------------------


GRAPHS = ["full", "ring", "star", "exponential", "erdos-renyi:p=0.5", "hierarchical:sites=3", "bipartite"]
few = st.integers(1, 30)


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


@given(rank=st.integers(0, 35), size=few)
def test_all_but_one(rank: int, size: int) -> None:
    check_alike(AllBut(rank, size), tuple(other for other in range(size) if other != rank))
    assert AllBut(rank, size) != tuple(range(size + 1))


@given(graph=st.builds(topology_from, st.sampled_from(GRAPHS), few, st.integers(0, 9)), data=st.data())
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


@given(graph=st.builds(topology_from, st.sampled_from(GRAPHS), few), data=st.data())
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
    asked = [turns.partner(9_998, number, graph.neighbours[9_998], random.Random(0), {}) for number in range(3)]
    assert asked == [9_999, 0, 1]


def test_the_full_graphs_fingerprint_is_that_of_its_edges() -> None:
    """A file may list them: peers with the generator and peers with the file have the same graph."""
    full = topology_from("full", 4)
    listed = Topology("own", tuple(map(tuple, full.neighbours)))
    assert full.fingerprint() == listed.fingerprint()
    assert full.neighbours == listed.neighbours
