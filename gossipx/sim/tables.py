"""The tables of one simulated peer: effects on the tables of a parameter server, carried out immediately.

It corresponds to :mod:`gossipx.runtime.tables`, which uses a thread. Gradients, copies and ranges are stored under the
ticket by which the role refers to them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable

from gossipx.protocol import effects, events, table_effects
from gossipx.protocol.server_messages import (
    CopyReply,
    CopyRequest,
    GradientRequest,
    RangesRequest,
    RecordRequest,
    TablesReply,
    TablesRequest,
)
from gossipx.tables.bucket_memory import ChangeSink, EmptySink, TablesSink
from gossipx.tables.client import Where
from gossipx.tables.migration import RangesSink
from gossipx.tables.store import CopySink, Gradient, TableStore


class SimTables:
    """Carries out a peer's effects on tables.

    Args:
        table_store: the peer's tables.
        handle: called with the events that result from an effect.
    """

    def __init__(self, table_store: TableStore, handle: Callable[[events.Event], None]):
        self.table_store = table_store
        self._handle = handle
        self._uploads: dict[Hashable, Gradient] = {}  # by the request's key, until kept or dropped
        self._gradients: dict[int, Gradient] = {}
        self._fetching: dict[int, tuple[Where, TablesSink | ChangeSink]] = {}
        self._copies: dict[int, CopySink] = {}
        self._ranges: dict[int, RangesSink] = {}

    # --- requests ---------------------------------------------------------------------------------

    def outgoing(self, send: effects.Send) -> tuple[effects.Send, bytearray]:
        """Return a request as it is sent, and its payload."""
        request = send.request
        if isinstance(request, GradientRequest):
            place = request.shard, request.bucket
            parts, source = self.table_store.client.encode(place)
            push = dataclasses.replace(request, parts=parts, settings=self.table_store.client.settings(place))
            return dataclasses.replace(send, request=push), bytearray(source.view)
        if isinstance(request, RecordRequest) and request.bucket >= 0:
            return send, bytearray(self._gradients[send.ticket].view)
        if isinstance(request, CopyRequest):
            self._copies[send.ticket] = self.table_store.copy_sink(request.shard)
        if isinstance(request, RangesRequest):
            self._ranges[send.ticket] = self.table_store.ranges()
        if isinstance(request, TablesRequest) and request.bucket >= 0:
            place = request.shard, request.bucket
            self._fetching[send.ticket] = place, self.table_store.client.sink(place)
            return dataclasses.replace(send, request=self.table_store.client.complete_request(request)), bytearray()
        return send, bytearray()

    def arrived(self, ticket: int, reply: TablesReply | CopyReply, payload: bytearray) -> None:
        """Store the payload of a reply."""
        pulled = self._fetching.get(ticket, (None, EmptySink()))[1]
        sink: TablesSink | ChangeSink | CopySink | RangesSink | EmptySink = (
            self._copies.get(ticket) or self._ranges.get(ticket) or pulled
        )
        sink.fit(reply).take(0, memoryview(payload))

    def uploaded(
        self, sender: int, key: Hashable, request: GradientRequest | RecordRequest, content: bytearray
    ) -> None:
        """Store the gradient that the request ``key`` uploaded."""
        gradient = self.table_store.sink_for(request)
        if isinstance(gradient, Gradient):
            gradient.sender = sender if isinstance(request, GradientRequest) else None
            gradient.take(0, memoryview(content))
            self._uploads[key] = gradient

    def drop(self, key: Hashable) -> None:
        """Release the upload of the request ``key`` unless it was kept."""
        if gradient := self._uploads.pop(key, None):
            gradient.release()

    # --- effects ----------------------------------------------------------------------------------

    def carry_out(self, effect: effects.Effect) -> bool:
        """Carry out an effect on tables. Return False if the effect is not about tables."""
        table_store = self.table_store
        match effect:
            case effects.Keep(key, ticket) if key in self._uploads:
                self._gradients[ticket] = self._uploads.pop(key)
            case table_effects.Share(ticket, other):
                self._gradients[other] = self._gradients[ticket].hold()
            case table_effects.TakeCopy(ticket, shard):
                table_store.take_copy(shard, self._copies.pop(ticket))
            case table_effects.ApplyGradient(ticket, scale):
                self._report_poisoned(table_store.apply(self._gradients.pop(ticket), scale))
            case table_effects.BufferGradient(ticket):
                self._report_poisoned(table_store.buffer(self._gradients.pop(ticket)))
            case table_effects.ApplyBuffer(shard, sums):
                table_store.apply_buffer(shard, sums)
            case table_effects.RestoreTables(shard, epoch):
                self._handle(events.TablesRestored(shard, epoch, None))  # the simulator has no files
            case table_effects.FillTables(shard):
                table_store.fill(shard)
            case table_effects.Gather():
                table_store.client.gather()
            case table_effects.Fetch(buckets):
                table_store.client.expect(buckets)
            case table_effects.Unchanged(buckets):
                table_store.client.unchanged(buckets)
            case table_effects.Fetched(ticket):
                table_store.client.fetched(*self._fetching.pop(ticket))
            case table_effects.PrepareTables(epoch, servers):
                table_store.prepare(epoch, servers)
            case table_effects.TakeRanges(ticket, pieces):
                table_store.take(self._ranges.pop(ticket), pieces)
            case table_effects.ReportPrepared(epoch):
                self._handle(events.Prepared(epoch, table_store.prepared()))
            case table_effects.PlaceTables(epoch, servers):
                table_store.switch_client(epoch, servers)
                table_store.place(epoch, servers)
            case table_effects.DropTables():
                table_store.drop()
            case _:
                return False
        return True

    def _report_poisoned(self, sender: int | None) -> None:
        if sender is not None:
            self._handle(events.GradientPoisoned(sender))

    def forget(self, ticket: int) -> None:
        """Release everything stored under ``ticket``."""
        self._fetching.pop(ticket, None)
        self._copies.pop(ticket, None)
        self._ranges.pop(ticket, None)
        if gradient := self._gradients.pop(ticket, None):
            gradient.release()

    def answer(
        self, answer: effects.Answer, reply: TablesReply | CopyReply
    ) -> tuple[TablesReply | CopyReply, bytearray]:
        """Return a reply as it is sent, and its payload."""
        if isinstance(reply, CopyReply):
            assert answer.copied_shard is not None
            content = bytearray(self.table_store.copy(answer.copied_shard).view)
            return dataclasses.replace(reply, size=len(content)), content
        if answer.pieces is not None:
            packed = self.table_store.pack(answer.pieces)
            return dataclasses.replace(reply, parts=((0, len(packed.view)),)), bytearray(packed.view)
        if answer.tables is None:
            return reply, bytearray()
        encoded = self.table_store.encode(answer.tables)
        content = bytearray(encoded.source.view)
        self.table_store.release(answer.tables.shard, encoded)
        return dataclasses.replace(reply, parts=encoded.parts, base=encoded.base), content
