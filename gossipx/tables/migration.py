"""Parts of tables on their way to another server: values, the optimizer's state, gradients that wait.

As bytes: the length of a header, the header as JSON, and the columns that it names one after the other. Nothing in it
is evaluated, and it is held against what was asked for.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gossipx.errors import ProtocolError, UsageError
from gossipx.memory import copy
from gossipx.model.buffers import typed
from gossipx.protocol.messages import CarryingReply
from gossipx.protocol.server_messages import TablesReply
from gossipx.server.placement import Partition
from gossipx.server.placement.buckets import Bucket
from gossipx.server.placement.layout import Layout, Layouts, common
from gossipx.tables.bucket_memory import Settings, Whole
from gossipx.tables.client import Client
from gossipx.tables.parts import raw
from gossipx.tables.shard import BucketTables, ShardStore

VALUES, BUFFER = "values", "buffer"
"""Columns that every piece has, and that one has for which gradients wait; the others are the optimizer's."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
}
LENGTH = struct.Struct("<Q")
HEADER, RECORD = 2**20, 2**12
"""Bytes of a header at most: for the settings, and for each piece."""
LARGEST = 256
"""Bytes an element at most: 16 numbers of 16, twice as many as any optimizer of PyTorch's keeps."""


def _size(pieces: Sequence[Partition]) -> int:
    return sum(one.stop - one.start for one in pieces)


def pack(store: ShardStore, pieces: Sequence[Partition], settings: Settings, progress: int) -> bytearray:
    """All that belongs to these pieces, of those that lie in ``store``.

    Args:
        settings, progress: of the optimizer, and whose they are.

    Raises:
        UsageError: the optimizer keeps something that belongs to no element.
    """
    records: list[dict[str, Any]] = []
    columns: list[memoryview] = []
    for part, bucket, place in _found(store, pieces):
        record, tensors = _record(store, bucket, place)
        records.append({"at": [part.table, part.start, part.stop], **record})
        columns += [raw(tensor.contiguous()) for tensor in tensors]
    header = json.dumps({"settings": settings, "progress": progress, "pieces": records}).encode("ascii")
    content = bytearray(LENGTH.pack(len(header)) + header)
    for column in columns:
        content += column
    return content


def _found(store: ShardStore, pieces: Sequence[Partition]) -> Iterator[tuple[Partition, BucketTables, slice]]:
    """The parts of ``pieces`` that lie in ``store``, each in one bucket, and where it lies in that bucket's values."""
    wanted: dict[int, list[Partition]] = {}
    for piece in pieces:
        wanted.setdefault(piece.table, []).append(piece)
    for bucket in store.buckets:
        for partition, place in zip(bucket.partitions, bucket.ranges, strict=True):
            for part in common([partition], wanted.get(partition.table, [])):
                first = place.start + part.start - partition.start
                yield part, bucket, slice(first, first + part.stop - part.start)


def _record(store: ShardStore, bucket: BucketTables, place: slice) -> tuple[dict[str, Any], list[Tensor]]:
    """What is to be said of a piece, and its columns."""
    names, tensors, numbers = [VALUES], [bucket.values[place]], {}
    if bucket.count:
        assert bucket.buffer is not None
        names.append(BUFFER)
        tensors.append(bucket.buffer[place])
    for within, slab, state in _state(store, bucket, place):
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == slab.shape:
                names.append(name)
                tensors.append(value.reshape(-1)[within])
            elif isinstance(value, Tensor) and value.numel() == 1:
                numbers[name] = [_name(value.dtype), float(value)]
            elif isinstance(value, int | float | None):
                numbers[name] = ["", value]
            else:
                raise UsageError(f"'{name}' of the optimizer belongs to no element, and cannot be moved")
    columns = [[name, _name(tensor.dtype)] for name, tensor in zip(names, tensors, strict=True)]
    return {"columns": columns, "numbers": numbers, "count": bucket.count}, tensors


def _name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UsageError(f"what is of dtype {name} cannot be moved")
    return name


def _state(store: ShardStore, bucket: BucketTables, place: slice) -> Iterator[tuple[slice, Tensor, dict[str, Any]]]:
    """Where a piece lies in what the optimizer works on, and the optimizer's state of that; nothing if not trained."""
    for span, slab in bucket.slabs:
        if store.optimizer is not None and span.start <= place.start < place.stop <= span.stop:
            yield slice(place.start - span.start, place.stop - span.start), slab, store.optimizer.state[slab]


