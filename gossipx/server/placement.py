"""Placement: which part of which table is stored on which server, and in which messages the parts travel.

A table is one tensor of the model. A placement is an immutable value with one method, ``decide(tables, servers)``,
which returns the partitions of tables for each server. For a custom one, inherit from :class:`Placement`.
:func:`checked` calls it and verifies that every element lies on exactly one server. :func:`moves` lists what must move
when servers are added or removed.

A message costs about as much as a good part of a megabyte. So consecutive small partitions are grouped into a
:class:`Bucket`, until they are worth one message, and a large partition gets its own. A bucket is pushed as soon as
autograd has computed all of its gradients, and only computation that uses its tables waits for its pull.

A :class:`Layout` follows from the list of servers alone, so all peers of a run compute the same one without
communicating it. When servers are added or removed, the remaining ones keep their order and new ones are inserted in
the middle (:func:`seated`). Elements that a peer holds before and after do not move.

Sources: P.-Y. Wu, *Versatile Communication Optimization for Deep Learning by Modularized Parameter Server* (2018),
sections 2.3.1 and 4.2; X. Yao, X. Wu, C.-L. Wang, *FluentPS* (2019), section III-A.
"""

from __future__ import annotations

import abc
import heapq
import itertools
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
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
        cuts = _even_cuts(len(tables), servers)
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
        cuts = _even_cuts(edges[-1], servers)
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


def placement_from(spec: str | Placement) -> Placement:
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
    held = {server: [_checked_partition(one, tables, name) for one in parts] for server, parts in enumerate(decided)}
    spans = _spans(held)
    placed: list[list[Partition]] = [[] for _ in range(servers)]
    for number, table in enumerate(tables):
        fault = _gap_in(spans.get(number, []), table.size)
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
            fault = _gap_in(spans.get(table, []), max(sizes))
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


# --- helpers of the methods -------------------------------------------------------------------------


def _even_cuts(total: int, servers: int) -> list[int]:
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


def _checked_partition(given: Any, tables: Sequence[Table], name: str) -> Partition:
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


def _gap_in(spans: Sequence[tuple[int, int, S]], size: int) -> str:
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


def bucket_size(nbytes: int) -> int:
    """Return the default size in bytes at which a bucket of a shard of ``nbytes`` is full."""
    return max(SMALLEST, min(LARGEST, nbytes // AT_LEAST))


def cut_into_buckets(
    partitions: Sequence[Partition], kind: Callable[[int], tuple[object, int]], least: int
) -> list[Bucket]:
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
@dataclass(frozen=True)
class Layouts:
    """Makes the layouts of one run.

    Attributes:
        tables: in the model's order.
        placement: decides which partition lies on which server.
        kind: returns a table's kind, which all tables of a bucket share, and its bytes per element.
        least: the size in bytes at which a bucket or a batch is full; None: the default.
    """

    tables: Sequence[Table]
    placement: Placement
    kind: Callable[[int], tuple[object, int]]
    least: int | None

    def make(self, servers: Sequence[int]) -> Layout:
        """Return the layout with these servers, by shard.

        Raises:
            UsageError: as :func:`~gossipx.server.placement.checked`.
        """
        placed = checked(self.placement, self.tables, len(servers))
        return Layout(tuple(servers), placed, [self._cut(held) for held in placed])

    def _cut(self, held: Sequence[Partition]) -> list[Bucket]:
        nbytes = sum((one.stop - one.start) * self.kind(one.table)[1] for one in held)
        return cut_into_buckets(held, self.kind, bucket_size(nbytes) if self.least is None else self.least)

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


def server_order(servers: Sequence[int], wanted: Collection[int]) -> list[int]:
    """Return the servers ``wanted``, by shard: present ones in their order, new ones inserted."""
    ordered = [rank for rank in servers if rank in wanted]
    for rank in sorted(set(wanted) - set(servers)):
        ordered = seated(ordered, rank)
    return ordered


def common_pieces(ours: Sequence[Partition], others: Sequence[Partition]) -> list[Partition]:
    """Return the parts that lie in both; none is empty."""
    return [
        Partition(one.table, start, stop)
        for one in ours
        for other in others
        if one.table == other.table and (start := max(one.start, other.start)) < (stop := min(one.stop, other.stop))
    ]
