"""Placement methods: which part of which table is stored on which server.

A table is one tensor of the model. A placement is an immutable value with one method, ``decide(tables, servers)``,
which returns the partitions of tables for each server. For a custom one, inherit from :class:`Placement`.
:func:`checked` calls it and verifies that every element lies on exactly one server. :func:`moves` lists what must move
when servers are added or removed.

Sources: P.-Y. Wu, *Versatile Communication Optimization for Deep Learning by Modularized Parameter Server* (2018),
sections 2.3.1 and 4.2; X. Yao, X. Wu, C.-L. Wang, *FluentPS* (2019), section III-A.
"""

from __future__ import annotations

import abc
import heapq
import itertools
import operator
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

from gossipx import specs
from gossipx.errors import UsageError

S = TypeVar("S", bound=Hashable)
"""A server's identity: a number or a name."""


@dataclass(frozen=True)
class Table:
    """One tensor of a model.

    Attributes:
        name: for messages.
        size: the number of elements, from 0.
    """

    name: str
    size: int

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"table '{self.name}' has {self.size} elements: a size is not negative")


@dataclass(frozen=True)
class Partition:
    """Elements [``start``, ``stop``) of the flattened table number ``table``, from 0."""

    table: int
    start: int
    stop: int


@dataclass(frozen=True)
class Placement(abc.ABC):
    """Decides which server stores which part of each table."""

    @abc.abstractmethod
    def decide(self, tables: Sequence[Table], servers: int) -> list[list[Partition]]:
        """Return for each server, from 0, the partitions that it stores, in order of tables.

        Every element of every table must be in exactly one partition. A table without elements is placed, too: one
        server stores its partition [0, 0).

        Args:
            tables: in the model's order.
            servers: the number of servers, at least 1.
        """


@final
@dataclass(frozen=True)
class Range(Placement):
    """Whole tables in order, as in ps-lite: their numbers are the keys, cut into equal ranges.

    The numbers of tables per server differ by at most one, whatever the tables' sizes.
    """

    def decide(self, tables: Sequence[Table], servers: int) -> list[list[Partition]]:
        cuts = _cuts(len(tables), servers)
        return [
            [Partition(number, 0, tables[number].size) for number in range(start, stop)]
            for start, stop in itertools.pairwise(cuts)
        ]


@final
@dataclass(frozen=True)
class Greedy(Placement):
    """Each table, in order, whole to the server with the fewest elements so far (TensorFlow's greedy strategy).

    Ties go to the first server.
    """

    def decide(self, tables: Sequence[Table], servers: int) -> list[list[Partition]]:
        return _to_the_least_loaded(tables, range(len(tables)), servers)


@final
@dataclass(frozen=True)
class Uniform(Placement):
    """Each table split over all servers evenly; each server's share of a table, and of all tables, is even to one
    element.

    Elements are dealt like cards, continuing where the previous table ended, so that the servers take turns at the odd
    ones. Each server's elements of a table are then stored as one range.
    """

    def decide(self, tables: Sequence[Table], servers: int) -> list[list[Partition]]:
        placed: list[list[Partition]] = [[] for _ in range(servers)]
        before = 0
        for number, table in enumerate(tables):
            start = 0
            for server in range(servers):
                stop = start + _dealt(before + table.size, server, servers) - _dealt(before, server, servers)
                if stop > start:
                    placed[server].append(Partition(number, start, stop))
                start = stop
            if not table.size:
                placed[before % servers].append(Partition(number, 0, 0))
            before += table.size
        return placed


@final
@dataclass(frozen=True)
class RoundRobin(Placement):
    """Whole tables to the servers in turn (Modularized Parameter Server, Code 4.1; TensorFlow's default)."""

    def decide(self, tables: Sequence[Table], servers: int) -> list[list[Partition]]:
        placed: list[list[Partition]] = [[] for _ in range(servers)]
        for number, table in enumerate(tables):
            placed[number % servers].append(Partition(number, 0, table.size))
        return placed


@final
@dataclass(frozen=True)
class Heuristic(Placement):
    """Whole tables, the largest first, each to the server with the fewest elements.

    Modularized Parameter Server, Algorithm 2.

    Ties go to the first table and the first server. No server stores more than 4/3 of the largest load in the best
    placement of whole tables (R. L. Graham, 1969).
    """

    def decide(self, tables: Sequence[Table], servers: int) -> list[list[Partition]]:
        largest_first = sorted(range(len(tables)), key=lambda number: -tables[number].size)
        return _to_the_least_loaded(tables, largest_first, servers)


