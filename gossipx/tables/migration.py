"""The byte format of table pieces that move between servers, and the code that fills new tables from them.

When servers are added or removed, parts of tables move to another peer with their values, optimizer state and buffered
gradients. The format is the length of a header, the header as JSON, and the columns that it names, one after the other.
Nothing in it is evaluated, and the receiver checks it against what it requested.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gossipx.errors import MALFORMED, ProtocolError, UsageError
from gossipx.memory import copy
from gossipx.model.pool import typed
from gossipx.protocol.messages import CarryingReply
from gossipx.protocol.server_messages import TablesReply
from gossipx.server.placement import Bucket, Layout, Layouts, Partition, common_pieces
from gossipx.tables.bucket_memory import Settings, Whole
from gossipx.tables.client import Client
from gossipx.tables.parts import raw
from gossipx.tables.shard import BucketTables, ShardStore

VALUES, BUFFER = "values", "buffer"
"""The columns that do not belong to the optimizer: values, and the gradient buffer if gradients are buffered."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
}
LENGTH = struct.Struct("<Q")
HEADER, RECORD = 2**20, 2**12
"""The largest size of a header in bytes: for the hyperparameters, and per piece."""
LARGEST = 256
"""Maximum number of bytes per element: 16 columns of 16 bytes, twice as many as any optimizer of PyTorch keeps."""


def _size(pieces: Sequence[Partition]) -> int:
    return sum(one.stop - one.start for one in pieces)


def pack(store: ShardStore, pieces: Sequence[Partition], settings: Settings, progress: int) -> bytearray:
    """Return all state of these pieces that lies in ``store``, as bytes.

    Args:
        settings: the optimizer's hyperparameters.
        progress: the iteration that they are from.

    Raises:
        UsageError: the optimizer keeps state that does not belong to single elements.
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
    """Yield the parts of ``pieces`` held by ``store``, each with its bucket and its range of the bucket's values."""
    wanted: dict[int, list[Partition]] = {}
    for piece in pieces:
        wanted.setdefault(piece.table, []).append(piece)
    for bucket in store.buckets:
        for partition, place in zip(bucket.partitions, bucket.ranges, strict=True):
            for part in common_pieces([partition], wanted.get(partition.table, [])):
                first = place.start + part.start - partition.start
                yield part, bucket, slice(first, first + part.stop - part.start)


def _record(store: ShardStore, bucket: BucketTables, place: slice) -> tuple[dict[str, Any], list[Tensor]]:
    """Return a piece's entry in the header, and its columns."""
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
                raise UsageError(
                    f"the optimizer's state '{name}' is not per element, so it cannot be moved to another server"
                )
    columns = [[name, _name(tensor.dtype)] for name, tensor in zip(names, tensors, strict=True)]
    return {"columns": columns, "numbers": numbers, "count": bucket.count}, tensors


def _name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UsageError(f"tensors of dtype {name} cannot be moved to another server")
    return name


def _state(store: ShardStore, bucket: BucketTables, place: slice) -> Iterator[tuple[slice, Tensor, dict[str, Any]]]:
    """Yield a piece's range in an optimizer tensor, that tensor, and its optimizer state; nothing if not trained."""
    for span, slab in bucket.slabs:
        if store.optimizer is not None and span.start <= place.start < place.stop <= span.stop:
            yield slice(place.start - span.start, place.stop - span.start), slab, store.optimizer.state[slab]