class Prepared:
    """Tables that are to be served, while they are being filled.

    Args:
        stores: by shard.

    Attributes:
        settings, progress: of the optimizer, as the worker has them that is ahead, and how far that is.
        problem: why they cannot be served, in one line; empty: nothing is known against it.
    """

    def __init__(self, stores: Mapping[int, ShardStore]):
        self.stores = stores
        self.settings: Settings = ()
        self.progress = -1
        self.problem = ""
        self._missing = sum(len(bucket.values) for store in stores.values() for bucket in store.buckets)
        self._waiting: list[tuple[BucketTables, slice, int]] = []  # pieces for which gradients wait, and how many

    def take(self, content: memoryview, pieces: Sequence[Partition]) -> None:
        """Fill in what :func:`pack` has made of these pieces.

        Raises:
            ProtocolError: it is not that.
        """
        try:
            (length,) = LENGTH.unpack_from(content)
            start = LENGTH.size + length
            header = json.loads(bytes(content[LENGTH.size : start]))
            told = [Partition(*map(int, record["at"])) for record in header["pieces"]]
            if not _size(told) == _size(pieces) == _size(common(told, pieces)):
                raise ProtocolError("it gave other ranges than were asked for")
            for at, record in zip(told, header["pieces"], strict=True):
                start = self._take(content, start, at, record)
            if start != len(content):
                raise ProtocolError(f"{len(content)} bytes of ranges, which have {start}")
            if header["progress"] > self.progress:
                self.settings, self.progress = tuple(header["settings"]), header["progress"]
        except (ValueError, KeyError, TypeError, IndexError, struct.error, RuntimeError) as error:
            raise ProtocolError(f"what it gave of its ranges does not fit: {error}") from error

    def _take(self, content: memoryview, start: int, at: Partition, record: dict[str, Any]) -> int:
        """Fill in one piece, from ``start`` of what came on; returns where it ends."""
        columns: dict[str, Tensor] = {}
        size = at.stop - at.start
        for name, dtype in record["columns"]:
            stop = start + size * DTYPES[dtype].itemsize
            held = bytearray(stop - start)
            copy(content[start:stop], memoryview(held))
            columns[name] = typed(memoryview(held), DTYPES[dtype])
            start = stop
        values, buffer = columns.pop(VALUES), columns.pop(BUFFER, None)
        for store in self.stores.values():
            for part, bucket, place in _found(store, [at]):
                within = slice(part.start - at.start, part.stop - at.start)
                bucket.values[place] = values[within]
                bucket.version += 1
                self._missing -= part.stop - part.start
                if buffer is not None:
                    bucket.wide()[place] = buffer[within]
                    self._waiting.append((bucket, place, record["count"]))
                for inside, slab, state in _state(store, bucket, place):
                    for name, column in columns.items():
                        like = state.setdefault(name, torch.zeros(slab.shape, dtype=column.dtype))
                        like.view(-1)[inside] = column[within]
                    for name, (kind, number) in record["numbers"].items():
                        # Those of all pieces are equal, but where a push came in part, as its worker died.
                        state.setdefault(name, torch.tensor(number, dtype=DTYPES[kind]) if kind else number)
        return start

    def finish(self) -> None:
        """All should be here: see that it is, and that a bucket has one count of the gradients that wait for it.

        A push that came in part, as its worker died, has left some pieces with one more than others: their sums are
        scaled, so that the mean of each stays what it is.
        """
        if self._missing and not self.problem:
            self.problem = f"{self._missing} values have not come"
        for bucket, _, count in self._waiting:
            bucket.count = max(bucket.count, count)
        for bucket, place, count in self._waiting:
            if count != bucket.count:
                bucket.wide()[place].mul_(bucket.count / count)
        self._waiting.clear()


class TableMigrator:
    """Makes one peer's tables of other layouts.

    Args:
        rank: of the peer.
        layouts: of the run.
        layout: that it begins by.
        store_of: makes a shard's tables of its partitions and its buckets.
    """

    def __init__(
        self,
        rank: int,
        layouts: Layouts,
        layout: Layout,
        store_of: Callable[[Sequence[Partition], Sequence[Bucket]], ShardStore],
    ):
        self._rank = rank
        self._layouts = layouts
        self._layout = layout
        self._store_of = store_of

    def prepare(self, servers: Sequence[int]) -> tuple[Prepared, list[Partition]]:
        """Tables to be filled, which are to lie here, and what of them lies here already."""
        layout = self._layouts.make(servers)
        here = [shard for shard, rank in enumerate(servers) if rank == self._rank]
        stores = {shard: self._store_of(layout.placed[shard], layout.cut[shard]) for shard in here}
        return Prepared(stores), common(self._layout.held_by(self._rank), layout.held_by(self._rank))

    @property
    def most(self) -> int:
        """Bytes that any part of these tables can have on its way: what another peer can make this one allocate."""
        held = [one for partitions in self._layout.placed for one in partitions]
        return HEADER + RECORD * (1 + 2 * len(held)) + LARGEST * _size(held)

    def go_over(self, client: Client, servers: Sequence[int], epoch: int) -> None:
        """Have the worker's side follow."""
        self._layout = self._layouts.make(servers)
        client.place(self._layout.placed, self._layout.cut, epoch)


class RangesSink(Whole):
    """Takes in what moves here."""

    misfit = "it answered by ranges that were not asked for"

    def size(self, reply: CarryingReply) -> int | None:
        return reply.parts[0][1] if isinstance(reply, TablesReply) and len(reply.parts) == 1 else None
