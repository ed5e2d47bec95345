"""A worker's side of all tables: gradients until they are sent, and received values until they are applied.

A table's elements may be spread over several shards, and each shard groups its partitions into buckets, which travel
one per message. This module maps tables to buckets, collects gradients until a bucket is complete, and lets the
training thread wait for the buckets of the tables that it uses next.

A sink checks the header of a reply, provides the buffer that the payload is received into, and decodes it afterwards.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from gossipx.codecs import Tensors
from gossipx.codecs.base import read_into
from gossipx.codecs.changes import FULL, checksum
from gossipx.errors import ProtocolError, UsageError
from gossipx.memory import Memory, Source, copy
from gossipx.model.pool import typed
from gossipx.protocol.fields import Parts, Setting
from gossipx.protocol.server_messages import MEASURED, CarryingReply, TablesReply, TablesRequest
from gossipx.server.placement import Layout, Partition
from gossipx.tables.coding import PushEncoder, Redistribution, Settings, TableSource, group_settings, warn_error_lost
from gossipx.tables.parts import ApplyBuffer, ClientTable, Replaceable, TransmitBuffer, load_states, states_of
from gossipx.wire import Bytes, Sink


@dataclass
class BucketMemory:
    """One bucket's send and receive memory, with the buffers that lie in it.

    Attributes:
        missing: tables that have not yet produced this iteration's gradient.
        push_encoder: encodes pushes; None without a push codec.
        tensors: the shapes that the pull codec sees; None without a pull codec.
        max_bytes: the largest size of an encoded change, in bytes.
        base: the checksum of the values in ``apply``; FULL: no server has sent any.
        is_new: the latest complete gradients have not been encoded yet.
        encoded: the latest gradients as they are sent; None: not encoded yet.
        settings: the optimizer's hyperparameters when these gradients were computed.
    """

    partitions: list[Partition]
    transmit: Memory
    apply: Memory
    senders: list[TransmitBuffer]
    receivers: list[ApplyBuffer]
    missing: set[int]
    push_encoder: PushEncoder | None = None
    tensors: Tensors | None = None
    max_bytes: int = 0
    base: int = FULL
    is_new: bool = False
    encoded: tuple[Parts, Source] | None = None
    settings: Settings = ()


class ReplySink:
    """Receives the payload of a reply about tables into one buffer, by default an empty one.

    A :class:`gossipx.wire.SinkFactory`.

    Attributes:
        content: the buffer.
    """

    nbytes = 0

    def __init__(self) -> None:
        self.content = memoryview(bytearray())

    def buffer_for(self, reply: CarryingReply) -> memoryview:
        """Return the buffer for the payload of ``reply``; raises as :meth:`fit`."""
        return self.content

    def fit(self, reply: CarryingReply) -> Sink:
        """Return the sink for the payload of ``reply``; raises ProtocolError if the reply does not fit the request."""
        self.content = self.buffer_for(reply)
        return Bytes(self.content)


class SizedSink(ReplySink):
    """Receives a payload of the size that its reply names into new memory.

    Args:
        wanted: what was requested, for messages.
        max_bytes: the largest accepted size in bytes.
        size_of: returns the size that a reply names; None: the reply is of another type.
    """

    def __init__(self, wanted: str, max_bytes: int, size_of: Callable[[CarryingReply], int | None]):
        super().__init__()
        self._wanted, self._max_bytes, self._size_of = wanted, max_bytes, size_of

    def buffer_for(self, reply: CarryingReply) -> memoryview:
        size = self._size_of(reply)
        if size is None or size > self._max_bytes:
            raise ProtocolError(f"the reply does not hold {self._wanted}")
        return memoryview(bytearray(size))


class TablesSink(ReplySink):
    """Receives one bucket without a pull codec.

    Args:
        bucket: its memory.
        is_raw: whether the payload is the values' memory layout, so that nothing has to be decoded.
    """

    def __init__(self, bucket: BucketMemory, is_raw: bool):
        super().__init__()
        self._bucket = bucket
        self._raw = is_raw
        self._parts: Parts = ()

    def buffer_for(self, reply: CarryingReply) -> memoryview:
        receivers = self._bucket.receivers
        self._parts = _parts_of(reply, len(receivers))
        check_sizes(self._parts, [one.data.numel() * one.data.element_size() for one in receivers], self._raw)
        if self._raw:
            return self._bucket.apply.view
        return memoryview(bytearray(sum(size for _, size in self._parts)))

    def read(self) -> None:
        """Accept the received payload; it is checked when it is decoded."""

    def decode(self) -> None:
        """Decode the payload into the apply buffers."""
        start = 0
        for receiver, (_, size) in zip(self._bucket.receivers, self._parts, strict=True):
            if not self._raw:
                receiver.decode(self.content[start : start + size])
            start += size


class ChangeSink(ReplySink):
    """Receives one bucket with a pull codec, as values or as a change of the values that are held here.

    Args:
        bucket: its memory.
        tensors: the shapes of the tensors in it.
    """

    def __init__(self, bucket: BucketMemory, tensors: Tensors):
        super().__init__()
        self._bucket = bucket
        self._tensors = tensors
        self._values = typed(bucket.apply.view, tensors.dtype)
        self._base = FULL
        self._add: Callable[[bool], None] | None = None

    def buffer_for(self, reply: CarryingReply) -> memoryview:
        ((_, size),) = _parts_of(reply, 1)
        assert isinstance(reply, TablesReply)
        nbytes = self._bucket.apply.view.nbytes
        if size > self._bucket.max_bytes if reply.base else size != nbytes:
            raise ProtocolError(f"{size} bytes for a bucket of {nbytes}")
        if reply.base not in (FULL, self._bucket.base):
            raise ProtocolError("the reply is a change of values that this peer does not have")
        self._base = reply.base
        return memoryview(bytearray(size))

    def read(self) -> None:
        """Parse a received change before anything relies on it.

        Raises:
            ProtocolError: it is malformed. The next pull then requests the full values.
        """
        if self._base == FULL:
            return
        try:
            self._add = read_into(self.content, self._values, tensors=self._tensors)
        except ProtocolError:
            self._bucket.base = FULL
            raise

    def decode(self) -> None:
        """Apply the payload to the values, unless they have changed since the request, as a duplicate reply would find
        them.
        """
        if self._base not in (FULL, self._bucket.base):
            return
        if self._base == FULL:
            copy(self.content, self._bucket.apply.view)
        else:
            if self._add is None:
                self.read()
            assert self._add is not None
            self._add(True)
        self._bucket.base = checksum(self._values)


def _parts_of(reply: CarryingReply, number: int) -> Parts:
    """Return the parts of a reply about ``number`` tables; ProtocolError if it is about others."""
    if not isinstance(reply, TablesReply) or [part for part, _ in reply.parts] != [*range(number)]:
        raise ProtocolError("the reply holds tables that were not requested")
    return reply.parts


MOST_ENCODED = 4
"""The largest size of an encoded partition, as a multiple of its raw size. It covers a custom encoder's worst case (an
index and a value per element) and limits what a peer can make this one allocate.
"""


def check_sizes(parts: Parts, sizes: Sequence[int], is_raw: bool) -> None:
    """Check the sizes of received partitions against the expected ``sizes`` in bytes.

    Raises:
        ProtocolError: naming the first that does not fit.
    """
    for (number, size), expected in zip(parts, sizes, strict=True):
        if size != expected if is_raw else size > MOST_ENCODED * expected + 64:
            raise ProtocolError(f"{size} bytes for partition {number} of {expected} bytes")


Where = tuple[int, int]
"""A bucket's address: shard and bucket number."""


