"""The worker's side of all tables: gradients until they are sent, values until they are applied."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gossipx.errors import UsageError
from gossipx.memory import Memory, Source
from gossipx.model.buffers import typed
from gossipx.protocol.fields import Parts
from gossipx.protocol.server_messages import MEASURED, TablesRequest
from gossipx.server.placement import Partition
from gossipx.server.placement.buckets import Bucket
from gossipx.tables.bucket_memory import BucketMemory, ChangeSink, Settings, TablesSink
from gossipx.tables.coding import Coding, PushEncoder, Redistribution, tell_lost
from gossipx.tables.parts import ApplyBuffer, ClientTable, Replaceable, Storages, TransmitBuffer, load_states, states_of

Where = tuple[int, int]
"""A shard and a bucket of it."""


@dataclass
class _Table:
    """One table, and the buckets that its partitions lie in."""

    table: ClientTable
    pieces: list[tuple[int, TransmitBuffer, ApplyBuffer]] = field(default_factory=list)  # by their first elements
    places: list[Where] = field(default_factory=list)
    fresh: bool = True  # what was fetched has been applied
    updated: bool = False  # it has given a gradient in this iteration


class Client:
    """All tables of one worker.

    Gradients are taken and values applied by the training thread; other threads send and fetch.

    Args:
        parameters: by table; their memory may not move.
        shards: for each shard its partitions.
        buckets: for each shard its buckets.
        storages: the classes that tables are made with.
        coding: the codecs of pushes and pulls.

    Attributes:
        settings_now: gives the settings that go with gradients made now; the desk's to set.
        epoch: of the layout that it goes by.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        shards: Sequence[Sequence[Partition]],
        buckets: Sequence[Sequence[Bucket]],
        storages: Storages,
        coding: Coding | None = None,
    ):
        self.settings_now: Callable[[], Settings] = tuple
        self._storages = storages
        self._coding = coding or Coding()
        self._tables = [_Table(storages.client_table(parameter, storages)) for parameter in parameters]
        self.epoch = 0
        self._bucket_memories: dict[Where, BucketMemory] = {}
        self._encoding = threading.Lock()
        self._arrived = threading.Condition()
        self._placing = threading.Lock()
        self._waiting: set[Where] = set()  # buckets that are to be fetched before their tables are used
        self._wanted: set[int] | None = None  # tables whose values are used when they come; None: all
        self._lay_out_all(shards, buckets)

    def _lay_out_all(self, shards: Sequence[Sequence[Partition]], buckets: Sequence[Sequence[Bucket]]) -> None:
        for shard, (partitions, cut) in enumerate(zip(shards, buckets, strict=True)):
            for number, bucket in enumerate(cut):
                self._bucket_memories[shard, number] = self._lay_out(
                    (shard, number), partitions[bucket.first : bucket.stop]
                )
        for one in self._tables:  # shards may hold its partitions in any order
            pieces = sorted(one.pieces, key=lambda piece: piece[0])
            one.table.senders[:] = [sender for _, sender, _ in pieces]
            one.table.takers[:] = [taker for _, _, taker in pieces]

    def _lay_out(self, place: Where, partitions: Sequence[Partition]) -> BucketMemory:
        dtype = self._tables[partitions[0].table].table.parameter.dtype
        sizes = [partition.stop - partition.start for partition in partitions]
        transmit, apply = (Memory(sum(sizes) * dtype.itemsize) for _ in range(2))
        ends = list(itertools.accumulate(sizes))
        buffers = [typed(memory.view, dtype) for memory in (transmit, apply)]
        senders, takers = [], []
        for partition, size, end in zip(partitions, sizes, ends, strict=True):
            sender = self._storages.transmit(buffers[0][end - size : end])
            taker = self._storages.apply(buffers[1][end - size : end])
            senders.append(sender)
            takers.append(taker)
            self._tables[partition.table].pieces.append((partition.start, sender, taker))
            self._tables[partition.table].places.append(place)
        made = BucketMemory(list(partitions), transmit, apply, senders, takers, {one.table for one in partitions})
        if self._coding.push is not None:
            made.push_encoder = PushEncoder(self._coding, partitions, buffers[0], self._seed(place))
        if self._coding.pull is not None:
            made.tensors = self._coding.tensors(partitions, dtype)
            made.most = self._coding.pull.longest(made.tensors)
        return made

    def _seed(self, place: Where) -> int:
        """Of what is drawn for a bucket."""
        return (self._coding.seed << 64) + (place[0] << 32) + place[1]

    def place(self, shards: Sequence[Sequence[Partition]], buckets: Sequence[Sequence[Bucket]], epoch: int) -> None:
        """Go over to another layout, while no gradient is taken or sent. What is not sent as it lies in memory is lost.

        Tables that were to be fetched are still to be fetched, in the buckets that they lie in now; others that lie in
        these are not used anew. What was kept of pushes goes to the buckets that its values lie in.
        """
        with self._placing, self._arrived:
            self._wanted = {one.table for place in self._waiting for one in self._bucket_memories[place].partitions}
            before = [(_joined(one.table.senders), _joined(one.table.takers)) for one in self._tables]
            spread = Redistribution()
            new = {
                one.table
                for bucket_memory in self._bucket_memories.values()
                if bucket_memory.is_new
                for one in bucket_memory.partitions
            }
            for bucket_memory in self._bucket_memories.values():
                if bucket_memory.push_encoder is not None:
                    spread.take(bucket_memory.push_encoder)
            self._bucket_memories = {}
            for table in self._tables:
                table.pieces, table.places = [], []
            self._lay_out_all(shards, buckets)
            for bucket_memory in self._bucket_memories.values():
                bucket_memory.is_new = not new.isdisjoint(one.table for one in bucket_memory.partitions)
                if bucket_memory.push_encoder is not None:
                    spread.give(bucket_memory.push_encoder)
            for table, both in zip(self._tables, before, strict=True):
                _spread(both[0], table.table.senders)
                _spread(both[1], table.table.takers)
            self._waiting = {
                place
                for place, bucket_memory in self._bucket_memories.items()
                if any(one.table in self._wanted for one in bucket_memory.partitions)
            }
            self.epoch = epoch
            self._arrived.notify_all()

    # --- gradients --------------------------------------------------------------------------------

    def update(self, table: int, gradient: Tensor) -> list[Where]:
        """Take a table's gradient of this iteration; the buckets that are whole by it.

        Raises:
            ValueError: it has given one in this iteration already.
        """
        one = self._tables[table]
        if one.updated:
            raise ValueError(f"table {table} has given a gradient in this iteration already")
        one.updated = True
        one.table.update(gradient)
        return self._whole(table)

    def flush(self) -> list[Where]:
        """The iteration is over: tables without a gradient have one of zeros; the buckets that are whole by that."""
        whole: list[Where] = []
        for number, table in enumerate(self._tables):
            if not table.updated:
                table.table.update(torch.zeros_like(table.table.parameter))
                whole += self._whole(number)
            table.updated = False
        for bucket_memory in self._bucket_memories.values():
            bucket_memory.missing = {partition.table for partition in bucket_memory.partitions}
        return whole

    def _whole(self, table: int) -> list[Where]:
        whole = []
        for place in self._tables[table].places:
            missing = self._bucket_memories[place].missing
            missing.discard(table)
            if not missing:
                bucket_memory = self._bucket_memories[place]
                bucket_memory.is_new, bucket_memory.encoded, bucket_memory.settings = True, None, self.settings_now()
                whole.append(place)
        return whole

    def encode(self, place: Where) -> tuple[Parts, Source]:
        """A bucket's gradients as they are sent; good until the next iteration's come.

        What is asked for again, as it did not arrive, is the same: an encoder may keep what it has not sent.
        """
        bucket_memory = self._bucket_memories[place]
        with self._encoding:
            if bucket_memory.encoded is None:
                if bucket_memory.push_encoder is not None:
                    frame = bucket_memory.push_encoder.encode(bucket_memory.settings)
                    sizes, source = [len(frame)], Source(frame)
                elif self._storages.raw_pushes:
                    sizes = [sender.data.numel() * sender.data.element_size() for sender in bucket_memory.senders]
                    source = Source(bucket_memory.transmit.view, bucket_memory.transmit.descriptor)
                else:
                    encoded = [memoryview(sender.encode()).cast("B") for sender in bucket_memory.senders]
                    sizes, source = [len(one) for one in encoded], Source(memoryview(bytearray().join(encoded)))
                bucket_memory.is_new, bucket_memory.encoded = False, (tuple(enumerate(sizes)), source)
            return bucket_memory.encoded

    def settings(self, place: Where) -> Settings:
        """The optimizer's settings as they were when a bucket's gradients were made.

        A schedule may have changed them when these are sent.
        """
        return self._bucket_memories[place].settings

    # --- values -----------------------------------------------------------------------------------

    def expect(self, places: Sequence[Where]) -> None:
        """These buckets are to be fetched before their tables are used again."""
        with self._arrived:
            self._waiting.update(places)
            self._wanted = None

    def unchanged(self, places: Sequence[Where]) -> None:
        """These buckets are not to be fetched after all."""
        with self._arrived:
            self._waiting.difference_update(places)
            self._arrived.notify_all()

    @property
    def raw_pulls(self) -> bool:
        """Whether values come as they lie in memory: nothing is to be done when they have come."""
        return self._storages.raw_pulls and self._coding.pull is None

    def sink(self, place: Where) -> TablesSink | ChangeSink:
        """Takes in what a server sends of a bucket."""
        bucket_memory = self._bucket_memories[place]
        return (
            TablesSink(bucket_memory, self._storages.raw_pulls)
            if bucket_memory.tensors is None
            else ChangeSink(bucket_memory, bucket_memory.tensors)
        )

    def told(self, request: TablesRequest) -> TablesRequest:
        """A request as it leaves: with what is to be measured, and what is here of the bucket.

        Who takes what there is now, to begin by or to end with, is given values as they are.
        """
        if request.significance == MEASURED:
            request = dataclasses.replace(request, significance=self.significance(request.shard))
        if request.bucket < 0 or request.progress < 0:
            return request
        return dataclasses.replace(request, base=self.base((request.shard, request.bucket)))

    def base(self, place: Where) -> int:
        """Where pulls have a codec: the checksum of what is here of a bucket; FULL: nothing that a server has given."""
        return self._bucket_memories[place].base

    def fetched(self, place: Where, sink: TablesSink | ChangeSink) -> None:
        """A bucket has come whole: its tables take it in when they are used next."""
        sink.decode()
        with self._arrived:
            for partition in self._bucket_memories[place].partitions:
                if self._wanted is None or partition.table in self._wanted:
                    self._tables[partition.table].fresh = False
            self._waiting.discard(place)
            self._arrived.notify_all()

    def wake(self) -> None:
        """Have whoever waits look again."""
        with self._arrived:
            self._arrived.notify_all()

    def ready(self, tables: Sequence[int] | None = None) -> bool:
        """Whether nothing is still to be fetched of these tables; None: of all."""
        if not self._waiting:
            return True
        if tables is None:
            return False
        return not any(place in self._waiting for table in tables for place in self._tables[table].places)

    def wait(self, tables: Sequence[int] | None, seconds: float) -> bool:
        """Wait until they are ready, at most so long; whether they are."""
        with self._arrived:
            return self._arrived.wait_for(lambda: self.ready(tables), seconds)

    def apply(self, tables: Sequence[int] | None = None) -> None:
        """Put what has come into the model; for the training thread, once they are :meth:`ready`."""
        with self._placing:
            for table in self._tables if tables is None else (self._tables[number] for number in tables):
                if not table.fresh:
                    table.fresh = True
                    table.table.apply()

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """What the parts keep from one iteration to the next, as plain data; tensors are no copies. None: nothing.

        For the training thread, between an iteration's last gradient and the next one's first. What still waits to be
        sent is encoded now: the checkpoints of shards that go with this one have it.
        """
        for place, bucket_memory in self._bucket_memories.items():
            if bucket_memory.is_new:
                self.encode(place)
        states = states_of(self._parts())
        push_encoder = [
            bucket_memory.push_encoder.state_dict()
            for bucket_memory in self._bucket_memories.values()
            if bucket_memory.push_encoder is not None
        ]
        if not push_encoder and all(state is None for state in states):
            return None
        return {"storages": self._storages.describe(), "states": states, "pushing": push_encoder}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave.

        Raises:
            UsageError: it is of other parts.
        """
        own = self._storages.describe()
        if state["storages"] != own:
            raise UsageError(f"it is of a run with the parts {state['storages']}, not {own or 'of gossipx alone'}")
        load_states(self._parts(), state["states"])
        if state["pushing"]:  # else the run has had no codec until now
            for bucket_memory, kept in zip(self._bucket_memories.values(), state["pushing"], strict=True):
                if bucket_memory.push_encoder is not None:
                    bucket_memory.push_encoder.load_state_dict(kept)
                else:
                    tell_lost(kept, "none")

    def _parts(self) -> list[Replaceable]:
        tables = [part for one in self._tables for part in (one.table, one.table.gradient, one.table.worker)]
        return [
            *tables,
            *(
                part
                for bucket_memory in self._bucket_memories.values()
                for part in (*bucket_memory.senders, *bucket_memory.takers)
            ),
        ]

    # --- figures ----------------------------------------------------------------------------------

    def significance(self, shard: int) -> float:
        """|g| / |w| of a shard's part of the last push (FluentPS, section III-E.2); 0 of no values."""
        gradient = weight = 0.0
        for (number, _), bucket_memory in self._bucket_memories.items():
            if number == shard:
                gradient += sum(float(sender.data.double().square().sum()) for sender in bucket_memory.senders)
                weight += sum(float(taker.data.double().square().sum()) for taker in bucket_memory.takers)
        return (gradient / weight) ** 0.5 if weight > 0 else 0.0


def _joined(buffers: Sequence[TransmitBuffer] | Sequence[ApplyBuffer]) -> Tensor:
    return torch.cat([buffer.data for buffer in buffers])


def _spread(values: Tensor, buffers: Sequence[TransmitBuffer] | Sequence[ApplyBuffer]) -> None:
    start = 0
    for buffer in buffers:
        stop = start + len(buffer.data)
        buffer.data.copy_(values[start:stop])
        start = stop
