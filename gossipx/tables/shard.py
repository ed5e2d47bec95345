"""The server's side of the tables of one shard: values, the optimizer, the gradient buffer.

For one thread at a time: what a role decides is carried out here in the order of its decisions.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossipx.codecs import decode_into
from gossipx.codecs.changes import FULL, Changes
from gossipx.errors import ProtocolError, UsageError
from gossipx.memory import Memory, Source, copy
from gossipx.model import kernels
from gossipx.model.buffers import typed
from gossipx.protocol.fields import Parts
from gossipx.protocol.server_messages import GradientRequest, RecordRequest
from gossipx.server.placement import Partition
from gossipx.server.placement.buckets import Bucket
from gossipx.tables.bucket_memory import check_sizes
from gossipx.tables.coding import Coding
from gossipx.tables.parts import Replaceable, Storages, load_states, states_of

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
"""Optimizers that treat every value by itself, so that parts of tensors, or several, may be given to them as one."""


class EncodedBucket:
    """A bucket as it was at one version, shared by all who are given it.

    Attributes:
        version: of the bucket.
        parts, source: as it is sent.
        memory: that it lies in, used again after its last holder's release; None: it lies elsewhere.
        base: checksum of the values that it changes; FULL: it has the values as they are.
        holders: those who send it, and the bucket as long as it is the last version.
    """

    def __init__(self, version: int, parts: Parts, source: Source, memory: Memory | None, base: int = FULL):
        self.version, self.parts, self.source, self.memory, self.base = version, parts, source, memory, base
        self.holders = 1


class BucketTables:
    """The tables of one bucket, flat one after the other.

    What is trained in 16 bits is kept in float32, and rounded to be given: steps that are smaller than what rounding
    leaves out would be lost one by one.
    """

    def __init__(self, partitions: Sequence[Partition], dtype: torch.dtype, storages: Storages, coding: Coding):
        sizes = [partition.stop - partition.start for partition in partitions]
        self.partitions = partitions
        self.memory = Memory(sum(sizes) * dtype.itemsize)
        self.told = typed(self.memory.view, dtype)  # as workers have them
        self.values = self.told.float() if dtype in (torch.float16, torch.bfloat16) else self.told
        ends = list(itertools.accumulate(sizes))
        self.ranges = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self.tables = [
            storages.server_table(partition, self.told[place], storages)
            for partition, place in zip(partitions, self.ranges, strict=True)
        ]
        self.sizes = [size * dtype.itemsize for size in sizes]
        self.slabs: list[tuple[slice, Tensor]] = []  # what the optimizer works on
        self.buffer: Tensor | None = None  # the sum of gradients that wait
        self.count = 0  # how many
        self.version = 0
        self.given: EncodedBucket | None = None  # of the last version that was asked for
        self.tensors = coding.tensors(partitions, dtype)
        self.most = 0 if coding.push is None else coding.push.longest(self.tensors)  # bytes of a push
        self.changes = None if coding.pull is None else Changes(coding.pull, self.tensors, coding.seed)

    def wide(self) -> Tensor:
        """The gradient buffer, made when it is first needed; where nothing waits what is in it means nothing.

        It is twice as wide as values, so that the sum is the same in whichever order workers' gradients come: of 32
        bits it is exact unless they differ by more than 2²⁸ times.
        """
        if self.buffer is None:
            dtype = torch.complex128 if self.values.is_complex() else torch.float64
            self.buffer = torch.zeros_like(self.values, dtype=dtype)
        return self.buffer

    def round(self) -> None:
        """Have what workers are given follow the values."""
        if self.told is not self.values:
            self.told.copy_(self.values)


class ShardStore:
    """One shard's tables.

    Args:
        partitions: of the shard.
        buckets: of these.
        parameters: the model's, by table; the values at the beginning are taken from them.
        groups: for each table its parameter group in the worker's optimizer; -1: it is not trained.
        optimizer: the worker's, of which the shard has one of its own, over its tables.
        storages: the classes that tables are made with.
        coding: the codecs of pushes and pulls.

    Attributes:
        buckets: their tables.
        optimizer: over these; None: none of them is trained.

    Raises:
        UsageError: an optimizer that cannot be made anew, or that looks at whole tensors where a tensor is cut.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        buckets: Sequence[Bucket],
        parameters: Sequence[Tensor],
        groups: Sequence[int],
        optimizer: torch.optim.Optimizer,
        storages: Storages,
        coding: Coding | None = None,
    ):
        self._storages = storages
        self._coding = coding or Coding()
        self._lock = threading.Lock()
        self._free: dict[int, list[Memory]] = {}
        self.buckets = [
            BucketTables(part, parameters[part[0].table].dtype, storages, self._coding)
            for part in (partitions[bucket.first : bucket.stop] for bucket in buckets)
        ]
        self.fill(parameters)
        self.optimizer = self._make_optimizer(parameters, groups, optimizer)

    def fill(self, parameters: Sequence[Tensor]) -> None:
        """Begin with these values, by table."""
        with torch.no_grad():
            for bucket in self.buckets:
                for partition, place in zip(bucket.partitions, bucket.ranges, strict=True):
                    flat = parameters[partition.table].detach().reshape(-1)
                    bucket.values[place].copy_(flat[partition.start : partition.stop])
                bucket.version += 1

    def _make_optimizer(
        self, parameters: Sequence[Tensor], groups: Sequence[int], like: torch.optim.Optimizer
    ) -> torch.optim.Optimizer | None:
        merges = isinstance(like, ELEMENTWISE)
        slabs: dict[int, list[Tensor]] = {}
        for bucket in self.buckets:
            numbered = [groups[partition.table] for partition in bucket.partitions]
            runs = [list(run) for _, run in itertools.groupby(range(len(numbered)), key=numbered.__getitem__)]
            for run in runs if merges else [[number] for number in range(len(numbered))]:
                partition, first = bucket.partitions[run[0]], bucket.ranges[run[0]].start
                slab = bucket.values[first : bucket.ranges[run[-1]].stop]
                if not merges:
                    whole = parameters[partition.table]
                    if len(slab) != whole.numel():
                        raise UsageError(
                            f"{type(like).__name__} looks at whole tensors, which this placement cuts: use heuristic"
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
        try:
            return type(like)(made) if made else None  # type: ignore[call-arg]
        except (TypeError, ValueError) as error:
            raise UsageError(f"{type(like).__name__} cannot be made anew for a server's tables: {error}") from error

    # --- gradients --------------------------------------------------------------------------------

    def size(self, request: GradientRequest | RecordRequest) -> int:
        """Bytes that a push brings.

        Raises:
            ProtocolError: it is none of this shard.
        """
        if request.bucket >= len(self.buckets):
            raise ProtocolError(f"bucket {request.bucket} of a shard of {len(self.buckets)}")
        bucket = self.buckets[request.bucket]
        if self._coding.push is not None:
            if [number for number, _ in request.parts] != [0] or request.parts[0][1] > bucket.most:
                raise ProtocolError("a push that is no frame of its bucket")
            return request.parts[0][1]
        if [number for number, _ in request.parts] != [*range(len(bucket.sizes))]:
            raise ProtocolError("a push of tables that are not in its bucket")
        check_sizes(request.parts, bucket.sizes, self._storages.raw_pushes)
        return sum(size for _, size in request.parts)

    def decode(self, request: GradientRequest | RecordRequest, content: memoryview) -> Tensor:
        """The gradient of a bucket, flat, in the dtype of its values, from what came; it may lie in that.

        Raises:
            ProtocolError: a part that is none of its partition's.
        """
        bucket = self.buckets[request.bucket]
        if self._coding.push is not None:
            decoded = torch.empty_like(bucket.values)
            decode_into(content, decoded, tensors=bucket.tensors)
            return decoded
        if self._storages.raw_pushes:
            return typed(content, bucket.told.dtype).to(bucket.values.dtype)
        gradient, start = torch.empty_like(bucket.values), 0
        for table, place, (_, size) in zip(bucket.tables, bucket.ranges, request.parts, strict=True):
            gradient[place] = table.update(content[start : start + size])
            start += size
        return gradient

    def apply(self, number: int, gradient: Tensor, scale: float, settings: Sequence[dict[str, float]]) -> None:
        """One optimizer step on one bucket."""
        bucket = self.buckets[number]
        if scale != 1.0:
            gradient = gradient * scale
        self._step([(bucket, gradient)], settings)

    def add(self, number: int, gradient: Tensor) -> None:
        """Add a gradient to the gradient buffer."""
        bucket = self.buckets[number]
        if bucket.count:
            kernels.accumulate(bucket.wide(), gradient)
        else:
            bucket.wide().copy_(gradient)
        bucket.count += 1

    def apply_buffer(self, settings: Sequence[dict[str, float]]) -> None:
        """One optimizer step on the mean of what the gradient buffer holds of each bucket; then it is empty."""
        steps = []
        for bucket in self.buckets:
            if bucket.count:
                assert bucket.buffer is not None
                steps.append((bucket, bucket.buffer.div_(bucket.count).to(bucket.values.dtype)))
                bucket.count = 0
        self._step(steps, settings)

    def _step(self, steps: Sequence[tuple[BucketTables, Tensor]], settings: Sequence[dict[str, float]]) -> None:
        if self.optimizer is None:
            return
        for group, number in zip(self.optimizer.param_groups, self._groups, strict=True):
            if number < len(settings):
                group.update(settings[number])
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
        """Of all values, as workers have them."""
        return sum(bucket.memory.view.nbytes for bucket in self.buckets)

    def room(self, request: GradientRequest | RecordRequest) -> int:
        """Bytes to take a push in, which is of a :meth:`size`: as many for all of a bucket's, to be used again."""
        bucket = self.buckets[request.bucket]
        return bucket.most or self.size(request)

    def encode(self, number: int, worker: int = 0, base: int = FULL) -> EncodedBucket:
        """A bucket as workers are given it, by now; not changed until :meth:`release`, and made once a version.

        Args:
            worker, base: where pulls have a codec, whom it is for, and the checksum of what that has.
        """
        bucket = self.buckets[number]
        if bucket.changes is not None:
            bucket.round()
            change = bucket.changes.frame(worker, base, bucket.version, bucket.told)
            if change is not None:
                size = change.source.view.nbytes
                return EncodedBucket(bucket.version, ((0, size),), change.source, None, base)
        given = bucket.given
        if given is None or given.version != bucket.version:
            if given is not None:
                self.release(given)
            given = bucket.given = self._encoded(bucket)
        with self._lock:
            given.holders += 1
        return given

    def _encoded(self, bucket: BucketTables) -> EncodedBucket:
        bucket.round()
        if not self._storages.raw_pulls:
            encoded = [memoryview(table.get()).cast("B") for table in bucket.tables]
            parts = tuple(enumerate(map(len, encoded)))
            return EncodedBucket(bucket.version, parts, Source(memoryview(bytearray().join(encoded))), None)
        size = sum(bucket.sizes)
        with self._lock:
            free = self._free.get(size)
            memory = free.pop() if free else Memory(size)
        copy(bucket.memory.view, memory.view)
        source = Source(memory.view, memory.descriptor)
        parts = tuple(enumerate(bucket.sizes)) if bucket.changes is None else ((0, size),)
        return EncodedBucket(bucket.version, parts, source, memory)

    def release(self, given: EncodedBucket) -> None:
        """It is sent, or of no interest any more; from any thread."""
        with self._lock:
            given.holders -= 1
            if not given.holders and given.memory is not None:
                self._free.setdefault(given.memory.view.nbytes, []).append(given.memory)

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Values, the optimizer's state and the gradient buffer; tensors are not copies."""
        return {
            "sizes": [bucket.sizes for bucket in self.buckets],
            "values": [bucket.values for bucket in self.buckets],
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "buffers": [bucket.buffer if bucket.count else None for bucket in self.buckets],
            "counts": [bucket.count for bucket in self.buckets],
            "parts": states_of(self._parts()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave.

        Raises:
            UsageError: it is of other buckets.
        """
        sizes = [bucket.sizes for bucket in self.buckets]
        if state["sizes"] != sizes:
            raise UsageError(
                "they are placed, or put together, in another way: leave --placement and --bucket as they were"
            )
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        rows = zip(self.buckets, state["values"], state["buffers"], state["counts"], strict=True)
        for bucket, values, buffer, count in rows:
            bucket.values.copy_(values)
            bucket.buffer, bucket.count = buffer, count
            bucket.version += 1
        load_states(self._parts(), state["parts"])

    def _parts(self) -> list[Replaceable]:
        tables = [table for bucket in self.buckets for table in bucket.tables]
        return [part for table in tables for part in (table, table.storage)]