@dataclass
class _Table:
    """One table, and the buckets that its partitions lie in.

    Attributes:
        pieces: the first element and the two buffers of each partition.
        fresh: all received values have been applied to the model.
        updated: the table has produced a gradient in this iteration.
    """

    table: ClientTable
    pieces: list[tuple[int, TransmitBuffer, ApplyBuffer]] = field(default_factory=list)
    places: list[Where] = field(default_factory=list)
    fresh: bool = True
    updated: bool = False


class TableClient:
    """All tables of one worker.

    The training thread stores gradients and applies values; other threads send and receive.

    Args:
        source: what the tables are made from.
        layout: the first.

    Attributes:
        epoch: the epoch of the current layout.
    """

    def __init__(self, source: TableSource, layout: Layout):
        self._optimizer, self._storages, self._coding = source.optimizer, source.storages, source.coding
        self._tables = [_Table(self._storages.client_table(one, self._storages)) for one in source.parameters]
        self.epoch = 0
        self._buckets: dict[Where, BucketMemory] = {}
        self._encoding = threading.Lock()
        self._arrived = threading.Condition()
        self._placing = threading.Lock()
        self._waiting: set[Where] = set()  # buckets that must arrive before their tables are used
        self._wanted: set[int] | None = None  # tables whose received values are used; None: all
        self._lay_out_all(layout)

    def _lay_out_all(self, layout: Layout) -> None:
        for shard, (partitions, cut) in enumerate(zip(layout.placed, layout.cut, strict=True)):
            for number, part in enumerate(cut):
                self._buckets[shard, number] = self._lay_out((shard, number), partitions[part.first : part.stop])
        for one in self._tables:  # shards may hold a table's partitions in any order
            pieces = sorted(one.pieces, key=lambda piece: piece[0])
            one.table.senders[:] = [sender for _, sender, _ in pieces]
            one.table.takers[:] = [receiver for _, _, receiver in pieces]

    def _lay_out(self, place: Where, partitions: Sequence[Partition]) -> BucketMemory:
        dtype = self._tables[partitions[0].table].table.parameter.dtype
        sizes = [partition.stop - partition.start for partition in partitions]
        transmit, apply = (Memory(sum(sizes) * dtype.itemsize) for _ in range(2))
        ends = list(itertools.accumulate(sizes))
        buffers = [typed(memory.view, dtype) for memory in (transmit, apply)]
        senders, receivers = [], []
        for partition, size, end in zip(partitions, sizes, ends, strict=True):
            sender = self._storages.transmit(buffers[0][end - size : end])
            receiver = self._storages.apply(buffers[1][end - size : end])
            senders.append(sender)
            receivers.append(receiver)
            self._tables[partition.table].pieces.append((partition.start, sender, receiver))
            self._tables[partition.table].places.append(place)
        made = BucketMemory(list(partitions), transmit, apply, senders, receivers, {one.table for one in partitions})
        if self._coding.push is not None:
            made.push_encoder = PushEncoder(self._coding, partitions, buffers[0], self._seed(place))
        if self._coding.pull is not None:
            made.tensors = self._coding.tensors(partitions, dtype)
            made.max_bytes = self._coding.pull.longest(made.tensors)
        return made

    def _seed(self, place: Where) -> int:
        """Return the seed of the bucket's random draws."""
        return (self._coding.seed << 64) + (place[0] << 32) + place[1]

    def place(self, layout: Layout, epoch: int) -> None:
        """Switch to another layout, while no gradient is stored or sent. Encoded gradients that were not sent are lost.

        Tables that are still expected stay expected, in their new buckets; values of other tables in these buckets are
        ignored when they arrive. The state of push codecs moves with the values that it belongs to.
        """
        with self._placing, self._arrived:
            self._wanted = {one.table for place in self._waiting for one in self._buckets[place].partitions}
            before = [(_joined_buffers(one.table.senders), _joined_buffers(one.table.takers)) for one in self._tables]
            spread = Redistribution()
            new = {one.table for bucket in self._buckets.values() if bucket.is_new for one in bucket.partitions}
            for bucket in self._buckets.values():
                if bucket.push_encoder is not None:
                    spread.collect(bucket.push_encoder)
            self._buckets = {}
            for table in self._tables:
                table.pieces, table.places = [], []
            self._lay_out_all(layout)
            for bucket in self._buckets.values():
                bucket.is_new = not new.isdisjoint(one.table for one in bucket.partitions)
                if bucket.push_encoder is not None:
                    spread.fill(bucket.push_encoder)
            for table, both in zip(self._tables, before, strict=True):
                _spread_over(both[0], table.table.senders)
                _spread_over(both[1], table.table.takers)
            self._waiting = {
                place
                for place, bucket in self._buckets.items()
                if any(one.table in self._wanted for one in bucket.partitions)
            }
            self.epoch = epoch
            self._arrived.notify_all()

    # --- gradients --------------------------------------------------------------------------------

    def update(self, table: int, gradient: Tensor) -> list[Where]:
        """Store a table's gradient of this iteration and return the buckets that it completes.

        Raises:
            ValueError: the table has a gradient in this iteration already.
        """
        one = self._tables[table]
        if one.updated:
            raise ValueError(f"table {table} already has a gradient in this iteration")
        one.updated = True
        one.table.update(gradient)
        return self._whole(table)

    @property
    def without_gradient(self) -> list[int]:
        """The tables that have no gradient in this iteration yet."""
        return [number for number, table in enumerate(self._tables) if not table.updated]

    def settings_of(self, table: int) -> dict[str, Setting]:
        """Return the optimizer's current hyperparameters of a table; none if it is not trained."""
        group, settings = self._coding.groups[table], group_settings(self._optimizer)
        return settings[group] if 0 <= group < len(settings) else {}

    def flush(self) -> list[Where]:
        """End the iteration: store zeros for tables without a gradient, and return the buckets that these complete."""
        whole: list[Where] = []
        for number, table in enumerate(self._tables):
            if not table.updated:
                table.table.update(torch.zeros_like(table.table.parameter))
                whole += self._whole(number)
            table.updated = False
        for bucket in self._buckets.values():
            bucket.missing = {partition.table for partition in bucket.partitions}
        return whole

    def _whole(self, table: int) -> list[Where]:
        whole = []
        for place in self._tables[table].places:
            bucket = self._buckets[place]
            bucket.missing.discard(table)
            if not bucket.missing:
                bucket.is_new, bucket.encoded, bucket.settings = True, None, group_settings(self._optimizer)
                whole.append(place)
        return whole

    def encode(self, place: Where) -> tuple[Parts, Source]:
        """Return a bucket's gradients as they are sent; valid until the next iteration's gradients.

        A retry sends the same bytes, since encoding again would change the encoder's error feedback.
        """
        bucket = self._buckets[place]
        with self._encoding:
            if bucket.encoded is None:
                if bucket.push_encoder is not None:
                    frame = bucket.push_encoder.encode()
                    sizes, source = [len(frame)], Source(frame)
                elif self._storages.raw_pushes:
                    sizes = [sender.data.numel() * sender.data.element_size() for sender in bucket.senders]
                    source = Source(bucket.transmit.view, bucket.transmit.descriptor)
                else:
                    encoded = [memoryview(sender.encode()).cast("B") for sender in bucket.senders]
                    sizes, source = [len(one) for one in encoded], Source(memoryview(bytearray().join(encoded)))
                bucket.is_new, bucket.encoded = False, (tuple(enumerate(sizes)), source)
                for sender in bucket.senders:
                    sender.gathers = False
            return bucket.encoded

    def gather(self) -> None:
        """Keep the gradients of the iteration that has ended, which are not sent: those of the next one are added."""
        for bucket in self._buckets.values():
            bucket.is_new = False
            for sender in bucket.senders:
                sender.gathers = True

    def settings(self, place: Where) -> Settings:
        """Return the optimizer's hyperparameters from when the bucket's gradients were computed.

        A learning rate schedule may have changed them by the time the gradients are sent.
        """
        return self._buckets[place].settings

    # --- values -----------------------------------------------------------------------------------

    def expect(self, places: Sequence[Where]) -> None:
        """Mark buckets as required before their tables are used again."""
        with self._arrived:
            self._waiting.update(places)
            self._wanted = None

    def unchanged(self, places: Sequence[Where]) -> None:
        """Stop waiting for buckets that will not be pulled after all."""
        with self._arrived:
            self._waiting.difference_update(places)
            self._arrived.notify_all()

    @property
    def raw_pulls(self) -> bool:
        """Whether values are received in their memory layout, so that nothing has to be decoded."""
        return self._storages.raw_pulls and self._coding.pull is None

    def sink(self, place: Where) -> TablesSink | ChangeSink:
        """Return the sink that receives a bucket from a server."""
        bucket = self._buckets[place]
        return (
            TablesSink(bucket, self._storages.raw_pulls)
            if bucket.tensors is None
            else ChangeSink(bucket, bucket.tensors)
        )

    def complete_request(self, request: TablesRequest) -> TablesRequest:
        """Return a pull request completed with measured values: the significance, and the checksum of the bucket's
        base.

        The first and the last pull of a run ask for full values, without a base.
        """
        if request.significance == MEASURED:
            request = msgspec.structs.replace(request, significance=self.significance(request.shard))
        if request.bucket < 0 or request.progress < 0:
            return request
        return msgspec.structs.replace(request, base=self.base((request.shard, request.bucket)))

    def base(self, place: Where) -> int:
        """Return the checksum of the bucket's values; FULL without a pull codec, or if no server has sent any."""
        return self._buckets[place].base

    def fetched(self, place: Where, sink: TablesSink | ChangeSink) -> None:
        """Decode a received bucket and mark its tables for the next :meth:`apply`."""
        sink.decode()
        with self._arrived:
            for partition in self._buckets[place].partitions:
                if self._wanted is None or partition.table in self._wanted:
                    self._tables[partition.table].fresh = False
            self._waiting.discard(place)
            self._arrived.notify_all()

    def ready(self, tables: Sequence[int] | None = None) -> bool:
        """Return whether no bucket of these tables is still expected; None: of all tables."""
        if not self._waiting:
            return True
        if tables is None:
            return False
        return not any(place in self._waiting for table in tables for place in self._tables[table].places)

    def wait(self, tables: Sequence[int] | None, seconds: float) -> bool:
        """Wait up to ``seconds`` until the tables are ready. Return whether they are."""
        with self._arrived:
            return self._arrived.wait_for(lambda: self.ready(tables), seconds)

    def apply(
        self, tables: Sequence[int] | None = None, before: Callable[[int], object] = lambda table: None
    ) -> list[int]:
        """Copy received values into the model. Called by the training thread once the tables are :meth:`ready`.

        Args:
            tables: numbers of the tables; None: all.
            before: called with the number of each table that is replaced, just before it is.

        Returns:
            The tables whose values were replaced.
        """
        replaced = []
        with self._placing:
            for number in range(len(self._tables)) if tables is None else tables:
                table = self._tables[number]
                if not table.fresh:
                    table.fresh = True
                    before(number)
                    table.table.apply()
                    replaced.append(number)
        return replaced

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state that parts and push encoders keep between iterations, or None if they keep nothing.

        It is plain data, whose tensors are not copies. Called by the training thread between two iterations. Complete
        gradients that were not sent yet are encoded first, since the matching checkpoints of shards include them.
        """
        for place, bucket in self._buckets.items():
            if bucket.is_new:
                self.encode(place)
        states = states_of(self._parts())
        push_encoder = [
            bucket.push_encoder.state_dict() for bucket in self._buckets.values() if bucket.push_encoder is not None
        ]
        if not push_encoder and all(state is None for state in states):
            return None
        return {"storages": self._storages.describe(), "states": states, "pushing": push_encoder}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            UsageError: the state was saved with other parts.
        """
        own = self._storages.describe()
        if state["storages"] != own:
            raise UsageError(
                f"the checkpoint was saved with the parts: {state['storages'] or 'built in'}, and this run has: "
                f"{own or 'built in'}"
            )
        load_states(self._parts(), state["states"])
        if state["pushing"]:  # empty: the saved run had no push codec
            for bucket, kept in zip(self._buckets.values(), state["pushing"], strict=True):
                if bucket.push_encoder is not None:
                    bucket.push_encoder.load_state_dict(kept)
                else:
                    warn_error_lost(kept, "none")

    def _parts(self) -> list[Replaceable]:
        tables = [part for one in self._tables for part in (one.table, one.table.gradient, one.table.worker)]
        return [
            *tables,
            *(part for bucket in self._buckets.values() for part in (*bucket.senders, *bucket.receivers)),
        ]

    # --- measures ---------------------------------------------------------------------------------

    def significance(self, shard: int) -> float:
        """Return |g| / |w| of the shard's part of the last push (FluentPS, section III-E.2); 0 if all weights are 0."""
        gradient = weight = 0.0
        for (number, _), bucket in self._buckets.items():
            if number == shard:
                gradient += sum(float(sender.data.double().square().sum()) for sender in bucket.senders)
                weight += sum(float(receiver.data.double().square().sum()) for receiver in bucket.receivers)
        return (gradient / weight) ** 0.5 if weight > 0 else 0.0


def _joined_buffers(buffers: Sequence[TransmitBuffer] | Sequence[ApplyBuffer]) -> Tensor:
    return torch.cat([buffer.data for buffer in buffers])


def _spread_over(values: Tensor, buffers: Sequence[TransmitBuffer] | Sequence[ApplyBuffer]) -> None:
    start = 0
    for buffer in buffers:
        stop = start + len(buffer.data)
        buffer.data.copy_(values[start:stop])
        start = stop
