"""What each placement makes of a model: Modularized Parameter Server's Figures 5.2 and 5.3 for any tables.

Pure arithmetic over tables; whoever asks brings the tables' names and sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gossipx.server.placement import Placement, Table, bytes_by_server, checked, variation

FLOAT32 = 4
"""Bytes an element."""


@dataclass(frozen=True)
class SizeClass:
    """The tables of one decimal order of size (a bar of Figure 5.2).

    Attributes:
        at_least: the fewest elements that count.
        at_most: the most.
        tables: how many there are.
        elements: of all of them together.
    """

    at_least: int
    at_most: int
    tables: int
    elements: int


@dataclass(frozen=True)
class Outcome:
    """What one placement makes of a model (a bar of Figure 5.3).

    Attributes:
        placement: its name.
        bytes: on each server, in float32.
        variation: the coefficient of variation of ``bytes``; 0 is even.
        partitions: on all servers together: messages, if each is sent by itself.
    """

    placement: str
    bytes: list[int]
    variation: float
    partitions: int


@dataclass(frozen=True)
class Survey:
    """A model's tables, and what placements make of them.

    Attributes:
        model: its name.
        servers: how many share it.
        tables: how many it has.
        elements: of all of them together.
        sizes: by decimal order, ascending, from the first to the last that occurs; empty ones between them are there.
        placements: in the order in which they were given.
    """

    model: str
    servers: int
    tables: int
    elements: int
    sizes: list[SizeClass]
    placements: list[Outcome]


def survey(model: str, tables: Sequence[Table], servers: int, placements: Mapping[str, Placement]) -> Survey:
    """Place ``tables`` by each of ``placements`` and see what comes of it.

    Args:
        model: its name.
        tables: in the model's order.
        servers: how many there are, at least 1.
        placements: by name.

    Raises:
        UsageError: a placement that does not place every element once.
    """
    outcomes = []
    for name, placement in placements.items():
        placed = checked(placement, tables, servers)
        loads = bytes_by_server(placed, FLOAT32)
        outcomes.append(Outcome(name, loads, variation(loads), sum(len(held) for held in placed)))
    elements = sum(table.size for table in tables)
    return Survey(model, servers, len(tables), elements, size_classes(tables), outcomes)


def size_classes(tables: Sequence[Table]) -> list[SizeClass]:
    """How many tables have 1 to 9 elements, 10 to 99, and so on; those without any come first, as 0 to 0."""
    orders = [len(str(table.size)) if table.size else 0 for table in tables]
    counts = Counter(orders)
    classes = []
    for order in range(min(orders, default=0), max(orders, default=-1) + 1):
        elements = sum(table.size for table, of in zip(tables, orders, strict=True) if of == order)
        at_least, at_most = (10 ** (order - 1), 10**order - 1) if order else (0, 0)
        classes.append(SizeClass(at_least, at_most, counts[order], elements))
    return classes
