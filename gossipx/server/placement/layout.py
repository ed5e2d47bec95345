"""Layouts: which peer holds which shard, what lies in it, and what has to move from one layout to another.

A layout follows from its servers alone, so that all peers of a run come to the same one without a word of it. When
servers come or go, those that stay keep their order and those that join are seated in the middle
(:func:`~gossipx.server.placement.seated`); what a peer holds before and after stays where it is
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
    """Where all tables of a run lie.

    Attributes:
        servers: by shard, the rank that holds it.
        placed: by shard, its partitions.
        cut: by shard, its buckets.
    """

    servers: tuple[int, ...]
    placed: list[list[Partition]]
    cut: list[list[Bucket]]

    @property
    def buckets(self) -> tuple[int, ...]:
        """By shard, how many it has."""
        return tuple(map(len, self.cut))

    def held_by(self, rank: int) -> list[Partition]:
        """All partitions that lie with a peer."""
        held = zip(self.servers, self.placed, strict=True)
        return [one for holder, partitions in held if holder == rank for one in partitions]


@dataclass(frozen=True)
class Batch:
    """What goes from one peer to another in one message.

    Attributes:
        source, target: ranks.
        pieces: of tables; none is empty.
    """

    source: int
    target: int
    pieces: tuple[Partition, ...]

    @property
    def plain(self) -> tuple[tuple[int, int, int], ...]:
        """The pieces as effects have them."""
        return tuple((one.table, one.start, one.stop) for one in self.pieces)


@final
class Layouts:
    """Makes the layouts of one run.

    Args:
        tables: in the model's order.
        placement: says what lies where.
        kind: of a table by its number: what all tables of a bucket have alike, and bytes an element.
        least: bytes from which on a bucket, or a batch, takes no more; None: as usual.
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
        """The layout of these servers, by shard.

        Raises:
            UsageError: as :func:`~gossipx.server.placement.checked`.
        """
        placed = checked(self._placement, self._tables, len(servers))
        return Layout(tuple(servers), placed, [self._cut(held) for held in placed])

    def _cut(self, held: Sequence[Partition]) -> list[Bucket]:
        nbytes = sum((one.stop - one.start) * self._kind(one.table)[1] for one in held)
        return buckets(held, self._kind, usual(nbytes) if self._least is None else self._least)

    def batches(self, before: Layout, after: Layout) -> list[Batch]:
        """All that has to go from peer to peer, and nothing else."""
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
    """The servers ``wanted``, by shard: those that there are already in their order, the others seated among them."""
    ordered = [rank for rank in servers if rank in wanted]
    for rank in sorted(set(wanted) - set(servers)):
        ordered = seated(ordered, rank)
    return ordered


def common(some: Sequence[Partition], others: Sequence[Partition]) -> list[Partition]:
    """The parts that lie in both; none is empty."""
    return [
        Partition(one.table, start, stop)
        for one in some
        for other in others
        if one.table == other.table and (start := max(one.start, other.start)) < (stop := min(one.stop, other.stop))
    ]
