"""All of one peer's tables: those that it computes with, and the shards that it holds for others."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossipx.checkpoint import from_bytes, to_bytes
from gossipx.errors import GossipxError, ProtocolError, UsageError
from gossipx.memory import PIECE, Memory, Source
from gossipx.model import kernels
from gossipx.protocol.messages import CarryingReply
from gossipx.protocol.server_messages import CopyReply, GradientRequest, RecordRequest
from gossipx.protocol.table_effects import Pieces, RequestedBucket
from gossipx.server.placement import Partition
from gossipx.tables.bucket_memory import Settings, Whole
from gossipx.tables.client import Client
from gossipx.tables.migration import Prepared, RangesSink, TableMigrator, pack
from gossipx.tables.shard import EncodedBucket, ShardStore


class Gradient:
    """A bucket's gradient as it came; a :class:`gossipx.wire.UploadSink` while it comes.

    Attributes:
        request: that brought it.
        view: its bytes.
        sender: the rank that pushed it; None: it is of a record.
    """

    sender: int | None = None

    def __init__(
        self,
        request: GradientRequest | RecordRequest,
        view: memoryview,
        descriptor: int | None = None,
        leave: Callable[[], None] = lambda: None,
    ):
        self.request = request
        self.view = view
        self.nbytes = view.nbytes
        self._descriptor = descriptor
        self._leave = leave
        self._holders = 1
        self._lock = threading.Lock()

    @property
    def source(self) -> Source:
        """Its bytes, to be sent on."""
        return Source(self.view, self._descriptor)

    def hold(self) -> Gradient:
        """Itself, to be released once more."""
        with self._lock:
            self._holders += 1
        return self

    def room(self, start: int) -> memoryview:
        """All that is left."""
        return self.view[start:]

    def filled(self, start: int) -> None:
        """Nothing is to be done with it yet."""

    def take(self, start: int, view: memoryview) -> None:
        """Copy them."""
        self.view[start : start + len(view)] = view

    def release(self) -> None:
        """Its memory may be used again."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        self._leave()

    close = release


COPY = 32
"""Times as many bytes as a shard has that a copy of it may have at most, and a megabyte: of 16 bits, in float32 with
three values of an optimizer's for each, and a gradient buffer in float64."""


class CopySink(Whole):
    """Takes in a copy of a shard's tables."""

    misfit = "it answered by what is no copy of the shard that was asked for"

    def size(self, reply: CarryingReply) -> int | None:
        return reply.size if isinstance(reply, CopyReply) else None


class DiscardSink:
    """What is pushed by a layout that is over, or not known here yet; a :class:`gossipx.wire.UploadSink` that keeps
    nothing.

    Args:
        request: that brings it.
    """

    def __init__(self, request: GradientRequest | RecordRequest):
        self.nbytes = sum(size for _, size in request.parts)
        self._view = memoryview(bytearray(min(self.nbytes, PIECE)))

    def room(self, start: int) -> memoryview:
        """Where the next of it may lie for a moment."""
        return self._view[: self.nbytes - start]

    def filled(self, start: int) -> None:
        """Nothing is to be done with it."""

    def take(self, start: int, view: memoryview) -> None:
        """It is not kept."""

    def release(self) -> None:
        """Nothing is to be given back."""


@dataclass
class _Hosted:
    """A shard that lies here."""

    store: ShardStore
    settings: Settings = ()  # of the optimizer, as the worker has them that is ahead
    progress: int = -1  # ... of that worker


def settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    """The numbers in an optimizer's parameter groups, as they are now (a schedule's learning rate)."""
    return tuple(
        {
            name: float(value)
            for name, value in group.items()
            if (isinstance(value, int | float) and not isinstance(value, bool))
            or (isinstance(value, Tensor) and value.numel() == 1)
        }
        for group in optimizer.param_groups
    )


