"""All tables of one peer: its worker's, and those of the shards that it hosts.

The drivers carry out the role's decisions about tables through this class.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossipx.checkpoint import from_bytes, to_bytes
from gossipx.errors import MALFORMED, GossipxError, ProtocolError, UsageError
from gossipx.memory import PIECE, Source, SpareMemory
from gossipx.model import kernels
from gossipx.protocol.fields import MAX_SETTING, Setting
from gossipx.protocol.server_messages import CopyReply, GradientRequest, RecordRequest
from gossipx.protocol.table_effects import Pieces, RequestedBucket
from gossipx.server.placement import Bucket, Layout, Layouts, Partition, common_pieces
from gossipx.tables.client import Settings, SizedSink, TableClient
from gossipx.tables.shard import EncodedBucket, NextTables, ShardStore, Shared, pack_pieces, ranges_sink
from gossipx.wire import Bytes


class Gradient(Bytes, Shared):
    """A received gradient of one bucket, reference-counted; a :class:`gossipx.wire.UploadSink` while it is being
    received, which is decoded once it is complete.

    Attributes:
        request: the push, or the record of one, that brought it.
        view: its bytes.
        sender: the rank that pushed it; None: it came with a record.
    """

    sender: int | None = None

    def __init__(
        self,
        request: GradientRequest | RecordRequest,
        view: memoryview,
        descriptor: int | None = None,
        free: Callable[[], None] = lambda: None,
    ):
        Bytes.__init__(self, view)
        Shared.__init__(self, free)
        self.request = request
        self.source = Source(view, descriptor)


COPY = 32
"""The largest size of a shard's copy, as a multiple of the shard's size plus a megabyte. It covers 16-bit values kept
in float32 with three optimizer values each, and a float64 gradient buffer.
"""


class DiscardSink:
    """A sink for pushes of an old or unknown layout, and for records of a shard that is not followed here.

    It is a :class:`gossipx.wire.UploadSink` that keeps nothing.

    Args:
        request: the push.
    """

    def __init__(self, request: GradientRequest | RecordRequest):
        self.nbytes = sum(size for _, size in request.parts)
        self._view = memoryview(bytearray(min(self.nbytes, PIECE)))

    def buffer_at(self, start: int) -> memoryview:
        """Return a scratch buffer for the bytes from ``start`` on."""
        return self._view[: self.nbytes - start]

    def filled(self, start: int) -> None:
        """Do nothing."""

    def take(self, start: int, view: memoryview) -> None:
        """Discard received bytes."""

    def release(self) -> None:
        """Do nothing: there is no memory to free."""


@dataclass
class _Hosted:
    """A shard hosted here.

    Attributes:
        settings: the optimizer's hyperparameters, from the worker with the highest progress.
        progress: that worker's.
    """

    store: ShardStore
    settings: Settings = ()
    progress: int = -1


def settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    """Return the optimizer's current numeric hyperparameters, such as a schedule's learning rate and betas."""
    return tuple(
        {name: value for name, given in group.items() if name != "params" and (value := _setting(given)) is not None}
        for group in optimizer.param_groups
    )


def _setting(value: object) -> Setting | None:
    """Return a hyperparameter as it is sent; None: it is not numeric."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, tuple | list) and 1 <= len(value) <= MAX_SETTING:
        numbers = [_setting(one) for one in value]
        return tuple(one for one in numbers if isinstance(one, int | float)) if None not in numbers else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


class TableMigrator:
    """Builds one peer's tables for other layouts.

    Args:
        rank: the peer's.
        layouts: makes the run's layouts.
        layout: the first.
        store_of: makes a shard's tables from its partitions and buckets.

    Attributes:
        layout: the current one.
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
        self.layout = layout
        self._store_of = store_of

    def store(self, shard: int) -> ShardStore:
        """Return the tables of a shard of the current layout, in their initial state."""
        return self._store_of(self.layout.placed[shard], self.layout.cut[shard])

    def prepare(self, servers: Sequence[int]) -> tuple[NextTables, list[Partition]]:
        """Return empty tables for the shards that this peer will hold, and the pieces of them that it holds already."""
        layout = self._layouts.make(servers)
        here = [shard for shard, rank in enumerate(servers) if rank == self._rank]
        stores = {shard: self._store_of(layout.placed[shard], layout.cut[shard]) for shard in here}
        return NextTables(stores), common_pieces(self.layout.held_by(self._rank), layout.held_by(self._rank))

    def switch_layout(self, client: TableClient, servers: Sequence[int], epoch: int) -> None:
        """Switch the worker's tables to the layout of ``servers``."""
        self.layout = self._layouts.make(servers)
        client.place(self.layout.placed, self.layout.cut, epoch)


