"""Tables on their way, in server mode: gradients that are pushed, tables that are pulled, and shards that move."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from gossipx.errors import CancelledError, ProtocolError, UsageError
from gossipx.memory import Source
from gossipx.protocol.effects import Send
from gossipx.protocol.events import Fault
from gossipx.protocol.messages import Reply
from gossipx.protocol.server_messages import (
    CopyRequest,
    GradientRequest,
    RangesRequest,
    RecordRequest,
    TablesReply,
    TablesRequest,
)
from gossipx.runtime.requests import Outbox, Prepared
from gossipx.tables.bucket_memory import ChangeSink, EmptySink, TablesSink
from gossipx.tables.migration import RangesSink
from gossipx.tables.store import CopySink, Gradient, TableStore

TableRequest = GradientRequest | TablesRequest | RecordRequest | CopyRequest | RangesRequest
"""Requests whose payload, or whose reply's, is tables or parts of them."""


@dataclass
class _Fetching:
    """Tables on their way to us."""

    place: tuple[int, int]
    sink: TablesSink | ChangeSink


class TableTransfers:
    """Sends requests about tables, and keeps what comes, or was brought, until it is forgotten.

    Args:
        outbox: of the peer.

    Attributes:
        table_store: the peer's tables; None without a parameter server.
    """

    def __init__(self, outbox: Outbox):
        self.table_store: TableStore | None = None
        self._outbox = outbox
        self._gradients: dict[int, Gradient] = {}  # those that others brought and that were kept
        self._fetching: dict[int, _Fetching] = {}
        self._copies: dict[int, CopySink] = {}
        self._ranges: dict[int, RangesSink] = {}

    @property
    def _table_store(self) -> TableStore:
        assert self.table_store is not None
        return self.table_store

    # --- out --------------------------------------------------------------------------------------

    def expect(self, send: Send) -> None:
        """Make room for the tables that a request is about to ask for, where they are placed at this moment."""
        match send.request:
            case TablesRequest(shard=shard, bucket=bucket) if bucket >= 0:
                self._fetching[send.ticket] = _Fetching((shard, bucket), self._table_store.client.sink((shard, bucket)))
            case RangesRequest():
                self._ranges[send.ticket] = self._table_store.ranges()

    def send(self, send: Send) -> None:
        """Send a request of the kinds of :data:`TableRequest`."""
        if isinstance(send.request, CopyRequest):
            self._copies[send.ticket] = self._table_store.room_for_copy(send.request.shard)
        self._outbox.send(send, lambda: self._prepared(send), lambda reply: self._arrived(send.ticket, reply))

    def _prepared(self, send: Send) -> Prepared:
        ticket, request = send.ticket, send.request
        match request:
            case GradientRequest():
                return self._push(request)
            case TablesRequest():
                fetching = self._fetching.get(ticket)
                sink = EmptySink() if fetching is None else fetching.sink
                return self._table_store.client.complete_request(request), sink, None
            case RecordRequest():
                gradient = self._gradients.get(ticket)
                return request, None, Source(memoryview(b"")) if gradient is None else gradient.source
            case CopyRequest():
                return request, self._copies.get(ticket, EmptySink()), None
            case _:
                return request, self._ranges.get(ticket, EmptySink()), None

    def _push(self, request: GradientRequest) -> Prepared:
        """Encode a bucket's gradients as they are when they leave."""
        client, place = self._table_store.client, (request.shard, request.bucket)
        if request.epoch != client.epoch:
            raise CancelledError("it is of a layout that is over")
        try:
            parts, source = client.encode(place)
        except Exception as error:
            self._broken(error)
            raise CancelledError("its gradients cannot be encoded") from error
        return dataclasses.replace(request, parts=parts, settings=client.settings(place)), None, source

    def _arrived(self, ticket: int, reply: Reply) -> Fault | None:
        fetching = self._fetching.get(ticket)
        if isinstance(reply, TablesReply) and fetching is not None:
            try:
                fetching.sink.read()
            except ProtocolError as error:
                raise ProtocolError(f"tables cannot be decoded, and are asked for again: {error}") from error
        return None

    # --- what came --------------------------------------------------------------------------------

    def fetched(self, ticket: int) -> None:
        """Use the tables that came under ``ticket``; nothing if that was done before."""
        fetching = self._fetching.pop(ticket, None)
        if fetching is None:
            return
        try:
            self._table_store.client.fetched(fetching.place, fetching.sink)
        except Exception as error:
            self._broken(error)

    def ranges(self, ticket: int) -> RangesSink:
        """Give away what came under ``ticket`` of tables that move here."""
        return self._ranges.pop(ticket)

    def copy(self, ticket: int) -> CopySink:
        """Give away the copy of a shard that came under ``ticket``."""
        return self._copies.pop(ticket)

    # --- gradients that others brought ----------------------------------------------------------------

    def keep(self, ticket: int, brought: Gradient) -> None:
        """Keep a gradient."""
        self._gradients[ticket] = brought

    def share(self, ticket: int, other: int) -> None:
        """Keep the gradient that was kept under ``ticket`` under ``other``, too."""
        self._gradients[other] = self._gradients[ticket].hold()

    def held_gradient(self, ticket: int) -> Gradient:
        """Return the gradient under ``ticket`` with a reference of its own, which the caller releases."""
        return self._gradients[ticket].hold()

    def gradient(self, ticket: int) -> Gradient:
        """Give away the gradient under ``ticket``."""
        return self._gradients.pop(ticket)

    def forget(self, ticket: int) -> None:
        """Release what is under ``ticket``."""
        for kept in (self._fetching, self._copies, self._ranges):
            kept.pop(ticket, None)
        if gradient := self._gradients.pop(ticket, None):
            gradient.release()

    # --- faults -----------------------------------------------------------------------------------

    def rejected(self, error: Exception) -> None:
        """Leave out another's push that does not fit its shard; end training by any other error."""
        if isinstance(error, ProtocolError):
            self._outbox.note("protocol", f"a push that does not fit is left out: {error}")
        else:
            self._broken(error)

    def _broken(self, error: Exception) -> None:
        if isinstance(error, UsageError):  # it says what is wrong, and where
            self._outbox.fail(error)
            return
        made = UsageError(f"a part of the parameter server failed: {type(error).__name__}: {error}")
        made.__cause__ = error
        self._outbox.fail(made)