class TableStore:
    """One peer's tables, and what is done with them.

    Args:
        client: its own side.
        stores: by shard, those that lie here.
        parameters: the model's, by table.
        optimizer: the worker's, whose settings go with each push.
        places: gradients of others that come in at a time; who brings more waits.

    Attributes:
        migrator: makes tables of other layouts; set by the caller where servers may change.
    """

    def __init__(
        self,
        client: Client,
        stores: Mapping[int, ShardStore],
        parameters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        places: int = 8,
    ):
        self.client = client
        self.migrator: TableMigrator | None = None
        self._hosted = {index: _Hosted(store) for index, store in stores.items()}
        self._epoch = 0  # of the layout that these are of
        self._coming: tuple[int, Prepared] | None = None  # those of another, being filled, and its epoch
        self._parameters = parameters
        client.settings_now = functools.partial(settings_of, optimizer)
        self._places = threading.BoundedSemaphore(places)
        # Of records, which wait for nobody: did they share places with pushes, two servers that follow each other's
        # shards could wait for each other.
        self._places_of_records = threading.BoundedSemaphore(places)
        self._lock = threading.Lock()
        self._free: dict[int, list[Memory]] = {}

    # --- of the shards ----------------------------------------------------------------------------

    def room_for(self, request: GradientRequest | RecordRequest) -> Gradient | DiscardSink | None:
        """Where a push, or a record of one, is taken in.

        Returns:
            None: there was no place for as long as its sender waits.

        Raises:
            ProtocolError: it is of no shard that lies here, or does not fit it.
        """
        stores = self._stores(request.epoch if isinstance(request, GradientRequest) else self._epoch)
        if stores is None:
            return DiscardSink(request)
        if request.shard not in stores:
            raise ProtocolError(f"a push for shard {request.shard}, which is not here")
        store = stores[request.shard]
        size = store.size(request) if request.bucket >= 0 else 0
        room = store.room(request) if size else 0
        places = self._places if isinstance(request, GradientRequest) else self._places_of_records
        if not places.acquire(timeout=request.patience):
            return None
        with self._lock:
            free = self._free.setdefault(room, [])
            memory = free.pop() if free else Memory(room)

        def leave() -> None:
            with self._lock:
                self._free[room].append(memory)
            places.release()

        # Another process that maps the file would see all of it.
        descriptor = memory.descriptor if room == size else None
        return Gradient(request, memory.view[:size], descriptor, leave)

    def _stores(self, epoch: int) -> Mapping[int, ShardStore] | None:
        """The shards that lie here by a layout; None: neither it is in force here, nor prepared."""
        coming = self._coming
        if coming is not None and coming[0] == epoch:
            return coming[1].stores
        return {index: one.store for index, one in self._hosted.items()} if epoch == self._epoch else None

    def fill(self, shard: int) -> None:
        """A shard begins with the values of our own model."""
        self._hosted[shard].store.fill(self._parameters)

    def apply(self, gradient: Gradient, scale: float) -> int | None:
        """One optimizer step with it.

        Returns:
            The rank of the worker whose gradient is left out, as it holds NaN or Inf; None: it was taken in, or is of a
            record.

        Raises:
            ProtocolError: as :meth:`ShardStore.decode`.
        """
        return self._take_in(
            gradient, lambda hosted, number, decoded: hosted.store.apply(number, decoded, scale, hosted.settings)
        )

    def buffer(self, gradient: Gradient) -> int | None:
        """Add it to the gradient buffer; returns and raises as :meth:`apply`."""
        return self._take_in(gradient, lambda hosted, number, decoded: hosted.store.add(number, decoded))

    def _take_in(self, gradient: Gradient, do: Callable[[_Hosted, int, Tensor], None]) -> int | None:
        """Decode a gradient and ``do`` with it what is wanted, unless it holds NaN or Inf: all models would have it."""
        with contextlib.closing(gradient):
            request = gradient.request
            hosted = self._hosted[request.shard]
            if request.progress >= hosted.progress:
                hosted.progress, hosted.settings = request.progress, request.settings
            decoded = hosted.store.decode(request, gradient.view)
            if not math.isfinite(kernels.squared_norm(decoded)):
                return gradient.sender
            do(hosted, request.bucket, decoded)
        return None

    def apply_buffer(self, shard: int) -> None:
        """One optimizer step with the mean of the gradient buffer."""
        hosted = self._hosted[shard]
        hosted.store.apply_buffer(hosted.settings)

    def encode(self, asked: RequestedBucket) -> EncodedBucket:
        """A bucket as the worker who has asked for it is given it; to be given back by :meth:`release`."""
        return self._hosted[asked.shard].store.encode(asked.bucket, asked.worker, asked.base)

    def release(self, shard: int, given: EncodedBucket) -> None:
        """It is sent, or of no interest any more; from any thread."""
        if shard in self._hosted:  # else it has moved, and what was lent goes with its last holder
            self._hosted[shard].store.release(given)

    def state_dict(self, shard: int) -> dict[str, Any]:
        """All of a shard's tables; tensors are not copies."""
        hosted = self._hosted[shard]
        return {"store": hosted.store.state_dict(), "settings": list(hosted.settings), "progress": hosted.progress}

    def load_state_dict(self, shard: int, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave; UsageError if it is of other tables."""
        hosted = self._hosted[shard]
        hosted.store.load_state_dict(state["store"])
        hosted.settings, hosted.progress = tuple(state["settings"]), state["progress"]

    def copy(self, shard: int) -> Source:
        """All of a shard's tables as bytes; what is done to them afterwards does not change these."""
        return Source(memoryview(to_bytes(self.state_dict(shard))))

    def room_for_copy(self, shard: int) -> CopySink:
        """Where a copy of a shard is taken in."""
        return CopySink(COPY * self._hosted[shard].store.nbytes + 2**20)

    def take_copy(self, shard: int, copy: CopySink) -> None:
        """The shard's tables are those of ``copy``.

        Raises:
            ProtocolError: it is of other tables.
        """
        try:
            self.load_state_dict(shard, from_bytes(copy.content))
        except (UsageError, ValueError, KeyError) as error:
            raise ProtocolError(f"a copy of shard {shard} cannot be taken: {error}") from error

    # --- when servers come or go --------------------------------------------------------------------

    def prepare(self, epoch: int, servers: Sequence[int]) -> None:
        """Make the tables that are to lie here, and fill in what lies here already."""
        assert self.migrator is not None
        coming = Prepared({})
        try:
            coming, stays = self.migrator.prepare(servers)
            for one in self._hosted.values():
                coming.take(memoryview(pack(one.store, stays, one.settings, one.progress)), stays)
        except GossipxError as error:
            coming.problem = str(error)
        self._coming = epoch, coming

    def pack(self, pieces: Pieces) -> Source:
        """What another peer is given of tables that move to it; UsageError if they cannot."""
        (one,) = self._hosted.values()
        wanted = [Partition(*piece) for piece in pieces]
        return Source(memoryview(pack(one.store, wanted, one.settings, one.progress)))

    def ranges(self) -> RangesSink:
        """Takes in what another peer gives."""
        assert self.migrator is not None
        return RangesSink(self.migrator.most)

    def take(self, ranges: RangesSink, pieces: Pieces) -> None:
        """Fill in what another peer has given."""
        assert self._coming is not None
        try:
            self._coming[1].take(ranges.content, [Partition(*piece) for piece in pieces])
        except GossipxError as error:
            self._coming[1].problem = str(error)

    def prepared(self) -> str:
        """All that was to come has come: why it cannot be served, or nothing."""
        assert self._coming is not None
        self._coming[1].finish()
        return self._coming[1].problem

    def go_over(self, epoch: int, servers: Sequence[int]) -> None:
        """Have the worker's side go over to a layout, at once."""
        assert self.migrator is not None
        self.migrator.go_over(self.client, servers, epoch)

    def place(self, epoch: int, servers: Sequence[int]) -> None:
        """Go over to the tables that were prepared for a layout, after all that was to be done with those of before.

        Where none were prepared, what is to lie here is still to be brought back.
        """
        assert self.migrator is not None
        coming = self.migrator.prepare(servers)[0] if self._coming is None else self._coming[1]
        settings, progress = coming.settings, coming.progress
        self._hosted = {index: _Hosted(store, settings, progress) for index, store in coming.stores.items()}
        self._epoch, self._coming = epoch, None

    def drop(self) -> None:
        """They are not needed: everything stays as it is."""
        self._coming = None
