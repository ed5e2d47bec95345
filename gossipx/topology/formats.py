"""Readers of graph files: GraphML, node-link JSON and edge lists. TOML is read in ``tables``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import networkx as nx

from gossipx.errors import UsageError

_FOREIGN = (LookupError, TypeError, ValueError, AttributeError, nx.NetworkXException)
"""Exceptions of networkx for a malformed file."""


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
        if not len(edge):  # networkx ignores lines of one word
            wanted = "not an edge list: give two ranks per line and an optional weight, such as '0 1' or '0 1 0.5'"
            raise UsageError(wanted, file=path, line=number)
        graph.update(edge)
    return graph


def _graphml(text: str, path: Path) -> Any:
    try:
        graph = nx.parse_graphml(text, node_type=int)
    except ElementTree.ParseError as error:
        raise UsageError(f"not XML: {error}", file=path, line=error.position[0]) from None
    except _FOREIGN as error:
        raise UsageError(f"not GraphML with ranks as nodes: {_reason(error)}", file=path) from None
    return _simple(graph)


def _node_link(text: str, path: Path) -> Any:
    wanted = 'node-link JSON is {"nodes": [{"id": 0}, …], "edges": [{"source": 0, "target": 1}, …]}'
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON: {error.msg}", file=path, line=error.lineno) from None
    except (RecursionError, ValueError):  # too deeply nested, or a number with too many digits
        raise UsageError(f"not a graph: {wanted}", file=path) from None
    try:
        graph = nx.node_link_graph(data, edges="links" if "links" in data else "edges")
    except _FOREIGN as error:
        raise UsageError(f"not a graph ({_reason(error)}): {wanted}", file=path) from None
    return _simple(graph)


def _simple(graph: Any) -> Any:
    """Return the graph without parallel edges."""
    return nx.DiGraph(graph) if graph.is_directed() else nx.Graph(graph)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"no {text}" if isinstance(error, KeyError) else text


READERS: dict[str, Callable[[str, Path], Any]] = {".graphml": _graphml, ".json": _node_link, ".edges": _edge_list}
"""Parsers to networkx graphs, by file ending; files with other endings are edge lists."""
