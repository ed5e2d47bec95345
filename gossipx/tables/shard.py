"""The tensors of one shard on its server: values, optimizer and gradient buffer.

The role decides when gradients are applied; this module carries it out. Only :meth:`ShardStore.release` is thread-safe;
everything else is called by one thread at a time, in the order of the decisions.
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
from gossipx.model.pool import typed
from gossipx.protocol.fields import Parts, Setting
from gossipx.protocol.server_messages import GradientRequest, RecordRequest
from gossipx.server.placement import Bucket, Partition
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
"""Optimizers that treat every element independently, so parts of a tensor, or several tensors, can be passed as one."""


class EncodedBucket:
    """One version of a bucket as it is sent; reference-counted, since several replies share it.

    Attributes:
        version: the bucket's version.
        parts: the sizes of its partitions.
        source: its bytes.
        memory: the buffer to reuse after the last release; None: ``source`` owns its memory.
        base: checksum of the values to which this change must be added; FULL: it holds full values.
        references: the reference count; the bucket itself holds a reference to its latest version.
    """

    def __init__(self, version: int, parts: Parts, source: Source, memory: Memory | None, base: int = FULL):
        self.version, self.parts, self.source, self.memory, self.base = version, parts, source, memory, base
        self.references = 1


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

    def __init__(self, partitions: Sequence[Partition], dtype: torch.dtype, storages: Storages, coding: Coding):
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
    """One shard's tables.

    Args:
        partitions: the parts of tables in this shard.
        buckets: their grouping into buckets.
        parameters: the parameter of each table; the initial values are copied from them.
        groups: each table's parameter group in the worker's optimizer; -1: not trained.
        optimizer: the worker's; the shard makes its own of the same class and hyperparameters.
        storages: the classes that tables are built from.
        coding: the codecs of pushes and pulls.

    Attributes:
        buckets: the tables of each bucket.
        optimizer: the shard's; None: no table is trained.

    Raises:
        UsageError: the optimizer cannot be constructed again, or needs whole tensors and a tensor is cut.
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
        """Set the values from ``parameters``, one per table."""
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
                            f"{type(like).__name__} needs whole tensors, which this placement cuts: use heuristic"
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

    def push_size(self, request: GradientRequest | RecordRequest) -> int:
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

    def decode(self, request: GradientRequest | RecordRequest, content: memoryview) -> Tensor:
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

    def push_capacity(self, request: GradientRequest | RecordRequest) -> int:
        """Return the size in bytes of a buffer for a push, the same for every push of a bucket so that buffers are
        reused.
        """
        bucket = self.buckets[request.bucket]
        return bucket.max_bytes or self.push_size(request)

    def encode(self, number: int, worker: int = 0, base: int = FULL) -> EncodedBucket:
        """Return the bucket's current version as it is sent: unchanged until :meth:`release`, encoded once per version.

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
                return EncodedBucket(bucket.version, ((0, size),), change.source, None, base)
        latest = bucket.latest
        if latest is None or latest.version != bucket.version:
            if latest is not None:
                self.release(latest)
            latest = bucket.latest = self._encoded(bucket)
        with self._lock:
            latest.references += 1
        return latest

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

    def release(self, encoded: EncodedBucket) -> None:
        """Drop a reference to an encoded bucket. May be called from any thread."""
        with self._lock:
            encoded.references -= 1
            if not encoded.references and encoded.memory is not None:
                self._free.setdefault(encoded.memory.view.nbytes, []).append(encoded.memory)

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
