"""Readers of graph files: GraphML, node-link JSON and edge lists. TOML is read in ``tables``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import networkx as nx

from gossipx.errors import UsageError

MAX_EDGES = 100_000
"""Edges of a file; a graph with more is one that a generator makes in less time than it is read."""
_FOREIGN = (LookupError, TypeError, ValueError, AttributeError, RecursionError, nx.NetworkXException)
"""Exceptions of networkx for a malformed file."""


def _edge_list(text: str, path: Path) -> Any:
    graph = nx.MultiGraph()
    lines = text.splitlines()
    _check_size(sum(1 for line in lines if line.strip()), path)
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            one, other, *weight = words
            graph.add_edge(int(one), int(other), number, **({"weight": float(*weight)} if weight else {}))
        except (TypeError, ValueError):
            wanted = "not an edge list: give two ranks per line and an optional weight, such as '0 1' or '0 1 0.5'"
            raise UsageError(wanted, file=path, line=number) from None
    return simple(graph, path, lines=True)


def _graphml(text: str, path: Path) -> Any:
    try:
        root = ElementTree.fromstring(text)
        found = {
            tag: [one for one in root.iter() if one.tag.rpartition("}")[2] == tag] for tag in ("key", "node", "edge")
        }
        _check_size(len(found["edge"]), path)
        for number, edge in enumerate(found["edge"], 1):
            edge.set("id", str(number))
        _check_once("node", (node.get("id") for node in found["node"]), path)
        for tag in ("node", "edge"):
            for one in found[tag]:
                _check_once(f"{tag} {one.get('id')}: key", (data.get("key") for data in one if data.get("key")), path)
        for key in found["key"]:
            if key.get("for", "all") == "all":  # networkx ignores the default of such a key
                key.set("for", "edge" if key.get("attr.name") == "weight" else "node")
        content = ElementTree.tostring(root, encoding="unicode")
        graph = nx.parse_graphml(content, node_type=int, edge_key_type=int, force_multigraph=True)
    except ElementTree.ParseError as error:
        raise UsageError(f"not XML: {error}", file=path, line=error.position[0]) from None
    except _FOREIGN as error:
        raise UsageError(f"not GraphML with ranks as nodes: {_reason(error)}", file=path) from None
    for all_data, name in ((graph.edges(data=True), "edge_default"), (graph.nodes(data=True), "node_default")):
        for *_, data in all_data:
            data.update({**graph.graph.get(name, {}), **data})
    return simple(graph, path)


def _node_link(text: str, path: Path) -> Any:
    wanted = 'node-link JSON is {"nodes": [{"id": 0}, …], "edges": [{"source": 0, "target": 1}, …]}'

    def fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _check_once("in one of its objects, field", (name for name, _ in pairs), path)
        return dict(pairs)

    try:
        data = json.loads(text, object_pairs_hook=fields)
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON: {error.msg}", file=path, line=error.lineno) from None
    except (RecursionError, ValueError):  # too deeply nested, or a number with too many digits
        raise UsageError(f"not a graph: {wanted}", file=path) from None
    try:
        name = "links" if "links" in data else "edges"
        _check_size(len(data.get(name, ())), path)
        _check_once("node", (node["id"] for node in data["nodes"] if "id" in node), path)
        edges = [{**edge, "key": number} for number, edge in enumerate(data.get(name, ()), 1)]
        graph = nx.node_link_graph({**data, name: edges, "multigraph": True, "graph": {}}, edges=name)
    except _FOREIGN as error:
        raise UsageError(f"not a graph ({_reason(error)}): {wanted}", file=path) from None
    return simple(graph, path)


def _check_once(what: str, names: Iterable[Any], path: Path) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise UsageError(f"{what} {twice} is given twice", file=path)


def _check_size(edges: int, path: Path) -> None:
    if edges > MAX_EDGES:
        raise UsageError(f"{edges} edges, and at most {MAX_EDGES} are read: name a generator", file=path)


def simple(graph: Any, path: Path | None, lines: bool = False) -> Any:
    """Return a multigraph without parallel edges, which must have the same weight; their keys are their places.

    Args:
        lines: places are lines of the file; else they count its edges, from 1.
    """
    made = nx.DiGraph() if graph.is_directed() else nx.Graph()
    made.add_nodes_from(graph.nodes(data=True))
    first: dict[tuple[int, int], tuple[float | None, int]] = {}
    for one, other, place, weight in graph.edges(keys=True, data="weight"):
        before, at = first.setdefault((one, other), (weight, place))
        if at != place and (1 if before is None else before) != (1 if weight is None else weight):
            weights = [1 if each is None else each for each in (weight, before)]
            of = f"on line {at}" if lines else f"in edge {at} of the file"
            here = "" if lines else f" in edge {place}"
            fault = f"edge {one} {other} has weight {weights[0]}{here}, and {weights[1]} {of}: give it one"
            raise UsageError(fault, file=path, line=place if lines else None)
        made.add_edge(one, other, **({} if weight is None else {"weight": weight}))
    return made


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"no {text}" if isinstance(error, KeyError) else text


READERS: dict[str, Callable[[str, Path], Any]] = {".graphml": _graphml, ".json": _node_link, ".edges": _edge_list}
"""Parsers to networkx graphs, by file ending; files with other endings are edge lists."""
