"""The tables of one peer in virtual time: what the driver's threads do in real processes, done at once."""

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
from gossipx.tables.bucket_memory import Changed, Nothing, Tables
from gossipx.tables.client import Where
from gossipx.tables.migration import Ranges
from gossipx.tables.store import Copy, Desk, Gradient


class SimTables:
    """What of a peer's effects is about tables.

    Args:
        desk: its tables.
        tell: told of what has come of an effect.
    """

    def __init__(self, desk: Desk, tell: Callable[[events.Event], None]):
        self.desk = desk
        self._tell = tell
        self._brought: dict[Hashable, Gradient] = {}  # by the key of the request
        self._kept: dict[int, Gradient] = {}
        self._fetching: dict[int, tuple[Where, Tables | Changed]] = {}
        self._copies: dict[int, Copy] = {}
        self._ranges: dict[int, Ranges] = {}

    # --- requests ---------------------------------------------------------------------------------

    def outgoing(self, send: effects.Send) -> tuple[effects.Send, bytearray]:
        """A request as it leaves, and what it brings."""
        request = send.request
        if isinstance(request, GradientRequest):
            place = request.shard, request.bucket
            parts, source = self.desk.client.encode(place)
            told = dataclasses.replace(request, parts=parts, settings=self.desk.client.settings(place))
            return dataclasses.replace(send, request=told), bytearray(source.view)
        if isinstance(request, RecordRequest) and request.bucket >= 0:
            return send, bytearray(self._kept[send.ticket].view)
        if isinstance(request, CopyRequest):
            self._copies[send.ticket] = self.desk.room_for_copy(request.shard)
        if isinstance(request, RangesRequest):
            self._ranges[send.ticket] = self.desk.ranges()
        if isinstance(request, TablesRequest) and request.bucket >= 0:
            place = request.shard, request.bucket
            self._fetching[send.ticket] = place, self.desk.client.sink(place)
            return dataclasses.replace(send, request=self.desk.client.told(request)), bytearray()
        return send, bytearray()

    def arrived(self, ticket: int, reply: TablesReply | CopyReply, payload: bytearray) -> None:
        """An answer is here."""
        asked = self._fetching.get(ticket, (None, Nothing()))[1]
        sink: Tables | Changed | Copy | Ranges | Nothing = self._copies.get(ticket) or self._ranges.get(ticket) or asked
        sink.fit(reply).take(0, memoryview(payload))

    def brought(self, sender: int, key: Hashable, request: GradientRequest | RecordRequest, content: bytearray) -> None:
        """The request ``key`` has brought a gradient."""
        gradient = self.desk.room_for(request)
        if isinstance(gradient, Gradient):
            gradient.sender = sender if isinstance(request, GradientRequest) else None
            gradient.take(0, memoryview(content))
            self._brought[key] = gradient

    def drop(self, key: Hashable) -> None:
        """What it has brought is not needed, if it was not kept."""
        if gradient := self._brought.pop(key, None):
            gradient.release()

    # --- effects ----------------------------------------------------------------------------------

    def carry_out(self, effect: effects.Effect) -> bool:
        """Do what is about tables; whether it was that."""
        desk = self.desk
        match effect:
            case effects.Keep(key, ticket) if key in self._brought:
                self._kept[ticket] = self._brought.pop(key)
            case table_effects.Share(ticket, other):
                self._kept[other] = self._kept[ticket].hold()
            case table_effects.TakeCopy(ticket, shard):
                desk.take_copy(shard, self._copies.pop(ticket))
            case table_effects.ApplyGradient(ticket, scale):
                self._left_out(desk.apply(self._kept.pop(ticket), scale))
            case table_effects.BufferGradient(ticket):
                self._left_out(desk.buffer(self._kept.pop(ticket)))
            case table_effects.ApplyBuffer(shard):
                desk.apply_buffer(shard)
            case table_effects.ComeBack(shard, epoch):
                self._tell(events.CameBack(shard, epoch, None))  # there are no files in virtual time
            case table_effects.FillTables(shard):
                desk.fill(shard)
            case table_effects.Fetch(buckets):
                desk.client.expect(buckets)
            case table_effects.Unchanged(buckets):
                desk.client.unchanged(buckets)
            case table_effects.Fetched(ticket):
                desk.client.fetched(*self._fetching.pop(ticket))
            case table_effects.PrepareTables(epoch, servers):
                desk.prepare(epoch, servers)
            case table_effects.TakeRanges(ticket, pieces):
                desk.take(self._ranges.pop(ticket), pieces)
            case table_effects.TellPrepared(epoch):
                self._tell(events.Prepared(epoch, desk.prepared()))
            case table_effects.PlaceTables(epoch, servers):
                desk.go_over(epoch, servers)
                desk.place(epoch, servers)
            case table_effects.DropTables():
                desk.drop()
            case _:
                return False
        return True

    def _left_out(self, sender: int | None) -> None:
        if sender is not None:
            self._tell(events.GradientPoisoned(sender))

    def forget(self, ticket: int) -> None:
        """What is under ``ticket`` is no longer needed."""
        self._fetching.pop(ticket, None)
        self._copies.pop(ticket, None)
        self._ranges.pop(ticket, None)
        if gradient := self._kept.pop(ticket, None):
            gradient.release()

    def answer(
        self, answer: effects.Answer, reply: TablesReply | CopyReply
    ) -> tuple[TablesReply | CopyReply, bytearray]:
        """An answer as it leaves, and what it brings."""
        if isinstance(reply, CopyReply):
            assert answer.copies is not None
            content = bytearray(self.desk.copy(answer.copies).view)
            return dataclasses.replace(reply, size=len(content)), content
        if answer.pieces is not None:
            packed = self.desk.pack(answer.pieces)
            return dataclasses.replace(reply, parts=((0, len(packed.view)),)), bytearray(packed.view)
        if answer.tables is None:
            return reply, bytearray()
        given = self.desk.encode(answer.tables)
        content = bytearray(given.source.view)
        self.desk.release(answer.tables.shard, given)
        return dataclasses.replace(reply, parts=given.parts, base=given.base), content
