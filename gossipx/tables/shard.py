"""The tensors of one shard on its server: values, optimizer and gradient buffer; and pieces of them that move.

The role decides when gradients are applied; this module carries it out. Only :class:`Shared` and :class:`SpareMemory`
are thread-safe; everything else is called by one thread at a time, in the order of the decisions.

When servers are added or removed, parts of tables move to another peer with their values, optimizer state and buffered
gradients, in the format of checkpoints. Nothing in it is evaluated, and the receiver checks it against what it
requested.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from gossipx.checkpoint import from_bytes, to_bytes
from gossipx.codecs import decode_into
from gossipx.codecs.changes import FULL, Changes
from gossipx.errors import MALFORMED, ProtocolError, UsageError
from gossipx.memory import Memory, Source, copy
from gossipx.model import kernels
from gossipx.model.pool import typed
from gossipx.protocol.fields import Parts, Setting
from gossipx.protocol.server_messages import CarryingReply, GradientRequest, TablesReply
from gossipx.protocol.table_effects import ShardRecord
from gossipx.server.placement import Layout, Partition, common_pieces
from gossipx.tables.client import SizedSink, check_sizes
from gossipx.tables.coding import Settings, TableSource
from gossipx.tables.parts import Replaceable, load_states, states_of

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Optimizers that treat every element independently, so parts of a tensor, or several tensors, can be passed as one."""


T = TypeVar("T", bound="Shared")


class SpareMemory:
    """Blocks of memory that are reused, by their size. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Memory]] = {}

    def take(self, nbytes: int) -> Memory:
        """Return a block of ``nbytes``, a new one if none is free."""
        with self._lock:
            free = self._free.get(nbytes)
            return free.pop() if free else Memory(nbytes)

    def give(self, memory: Memory) -> None:
        """Give a block back."""
        with self._lock:
            self._free.setdefault(memory.view.nbytes, []).append(memory)


class Shared:
    """A reference-counted resource. Thread-safe.

    Args:
        free: called after the last release.
    """

    def __init__(self, free: Callable[[], None]):
        self._free = free
        self._references = 1
        self._counting = threading.Lock()

    def hold(self: T) -> T:
        """Acquire another reference, to be released as well. Return self."""
        with self._counting:
            self._references += 1
        return self

    def release(self) -> None:
        """Drop a reference."""
        with self._counting:
            self._references -= 1
            if self._references:
                return
        self._free()


class EncodedBucket(Shared):
    """One version of a bucket as it is sent, which several replies share. The bucket itself holds the latest version.

    Attributes:
        version: the bucket's version.
        parts: the sizes of its partitions.
        source: its bytes.
        base: checksum of the values to which this change must be added; FULL: it holds full values.
    """

    def __init__(
        self,
        version: int,
        parts: Parts,
        source: Source,
        base: int = FULL,
        free: Callable[[], None] = lambda: None,
    ):
        super().__init__(free)
        self.version, self.parts, self.source, self.base = version, parts, source, base


class BucketTables:
    """The tables of one bucket, flat, one after the other.

    Values trained in 16 bits are kept in float32 and rounded when they are sent. Otherwise steps smaller than the
    rounding error would be lost.

    Attributes:
        served: the values as workers receive them.
        values: the values that the optimizer changes: ``served`` itself, or a float32 copy.
        slabs: the tensors that the optimizer works on, each with its range of the values.
        buffer: the sum of the buffered gradients; None: never used.
        count: the number of buffered gradients.
        latest: the last version that was encoded.
        max_bytes: the largest size of a push, in bytes; 0 without a push codec.
    """

    def __init__(self, partitions: Sequence[Partition], dtype: torch.dtype, source: TableSource):
        storages, coding = source.storages, source.coding
        sizes = [partition.stop - partition.start for partition in partitions]
        self.partitions = partitions
        self.memory = Memory(sum(sizes) * dtype.itemsize)
        self.served = typed(self.memory.view, dtype)
        self.values = self.served.float() if dtype in (torch.float16, torch.bfloat16) else self.served
        ends = list(itertools.accumulate(sizes))
        self.ranges = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self.tables = [
            storages.server_table(partition, self.served[place], storages)
            for partition, place in zip(partitions, self.ranges, strict=True)
        ]
        self.sizes = [size * dtype.itemsize for size in sizes]
        self.slabs: list[tuple[slice, Tensor]] = []
        self.buffer: Tensor | None = None
        self.count = 0
        self.version = 0
        self.latest: EncodedBucket | None = None
        self.tensors = coding.tensors(partitions, dtype)
        self.max_bytes = 0 if coding.push is None else coding.push.longest(self.tensors)
        self.changes = None if coding.pull is None else Changes(coding.pull, self.tensors, coding.seed)

    def gradient_buffer(self) -> Tensor:
        """Return the gradient buffer, allocated on first use; its content is undefined while ``count`` is 0.

        It is twice as wide as the values, so that the sum does not depend on the order in which gradients arrive: sums
        of 32-bit values are exact unless the values differ by a factor above 2²⁸.
        """
        if self.buffer is None:
            self.buffer = torch.zeros_like(self.values, dtype=self.sum_dtype)
        return self.buffer

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of the gradient buffer."""
        return torch.complex128 if self.values.is_complex() else torch.float64

    def round(self) -> None:
        """Round the optimizer's values into those that workers receive."""
        if self.served is not self.values:
            self.served.copy_(self.values)


