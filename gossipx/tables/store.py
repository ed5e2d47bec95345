"""All tables of one peer: its worker's, and those of the shards that it hosts.

The drivers carry out the role's decisions about tables through this class.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossipx.errors import GossipxError, ProtocolError
from gossipx.memory import PIECE, Source
from gossipx.model import kernels
from gossipx.protocol.effects import Pieces, RequestedBucket
from gossipx.protocol.server_messages import GradientRequest
from gossipx.protocol.table_effects import ShardRecord
from gossipx.server.placement import Layout, Layouts, Partition, common_pieces
from gossipx.tables.client import SizedSink, TableClient
from gossipx.tables.coding import Settings, TableSource
from gossipx.tables.shard import EncodedBucket, NextTables, ShardStore, Shared, SpareMemory, pack_pieces, ranges_sink
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
        request: GradientRequest | ShardRecord,
        view: memoryview,
        descriptor: int | None = None,
        free: Callable[[], None] = lambda: None,
    ):
        Bytes.__init__(self, view)
        Shared.__init__(self, free)
        self.request = request
        self.source = Source(view, descriptor)


class DiscardSink:
    """A sink for pushes of an old or unknown layout.

    It is a :class:`gossipx.wire.UploadSink` that keeps nothing.

    Args:
        request: the push.
    """

    def __init__(self, request: GradientRequest):
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


class TableStore:
    """One peer's tables.

    Args:
        source: what the tables are made from.
        rank: the peer's.
        layouts: makes the run's layouts.
        layout: the first.
        shards: the hosted ones.
        places: the number of gradients received at a time; further senders wait.

    Attributes:
        client: the worker's side.
    """

    def __init__(
        self,
        source: TableSource,
        rank: int,
        layouts: Layouts,
        layout: Layout,
        shards: Iterable[int],
        places: int = 8,
    ):
        self.client = TableClient(source, layout)
        self._source = source
        self._rank = rank
        self._layouts = layouts
        self._layout = layout  # the worker's current one
        self._hosted = {shard: _Hosted(ShardStore(source, layout, shard)) for shard in shards}
        self._epoch = 0  # of the hosted shards' layout
        self._next: tuple[int, NextTables] | None = None  # the next epoch and its tables
        self._places = threading.BoundedSemaphore(places)
        self._spare = SpareMemory()

    # --- hosted shards -----------------------------------------------------------------------------

    def sink_for(self, request: GradientRequest) -> Gradient | DiscardSink | None:
        """Return the sink for a push.

        Returns:
            None: no place became free for as long as its sender waits.

        Raises:
            ProtocolError: its shard is not hosted here, or it does not fit the shard.
        """
        stores = self._stores(request.epoch)
        if stores is None:
            return DiscardSink(request)
        if request.shard not in stores:
            raise ProtocolError(f"a push for shard {request.shard}, which this peer does not hold")
        store = stores[request.shard]
        size, capacity = store.push_size(request), store.push_capacity(request)
        places = self._places
        if not places.acquire(timeout=request.patience):
            return None
        spare = self._spare  # not this object: a gradient that is kept must not keep all tables
        memory = spare.take(capacity)

        def free() -> None:
            spare.give(memory)
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
        self._hosted[shard].store.fill(self._source.parameters)

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

    # --- when the servers change --------------------------------------------------------------------

    def prepare(self, epoch: int, servers: Sequence[int]) -> None:
        """Make the tables of the next layout that this peer will hold, and fill in the pieces that it holds already."""
        coming = NextTables({})
        try:
            layout = self._layouts.make(servers)
            coming = self._tables_of(layout)
            stays = common_pieces(self._layout.held_by(self._rank), layout.held_by(self._rank))
            for one in self._hosted.values():
                coming.take(memoryview(pack_pieces(one.store, stays, one.settings, one.progress)), stays)
        except GossipxError as error:
            coming.problem = str(error)
        self._next = epoch, coming

    def _tables_of(self, layout: Layout) -> NextTables:
        """Return empty tables for the shards of ``layout`` that this peer holds."""
        here = [shard for shard, rank in enumerate(layout.servers) if rank == self._rank]
        return NextTables({shard: ShardStore(self._source, layout, shard) for shard in here})

    def pack(self, pieces: Pieces) -> Source:
        """Return pieces that move to another peer, as bytes; UsageError if they cannot be moved."""
        (one,) = self._hosted.values()
        wanted = [Partition(*piece) for piece in pieces]
        return Source(memoryview(pack_pieces(one.store, wanted, one.settings, one.progress)))

    def ranges(self) -> SizedSink:
        """Return a sink for pieces from another peer."""
        return ranges_sink(self._layout)

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
        self._layout = self._layouts.make(servers)
        self.client.place(self._layout, epoch)

    def place(self, epoch: int, servers: Sequence[int]) -> None:
        """Switch to the tables that were prepared for a layout, once all operations on the old ones are done.

        If none were prepared, the new tables are empty, and are restored from disk afterwards.
        """
        coming = self._tables_of(self._layouts.make(servers)) if self._next is None else self._next[1]
        settings, progress = coming.settings, coming.progress
        self._hosted = {index: _Hosted(store, settings, progress) for index, store in coming.stores.items()}
        self._epoch, self._next = epoch, None

    def drop(self) -> None:
        """Discard the prepared tables; the old layout stays in force."""
        self._next = None
