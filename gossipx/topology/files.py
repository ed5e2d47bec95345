"""Topology files: TOML and edge lists, including those that come with gossipx.

In both formats nodes are ranks, 0 to n − 1. An edge's ``weight`` (above 0, at most 1) is a factor on the mixing share
over this edge. A node's ``site`` is its machine or room. Self-loops are ignored.
"""

from __future__ import annotations

import inspect
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gossipx import specs
from gossipx.errors import UsageError
from gossipx.specs import suggest, texts
from gossipx.topology.graphs import PLAIN, Generator, Topology, neighbours_of

_ENDINGS = (".edges", ".toml")
_SHOWN = 8
"""Maximum number of ranks to list in a message."""


def topology_from(name: str, size: int | None = None, seed: int = 0, connected: bool = True) -> Topology:
    """Return the named topology for ``size`` peers.

    Args:
        name: a generator's spec, a file, or the name of a file that comes with gossipx (see :func:`shipped`).
        size: number of peers; None: the number of nodes in the file.
        seed: the seed of the run, for which random graphs are the same on all machines.
        connected: whether to refuse a graph in which some peer cannot reach another.

    Raises:
        UsageError: an unknown name, an unreadable file, an invalid node, or peers that cannot reach each other.
    """
    path = _graph_path(name)
    topology = _generate(name, _known_size(size, name), seed) if path is None else _graph_in(path, name, size, seed)
    islands = topology.islands()
    if connected and len(islands) > 1:
        alone = islands[0]
        ranks = ", ".join(map(str, alone[:_SHOWN])) + (", …" if len(alone) > _SHOWN else "")
        what = "lack a path to or from the other peers" if topology.directed else "have no path to the other peers"
        raise UsageError(f"peers [{ranks}] {what}: add edges between them and the rest", file=path)
    return topology


def shipped() -> dict[str, Path]:
    """Return the topology files that need no directory and ending: those in ``topologies`` and those of gossipx."""
    places = (
        Path("topologies"),
        Path(__file__).parents[2] / "topologies",
        Path(sysconfig.get_path("data"), "share", "gossipx", "topologies"),
    )
    found: dict[str, Path] = {}
    for place in places:
        for path in sorted(place.glob("*")):
            if path.suffix in _ENDINGS and path.is_file():
                found.setdefault(path.stem, path)
    return found


def absolute_topology(name: str) -> str:
    """Return the name of a topology in a form that is valid in any working directory; an unknown one as it is."""
    try:
        path = _graph_path(name)
    except UsageError:
        return name
    return name if path is None or path.is_absolute() else str(path.absolute())


def _graph_path(name: str) -> Path | None:
    """Return the named file; None if the name is a generator's."""
    word = name.partition(":")[0].strip()
    generators = _generators_with(word)
    if word in generators:
        return None
    if texts.found(Path(name)) == "file":
        return Path(name)
    files = shipped()
    if name in files:
        return files[name]
    if Path(name).suffix or Path(name).name != name:
        raise UsageError("no such topology file", file=name)
    known = ", ".join(sorted(generators))
    from_files = f", {', '.join(sorted(files))}" if files else ""
    near = suggest(word, {**generators, **files})
    raise UsageError(f"unknown topology '{word}'{near}: one of {known}{from_files}, or a file")


def _generate(spec: str, size: int, seed: int) -> Topology:
    name = spec.partition(":")[0].strip()
    graph = specs.build(spec, _generators_with(name), "topology")(size, seed)
    if isinstance(graph, tuple):
        return Topology(spec, graph, generator=name)
    sites = tuple(graph.nodes[rank].get("site", -1) for rank in range(size))
    return Topology(spec, neighbours_of(graph), generator=name, sites=sites if -1 not in sites else ())


def _generators_with(name: str) -> Mapping[str, Callable[..., Generator]]:
    """Return a table that has this generator, if there is one: the plain ones need no networkx."""
    if name in PLAIN:
        return PLAIN
    from gossipx.topology.generators import GENERATORS  # imports networkx

    return GENERATORS


def _known_size(size: int | None, name: str) -> int:
    if size is None:
        word, value = (part.strip() for part in (name.partition(":")[::2]))
        if value and not inspect.signature(_generators_with(word)[word]).parameters:
            number = value if value.isdecimal() else "N"
            raise UsageError(
                f"topology '{name}': '{word}' takes no keys; give the number of peers apart: {word} --size {number}"
            )
        raise UsageError(f"topology '{name}' has no fixed number of peers: give one (--size N)")
    return size


def _graph_in(path: Path, name: str, size: int | None, seed: int) -> Topology:
    text = texts.read(path, "topology")
    from gossipx.topology.formats import read_edge_list, read_toml  # imports networkx, which most runs do not need

    if path.suffix == ".toml":
        graph, schedule = read_toml(text, path)
        if isinstance(graph, str):
            topology = _generate(graph, _known_size(size, name), seed)
        else:
            topology = _of_graph(graph, path, name, size)
        return replace(topology, name=name, schedule=schedule)
    return _of_graph(read_edge_list(text, path), path, name, size)


def _of_graph(graph: Any, path: Path, name: str, size: int | None) -> Topology:
    """Convert a networkx graph from a file to the topology of ``size`` peers."""
    if not len(graph):
        raise UsageError("the graph has no edges", file=path)
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
            raise UsageError(f"node {node} is not a rank in a run of {size} peers (0 to {size - 1})", file=path)
    graph.add_nodes_from(range(size))
    shares: dict[tuple[int, int], float] = {}
    for one, other, weight in graph.edges(data="weight"):
        if weight is None:
            continue
        if type(weight) not in (int, float) or not 0 < weight <= 1:
            raise UsageError(f"edge {one} {other}: weight {weight!r} must be above 0 and at most 1", file=path)
        shares[one, other] = weight
        if not graph.is_directed():
            shares[other, one] = weight
    return Topology(name, neighbours_of(graph), edge_shares=shares, sites=_sites(graph, path))


def _sites(graph: Any, path: Path) -> tuple[int, ...]:
    given = dict(graph.nodes(data="site"))
    given = {node: site for node, site in given.items() if site is not None}
    if not given:
        return ()
    missing = [rank for rank in range(len(graph)) if rank not in given]
    if missing:
        raise UsageError(f"some nodes have a site, and node {missing[0]} has none", file=path)
    found = [given[rank] for rank in range(len(graph))]
    return tuple(found.index(site) for site in found)