@final
@dataclass(frozen=True)
class Sliced(Placement):
    """All tables in sequence, cut into even ranges: FluentPS's elastic parameter slicing (section III-A).

    Servers are even to one element, and there are fewer than ``tables + servers`` partitions: only tables that a cut
    goes through are spread over two servers or more.

    When one of N servers joins or leaves, the others stay in order and the ranges are made even again. The share of all
    elements that moves is 1/2 − p(N − 1 − p) / (N(N − 1)), to within N elements, where p is the position of the joining
    or leaving server, from 0, and N includes it. That is half of them at either end. In the middle, where
    :func:`seated` inserts it, it is 1/4 + 1/(4N), or 1/4 + 1/(4(N − 1)) for even N. Any method must move 1/N to or from
    that server; the rest is the price of contiguous ranges.
    """

    def decide(self, tables: Sequence[Table], servers: int) -> list[list[Partition]]:
        edges = list(itertools.accumulate((table.size for table in tables), initial=0))
        cuts = _cuts(edges[-1], servers)
        placed: list[list[Partition]] = [[] for _ in range(servers)]
        for number, (first, end) in enumerate(itertools.pairwise(edges)):
            inside = sorted(set(cuts[bisect_right(cuts, first) : bisect_left(cuts, end)]))
            for start, stop in itertools.pairwise([first, *inside, end]):
                server = bisect_right(cuts, start, hi=servers) - 1
                placed[server].append(Partition(number, start - first, stop - first))
        return placed


BUILT_IN: dict[str, Callable[[], Placement]] = {
    "range": Range,
    "greedy": Greedy,
    "uniform": Uniform,
    "round-robin": RoundRobin,
    "heuristic": Heuristic,
    "sliced": Sliced,
}


def parse(spec: str | Placement) -> Placement:
    """Return the placement for ``spec``.

    Args:
        spec: a name of :data:`BUILT_IN`, or a placement, which is returned as it is.

    Raises:
        UsageError: naming a valid spec.
    """
    return spec if isinstance(spec, Placement) else specs.build(spec, BUILT_IN, "placement")


def checked(placement: Placement, tables: Sequence[Table], servers: int) -> list[list[Partition]]:
    """Call ``placement`` and verify that every element of every table lies on exactly one server.

    The result is sorted by table, and within a table by element. Empty partitions are removed, except for one of each
    empty table.

    Args:
        placement: built in or custom.
        tables: in the model's order.
        servers: the number of servers, at least 1.

    Raises:
        UsageError: one line with the class, the table and the fault.
    """
    if servers < 1:
        raise UsageError(f"a placement needs at least 1 server, not {servers}")
    name = type(placement).__name__
    decided: Any = placement.decide(tables, servers)
    if not isinstance(decided, list | tuple) or not all(isinstance(held, list | tuple) for held in decided):
        raise UsageError(f"placement {name}: decide must return a list with a list of partitions for each server")
    if len(decided) != servers:
        raise UsageError(f"placement {name}: it returned {len(decided)} servers instead of {servers}")
    held = {server: [_whole(one, tables, name) for one in parts] for server, parts in enumerate(decided)}
    spans = _spans(held)
    placed: list[list[Partition]] = [[] for _ in range(servers)]
    for number, table in enumerate(tables):
        fault = _fault(spans.get(number, []), table.size)
        if fault:
            raise UsageError(f"placement {name}: {_describe(table)}: {fault}")
        for start, stop, server in spans[number]:
            placed[server].append(Partition(number, start, stop))
    return placed


@dataclass(frozen=True)
class Move(Generic[S]):
    """Elements [``start``, ``stop``) of a table that change servers.

    Attributes:
        table: its number, from 0.
        start: the first element; equal to ``stop`` for a table without elements.
        stop: the end, exclusive.
        source: the server that stored them; it may have left.
        target: the server that stores them now.
    """

    table: int
    start: int
    stop: int
    source: S
    target: S


def moves(before: Mapping[S, Sequence[Partition]], after: Mapping[S, Sequence[Partition]]) -> list[Move[S]]:
    """Return what must move from one placement to another, and nothing else, in as few and as long pieces as possible.

    Args:
        before: server to its partitions, such as ``dict(zip(servers, checked(...), strict=True))``.
        after: the same for the new servers and the same tables; a server that stays keeps its key.

    Returns:
        The moves by table, and within a table by element.

    Raises:
        UsageError: one of the two does not place every element once; one line with the table.
    """
    old, new = _spans(before), _spans(after)
    result: list[Move[S]] = []
    for table in sorted(old.keys() | new.keys()):
        sizes = {spans[table][-1][1] for spans in (old, new) if table in spans}
        for when, spans in (("before", old), ("after", new)):
            fault = _fault(spans.get(table, []), max(sizes))
            if fault:
                raise UsageError(f"table {table} {when} the move: {fault}")
        result += _changes(table, old[table], new[table])
    return result


def seated(servers: Sequence[S], joins: S) -> list[S]:
    """Return the order of servers with a new one inserted in the middle.

    Placements that cut evenly in order then move little more than a quarter (``uniform`` and ``sliced`` of all
    elements, ``range`` of all tables). With the new server at an end it would be half (:class:`Sliced` has the
    formula).
    """
    middle = len(servers) // 2
    return [*servers[:middle], joins, *servers[middle:]]


