"""Readers of topology files: GraphML, node-link JSON, edge lists and TOML.

TOML has a generator with parameters, or edges with optional weights; and a schedule::

    generator = "hierarchical"            directed = false               # the default
    parameters = { sites = 2 }            edges = [[0, 1], [1, 2, 0.5]]  # the default weight is 1
    schedule = "inner-outer"              sites = [[0, 1], [2]]          # optional: ranks by machine
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import networkx as nx

from gossipx import specs
from gossipx.errors import UsageError
from gossipx.specs import toml
from gossipx.topology import schedules
from gossipx.topology.generators import GENERATORS

MAX_EDGES = 100_000
"""Edges of a file; a graph with more is one that a generator makes in less time than it is read."""
_FOREIGN = (LookupError, TypeError, ValueError, AttributeError, RecursionError, nx.NetworkXException)
"""Exceptions of networkx for a malformed file."""


def _edge_list(text: str, path: Path) -> Any:
    graph = nx.MultiGraph()
    lines = text.splitlines()
    _check_graph_size(sum(1 for line in lines if line.strip()), path)
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
    return _simple(graph, path, lines=True)


def _graphml(text: str, path: Path) -> Any:
    try:
        root = ElementTree.fromstring(text)
        found = {
            tag: [one for one in root.iter() if one.tag.rpartition("}")[2] == tag] for tag in ("key", "node", "edge")
        }
        _check_graph_size(len(found["edge"]), path)
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
    return _simple(graph, path)


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
        _check_graph_size(len(data.get(name, ())), path)
        _check_once("node", (node["id"] for node in data["nodes"] if "id" in node), path)
        edges = [{**edge, "key": number} for number, edge in enumerate(data.get(name, ()), 1)]
        graph = nx.node_link_graph({**data, name: edges, "multigraph": True, "graph": {}}, edges=name)
    except _FOREIGN as error:
        raise UsageError(f"not a graph ({_reason(error)}): {wanted}", file=path) from None
    return _simple(graph, path)


def _check_once(what: str, names: Iterable[Any], path: Path) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise UsageError(f"{what} {twice} is given twice", file=path)


def _check_graph_size(edges: int, path: Path) -> None:
    if edges > MAX_EDGES:
        raise UsageError(f"{edges} edges, and at most {MAX_EDGES} are read: name a generator", file=path)


def _simple(graph: Any, path: Path | None, lines: bool = False) -> Any:
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


# --- TOML ----------------------------------------------------------------------------------------

_KEYS = dict.fromkeys(("generator", "parameters", "edges", "directed", "sites", "schedule"))


@dataclass(frozen=True)
class TopologyFile:
    """The content of a TOML topology.

    Attributes:
        graph: a networkx graph, or a generator's spec.
        schedule: a spec; None: the file sets none.
    """

    graph: Any
    schedule: str | None


def read_toml(text: str, path: Path) -> TopologyFile:
    """Parse the text of a TOML topology.

    Raises:
        UsageError: it is malformed; the message names the file, the line and a correct form.
    """
    data = toml.loads(text, path)
    key = next(iter(data), "generator")
    try:
        for key in data:
            specs.known_word("key", key, _KEYS)
        if ("generator" in data) == ("edges" in data):
            raise UsageError('give either generator = "ring" or edges = [[0, 1], [1, 2]], not both')
        excluded = ("directed", "sites") if "generator" in data else ("parameters",)
        for key in (key for key in excluded if key in data):
            raise UsageError(f"'{key}' cannot be used with {'a generator' if 'generator' in data else 'edges'}")
        parts: dict[str, Any] = {}
        for key, check in _CHECKS.items():
            parts[key] = check(data[key]) if key in data else None
        key = "generator"
        graph = _spec(parts["generator"], parts["parameters"]) if "generator" in data else None
        key = "edges"
        graph = graph or _graph_of_edges(parts["edges"], parts["directed"])
        key = "sites"
        _assign_sites(graph, parts["sites"] or [])
    except UsageError as error:
        raise UsageError(str(error), path, _line_of_key(text, key)) from None
    return TopologyFile(graph, parts["schedule"])


def _spec(generator: str, parameters: dict[str, Any] | None) -> str:
    given = ",".join(f"{key}={str(value).lower()}" for key, value in (parameters or {}).items())
    spec = f"{generator}:{given}" if given else generator
    specs.build(spec, GENERATORS, "generator")
    return spec


def _graph_of_edges(edges: list[Any], directed: bool | None) -> Any:
    graph = nx.MultiDiGraph() if directed else nx.MultiGraph()
    for number, (one, other, *weight) in enumerate(edges, 1):
        graph.add_edge(one, other, number, **({"weight": weight[0]} if weight else {}))
    return _simple(graph, None)


def _assign_sites(graph: Any, sites: list[Any]) -> None:
    """Give each node its site."""
    for number, ranks in enumerate(sites):
        for rank in ranks:
            if rank not in graph:
                raise UsageError(f"site {number}: {rank} is not a rank with an edge")
            if "site" in graph.nodes[rank]:
                raise UsageError(f"rank {rank} is in two sites")
            graph.nodes[rank]["site"] = number


# --- checks of the values, by key -----------------------------------------------------------------


def _checked_text(value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{value!r} is not a string")
    return value


def _checked_table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError("parameters must be a table, such as { sites = 2 }")
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise UsageError("directed must be true or false")
    return value


def _checked_ranks(value: Any) -> list[Any]:
    if not _is_lists(value) or not all(type(rank) is int for ranks in value for rank in ranks):
        raise UsageError("sites must be a list of lists of ranks, such as [[0, 1], [2, 3]]")
    return list(value)


def _edges(value: Any) -> list[Any]:
    if not _is_lists(value):
        raise UsageError("edges must be a list of pairs of ranks, such as [[0, 1], [1, 2]]")
    for number, edge in enumerate(value, 1):
        ranks, weight = edge[:2], edge[2:]
        if [type(rank) for rank in ranks] != [int, int] or len(weight) > 1:
            raise UsageError(f"edge {number} is {edge}: give two ranks and an optional weight, such as [0, 1, 0.5]")
    return list(value)


def _is_lists(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, list) for one in value)


def _schedule(value: Any) -> str:
    schedules.check_schedule(_checked_text(value))
    return str(value)


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "generator": _checked_text,
    "parameters": _checked_table,
    "edges": _edges,
    "directed": _truth,
    "sites": _checked_ranks,
    "schedule": _schedule,
}


def _line_of_key(text: str, key: str) -> int:
    """Return the line number of a key; 1 if it is not found."""
    start = re.compile(rf"\s*\[*\s*[\"']?{re.escape(key)}[\"']?\s*[\].=]")
    return next((number for number, line in enumerate(text.splitlines(), 1) if start.match(line)), 1)
