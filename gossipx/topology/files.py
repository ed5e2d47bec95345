"""Topologies from files: TOML, GraphML, node-link JSON, or an edge list; and those that gossipx brings along.

In every format nodes are ranks, 0 to n − 1, an edge's ``weight`` is its factor on the share that is taken over it
(above 0, at most 1), and a node's ``site`` the machine or room that it stands in. Loops are ignored.
"""

from __future__ import annotations

import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

from gossipx.errors import UsageError
from gossipx.specs import suggest
from gossipx.topology.graphs import PLAIN, Topology, generate, neighbours_of

_ENDINGS = (".edges", ".graphml", ".json", ".toml")
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
            if path.suffix in _ENDINGS and path.is_file():
                found.setdefault(path.stem, path)
    return found


def _path_of(name: str) -> Path | None:
    """The file that is meant; None: a generator is."""
    word = name.partition(":")[0].strip()
    if word in PLAIN:
        return None
    from gossipx.topology.generators import GENERATORS

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
    from gossipx.topology.formats import READERS  # networkx, which most runs do not need
    from gossipx.topology.tables import drawn_in_toml

    if path.suffix == ".toml":
        drawing = drawn_in_toml(text, path)
        if isinstance(drawing.graph, str):
            made = generate(drawing.graph, _known(size, name), seed)
        else:
            made = _of_graph(drawing.graph, path, name, size)
        return replace(made, name=name, schedule=drawing.schedule)
    return _of_graph(READERS.get(path.suffix, READERS[".edges"])(text, path), path, name, size)


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
    given = dict(graph.nodes(data="site"))
    given = {node: site for node, site in given.items() if site is not None}
    if not given:
        return ()
    missing = [rank for rank in range(len(graph)) if rank not in given]
    if missing:
        raise UsageError(f"some nodes have a site, and node {missing[0]} has none", file=path)
    words = [str(given[rank]) for rank in range(len(graph))]
    return tuple(words.index(word) for word in words)