class Prepared:
    """Tables of the next layout, while they are being filled.

    Args:
        stores: by shard.

    Attributes:
        settings: the optimizer's hyperparameters, from the piece with the highest progress.
        progress: that progress; -1: no piece has been filled in.
        problem: why they cannot be served, in one line; empty: no problem so far.
    """

    def __init__(self, stores: Mapping[int, ShardStore]):
        self.stores = stores
        self.settings: Settings = ()
        self.progress = -1
        self.problem = ""
        self._missing = sum(len(bucket.values) for store in stores.values() for bucket in store.buckets)
        self._waiting: list[tuple[BucketTables, slice, int]] = []  # pieces with buffered gradients, and how many

    def take(self, content: memoryview, pieces: Sequence[Partition]) -> None:
        """Fill in the bytes that :func:`pack` made of these pieces.

        Raises:
            ProtocolError: the bytes are malformed, or hold other pieces.
        """
        try:
            (length,) = LENGTH.unpack_from(content)
            start = LENGTH.size + length
            header = json.loads(bytes(content[LENGTH.size : start]))
            received = [Partition(*map(int, record["at"])) for record in header["pieces"]]
            if not _size(received) == _size(pieces) == _size(common_pieces(received, pieces)):
                raise ProtocolError("the reply holds other ranges than were requested")
            for at, record in zip(received, header["pieces"], strict=True):
                start = self._take(content, start, at, record)
            if start != len(content):
                raise ProtocolError(f"{len(content)} bytes of ranges instead of {start}")
            if header["progress"] > self.progress:
                self.settings, self.progress = tuple(header["settings"]), header["progress"]
        except (*MALFORMED, struct.error) as error:
            raise ProtocolError(f"the ranges in the reply are malformed: {error}") from error

    def _take(self, content: memoryview, start: int, at: Partition, record: dict[str, Any]) -> int:
        """Fill in the piece whose columns begin at ``start`` of the content. Return where they end."""
        columns: dict[str, Tensor] = {}
        size = at.stop - at.start
        for name, dtype in record["columns"]:
            stop = start + size * DTYPES[dtype].itemsize
            owned = bytearray(stop - start)
            copy(content[start:stop], memoryview(owned))
            columns[name] = typed(memoryview(owned), DTYPES[dtype])
            start = stop
        values, buffer = columns.pop(VALUES), columns.pop(BUFFER, None)
        for store in self.stores.values():
            for part, bucket, place in _found(store, [at]):
                within = slice(part.start - at.start, part.stop - at.start)
                bucket.values[place] = values[within]
                bucket.version += 1
                self._missing -= part.stop - part.start
                if buffer is not None:
                    bucket.gradient_buffer()[place] = buffer[within]
                    self._waiting.append((bucket, place, record["count"]))
                for inside, slab, state in _state(store, bucket, place):
                    for name, column in columns.items():
                        like = state.setdefault(name, torch.zeros(slab.shape, dtype=column.dtype))
                        like.view(-1)[inside] = column[within]
                    for name, (kind, number) in record["numbers"].items():
                        # They are the same in all pieces, unless a worker died in the middle of a push.
                        state.setdefault(name, torch.tensor(number, dtype=DTYPES[kind]) if kind else number)
        return start

    def finish(self) -> None:
        """Check that all pieces have arrived, and make the buffered gradient counts of each bucket equal.

        If a worker died in the middle of a push, some pieces hold one gradient more than others. Their sums are scaled
        so that the mean of each piece stays the same.
        """
        if self._missing and not self.problem:
            self.problem = f"{self._missing} values have not arrived"
        for bucket, _, count in self._waiting:
            bucket.count = max(bucket.count, count)
        for bucket, place, count in self._waiting:
            if count != bucket.count:
                bucket.gradient_buffer()[place].mul_(bucket.count / count)
        self._waiting.clear()


class TableMigrator:
    """Builds one peer's tables for other layouts.

    Args:
        rank: the peer's.
        layouts: makes the run's layouts.
        layout: the first.
        store_of: makes a shard's tables from its partitions and buckets.
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
        """Return empty tables for the shards that this peer will hold, and the pieces of them that it holds already."""
        layout = self._layouts.make(servers)
        here = [shard for shard, rank in enumerate(servers) if rank == self._rank]
        stores = {shard: self._store_of(layout.placed[shard], layout.cut[shard]) for shard in here}
        return Prepared(stores), common_pieces(self._layout.held_by(self._rank), layout.held_by(self._rank))

    @property
    def max_bytes(self) -> int:
        """The largest size in bytes of any moved piece; it limits what another peer can make this one allocate."""
        partitions = [one for placed in self._layout.placed for one in placed]
        return HEADER + RECORD * (1 + 2 * len(partitions)) + LARGEST * _size(partitions)

    def switch_layout(self, client: Client, servers: Sequence[int], epoch: int) -> None:
        """Switch the worker's tables to the layout of ``servers``."""
        self._layout = self._layouts.make(servers)
        client.place(self._layout.placed, self._layout.cut, epoch)


class RangesSink(Whole):
    """Receives pieces that move to this peer."""

    misfit = "the reply holds no ranges"

    def size(self, reply: CarryingReply) -> int | None:
        return reply.parts[0][1] if isinstance(reply, TablesReply) and len(reply.parts) == 1 else None
