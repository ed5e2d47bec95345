"""The generators ``full`` and ``ring``, which nearly every run uses.

All others (:mod:`gossipx.topology.generators`) need networkx, which takes 0.2 s to import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gossipx.topology.ranks import AllBut

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
"""Generators by name that do not need networkx."""
