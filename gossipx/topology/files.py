"""Topologies from files: TOML, GraphML, node-link JSON, or an edge list; and those that gossipx brings along.

In every format nodes are ranks, 0 to n − 1, an edge's ``weight`` is its factor on the share that is taken over it
(above 0, at most 1), and a node's ``site`` the machine or room that it stands in. Loops are ignored.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import networkx as nx

from gossipx.errors import UsageError
from gossipx.specs import suggest
from gossipx.topology.graphs import GENERATORS, Topology, generate, neighbours_of
from gossipx.topology.tables import drawn_in_toml

_FOREIGN = (LookupError, TypeError, ValueError, AttributeError, nx.NetworkXException)
"""What networkx raises for a file that is not what its name says."""
_SHOWN = 8
"""Ranks that a message lists at most."""


def load(name: str, size: int | None = None, seed: int = 0, connected: bool = True) -> Topology:
    """The topology that ``name`` means for ``size`` peers.

    Args:
        name: a generator's spec, a file, or the name of one that gossipx brings along (see :func:`shipped`).
        size: number of peers; None: as many as the file has nodes.
        seed: the run's; random graphs are the same on all machines for it.
        connected: refuse a graph in which some peer cannot reach another.

    Raises:
        UsageError: an unknown name, an unreadable file, a node that is no rank, or peers that cannot reach each other.
    """
    path = _path_of(name)
    topology = generate(name, _known(size, name), seed) if path is None else _read(path, name, size, seed)
    islands = topology.islands()
    if connected and len(islands) > 1:
        alone = islands[0]
        ranks = ", ".join(map(str, alone[:_SHOWN])) + (", …" if len(alone) > _SHOWN else "")
        what = "do not both reach the others and are reached by them" if topology.directed else "reach no others"
        raise UsageError(f"peers [{ranks}] {what}: add edges between them and the rest", file=path)
    return topology


def shipped() -> dict[str, Path]:
    """Files that can be named without directory and ending: of ``topologies`` here, and of those of gossipx."""
    places = (
        Path("topologies"),
        Path(__file__).parents[2] / "topologies",
        Path(sysconfig.get_path("data"), "share", "gossipx", "topologies"),
    )
    found: dict[str, Path] = {}
    for place in places:
        for path in sorted(place.glob("*")):
            if path.suffix in (".edges", ".toml", *_READERS) and path.is_file():
                found.setdefault(path.stem, path)
    return found


def _path_of(name: str) -> Path | None:
    """The file that is meant; None: a generator is."""
    word = name.partition(":")[0].strip()
    if word in GENERATORS:
        return None
    if Path(name).is_file():
        return Path(name)
    files = shipped()
    if name in files:
        return files[name]
    if Path(name).suffix or Path(name).name != name:
        raise UsageError("no such topology file", file=name)
    known = ", ".join(sorted(GENERATORS))
    brought = f", {', '.join(sorted(files))}" if files else ""
    near = suggest(word, {**GENERATORS, **files})
    raise UsageError(f"unknown topology '{word}'{near}: one of {known}{brought}, or a file")


def _known(size: int | None, name: str) -> int:
    if size is None:
        raise UsageError(f"topology '{name}' fits any number of peers: give one (--size N)")
    return size


def _read(path: Path, name: str, size: int | None, seed: int) -> Topology:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read the topology: {reason}", file=path) from error
    if path.suffix == ".toml":
        drawing = drawn_in_toml(text, path)
        if isinstance(drawing.graph, str):
            made = generate(drawing.graph, _known(size, name), seed)
        else:
            made = _of_graph(drawing.graph, path, name, size)
        return replace(made, name=name, schedule=drawing.schedule)
    return _of_graph(_READERS.get(path.suffix, _edge_list)(text, path), path, name, size)


def _of_graph(graph: Any, path: Path, name: str, size: int | None) -> Topology:
    """What a graph that somebody drew means for ``size`` peers."""
    if not len(graph):
        raise UsageError("no edges in it", file=path)
    size = len(graph) if size is None else size
    nodes = len(graph)
    if nodes > size and set(graph) == set(range(nodes)):
        raise UsageError(
            f"its graph has {nodes} nodes and the run {size} peer{'s' * (size > 1)}:"
            f" give a hosts file of {nodes} peers (gossipx topology: --size {nodes}), or another --topology",
            file=path,
        )
    for node in graph:
        if type(node) is not int or not 0 <= node < size:
            raise UsageError(f"node {node} is no rank of a run of {size} peers (0 to {size - 1})", file=path)
    graph.add_nodes_from(range(size))
    shares: dict[tuple[int, int], float] = {}
    for one, other, weight in graph.edges(data="weight"):
        if weight is None:
            continue
        if type(weight) not in (int, float) or not 0 < weight <= 1:
            raise UsageError(f"edge {one} {other}: weight {weight!r} is no share above 0 and up to 1", file=path)
        shares[one, other] = weight
        if not graph.is_directed():
            shares[other, one] = weight
    return Topology(name, neighbours_of(graph), edge_shares=shares, sites=_sites(graph, path))


def _sites(graph: Any, path: Path) -> tuple[int, ...]:
    given = nx.get_node_attributes(graph, "site")
    if not given:
        return ()
    missing = [rank for rank in range(len(graph)) if rank not in given]
    if missing:
        raise UsageError(f"some nodes have a site, and node {missing[0]} has none", file=path)
    words = [str(given[rank]) for rank in range(len(graph))]
    return tuple(words.index(word) for word in words)


# --- formats --------------------------------------------------------------------------------------


def _edge_list(text: str, path: Path) -> Any:
    graph = nx.Graph()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            edge = nx.parse_edgelist([" ".join(words)], nodetype=int, data=(("weight", float),)[: len(words) - 2])
        except _FOREIGN:
            edge = nx.Graph()
        if not len(edge):  # also what networkx passes over: a word alone
            wanted = "not an edge list: two ranks a line, and a weight if need be, such as '0 1' or '0 1 0.5'"
            raise UsageError(wanted, file=path, line=number)
        graph.update(edge)
    return graph


def _graphml(text: str, path: Path) -> Any:
    try:
        graph = nx.parse_graphml(text, node_type=int)
    except ElementTree.ParseError as error:
        raise UsageError(f"not XML: {error}", file=path, line=error.position[0]) from None
    except _FOREIGN as error:
        raise UsageError(f"not GraphML whose nodes are ranks: {_told(error)}", file=path) from None
    return _simple(graph)


def _node_link(text: str, path: Path) -> Any:
    wanted = 'node-link JSON is {"nodes": [{"id": 0}, …], "edges": [{"source": 0, "target": 1}, …]}'
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON: {error.msg}", file=path, line=error.lineno) from None
    except (RecursionError, ValueError):  # a number of thousands of digits
        raise UsageError(f"not a graph: {wanted}", file=path) from None
    try:
        graph = nx.node_link_graph(data, edges="links" if "links" in data else "edges")
    except _FOREIGN as error:
        raise UsageError(f"not a graph ({_told(error)}): {wanted}", file=path) from None
    return _simple(graph)


def _simple(graph: Any) -> Any:
    """Without parallel edges."""
    return nx.DiGraph(graph) if graph.is_directed() else nx.Graph(graph)


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"no {text}" if isinstance(error, KeyError) else text


_READERS: dict[str, Callable[[str, Path], Any]] = {".graphml": _graphml, ".json": _node_link}
"""Formats by ending, TOML aside; any other file is an edge list."""
