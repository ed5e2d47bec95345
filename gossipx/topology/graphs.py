"""Graphs over the ranks of a run."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gossipx.topology.ranks import AllBut, Rotated, position_of

Generator = Callable[[int, int], Any]
"""A function of (size, seed) that returns a networkx graph over the ranks 0 … size − 1, or each rank's neighbours."""


def full() -> Generator:
    """All peers are neighbours."""
    return lambda size, seed: tuple(AllBut(rank, size) for rank in range(size))


def ring() -> Generator:
    """Each peer's neighbours are the peers before and after it."""
    return lambda size, seed: tuple(
        tuple(sorted({(rank - 1) % size, (rank + 1) % size} - {rank})) for rank in range(size)
    )


PLAIN: dict[str, Callable[..., Generator]] = {"full": full, "ring": ring}
"""The generators that nearly every run uses, by name. The others, in :mod:`gossipx.topology.generators`, need networkx,
which takes 0.2 s to import."""


@dataclass(frozen=True)
class Topology:
    """A graph over ranks. An edge i → j means that i pulls from j or, in runs that push, pushes to j.

    Attributes:
        name: as the user gave it.
        neighbours: for each rank, the ranks that it has edges to, ascending.
        generator: name of its generator, without parameters; empty: it is from a file.
        edge_shares: by (i, j), a factor from 0 to 1 on the share of j's model that i mixes; 1 if missing.
        sites: for each rank, the number of its machine or room; empty: unknown.
        schedule: spec of the schedule that its file sets; None: it sets none.
    """

    name: str
    neighbours: Sequence[Sequence[int]]
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
        """Whether some edge has no reverse edge."""
        if self.generator in PLAIN:
            return False
        edges = {(one, other) for one, others in enumerate(self.neighbours) for other in others}
        return any((other, one) not in edges for one, other in edges)

    def fingerprint(self) -> str:
        """Return the number of edges and a digest of everything but the name, to compare graphs between peers."""
        shares = sorted(
            (edge, float(share))
            for edge, share in self.edge_shares.items()
            if share != 1 and position_of(edge[1], self.neighbours[edge[0]]) is not None
        )
        content = tuple(map(tuple, self.neighbours)), shares, self.sites
        return f"{sum(map(len, self.neighbours))} edges {hashlib.sha256(repr(content).encode()).hexdigest()[:12]}"

    def in_turn(self, rank: int) -> Sequence[int]:
        """Return the neighbours of ``rank`` in cyclic order from the next rank on, so that no two peers begin alike."""
        return Rotated(self.neighbours[rank], rank)

    def islands(self) -> list[list[int]]:
        """Return the strongly connected components, smallest first; one means that the graph is strongly connected."""
        if self.generator in PLAIN:
            return [list(range(self.size))]
        import networkx as nx  # not needed for full and ring

        graph = nx.DiGraph()
        graph.add_nodes_from(range(self.size))
        graph.add_edges_from((one, other) for one, others in enumerate(self.neighbours) for other in others)
        return sorted((sorted(part) for part in nx.strongly_connected_components(graph)), key=lambda p: (len(p), p))


def neighbours_of(graph: Any) -> tuple[tuple[int, ...], ...]:
    """Return the neighbours of each node of a networkx graph, ascending, without self-loops."""
    return tuple(tuple(sorted(set(graph.neighbors(rank)) - {rank})) for rank in range(len(graph)))


def generator_descriptions(table: Mapping[str, Callable[..., Any]]) -> dict[str, str]:
    """Return for each entry its spec with all defaults, and the first line of its docstring."""
    lines = {}
    for name, factory in table.items():
        parameters = inspect.signature(factory).parameters.values()
        keys = ",".join(f"{p.name}={'…' if p.default is p.empty else p.default}" for p in parameters)
        lines[f"{name}:{keys}" if keys else name] = inspect.cleandoc(factory.__doc__ or "").splitlines()[0]
    return lines
