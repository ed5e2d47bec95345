"""Buckets: what travels between a worker and a shard in one message.

A message costs as much as a good part of a megabyte, so that partitions that follow one another are put together until
they are worth one; a large one goes alone. Each bucket leaves as soon as autograd has made all of its gradients, and is
waited for by what is computed with its tables alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gossipx.server.placement import Partition

SMALLEST, LARGEST = 2**20, 2**22
"""Bytes of a bucket where nothing else is said: at 1 Gbit/s 8 to 34 ms, some ten times what a message costs."""
AT_LEAST = 4
"""Buckets of a shard, of which one travels while gradients of the next are computed, as far as these are so large."""


@dataclass(frozen=True)
class Bucket:
    """Partitions of one shard, from ``first`` to ``stop`` − 1 of the shard's list."""

    first: int
    stop: int


def usual(nbytes: int) -> int:
    """Bytes from which on a bucket takes no further partition, in a shard of ``nbytes``, where nothing else is said."""
    return max(SMALLEST, min(LARGEST, nbytes // AT_LEAST))


def buckets(partitions: Sequence[Partition], kind: Callable[[int], tuple[object, int]], least: int) -> list[Bucket]:
    """Cut a shard's partitions into buckets, in their order.

    Args:
        partitions: of the shard.
        kind: of a table by its number: what all tables of a bucket have alike (their dtype), and bytes an element.
        least: bytes from which on a bucket takes no further partition; 0: each partition is one.
    """
    made: list[Bucket] = []
    first, size, alike = 0, 0, None
    for number, partition in enumerate(partitions):
        kept_alike, element = kind(partition.table)
        nbytes = (partition.stop - partition.start) * element
        joins = number > first and kept_alike == alike and size + nbytes <= least
        if number > first and not joins:
            made.append(Bucket(first, number))
            first, size = number, 0
        alike = kept_alike
        size += nbytes
    if partitions:
        made.append(Bucket(first, len(partitions)))
    return made
