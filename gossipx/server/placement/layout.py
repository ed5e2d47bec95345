"""Layouts: which peer holds which shard, which partitions lie in it, and what moves from one layout to another.

A layout follows from the list of servers alone, so all peers of a run compute the same one without communicating it.
When servers are added or removed, the remaining ones keep their order and new ones are inserted in the middle
(:func:`~gossipx.server.placement.seated`). Elements that a peer holds before and after do not move
(:func:`~gossipx.server.placement.moves`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import final

from gossipx.server.placement import Partition, Placement, Table, checked, moves, seated
from gossipx.server.placement.buckets import Bucket, buckets, usual


@dataclass(frozen=True)
class Layout:
    """The location of all tables of a run.

    Attributes:
        servers: for each shard, the rank that holds it.
        placed: for each shard, its partitions.
        cut: for each shard, its buckets.
    """

    servers: tuple[int, ...]
    placed: list[list[Partition]]
    cut: list[list[Bucket]]

    @property
    def buckets(self) -> tuple[int, ...]:
        """The number of buckets of each shard."""
        return tuple(map(len, self.cut))

    def held_by(self, rank: int) -> list[Partition]:
        """Return all partitions that a peer holds."""
        held = zip(self.servers, self.placed, strict=True)
        return [one for holder, partitions in held if holder == rank for one in partitions]


@dataclass(frozen=True)
class Batch:
    """The pieces that move from one peer to another in one message.

    Attributes:
        source, target: ranks.
        pieces: of tables; none is empty.
    """

    source: int
    target: int
    pieces: tuple[Partition, ...]

    @property
    def plain(self) -> tuple[tuple[int, int, int], ...]:
        """The pieces as effects carry them: (table, start, stop)."""
        return tuple((one.table, one.start, one.stop) for one in self.pieces)


@final
class Layouts:
    """Makes the layouts of one run.

    Args:
        tables: in the model's order.
        placement: decides which partition lies on which server.
        kind: returns a table's kind, which all tables of a bucket share, and its bytes per element.
        least: the size in bytes at which a bucket or a batch is full; None: the default.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        placement: Placement,
        kind: Callable[[int], tuple[object, int]],
        least: int | None,
    ):
        self._tables, self._placement, self._kind, self._least = tables, placement, kind, least

    def make(self, servers: Sequence[int]) -> Layout:
        """Return the layout with these servers, by shard.

        Raises:
            UsageError: as :func:`~gossipx.server.placement.checked`.
        """
        placed = checked(self._placement, self._tables, len(servers))
        return Layout(tuple(servers), placed, [self._cut(held) for held in placed])

    def _cut(self, held: Sequence[Partition]) -> list[Bucket]:
        nbytes = sum((one.stop - one.start) * self._kind(one.table)[1] for one in held)
        return buckets(held, self._kind, usual(nbytes) if self._least is None else self._least)

    def batches(self, before: Layout, after: Layout) -> list[Batch]:
        """Return the pieces that must move between peers, and no others."""
        ranks = {*before.servers, *after.servers}
        old, new = ({rank: layout.held_by(rank) for rank in ranks} for layout in (before, after))
        pieces: dict[tuple[int, int], list[Partition]] = {}
        for move in moves(old, new):
            if move.start < move.stop:
                piece = Partition(move.table, move.start, move.stop)
                pieces.setdefault((move.source, move.target), []).append(piece)
        return [
            Batch(source, target, tuple(found[one.first : one.stop]))
            for (source, target), found in sorted(pieces.items())
            for one in self._cut(found)
        ]


def order(servers: Sequence[int], wanted: Collection[int]) -> list[int]:
    """Return the servers ``wanted``, by shard: present ones in their order, new ones inserted."""
    ordered = [rank for rank in servers if rank in wanted]
    for rank in sorted(set(wanted) - set(servers)):
        ordered = seated(ordered, rank)
    return ordered


def common(ours: Sequence[Partition], others: Sequence[Partition]) -> list[Partition]:
    """Return the parts that lie in both; none is empty."""
    return [
        Partition(one.table, start, stop)
        for one in ours
        for other in others
        if one.table == other.table and (start := max(one.start, other.start)) < (stop := min(one.stop, other.stop))
    ]
