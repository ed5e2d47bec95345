"""Readers of topology files: edge lists and TOML.

TOML has a generator with parameters, or edges with optional weights; and a schedule::

    generator = "hierarchical"            directed = false               # the default
    parameters = { sites = 2 }            edges = [[0, 1], [1, 2, 0.5]]  # the default weight is 1
    schedule = "inner-outer"              sites = [[0, 1], [2]]          # optional: ranks by machine
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
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

_FORMS = {
    "edges": "two ranks and an optional weight each, such as [[0, 1], [1, 2, 0.5]]",
    "sites": "lists of ranks, such as [[0, 1], [2, 3]]",
    "parameters": "a table, such as { sites = 2 }",
}
"""The form of values that are not plain, by key."""


class TopologyFile(msgspec.Struct, frozen=True):
    """The content of a TOML topology, as it stands in the file."""

    generator: str | None = None
    parameters: dict[str, bool | int | float | str] = {}
    edges: list[Annotated[list[int | float], msgspec.Meta(min_length=2, max_length=3)]] | None = None
    directed: bool = False
    sites: list[list[int]] = []
    schedule: str | None = None

    def graph(self) -> Any:
        """Return the graph of the edges, as one of networkx, with the sites of its nodes; or the generator's spec."""
        if self.generator is not None:
            given = ",".join(f"{key}={str(value).lower()}" for key, value in self.parameters.items())
            return f"{self.generator}:{given}" if given else self.generator
        graph = nx.MultiDiGraph() if self.directed else nx.MultiGraph()
        for number, (one, other, *weight) in enumerate(self.edges or (), 1):
            graph.add_edge(one, other, number, **({"weight": weight[0]} if weight else {}))
        return _simple(graph, None)


def read_toml(text: str, path: Path) -> tuple[Any, str | None]:
    """Parse the text of a TOML topology.

    Returns:
        A networkx graph or a generator's spec, and the spec of a schedule; None: the file sets none.

    Raises:
        UsageError: it is malformed; the message names the file, the line and a correct form.
    """
    data = toml.loads(text, path)
    key = next(iter(data), "generator")
    try:
        for key in data:
            specs.known_word("key", key, dict.fromkeys(TopologyFile.__struct_fields__))
        if ("generator" in data) == ("edges" in data):
            raise UsageError('give either generator = "ring" or edges = [[0, 1], [1, 2]], not both')
        excluded = ("directed", "sites") if "generator" in data else ("parameters",)
        for key in (key for key in excluded if key in data):
            raise UsageError(f"'{key}' cannot be used with {'a generator' if 'generator' in data else 'edges'}")
        file = msgspec.convert(data, TopologyFile)
        key = "schedule"
        if file.schedule is not None:
            schedules.check_schedule(file.schedule)
        key = "generator" if "generator" in data else "edges"
        graph = file.graph()
        if file.generator is not None:
            specs.build(graph, GENERATORS, "generator")
        key = "sites"
        _assign_sites(graph, file.sites)
    except msgspec.ValidationError as error:
        fault, _, place = str(error).rpartition(" - at `$.")
        key = re.split(r"\W", place)[0]
        wanted = f": give {_FORMS[key]}" if key in _FORMS else ""
        raise UsageError(f"{place[:-1]}: {fault}{wanted}", path, _line_of_key(text, key)) from None
    except UsageError as error:
        raise UsageError(str(error), path, _line_of_key(text, key)) from None
    return graph, file.schedule


def _assign_sites(graph: Any, sites: list[Any]) -> None:
    """Give each node its site."""
    for number, ranks in enumerate(sites):
        for rank in ranks:
            if rank not in graph:
                raise UsageError(f"site {number}: {rank} is not a rank with an edge")
            if "site" in graph.nodes[rank]:
                raise UsageError(f"rank {rank} is in two sites")
            graph.nodes[rank]["site"] = number


def _line_of_key(text: str, key: str) -> int:
    """Return the line number of a key; 1 if it is not found."""
    start = re.compile(rf"\s*\[*\s*[\"']?{re.escape(key)}[\"']?\s*[\].=]")
    return next((number for number, line in enumerate(text.splitlines(), 1) if start.match(line)), 1)
