"""The measures by which *Modularized Parameter Server* compares placements (Figures 5.1 and 5.3)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gossipx.server.placement import Placement, Table, checked

FLOAT32 = 4
"""Bytes per element."""


@dataclass(frozen=True)
class PlacementResult:
    """The result of one placement on a model (a bar of Figure 5.3).

    Attributes:
        placement: its name.
        bytes: on each server, in float32.
        variation: the coefficient of variation of ``bytes``: the standard deviation (of the whole population) by the
            mean; 0 is even.
        partitions: on all servers together; the number of messages without buckets.
    """

    placement: str
    bytes: list[int]
    variation: float
    partitions: int


@dataclass(frozen=True)
class Survey:
    """A model's tables, and the results of placements on them.

    Attributes:
        tables: the number of tables.
        elements: of all tables together.
        placements: in the given order.
    """

    tables: int
    elements: int
    placements: list[PlacementResult]


def survey(tables: Sequence[Table], servers: int, placements: Mapping[str, Placement]) -> Survey:
    """Place ``tables``, in the model's order, by each of ``placements``, and compare the results."""
    results = []
    for name, placement in placements.items():
        placed = checked(placement, tables, servers)
        loads = [FLOAT32 * sum(one.stop - one.start for one in held) for held in placed]
        variation = statistics.pstdev(loads) / statistics.fmean(loads)
        results.append(PlacementResult(name, loads, variation, sum(map(len, placed))))
    return Survey(len(tables), sum(table.size for table in tables), results)