class TableStore:
    """One peer's tables.

    Args:
        client: the worker's side.
        stores: the hosted shards, by index.
        parameters: the model's, by table.
        optimizer: the worker's, whose hyperparameters go with each push.
        places: the number of gradients received at a time; further senders wait.

    Attributes:
        migrator: makes tables of replicas and of other layouts; set by the caller if shards may move.
    """

    def __init__(
        self,
        client: TableClient,
        stores: Mapping[int, ShardStore],
        parameters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        places: int = 8,
    ):
        self.client = client
        self.migrator: TableMigrator | None = None
        self._hosted = {index: _Hosted(store) for index, store in stores.items()}
        self._epoch = 0  # of the hosted shards' layout
        self._next: tuple[int, NextTables] | None = None  # the next epoch and its tables
        self._parameters = parameters
        client.settings_now = functools.partial(settings_of, optimizer)
        self._places = threading.BoundedSemaphore(places)
        # Records have their own, since applying them never waits. If they shared places with pushes, two servers that
        # replicate each other's shards could deadlock.
        self._places_of_records = threading.BoundedSemaphore(places)
        self._spare = SpareMemory()

    # --- hosted shards -----------------------------------------------------------------------------

    def sink_for(self, request: GradientRequest | RecordRequest) -> Gradient | DiscardSink | None:
        """Return the sink for a push or for a record of one.

        Returns:
            None: no place became free for as long as its sender waits.

        Raises:
            ProtocolError: its shard is not hosted here, or it does not fit the shard.
        """
        stores = self._stores(request.epoch if isinstance(request, GradientRequest) else self._epoch)
        no_replica = isinstance(request, RecordRequest) and request.shard not in self._hosted
        if stores is None or no_replica:  # this peer may have restarted, and does not follow the shard yet
            return DiscardSink(request)
        if request.shard not in stores:
            raise ProtocolError(f"a push for shard {request.shard}, which this peer does not hold")
        store = stores[request.shard]
        size = store.push_size(request) if request.bucket >= 0 else 0
        capacity = store.push_capacity(request) if size else 0
        places = self._places if isinstance(request, GradientRequest) else self._places_of_records
        if not places.acquire(timeout=request.patience):
            return None
        memory = self._spare.take(capacity)

        def free() -> None:
            self._spare.give(memory)
            places.release()

        # Another process could map the whole buffer, so it is shared only if the push fills it.
        descriptor = memory.descriptor if capacity == size else None
        return Gradient(request, memory.view[:size], descriptor, free)

    def _stores(self, epoch: int) -> Mapping[int, ShardStore] | None:
        """Return the shards of a layout; None if it is neither in force here nor prepared."""
        coming = self._next
        if coming is not None and coming[0] == epoch:
            return coming[1].stores
        return {index: one.store for index, one in self._hosted.items()} if epoch == self._epoch else None

    def fill(self, shard: int) -> None:
        """Set a shard's values from this peer's own model."""
        self._hosted[shard].store.fill(self._parameters)

    def apply(self, gradient: Gradient, scale: float, buffers: bool = False) -> int | None:
        """Do one optimizer step with a gradient; ``buffers``: add it to the gradient buffer, too.

        Returns:
            The rank of the worker whose gradient was skipped because it contains NaN or Inf; None: it was applied, or
            came with a record.

        Raises:
            ProtocolError: as :meth:`ShardStore.decode`.
        """

        def take(hosted: _Hosted, number: int, decoded: Tensor) -> None:
            if buffers:
                hosted.store.add(number, decoded)
            hosted.store.apply(number, decoded, scale, hosted.settings)

        return self._take_in(gradient, take)

    def buffer(self, gradient: Gradient) -> int | None:
        """Add a gradient to the gradient buffer; returns and raises as :meth:`apply`."""
        return self._take_in(gradient, lambda hosted, number, decoded: hosted.store.add(number, decoded))

    def _take_in(self, gradient: Gradient, do: Callable[[_Hosted, int, Tensor], None]) -> int | None:
        """Decode a gradient and call ``do`` with it; skip it if it contains NaN or Inf, which would spread to all
        models.
        """
        try:
            request = gradient.request
            hosted = self._hosted[request.shard]
            if request.progress >= hosted.progress:
                hosted.progress, hosted.settings = request.progress, request.settings
            decoded = hosted.store.decode(request, gradient.view)
            if not math.isfinite(kernels.squared_norm(decoded)):
                return gradient.sender
            do(hosted, request.bucket, decoded)
            return None
        finally:
            gradient.release()

    def apply_buffer(self, shard: int, sums: bool = False) -> None:
        """Do one optimizer step with the mean of the gradient buffer; ``sums``: with its sum."""
        hosted = self._hosted[shard]
        hosted.store.apply_buffer(hosted.settings, sums)

    def encode(self, asked: RequestedBucket) -> EncodedBucket:
        """Return a bucket as the requesting worker receives it, until the caller releases it."""
        return self._hosted[asked.shard].store.encode(asked.bucket, asked.worker, asked.base)

    def state_dict(self, shard: int) -> dict[str, Any]:
        """Return all of a shard's tables; tensors are not copies."""
        hosted = self._hosted[shard]
        return {"store": hosted.store.state_dict(), "settings": list(hosted.settings), "progress": hosted.progress}

    def load_state_dict(self, shard: int, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; UsageError if it is of other tables."""
        hosted = self._hosted[shard]
        settings, progress = tuple(state["settings"]), int(state["progress"])
        hosted.store.load_state_dict(state["store"])
        hosted.settings, hosted.progress = settings, progress

    def copy(self, shard: int) -> Source:
        """Return a snapshot of a shard's tables as bytes."""
        return Source(memoryview(to_bytes(self.state_dict(shard))))

    def copy_sink(self, shard: int) -> SizedSink:
        """Return a sink for a copy of a shard, which is hosted here from now on."""
        if shard not in self._hosted and self.migrator is not None:
            self._hosted[shard] = _Hosted(self.migrator.store(shard))
        most = COPY * self._hosted[shard].store.nbytes + 2**20
        return SizedSink(
            "a copy of the requested shard", most, lambda reply: reply.size if isinstance(reply, CopyReply) else None
        )

    def take_copy(self, shard: int, copy: SizedSink) -> None:
        """Replace the shard's tables with a received copy.

        Raises:
            ProtocolError: it is of other tables.
        """
        try:
            self.load_state_dict(shard, from_bytes(copy.content))
        except (UsageError, *MALFORMED) as error:
            raise ProtocolError(f"the copy of shard {shard} is unusable: {error}") from error

    # --- when the servers change --------------------------------------------------------------------

    def prepare(self, epoch: int, servers: Sequence[int]) -> None:
        """Make the tables of the next layout that this peer will hold, and fill in the pieces that it holds already."""
        assert self.migrator is not None
        coming = NextTables({})
        try:
            coming, stays = self.migrator.prepare(servers)
            for one in self._hosted.values():
                coming.take(memoryview(pack_pieces(one.store, stays, one.settings, one.progress)), stays)
        except GossipxError as error:
            coming.problem = str(error)
        self._next = epoch, coming

    def pack(self, pieces: Pieces) -> Source:
        """Return pieces that move to another peer, as bytes; UsageError if they cannot be moved."""
        (one,) = self._hosted.values()
        wanted = [Partition(*piece) for piece in pieces]
        return Source(memoryview(pack_pieces(one.store, wanted, one.settings, one.progress)))

    def ranges(self) -> SizedSink:
        """Return a sink for pieces from another peer."""
        assert self.migrator is not None
        return ranges_sink(self.migrator.layout)

    def take(self, ranges: SizedSink, pieces: Pieces) -> None:
        """Fill in pieces from another peer."""
        assert self._next is not None
        try:
            self._next[1].take(ranges.content, [Partition(*piece) for piece in pieces])
        except GossipxError as error:
            self._next[1].problem = str(error)

    def prepared(self) -> str:
        """Check the prepared tables after the last piece. Return why they cannot be served, or an empty string."""
        assert self._next is not None
        self._next[1].finish()
        return self._next[1].problem

    def switch_client(self, epoch: int, servers: Sequence[int]) -> None:
        """Switch the worker's side to a layout at once."""
        assert self.migrator is not None
        self.migrator.switch_layout(self.client, servers, epoch)

    def place(self, epoch: int, servers: Sequence[int]) -> None:
        """Switch to the tables that were prepared for a layout, once all operations on the old ones are done.

        If none were prepared, the new tables are empty, and are restored from disk afterwards.
        """
        assert self.migrator is not None
        coming = self.migrator.prepare(servers)[0] if self._next is None else self._next[1]
        settings, progress = coming.settings, coming.progress
        self._hosted = {index: _Hosted(store, settings, progress) for index, store in coming.stores.items()}
        self._epoch, self._next = epoch, None

    def drop(self) -> None:
        """Discard the prepared tables; the old layout stays in force."""
        self._next = None
