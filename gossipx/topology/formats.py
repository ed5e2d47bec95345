"""Readers of topology files: edge lists and TOML.

TOML has a generator with parameters, or edges with optional weights; and a schedule::

    generator = "hierarchical"            directed = false               # the default
    parameters = { sites = 2 }            edges = [[0, 1], [1, 2, 0.5]]  # the default weight is 1
    schedule = "inner-outer"              sites = [[0, 1], [2]]          # optional: ranks by machine
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx

from gossipx import specs
from gossipx.errors import UsageError
from gossipx.specs import toml
from gossipx.topology import schedules
from gossipx.topology.generators import GENERATORS

MAX_EDGES = 100_000
"""Edges of a file; a graph with more is one that a generator makes in less time than it is read."""


def read_edge_list(text: str, path: Path) -> Any:
    """Parse the text of an edge list to a networkx graph.

    Raises:
        UsageError: it is malformed; the message names the file, the line and a correct form.
    """
    graph = nx.MultiGraph()
    lines = text.splitlines()
    if (edges := sum(1 for line in lines if line.strip())) > MAX_EDGES:
        raise UsageError(f"{edges} edges, and at most {MAX_EDGES} are read: name a generator", file=path)
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
