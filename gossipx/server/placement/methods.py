"""Placement: which part of which table lies on which server.

A table is one tensor of the model. A placement is an immutable value with one method, ``decide(tables, servers)``,
which says for each server what partitions of tables lie there. One of your own is a subclass of :class:`Placement`;
:func:`checked` calls it and sees that every element lies somewhere, once. :func:`moves` tells what has to move when a
server comes or goes.

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
"""What tells servers apart: a number, a name."""


@dataclass(frozen=True)
class Table:
    """One tensor of a model.

    Attributes:
        name: for people.
        size: elements, from 0.
    """

    name: str
    size: int

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"table '{self.name}' has {self.size} elements: a size is not negative")


@dataclass(frozen=True)
class Partition:
    """Elements [``start``, ``stop``) of the flattened table of number ``table``, from 0."""

    table: int
    start: int
    stop: int


@dataclass(frozen=True)
class Placement(abc.ABC):
    """Says where tables lie."""

    @abc.abstractmethod
    def decide(self, tables: Sequence[Table], servers: int) -> list[list[Partition]]:
        """By server, from 0, the partitions that lie there, in order of tables.

        Every element of every table is in exactly one partition. A table without elements is placed, too: one server
        holds the partition [0, 0) of it.

        Args:
            tables: in the model's order.
            servers: how many there are, at least 1.
        """


@final
@dataclass(frozen=True)
class Range(Placement):
    """Whole tables in order, ps-lite's way: their numbers are the keys, cut into equal ranges.

    Servers get equally many tables (to one), whatever the tables' sizes.
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
    """Each table, as it comes, whole to the server with the fewest elements so far (TensorFlow's greedy strategy).

    Of servers that have equally few the first takes it.
    """

    def decide(self, tables: Sequence[Table], servers: int) -> list[list[Partition]]:
        return _to_the_least_loaded(tables, range(len(tables)), servers)


@final
@dataclass(frozen=True)
class Uniform(Placement):
    """Each table split over all servers, evenly to one element; all tables together, too, are even to one element.

    Elements are dealt like cards, on from where the table before ended, so that the servers take turns at the odd ones;
    then what a server was dealt of a table lies together.
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

    Of tables of one size the first goes first, and of servers that have equally few the first takes it. No server has
    more than 4/3 of what the fullest has in the best way to place whole tables (R. L. Graham, 1969).
    """

    def decide(self, tables: Sequence[Table], servers: int) -> list[list[Partition]]:
        largest_first = sorted(range(len(tables)), key=lambda number: -tables[number].size)
        return _to_the_least_loaded(tables, largest_first, servers)


