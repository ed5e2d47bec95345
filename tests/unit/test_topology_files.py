"""Topology files: parsing, and the messages for malformed ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossipx.errors import UsageError
from gossipx.topology import Topology, shipped, topology_from
from gossipx.topology.analysis import analyse
from gossipx.topology.formats import MAX_EDGES

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
    made = read(tmp_path, "x.toml", "directed = true\nedges = [[0, 1, 0.5], [1, 2], [2, 0], [0, 2]]\n", None)
    assert made.neighbours == ((1, 2), (2,), (0,)) and made.directed
    assert made.edge_shares == {(0, 1): 0.5}


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


def test_the_two_directions_of_an_edge_may_have_two_weights(tmp_path: Path) -> None:
    made = read(tmp_path, "x.toml", "directed = true\nedges = [[0, 1, 0.5], [1, 0, 0.25], [0, 1, 0.5]]\n", None)
    assert made.edge_shares == {(0, 1): 0.5, (1, 0): 0.25}


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
        ("0 1 {'weight': \n", "graph.edges:1: not an edge list"),
        ("0 1 2 3\n", "graph.edges:1: not an edge list"),
        ("<graphml/>\n", "graph.edges:1: not an edge list: give two ranks per line and an optional weight"),
        ("0 1\n1 4\n", "graph.edges: node 4 is not a rank in a run of 4 peers (0 to 3)"),
        ("0 1\n1 2\n2 3\n3 4\n", "graph.edges: its graph has 5 nodes and the run 4 peers: give a hosts file of"),
        ("0 1\n1 -2\n", "node -2 is not a rank"),
        ("0 1\n2 3\n", "peers [0, 1] have no path to the other peers"),
        ("0 1\n1 2\n", "peers [3] have no path to the other peers"),
        ("0 1 0\n1 2\n2 3\n", "edge 0 1: weight 0.0 must be above 0 and at most 1"),
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
            "x.toml:2: parameters: Expected `object`, got `int`: give a table, such as { sites = 2 }",
        ),
        ("generator = 'ring'\ndirected = true", "x.toml:2: 'directed' cannot be used with a generator"),
        ("edges = [[0, 1]]\n[parameters]\n", "x.toml:2: 'parameters' cannot be used with edges"),
        ("edges = 3", "x.toml:1: edges: Expected `array | null`, got `int`: give two ranks and an"),
        ("edges = [[0, 1], [1, '2']]", "x.toml:1: edges[1][1]: Expected `int | float`, got `str`: give two ranks"),
        ("edges = [[0, 1, 1, 1]]", "x.toml:1: edges[0]: Expected `array` of length <= 3: give two ranks"),
        ("edges = [[0, true]]", "x.toml:1: edges[0][1]: Expected `int | float`, got `bool`"),
        ("edges = [[0]]", "x.toml:1: edges[0]: Expected `array` of length >= 2"),
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
