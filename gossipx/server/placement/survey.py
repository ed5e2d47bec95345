"""A comparison of placements on one model: Modularized Parameter Server's Figures 5.2 and 5.3 for any tables.

This is pure arithmetic over table names and sizes, which the caller provides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gossipx.server.placement import Placement, Table, bytes_by_server, checked, variation

FLOAT32 = 4
"""Bytes per element."""


@dataclass(frozen=True)
class SizeClass:
    """The tables of one decimal order of size (a bar of Figure 5.2).

    Attributes:
        at_least: the smallest number of elements in the class.
        at_most: the largest.
        tables: the number of tables.
        elements: of all of them together.
    """

    at_least: int
    at_most: int
    tables: int
    elements: int


@dataclass(frozen=True)
class Outcome:
    """The result of one placement on a model (a bar of Figure 5.3).

    Attributes:
        placement: its name.
        bytes: on each server, in float32.
        variation: the coefficient of variation of ``bytes``; 0 is even.
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
        model: its name.
        servers: the number of servers.
        tables: the number of tables.
        elements: of all tables together.
        sizes: by decimal order, ascending, from the first to the last that occurs, including empty classes in between.
        placements: in the given order.
    """

    model: str
    servers: int
    tables: int
    elements: int
    sizes: list[SizeClass]
    placements: list[Outcome]


def survey(model: str, tables: Sequence[Table], servers: int, placements: Mapping[str, Placement]) -> Survey:
    """Place ``tables`` by each of ``placements`` and compare the results.

    Args:
        model: its name.
        tables: in the model's order.
        servers: the number of servers, at least 1.
        placements: by name.

    Raises:
        UsageError: a placement does not place every element once.
    """
    outcomes = []
    for name, placement in placements.items():
        placed = checked(placement, tables, servers)
        loads = bytes_by_server(placed, FLOAT32)
        outcomes.append(Outcome(name, loads, variation(loads), sum(len(held) for held in placed)))
    elements = sum(table.size for table in tables)
    return Survey(model, servers, len(tables), elements, size_classes(tables), outcomes)


def size_classes(tables: Sequence[Table]) -> list[SizeClass]:
    """Count the tables with 1 to 9 elements, 10 to 99, and so on; empty tables come first, as class 0 to 0."""
    orders = [len(str(table.size)) if table.size else 0 for table in tables]
    counts = Counter(orders)
    classes = []
    for order in range(min(orders, default=0), max(orders, default=-1) + 1):
        elements = sum(table.size for table, of in zip(tables, orders, strict=True) if of == order)
        at_least, at_most = (10 ** (order - 1), 10**order - 1) if order else (0, 0)
        classes.append(SizeClass(at_least, at_most, counts[order], elements))
    return classes
