"""Graph generators, most of them based on networkx.

Every generator works for any number of peers from 1 on. Its graph is simple and (strongly) connected, its nodes are the
ranks, and the same seed gives the same graph on every machine. ``gossipx topology list`` shows the first line of each
generator's docstring.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import networkx as nx

from gossipx.topology.graphs import PLAIN, Generator


def star() -> Generator:
    """Rank 0 is the only neighbour of all others."""
    return lambda size, seed: nx.star_graph(size - 1)


def grid() -> Generator:
    """Rows and columns, as square as possible; the last row may be short."""
    return lambda size, seed: _lattice(size, nx.add_path)


def torus() -> Generator:
    """A grid whose rows and columns are rings."""
    return lambda size, seed: _lattice(size, nx.add_cycle)


def _lattice(size: int, connect: Callable[[Any, Sequence[int]], None]) -> Any:
    # networkx only makes full grids; a short last row allows any number of peers.
    width = math.ceil(size / math.isqrt(size))
    graph = nx.empty_graph(size)
    for row in range(0, size, width):
        connect(graph, range(row, min(row + width, size)))
    for column in range(width):
        connect(graph, range(column, size, width))
    return graph


def hypercube() -> Generator:
    """Ranks that differ in one bit; unless there are 2^k peers, the cube's corners above the last rank are missing."""

    def make(size: int, seed: int) -> Any:
        cube = nx.hypercube_graph(max(1, (size - 1).bit_length()))
        # Clearing bits leads from any rank to 0 by lower ranks, so the subgraph stays connected.
        return nx.convert_node_labels_to_integers(cube, ordering="sorted").subgraph(range(size))

    return make


def exponential(base: int = 2) -> Generator:
    """Directed: each peer pulls from those 1, base, base², … ranks ahead, modulo the number of peers."""
    if base < 2:
        raise ValueError("base must be at least 2")

    def make(size: int, seed: int) -> Any:
        # Ying et al., "Exponential Graph is Provably Efficient for Decentralized Deep Training" (2021), for base 2.
        graph = nx.empty_graph(size, create_using=nx.DiGraph)
        hop = 1
        while hop < size:
            graph.add_edges_from((rank, (rank + hop) % size) for rank in range(size))
            hop *= base
        return graph

    return make


def expander() -> Generator:
    """Margulis' expander on a square of peers; for other sizes, the next square's surplus nodes are merged."""

    def make(size: int, seed: int) -> Any:
        side = math.isqrt(size - 1) + 1
        square = nx.convert_node_labels_to_integers(nx.margulis_gabber_galil_graph(side), ordering="sorted")
        # A node v ≥ size is merged with v − size: the graph stays connected, and no set's cut shrinks. The surplus is
        # at most 2 · side − 2 ≤ size, so that at most two nodes are merged (degree 16 at most, not 8).
        return nx.Graph(nx.relabel_nodes(square, lambda node: node % size))

    return make


def regular(degree: int = 4) -> Generator:
    """A random graph where each peer has ``degree`` neighbours (one more if degree and size are both odd)."""
    if degree < 3:
        raise ValueError("degree must be at least 3; the regular graph of degree 2 is the ring")

    def make(size: int, seed: int) -> Any:
        possible = degree + degree * size % 2
        if possible >= size - 1:
            return nx.complete_graph(size)
        draws = (nx.random_regular_graph(possible, size, seed=(seed + k) % 2**32) for k in range(1000))
        return next(graph for graph in draws if nx.is_connected(graph))  # nearly always the first

    return make


def small_world(degree: int = 4, p: float = 0.1) -> Generator:
    """A ring where each peer has its ``degree`` nearest neighbours; each edge adds a shortcut with probability p."""
    if degree < 2 or degree % 2:
        raise ValueError("degree must be even and at least 2: half of it on each side")
    _probability(p)
    # Newman and Watts add shortcuts; in Watts and Strogatz' model they replace edges, which may disconnect the graph.
    return lambda size, seed: nx.newman_watts_strogatz_graph(size, min(degree, size), p, seed=seed)


def erdos_renyi(p: float) -> Generator:
    """Each pair with probability p, and as few more edges as it takes to connect the graph."""
    _probability(p)

    def make(size: int, seed: int) -> Any:
        graph = nx.gnp_random_graph(size, p, seed=seed)
        graph.add_edges_from(nx.k_edge_augmentation(graph, k=1) if size > 1 else ())
        return graph

    return make


def hierarchical(sites: int = 2) -> Generator:
    """Sites of nearly equal size: all peers of a site are neighbours, and so are the k-th peers of all sites."""
    if sites < 1:
        raise ValueError("sites must be at least 1")

    def make(size: int, seed: int) -> Any:
        count = min(sites, size)
        bounds = [size * site // count for site in range(count + 1)]
        groups = [range(first, after) for first, after in itertools.pairwise(bounds)]
        twins = ([one for one in place if one is not None] for place in itertools.zip_longest(*groups))
        graph = nx.compose_all([nx.complete_graph(members) for members in (*groups, *twins)])
        nx.set_node_attributes(graph, {rank: site for site, group in enumerate(groups) for rank in group}, "site")
        return graph

    return make


def bipartite() -> Generator:
    """Two halves: each peer is a neighbour of all peers in the other half."""
    return lambda size, seed: nx.complete_bipartite_graph(size - size // 2, size // 2)


def _probability(p: float) -> None:
    if not 0 <= p <= 1:
        raise ValueError("p must be a probability, from 0 to 1")


GENERATORS: dict[str, Callable[..., Generator]] = {
    **PLAIN,
    "star": star,
    "grid": grid,
    "torus": torus,
    "hypercube": hypercube,
    "exponential": exponential,
    "expander": expander,
    "regular": regular,
    "small-world": small_world,
    "erdos-renyi": erdos_renyi,
    "hierarchical": hierarchical,
    "bipartite": bipartite,
}
"""Functions by name that take a generator's parameters and return the generator."""
