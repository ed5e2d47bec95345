"""Buckets: groups of table partitions that travel between a worker and a shard in one message.

A message costs about as much as a good part of a megabyte. So consecutive small partitions are grouped until they are
worth one message, and a large partition gets its own. A bucket is pushed as soon as autograd has computed all of its
gradients, and only computation that uses its tables waits for its pull.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gossipx.server.placement import Partition

SMALLEST, LARGEST = 2**20, 2**22
"""The range of the default bucket size in bytes: 8 to 34 ms at 1 Gbit/s, some ten times the cost of a message."""
AT_LEAST = 4
"""The default number of buckets in a shard, as far as they are at least SMALLEST: one travels while the next one's
gradients are computed.
"""


@dataclass(frozen=True)
class Bucket:
    """The partitions ``first`` to ``stop`` − 1 of a shard's list."""

    first: int
    stop: int


def usual(nbytes: int) -> int:
    """Return the default size in bytes at which a bucket of a shard of ``nbytes`` is full."""
    return max(SMALLEST, min(LARGEST, nbytes // AT_LEAST))


def buckets(partitions: Sequence[Partition], kind: Callable[[int], tuple[object, int]], least: int) -> list[Bucket]:
    """Cut a shard's partitions into buckets, in order.

    Args:
        partitions: the shard's.
        kind: returns a table's kind, which all tables of a bucket share (their dtype), and its bytes per element.
        least: the size in bytes at which a bucket is full; 0: one partition per bucket.
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