class ShardStore:
    """One shard's tables, initially with the values of this peer's parameters.

    Args:
        source: what the tables are made from.
        layout: that of the shard.
        shard: its index.

    Attributes:
        buckets: the tables of each bucket.
        optimizer: the shard's; None: no table is trained.

    Raises:
        UsageError: the optimizer cannot be constructed again, or needs whole tensors and a tensor is cut.
    """

    def __init__(self, source: TableSource, layout: Layout, shard: int):
        self._storages, self._coding = source.storages, source.coding
        self._spare = SpareMemory()
        parts = [layout.placed[shard][bucket.first : bucket.stop] for bucket in layout.cut[shard]]
        self.buckets = [BucketTables(part, source.parameters[part[0].table].dtype, source) for part in parts]
        self.fill(source.parameters)
        self.optimizer = self._make_optimizer(source.parameters, source.optimizer)

    def fill(self, parameters: Sequence[Tensor]) -> None:
        """Set the values from ``parameters``, one per table."""
        with torch.no_grad():
            for bucket in self.buckets:
                for partition, place in zip(bucket.partitions, bucket.ranges, strict=True):
                    flat = parameters[partition.table].detach().reshape(-1)
                    bucket.values[place].copy_(flat[partition.start : partition.stop])
                bucket.version += 1

    def _make_optimizer(
        self, parameters: Sequence[Tensor], like: torch.optim.Optimizer
    ) -> torch.optim.Optimizer | None:
        merges = isinstance(like, ELEMENTWISE)
        slabs: dict[int, list[Tensor]] = {}
        for bucket in self.buckets:
            numbered = [self._coding.groups[partition.table] for partition in bucket.partitions]
            runs = [list(run) for _, run in itertools.groupby(range(len(numbered)), key=numbered.__getitem__)]
            for run in runs if merges else [[number] for number in range(len(numbered))]:
                partition, first = bucket.partitions[run[0]], bucket.ranges[run[0]].start
                slab = bucket.values[first : bucket.ranges[run[-1]].stop]
                if not merges:
                    whole = parameters[partition.table]
                    if len(slab) != whole.numel():
                        raise UsageError(
                            f"{type(like).__name__} needs whole tensors, which this placement cuts: give --placement"
                            " heuristic"
                        )
                    slab = slab.view(whole.shape)
                if numbered[run[0]] >= 0 and slab.numel():
                    bucket.slabs.append((slice(first, first + slab.numel()), slab))
                    slabs.setdefault(numbered[run[0]], []).append(slab)
        made = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": slabs[number]}
            for number, group in enumerate(like.param_groups)
            if number in slabs
        ]
        self._groups = sorted(slabs)
        if not made:
            return None
        try:
            optimizer: torch.optim.Optimizer = type(like)(made)  # type: ignore[call-arg]
        except (TypeError, ValueError) as error:
            raise UsageError(f"{type(like).__name__} cannot be constructed for a server's tables: {error}") from error
        # Optimizers of users may keep hyperparameters as attributes, beside the parameter groups.
        vars(optimizer).update((name, value) for name, value in vars(like).items() if _is_plain(value))
        return optimizer

    # --- gradients --------------------------------------------------------------------------------

    def push_size(self, request: GradientRequest) -> int:
        """Return the number of bytes that a push brings.

        Raises:
            ProtocolError: the push does not fit the shard.
        """
        if request.bucket >= len(self.buckets):
            raise ProtocolError(f"bucket {request.bucket} of a shard of {len(self.buckets)}")
        bucket = self.buckets[request.bucket]
        if self._coding.push is not None:
            if [number for number, _ in request.parts] != [0] or request.parts[0][1] > bucket.max_bytes:
                raise ProtocolError("the push is not a valid frame of its bucket")
            return request.parts[0][1]
        if [number for number, _ in request.parts] != [*range(len(bucket.sizes))]:
            raise ProtocolError("the push holds tables that are not in its bucket")
        check_sizes(request.parts, bucket.sizes, self._storages.raw_pushes)
        return sum(size for _, size in request.parts)

    def decode(self, request: GradientRequest | ShardRecord, content: memoryview) -> Tensor:
        """Decode a push into a bucket's gradient, flat, in the dtype of the values; it may share memory with
        ``content``.

        Raises:
            ProtocolError: a part does not fit its partition.
        """
        bucket = self.buckets[request.bucket]
        if self._coding.push is not None:
            decoded = torch.empty_like(bucket.values)
            decode_into(content, decoded, tensors=bucket.tensors)
            return decoded
        if self._storages.raw_pushes:
            return typed(content, bucket.served.dtype).to(bucket.values.dtype)
        gradient, start = torch.empty_like(bucket.values), 0
        for table, place, (_, size) in zip(bucket.tables, bucket.ranges, request.parts, strict=True):
            gradient[place] = table.update(content[start : start + size])
            start += size
        return gradient

    def apply(self, number: int, gradient: Tensor, scale: float, settings: Sequence[dict[str, Setting]]) -> None:
        """Do one optimizer step on one bucket; ``settings`` are the hyperparameters of each parameter group."""
        bucket = self.buckets[number]
        if scale != 1.0:
            gradient = gradient * scale
        self._step([(bucket, gradient)], settings)

    def add(self, number: int, gradient: Tensor) -> None:
        """Add a gradient to the gradient buffer."""
        bucket = self.buckets[number]
        if bucket.count:
            kernels.accumulate(bucket.gradient_buffer(), gradient)
        else:
            bucket.gradient_buffer().copy_(gradient)
        bucket.count += 1

    def apply_buffer(self, settings: Sequence[dict[str, Setting]], sums: bool = False) -> None:
        """Do one optimizer step with the mean of each bucket's gradient buffer (``sums``: its sum), and empty them."""
        steps = []
        for bucket in self.buckets:
            if bucket.count:
                assert bucket.buffer is not None
                steps.append((bucket, bucket.buffer.div_(1 if sums else bucket.count).to(bucket.values.dtype)))
                bucket.count = 0
        self._step(steps, settings)

    def _step(self, steps: Sequence[tuple[BucketTables, Tensor]], settings: Sequence[dict[str, Setting]]) -> None:
        if self.optimizer is None:
            return
        for group, number in zip(self.optimizer.param_groups, self._groups, strict=True):
            if number < len(settings):
                for name, value in settings[number].items():  # saved ones have lists in place of tuples
                    group[name] = value if isinstance(value, int | float) else tuple(value)
        for bucket, gradient in steps:
            for place, slab in bucket.slabs:
                slab.grad = gradient[place].view(slab.shape)
        self.optimizer.step()
        for bucket, _ in steps:
            bucket.version += 1
            for _, slab in bucket.slabs:
                slab.grad = None

    # --- values -----------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """The size in bytes of all values as workers receive them."""
        return sum(bucket.memory.view.nbytes for bucket in self.buckets)

    def push_capacity(self, request: GradientRequest) -> int:
        """Return the size in bytes of a buffer for a push, the same for every push of a bucket so that buffers are
        reused.
        """
        bucket = self.buckets[request.bucket]
        return bucket.max_bytes or self.push_size(request)

    def encode(self, number: int, worker: int = 0, base: int = FULL) -> EncodedBucket:
        """Return the bucket's current version as it is sent: unchanged until it is released, encoded once per version.

        Args:
            worker: with a pull codec, the rank that receives it.
            base: with a pull codec, the checksum of the values that the worker has.
        """
        bucket = self.buckets[number]
        if bucket.changes is not None:
            bucket.round()
            change = bucket.changes.frame(worker, base, bucket.version, bucket.served)
            if change is not None:
                size = change.source.view.nbytes
                return EncodedBucket(bucket.version, ((0, size),), change.source, base)
        latest = bucket.latest
        if latest is None or latest.version != bucket.version:
            if latest is not None:
                latest.release()
            latest = bucket.latest = self._encoded(bucket)
        return latest.hold()

    def _encoded(self, bucket: BucketTables) -> EncodedBucket:
        bucket.round()
        if not self._storages.raw_pulls:
            encoded = [memoryview(table.get()).cast("B") for table in bucket.tables]
            parts = tuple(enumerate(map(len, encoded)))
            return EncodedBucket(bucket.version, parts, Source(memoryview(bytearray().join(encoded))))
        size = sum(bucket.sizes)
        memory = self._spare.take(size)
        copy(bucket.memory.view, memory.view)
        source = Source(memory.view, memory.descriptor)
        parts = tuple(enumerate(bucket.sizes)) if bucket.changes is None else ((0, size),)
        # Its release must not refer to this object, which keeps it: both would stay until the next gc run.
        return EncodedBucket(bucket.version, parts, source, free=functools.partial(self._spare.give, memory))

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the values, the optimizer's state and the gradient buffer; tensors are not copies."""
        return {
            "sizes": [bucket.sizes for bucket in self.buckets],
            "values": [bucket.values for bucket in self.buckets],
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "buffers": [bucket.buffer if bucket.count else None for bucket in self.buckets],
            "counts": [bucket.count for bucket in self.buckets],
            "parts": states_of(self._parts()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            UsageError: the saved buckets differ.
        """
        sizes = [bucket.sizes for bucket in self.buckets]
        if state["sizes"] != sizes:
            raise UsageError(
                "the saved tables are placed or bucketed differently: keep --placement and --bucket as they were"
            )
        rows = list(zip(self.buckets, state["values"], state["buffers"], state["counts"], strict=True))
        for bucket, values, buffer, count in rows:  # all of them before any is replaced
            saved = [(values, bucket.values.dtype), *([(buffer, bucket.sum_dtype)] if count else [])]
            if not all(
                isinstance(one, Tensor) and (one.shape, one.dtype) == (bucket.values.shape, dtype)
                for one, dtype in saved
            ):
                raise UsageError("the saved tables have other shapes or dtypes than those of this run")
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        load_states(self._parts(), state["parts"])
        for bucket, values, buffer, count in rows:
            bucket.values.copy_(values)
            bucket.buffer, bucket.count = buffer, count
            bucket.version += 1

    def _parts(self) -> list[Replaceable]:
        tables = [table for bucket in self.buckets for table in bucket.tables]
        return [part for table in tables for part in (table, table.storage)]


def _is_plain(value: object) -> bool:
    items = value if isinstance(value, tuple) else (value,)
    return all(isinstance(item, bool | int | float | str | None) for item in items)


# --- pieces that move to another server -----------------------------------------------------------

VALUES, BUFFER = "values", "buffer"
"""The columns that do not belong to the optimizer: values, and the gradient buffer if gradients are buffered."""
HEADER, RECORD = 2**20, 2**12
"""The largest size in bytes of what is no column: in all, and per piece."""
MOST_BYTES = 256
"""Maximum number of bytes per element: 16 columns of 16 bytes, twice as many as any optimizer of PyTorch keeps."""


def _elements_of(pieces: Sequence[Partition]) -> int:
    return sum(one.stop - one.start for one in pieces)


def pack_pieces(store: ShardStore, pieces: Sequence[Partition], settings: Settings, progress: int) -> bytes:
    """Return all state of these pieces that lies in ``store``, as bytes.

    Args:
        settings: the optimizer's hyperparameters.
        progress: the iteration that they are from.

    Raises:
        UsageError: the optimizer keeps state that does not belong to single elements.
    """
    packed = [_packed_piece(store, *held) for held in _held_parts(store, pieces)]
    return to_bytes({"settings": settings, "progress": progress, "pieces": packed})


def _held_parts(store: ShardStore, pieces: Sequence[Partition]) -> Iterator[tuple[Partition, BucketTables, slice]]:
    """Yield the parts of ``pieces`` held by ``store``, each with its bucket and its range of the bucket's values."""
    wanted: dict[int, list[Partition]] = {}
    for piece in pieces:
        wanted.setdefault(piece.table, []).append(piece)
    for bucket in store.buckets:
        for partition, place in zip(bucket.partitions, bucket.ranges, strict=True):
            for part in common_pieces([partition], wanted.get(partition.table, [])):
                first = place.start + part.start - partition.start
                yield part, bucket, slice(first, first + part.stop - part.start)


def _packed_piece(store: ShardStore, at: Partition, bucket: BucketTables, place: slice) -> dict[str, Any]:
    """Return a piece as plain data and tensors: a column per kind of values, and numbers that hold for all elements."""
    columns, numbers = {VALUES: bucket.values[place]}, {}
    if bucket.count:
        assert bucket.buffer is not None
        columns[BUFFER] = bucket.buffer[place]
    for within, slab, state in _optimizer_ranges(store, bucket, place):
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == slab.shape:
                columns[name] = value.reshape(-1)[within]
            elif isinstance(value, int | float | None) or (isinstance(value, Tensor) and value.numel() == 1):
                numbers[name] = value
            else:
                raise UsageError(
                    f"the optimizer's state '{name}' is not per element, so it cannot be moved to another server"
                )
    return {"at": (at.table, at.start, at.stop), "columns": columns, "numbers": numbers, "count": bucket.count}


def _optimizer_ranges(
    store: ShardStore, bucket: BucketTables, place: slice
) -> Iterator[tuple[slice, Tensor, dict[str, Any]]]:
    """Yield a piece's range in an optimizer tensor, that tensor, and its optimizer state; nothing if not trained."""
    for span, slab in bucket.slabs:
        if store.optimizer is not None and span.start <= place.start < place.stop <= span.stop:
            yield slice(place.start - span.start, place.stop - span.start), slab, store.optimizer.state[slab]


class NextTables:
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
        """Fill in the bytes that :func:`pack_pieces` made of these pieces.

        Raises:
            ProtocolError: the bytes are malformed, or hold other pieces.
        """
        try:
            state = from_bytes(content)
            received = [Partition(*map(int, piece["at"])) for piece in state["pieces"]]
            if not _elements_of(received) == _elements_of(pieces) == _elements_of(common_pieces(received, pieces)):
                raise ProtocolError("the reply holds other ranges than were requested")
            for at, piece in zip(received, state["pieces"], strict=True):
                self._take(at, piece["columns"], piece["numbers"], piece["count"])
            if state["progress"] > self.progress:
                self.settings, self.progress = state["settings"], state["progress"]
        except MALFORMED as error:
            raise ProtocolError(f"the ranges in the reply are malformed: {error}") from error

    def _take(self, at: Partition, columns: dict[str, Tensor], numbers: dict[str, Any], count: int) -> None:
        if any(column.shape != (at.stop - at.start,) for column in columns.values()):
            raise ProtocolError("the reply holds columns of another length than their piece")
        values, buffer = columns.pop(VALUES), columns.pop(BUFFER, None)
        for store in self.stores.values():
            for part, bucket, place in _held_parts(store, [at]):
                within = slice(part.start - at.start, part.stop - at.start)
                bucket.values[place] = values[within]
                bucket.version += 1
                self._missing -= part.stop - part.start
                if buffer is not None:
                    bucket.gradient_buffer()[place] = buffer[within]
                    self._waiting.append((bucket, place, count))
                for inside, slab, state in _optimizer_ranges(store, bucket, place):
                    for name, column in columns.items():
                        like = state.setdefault(name, torch.zeros(slab.shape, dtype=column.dtype))
                        like.view(-1)[inside] = column[within]
                    for name, number in numbers.items():
                        # They are the same in all pieces, unless a worker died in the middle of a push.
                        state.setdefault(name, number.clone() if isinstance(number, Tensor) else number)

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


def ranges_sink(layout: Layout) -> SizedSink:
    """Return a sink for pieces that move to this peer; it limits what another peer can make us allocate."""
    partitions = [one for placed in layout.placed for one in placed]
    most = HEADER + RECORD * (1 + 2 * len(partitions)) + MOST_BYTES * _elements_of(partitions)
    return SizedSink("the requested ranges", most, _size_of_ranges)


def _size_of_ranges(reply: CarryingReply) -> int | None:
    return reply.parts[0][1] if isinstance(reply, TablesReply) and len(reply.parts) == 1 else None
