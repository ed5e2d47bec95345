"""Graphs over the ranks of a run.

networkx makes most of those that have a name (:mod:`gossipx.topology.generators`). It takes a fifth of a second to
import, so the two that nearly every run uses are made here.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gossipx import specs

Generator = Callable[[int, int], Any]
"""Makes a graph over the ranks 0 … size − 1 from (size, seed): networkx's, or each rank's neighbours."""


@dataclass(frozen=True)
class Topology:
    """A graph over ranks. An edge i → j means that i turns to j: it pulls j's model.

    Attributes:
        name: as the user gave it.
        neighbours: for each rank the ranks that it turns to, ascending.
        generator: which one made it, without parameters; empty: it was drawn by hand.
        edge_shares: factor from 0 to 1 on the share of j's model that i takes, by (i, j); 1 where none is given.
        sites: for each rank the number of the machine or room that it stands in; empty: nobody said.
        schedule: the one that its file asks for, as a spec; None: it does not.
    """

    name: str
    neighbours: tuple[tuple[int, ...], ...]
    generator: str = ""
    edge_shares: Mapping[tuple[int, int], float] = field(default_factory=dict)
    sites: tuple[int, ...] = ()
    schedule: str | None = None

    @property
    def size(self) -> int:
        """Number of peers."""
        return len(self.neighbours)

    @property
    def directed(self) -> bool:
        """Whether some peer turns to one that may not turn to it."""
        edges = {(one, other) for one, others in enumerate(self.neighbours) for other in others}
        return any((other, one) not in edges for one, other in edges)

    def fingerprint(self) -> str:
        """What tells it from any other graph, whatever their names: its edges' number, and a digest of all it holds."""
        edges = {(one, other) for one, others in enumerate(self.neighbours) for other in others}
        shares = sorted(
            (edge, float(share)) for edge, share in self.edge_shares.items() if edge in edges and share != 1
        )
        held = self.neighbours, shares, self.sites
        return f"{sum(map(len, self.neighbours))} edges {hashlib.sha256(repr(held).encode()).hexdigest()[:12]}"

    def in_turn(self, rank: int) -> tuple[int, ...]:
        """The neighbours of ``rank`` from the next higher rank on, and round: no two peers then begin with the same."""
        return tuple(sorted(self.neighbours[rank], key=lambda other: (other - rank) % self.size))

    def islands(self) -> list[list[int]]:
        """The largest groups within which all reach each other, the smallest first; one group: strongly connected."""
        if self.generator in PLAIN:
            return [list(range(self.size))]
        import networkx as nx  # for graphs that somebody drew

        graph = nx.DiGraph()
        graph.add_nodes_from(range(self.size))
        graph.add_edges_from((one, other) for one, others in enumerate(self.neighbours) for other in others)
        return sorted((sorted(part) for part in nx.strongly_connected_components(graph)), key=lambda p: (len(p), p))


def generate(spec: str, size: int, seed: int) -> Topology:
    """The graph of a generator.

    Args:
        spec: such as ``small-world:degree=4``; see :data:`gossipx.topology.generators.GENERATORS`.
        size: number of peers, from 1.
        seed: of random graphs; all peers of a run give the same.

    Raises:
        UsageError: an unknown generator or parameter, or a bad value.
    """
    name = spec.partition(":")[0].strip()
    made = specs.build(spec, PLAIN if name in PLAIN else _generators(), "topology")(size, seed)
    if isinstance(made, tuple):
        return Topology(spec, made, generator=name)
    sites = tuple(made.nodes[rank].get("site", -1) for rank in range(size))
    return Topology(spec, neighbours_of(made), generator=name, sites=sites if -1 not in sites else ())


def _generators() -> Mapping[str, Callable[..., Generator]]:
    from gossipx.topology.generators import GENERATORS  # and networkx

    return GENERATORS


def neighbours_of(graph: Any) -> tuple[tuple[int, ...], ...]:
    """Whom each node turns to, ascending; loops are left out."""
    return tuple(tuple(sorted(set(graph.neighbors(rank)) - {rank})) for rank in range(len(graph)))


def full() -> Generator:
    """All are neighbours."""
    return lambda size, seed: tuple(tuple(other for other in range(size) if other != rank) for rank in range(size))


def ring() -> Generator:
    """Each peer has the one before it and the one after it."""
    return lambda size, seed: tuple(
        tuple(sorted({(rank - 1) % size, (rank + 1) % size} - {rank})) for rank in range(size)
    )


PLAIN: dict[str, Callable[..., Generator]] = {"full": full, "ring": ring}
"""By name, the generators that need no networkx."""


def described(table: Mapping[str, Callable[..., Any]]) -> dict[str, str]:
    """For each entry, how its spec is written with all its defaults, and what it is, from its docstring."""
    told = {}
    for name, made in table.items():
        taken = inspect.signature(made).parameters.values()
        keys = ",".join(f"{one.name}={'…' if one.default is one.empty else one.default}" for one in taken)
        told[f"{name}:{keys}" if keys else name] = inspect.cleandoc(made.__doc__ or "").splitlines()[0]
    return told
