"""The measures by which *Modularized Parameter Server* compares placements (Figures 5.1 and 5.3)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gossipx.server.placement import Placement, Table, checked


@dataclass(frozen=True)
class Placed:
    """A model on servers: the bytes of each, in float32, and the number of partitions of all together, which is the
    number of messages without buckets."""

    bytes: list[int]
    partitions: int

    @property
    def variation(self) -> float:
        """The coefficient of variation of the bytes: their standard deviation by their mean; 0 is even."""
        return statistics.pstdev(self.bytes) / statistics.fmean(self.bytes)


def placed(tables: Sequence[Table], servers: int, placement: Placement) -> Placed:
    """Place tables, in the model's order."""
    made = checked(placement, tables, servers)
    return Placed([4 * sum(one.stop - one.start for one in held) for held in made], sum(map(len, made)))