def bytes_by_server(placed: Iterable[Iterable[Partition]], element: int = 4) -> list[int]:
    """Return the bytes stored on each server.

    Args:
        placed: for each server, its partitions.
        element: bytes per element; 4 is float32's.
    """
    return [element * sum(partition.stop - partition.start for partition in held) for held in placed]


def variation(loads: Sequence[int]) -> float:
    """Return the coefficient of variation over servers: standard deviation (of the whole population) by mean.

    This is the measure of Modularized Parameter Server's Figure 5.3: 0 is even. It is also 0 if all loads are 0.
    """
    mean = statistics.fmean(loads)
    return statistics.pstdev(loads) / mean if mean else 0.0


# --- helpers of the methods -------------------------------------------------------------------------


def _cuts(total: int, servers: int) -> list[int]:
    """Cut 0 to ``total`` into ranges that are equal to within one: server k has [cuts[k], cuts[k + 1])."""
    return [total * server // servers for server in range(servers + 1)]


def _dealt(cards: int, server: int, servers: int) -> int:
    """Return the number of cards of one server when ``cards`` are dealt one by one, starting at server 0."""
    return (cards + servers - 1 - server) // servers


def _to_the_least_loaded(tables: Sequence[Table], order: Iterable[int], servers: int) -> list[list[Partition]]:
    """Assign whole tables in ``order``, each to the server with the fewest elements; ties go to the first server."""
    loads = [(0, server) for server in range(servers)]  # a heap
    placed: list[list[Partition]] = [[] for _ in range(servers)]
    for number in order:
        size = tables[number].size
        load, server = loads[0]
        heapq.heapreplace(loads, (load + size, server))
        placed[server].append(Partition(number, 0, size))
    return [sorted(held, key=lambda partition: partition.table) for held in placed]


# --- checks --------------------------------------------------------------------------------------


def _whole(given: Any, tables: Sequence[Table], name: str) -> Partition:
    """Return a custom placement's partition with plain numbers that lie in their table, or raise a UsageError."""
    if not isinstance(given, Partition):
        raise UsageError(f"placement {name}: a {type(given).__name__} is not a Partition")
    try:
        table, start, stop = (operator.index(number) for number in (given.table, given.start, given.stop))
    except TypeError:
        shown = " ".join(str(given).split())
        raise UsageError(f"placement {name}: {shown:.100} has a number that is not an integer") from None
    if not 0 <= table < len(tables):
        raise UsageError(f"placement {name}: there is no table {table}: tables are 0 to {len(tables) - 1}")
    if not 0 <= start <= stop <= tables[table].size:
        raise UsageError(f"placement {name}: {_describe(tables[table])}: [{start}, {stop}) is out of range")
    return Partition(table, start, stop)


def _describe(table: Table) -> str:
    return f"table '{table.name}' of {table.size} elements"


def _spans(held: Mapping[S, Sequence[Partition]]) -> dict[int, list[tuple[int, int, S]]]:
    """Return (start, stop, server) of each table in order, without empty ones, except for one of a table that has no
    others.
    """
    result: dict[int, list[tuple[int, int, S]]] = {}
    for server, partitions in held.items():
        for one in partitions:
            result.setdefault(one.table, []).append((one.start, one.stop, server))
    for table, spans in result.items():
        spans.sort(key=lambda span: span[:2])
        result[table] = [span for span in spans if span[0] < span[1]] or spans[:1]
    return result


def _fault(spans: Sequence[tuple[int, int, S]], size: int) -> str:
    """Return what is wrong with a table's spans, or an empty string if each of ``size`` elements is in exactly one."""
    if not spans:
        return "it lies on no server"
    end, holder = 0, spans[0][2]
    for start, stop, server in spans:
        if start > end:
            return f"elements [{end}, {start}) lie on no server"
        if start < end:
            return f"elements [{start}, {min(end, stop)}) lie twice, on server {holder} and on server {server}"
        end, holder = stop, server
    return f"elements [{end}, {size}) lie on no server" if end < size else ""


def _changes(table: int, old: Sequence[tuple[int, int, S]], new: Sequence[tuple[int, int, S]]) -> list[Move[S]]:
    """Return the moves of one table, from spans that both cover it."""
    result: list[Move[S]] = []
    mine, theirs = iter(old), iter(new)
    span, other = next(mine, None), next(theirs, None)
    while span and other:
        start, stop = max(span[0], other[0]), min(span[1], other[1])
        source, target = span[2], other[2]
        if source != target:
            if result and (result[-1].stop, result[-1].source, result[-1].target) == (start, source, target):
                start = result.pop().start  # merge with the previous move
            result.append(Move(table, start, stop, source, target))
        span = next(mine, None) if span[1] == stop else span
        other = next(theirs, None) if other[1] == stop else other
    return result
