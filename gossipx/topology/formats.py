"""Readers of graph files: GraphML, node-link JSON, and edge lists. TOML is read in ``tables``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import networkx as nx

from gossipx.errors import UsageError

_FOREIGN = (LookupError, TypeError, ValueError, AttributeError, nx.NetworkXException)
"""What networkx raises for a file that is not what its name says."""


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


READERS: dict[str, Callable[[str, Path], Any]] = {".graphml": _graphml, ".json": _node_link, ".edges": _edge_list}
"""By ending, what makes a networkx graph of a file's text; a file with another ending is an edge list."""
