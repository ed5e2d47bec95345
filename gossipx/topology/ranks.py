"""Sequences of ranks that are computed when they are read, instead of stored.

The topology ``full`` of N peers has N² edges, and each peer draws its partner among N − 1 neighbours. With these views
a graph of 10,000 peers takes a megabyte, and a draw copies no list.
"""

from __future__ import annotations

import abc
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from operator import eq
from typing import final, overload


class Ranks(Sequence[int]):
    """Computed ranks; equal to any other sequence of the same ranks."""

    __slots__ = ()

    @abc.abstractmethod
    def _at(self, position: int) -> int:
        """Return the rank at a position from 0 to the length − 1."""

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        positions = range(len(self))[index]
        return tuple(map(self._at, positions)) if isinstance(positions, range) else self._at(positions)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@final
class AllBut(Ranks):
    """All ranks below ``size`` but ``rank``, ascending: the neighbours of peer ``rank`` on a full graph."""

    __slots__ = ("rank", "size")

    def __init__(self, rank: int, size: int):
        self.rank = rank
        self.size = size

    def __len__(self) -> int:
        return self.size - (self.rank < self.size)

    def _at(self, position: int) -> int:
        return position + (position >= self.rank)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(range(min(self.rank, self.size)), range(self.rank + 1, self.size))

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and 0 <= rank < self.size and rank != self.rank


@final
class Rotated(Ranks):
    """The ascending ``ranks`` in cyclic order, beginning with the first one above ``rank``."""

    __slots__ = ("_ranks", "_start")

    def __init__(self, ranks: Sequence[int], rank: int):
        self._ranks = ranks
        self._start = bisect_right(ranks, rank)

    def __len__(self) -> int:
        return len(self._ranks)

    def _at(self, position: int) -> int:
        return self._ranks[(self._start + position) % len(self._ranks)]


@final
class Without(Ranks):
    """The ascending ``ranks`` without the ``excluded`` ones, some of which may not be among them.

    With k of them excluded, it takes O(k log k) to build, and O(log k) to read an item.
    """

    __slots__ = ("_excluded", "_offsets", "_ranks")

    def __init__(self, ranks: Sequence[int], excluded: Collection[int]):
        self._ranks = ranks
        self._excluded = excluded if isinstance(excluded, set | frozenset) else frozenset(excluded)
        positions = sorted(at for rank in self._excluded if (at := position_of(rank, ranks)) is not None)
        # How many ranks that are kept precede each of those left out, ascending.
        self._offsets = [at - earlier for earlier, at in enumerate(positions)]

    def __len__(self) -> int:
        return len(self._ranks) - len(self._offsets)

    def _at(self, position: int) -> int:
        return self._ranks[position + bisect_right(self._offsets, position)]

    def __iter__(self) -> Iterator[int]:
        return (rank for rank in self._ranks if rank not in self._excluded)

    def __contains__(self, rank: object) -> bool:
        if not isinstance(rank, int) or rank in self._excluded:
            return False
        return position_of(rank, self._ranks) is not None


def position_of(rank: int, ranks: Sequence[int]) -> int | None:
    """Return the position of ``rank`` in ascending ``ranks``, in logarithmic time; None if it is not there."""
    if isinstance(ranks, AllBut):
        return rank - (rank > ranks.rank) if rank in ranks else None
    at = bisect_left(ranks, rank)
    return at if at < len(ranks) and ranks[at] == rank else None


def added_to(ranks: Sequence[int], rank: int) -> Sequence[int]:
    """Return ascending ``ranks`` with one more; a full graph stays a view when it grows by the next rank."""
    if isinstance(ranks, AllBut) and rank == ranks.size + (ranks.rank == ranks.size):
        return AllBut(ranks.rank, rank + 1)
    return tuple(sorted({*ranks, rank}))