@final
@dataclass(frozen=True)
class Sliced(Placement):
    """All tables one after the other, cut into even ranges: FluentPS's elastic parameter slicing (section III-A).

    Servers are even to one element, and there are fewer than ``tables + servers`` partitions: only tables that a cut
    goes through lie on two servers or more.

    When one of N servers joins or goes, the others stay in order and the ranges are made even again. Of all elements
    that moves the share 1/2 − p(N − 1 − p) / (N(N − 1)), to N elements, p being its position from 0: half of them at
    either end, and in the middle, where :func:`seated` lets it join, 1/4 + 1/(4N), or for even N 1/4 + 1/(4(N − 1)).
    1/N is what has to come to, or to leave, any one of N; the rest is the price of ranges that stay in one piece.
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
    """The placement that ``spec`` means.

    Args:
        spec: a name of :data:`BUILT_IN`, or a placement, which is taken as it is.

    Raises:
        UsageError: naming what would have been right.
    """
    return spec if isinstance(spec, Placement) else specs.build(spec, BUILT_IN, "placement")


def checked(placement: Placement, tables: Sequence[Table], servers: int) -> list[list[Partition]]:
    """What ``placement`` decides, seen to be whole: every element of every table lies on one server.

    Partitions are put in order of tables, and within a table of elements. Those without elements are left out, but for
    one of each table that has none.

    Args:
        placement: a built-in one or a user's.
        tables: in the model's order.
        servers: how many there are, at least 1.

    Raises:
        UsageError: one line with the class, the table and what is wrong.
    """
    if servers < 1:
        raise UsageError(f"a placement is for at least 1 server, and there are {servers}")
    name = type(placement).__name__
    decided: Any = placement.decide(tables, servers)
    if not isinstance(decided, list | tuple) or not all(isinstance(held, list | tuple) for held in decided):
        raise UsageError(f"placement {name}: decide gives a list with a list of partitions for each server")
    if len(decided) != servers:
        raise UsageError(f"placement {name}: it places on {len(decided)} servers, and there are {servers}")
    held = {server: [_whole(one, tables, name) for one in parts] for server, parts in enumerate(decided)}
    spans = _spans(held)
    placed: list[list[Partition]] = [[] for _ in range(servers)]
    for number, table in enumerate(tables):
        fault = _fault(spans.get(number, []), table.size)
        if fault:
            raise UsageError(f"placement {name}: {_told(table)}: {fault}")
        for start, stop, server in spans[number]:
            placed[server].append(Partition(number, start, stop))
    return placed


@dataclass(frozen=True)
class Move(Generic[S]):
    """Elements [``start``, ``stop``) of a table that change servers.

    Attributes:
        table: its number, from 0.
        start: the first element; equal to ``stop`` for a table without elements.
        stop: the one behind the last.
        source: the server that had them; it may be gone.
        target: the server that has them now.
    """

    table: int
    start: int
    stop: int
    source: S
    target: S


def moves(before: Mapping[S, Sequence[Partition]], after: Mapping[S, Sequence[Partition]]) -> list[Move[S]]:
    """What has to move from one placement to another, and nothing else: as few and as long pieces as there can be.

    Args:
        before: server to its partitions, such as ``dict(zip(servers, checked(...), strict=True))``.
        after: the same of the servers that there are now, of the same tables; who stays keeps its key.

    Returns:
        By table, and within a table by element.

    Raises:
        UsageError: the two do not place the same elements once each; one line with the table.
    """
    old, new = _spans(before), _spans(after)
    found: list[Move[S]] = []
    for table in sorted(old.keys() | new.keys()):
        sizes = {spans[table][-1][1] for spans in (old, new) if table in spans}
        for when, spans in (("before", old), ("after", new)):
            fault = _fault(spans.get(table, []), max(sizes))
            if fault:
                raise UsageError(f"table {table} {when} the move: {fault}")
        found += _changes(table, old[table], new[table])
    return found


def seated(servers: Sequence[S], joins: S) -> list[S]:
    """The order of servers with one that joins: in the middle.

    Placements that cut evenly in order then move little more than a quarter (``uniform`` and ``sliced`` of all
    elements, ``range`` of all tables); with the new one at an end it is half (:class:`Sliced` has the formula).
    """
    middle = len(servers) // 2
    return [*servers[:middle], joins, *servers[middle:]]


def bytes_by_server(placed: Iterable[Iterable[Partition]], element: int = 4) -> list[int]:
    """Bytes that lie on each server, in its order.

    Args:
        placed: by server, its partitions.
        element: bytes an element; 4 is float32's.
    """
    return [element * sum(partition.stop - partition.start for partition in held) for held in placed]


def variation(loads: Sequence[int]) -> float:
    """The coefficient of variation over servers: standard deviation (of the whole population) by mean.

    The figure of Modularized Parameter Server's Figure 5.3: 0 is even. 0, too, where nothing lies anywhere.
    """
    mean = statistics.fmean(loads)
    return statistics.pstdev(loads) / mean if mean else 0.0


# --- how it is decided ----------------------------------------------------------------------------


def _cuts(total: int, servers: int) -> list[int]:
    """0 to ``total`` in equal ranges, to one: server k has [cuts[k], cuts[k + 1])."""
    return [total * server // servers for server in range(servers + 1)]


def _dealt(cards: int, server: int, servers: int) -> int:
    """How many of so many cards a server has when they are dealt one by one, from server 0 on."""
    return (cards + servers - 1 - server) // servers


def _to_the_least_loaded(tables: Sequence[Table], order: Iterable[int], servers: int) -> list[list[Partition]]:
    """Whole tables in ``order``, each to the server with the fewest elements, of several to the first."""
    loads = [(0, server) for server in range(servers)]  # a heap
    placed: list[list[Partition]] = [[] for _ in range(servers)]
    for number in order:
        size = tables[number].size
        load, server = loads[0]
        heapq.heapreplace(loads, (load + size, server))
        placed[server].append(Partition(number, 0, size))
    return [sorted(held, key=lambda partition: partition.table) for held in placed]


# --- how it is checked ----------------------------------------------------------------------------


def _whole(given: Any, tables: Sequence[Table], name: str) -> Partition:
    """A user's partition with plain numbers that lie in their table, or a UsageError."""
    if not isinstance(given, Partition):
        raise UsageError(f"placement {name}: a {type(given).__name__} is no Partition")
    try:
        table, start, stop = (operator.index(number) for number in (given.table, given.start, given.stop))
    except TypeError:
        shown = " ".join(str(given).split())
        raise UsageError(f"placement {name}: {shown:.100} has a number that is not whole") from None
    if not 0 <= table < len(tables):
        raise UsageError(f"placement {name}: there is no table {table}: they are 0 to {len(tables) - 1}")
    if not 0 <= start <= stop <= tables[table].size:
        raise UsageError(f"placement {name}: {_told(tables[table])}: [{start}, {stop}) does not lie in it")
    return Partition(table, start, stop)


def _told(table: Table) -> str:
    return f"table '{table.name}' of {table.size} elements"


def _spans(held: Mapping[S, Sequence[Partition]]) -> dict[int, list[tuple[int, int, S]]]:
    """By table, (start, stop, server) in order; without empty ones, but for one of a table that has no others."""
    found: dict[int, list[tuple[int, int, S]]] = {}
    for server, partitions in held.items():
        for one in partitions:
            found.setdefault(one.table, []).append((one.start, one.stop, server))
    for table, spans in found.items():
        spans.sort(key=lambda span: span[:2])
        found[table] = [span for span in spans if span[0] < span[1]] or spans[:1]
    return found


def _fault(spans: Sequence[tuple[int, int, S]], size: int) -> str:
    """What is wrong with a table's spans, in words; nothing if they have each of ``size`` elements once."""
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
    """The moves of one table, from spans that both cover it."""
    found: list[Move[S]] = []
    mine, theirs = iter(old), iter(new)
    span, other = next(mine, None), next(theirs, None)
    while span and other:
        start, stop = max(span[0], other[0]), min(span[1], other[1])
        source, target = span[2], other[2]
        if source != target:
            if found and (found[-1].stop, found[-1].source, found[-1].target) == (start, source, target):
                start = found.pop().start  # one piece, though either side has it in several
            found.append(Move(table, start, stop, source, target))
        span = next(mine, None) if span[1] == stop else span
        other = next(theirs, None) if other[1] == stop else other
    return found
