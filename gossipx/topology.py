"""Who may pull from whom, and who meets whom in an agreement. networkx is the graph library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx

from gossipx.errors import UsageError
from gossipx.specs import suggest

GENERATORS: dict[str, Callable[[int], Any]] = {
    "full": nx.complete_graph,
    "ring": lambda size: nx.cycle_graph(size) if size > 2 else nx.path_graph(size),
    "star": lambda size: nx.star_graph(size - 1),
}
"""Graphs over the ranks 0 … size − 1 by name."""


@dataclass(frozen=True)
class Topology:
    """A graph over ranks.

    Attributes:
        name: as the user gave it.
        neighbours: for each rank the ranks that it pulls from, ascending.
    """

    name: str
    neighbours: tuple[tuple[int, ...], ...]


def load(name: str, size: int) -> Topology:
    """The topology that ``name`` means for ``size`` peers.

    Args:
        name: one of :data:`GENERATORS`, or a file with an edge list (``0 1`` a line, ``#`` comments).
        size: number of peers.

    Raises:
        UsageError: an unknown name, an unreadable file, a node that is no rank, or peers that cannot reach each other.
    """
    if name in GENERATORS:
        graph = GENERATORS[name](size)
    elif Path(name).is_file():
        graph = _read(Path(name), size)
    else:
        known = ", ".join(sorted(GENERATORS))
        raise UsageError(f"unknown topology '{name}'{suggest(name, GENERATORS)}: one of {known}, or an edge list file")
    return Topology(name, tuple(tuple(sorted(graph.neighbors(rank))) for rank in range(size)))


def _read(path: Path, size: int) -> Any:
    try:
        graph = nx.read_edgelist(path, nodetype=int)
    except (TypeError, ValueError, nx.NetworkXException) as error:
        raise UsageError(f"not an edge list, two ranks a line: {error}", file=path) from error
    strangers = sorted(set(graph) - set(range(size)))
    if strangers:
        raise UsageError(f"node {strangers[0]} is no rank of a run of {size} peers (0 to {size - 1})", file=path)
    graph.add_nodes_from(range(size))
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    if not nx.is_connected(graph):
        alone = min(nx.connected_components(graph), key=len)
        raise UsageError(f"peers {sorted(alone)} reach no others: add edges between them and the rest", file=path)
    return graph


@dataclass(frozen=True)
class Meeting:
    """One peer's part in one round of an agreement.

    Attributes:
        partner: position of the one met.
        takes: whether this peer takes the partner's model in.
        gives: whether the partner takes this peer's.
        whole: whether it takes that model in its own's place, rather than average.
    """

    partner: int
    takes: bool = True
    gives: bool = True
    whole: bool = False


def agreement_rounds(size: int) -> int:
    """Rounds of an agreement among ``size`` peers: log2 of it, and two more unless it is a power of two."""
    core = size.bit_length() - 1
    return core if size == 1 << core else core + 2


def agreement_meeting(position: int, round: int, size: int) -> Meeting | None:
    """Whom the peer at ``position`` meets in ``round``, or None if it rests.

    Recursive doubling: among a power of two of peers, each round k pairs those whose positions differ in bit k alone,
    and averaging each pair leaves all equal to the mean of all, exactly. Peers beyond the largest power of two first
    give their models to one of these (averages are weighted by how many models they hold), and take the result at the
    end.

    Args:
        position: from 0 to ``size`` − 1, among those that take part.
        round: from 0 to ``agreement_rounds(size)`` − 1.
    """
    core = 1 << (size.bit_length() - 1)
    extra = size - core
    if extra:
        if round in (0, agreement_rounds(size) - 1):
            last = round > 0
            if position >= core:
                return Meeting(position - core, takes=last, gives=not last, whole=last)
            return Meeting(position + core, takes=not last, gives=last) if position < extra else None
        round -= 1
    return Meeting(position ^ (1 << round)) if position < core else None
