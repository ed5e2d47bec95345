"""Table transfers in server mode: gradients that are pushed, tables that are pulled, and shards that move.

Each transfer is stored under the ticket by which the role refers to it, until the role forgets the ticket.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

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
"""Requests that carry tables, gradients or parts of them in the request or the reply."""


@dataclass
class _Fetching:
    """A pull of one bucket of tables that is under way."""

    place: tuple[int, int]
    sink: TablesSink | ChangeSink


class TableTransfers:
    """Sends requests about tables and stores received tables and uploaded gradients by ticket.

    Args:
        outbox: sends this peer's requests.

    Attributes:
        table_store: the peer's tables; None without a parameter server.
    """

    def __init__(self, outbox: Outbox):
        self.table_store: TableStore | None = None
        self._outbox = outbox
        self._gradients: dict[int, Gradient] = {}  # uploaded by other peers
        self._fetching: dict[int, _Fetching] = {}
        self._copies: dict[int, CopySink] = {}
        self._ranges: dict[int, RangesSink] = {}

    @property
    def _table_store(self) -> TableStore:
        assert self.table_store is not None
        return self.table_store

    # --- out --------------------------------------------------------------------------------------

    def expect(self, send: Send) -> None:
        """Prepare the sink for a pull by the current placement. Called under the driver's lock."""
        match send.request:
            case TablesRequest(shard=shard, bucket=bucket) if bucket >= 0:
                self._fetching[send.ticket] = _Fetching((shard, bucket), self._table_store.client.sink((shard, bucket)))
            case RangesRequest():
                self._ranges[send.ticket] = self._table_store.ranges()

    def send(self, send: Send) -> None:
        """Send a request of one of the types of :data:`TableRequest`."""
        if isinstance(send.request, CopyRequest):
            self._copies[send.ticket] = self._table_store.copy_sink(send.request.shard)
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
        """Encode a bucket's gradients just before they are sent."""
        client, place = self._table_store.client, (request.shard, request.bucket)
        if request.epoch != client.epoch:
            raise CancelledError("the servers were changed before the push was sent")
        try:
            parts, source = client.encode(place)
        except Exception as error:
            self._fail(error)
            raise CancelledError("its gradients cannot be encoded") from error
        return msgspec.structs.replace(request, parts=parts, settings=client.settings(place)), None, source

    def _arrived(self, ticket: int, reply: Reply) -> Fault | None:
        fetching = self._fetching.get(ticket)
        if isinstance(reply, TablesReply) and fetching is not None:
            try:
                fetching.sink.read()
            except ProtocolError as error:
                raise ProtocolError(f"pulled tables cannot be decoded, the pull is retried: {error}") from error
        return None

    # --- received tables --------------------------------------------------------------------------

    def fetched(self, ticket: int) -> None:
        """Pass the tables received under ``ticket`` to the client. Do nothing if that was done before."""
        fetching = self._fetching.pop(ticket, None)
        if fetching is None:
            return
        try:
            self._table_store.client.fetched(fetching.place, fetching.sink)
        except Exception as error:
            self._fail(error)

    def ranges(self, ticket: int) -> RangesSink:
        """Take the ranges of a moving shard that were received under ``ticket``."""
        return self._ranges.pop(ticket)

    def copy(self, ticket: int) -> CopySink:
        """Take the copy of a shard that was received under ``ticket``."""
        return self._copies.pop(ticket)

    # --- uploaded gradients -----------------------------------------------------------------------

    def keep(self, ticket: int, gradient: Gradient) -> None:
        """Store an uploaded gradient under ``ticket``."""
        self._gradients[ticket] = gradient

    def share(self, ticket: int, other: int) -> None:
        """Store a second reference to the gradient of ``ticket`` under ``other``."""
        self._gradients[other] = self._gradients[ticket].hold()

    def held_gradient(self, ticket: int) -> Gradient:
        """Return a new reference to the gradient of ``ticket``; the caller releases it."""
        return self._gradients[ticket].hold()

    def gradient(self, ticket: int) -> Gradient:
        """Take the gradient of ``ticket``; its reference becomes the caller's."""
        return self._gradients.pop(ticket)

    def forget(self, ticket: int) -> None:
        """Release everything stored under ``ticket``."""
        for stored in (self._fetching, self._copies, self._ranges):
            stored.pop(ticket, None)
        if gradient := self._gradients.pop(ticket, None):
            gradient.release()

    # --- faults -----------------------------------------------------------------------------------

    def rejected(self, error: Exception) -> None:
        """Log and ignore a push that does not fit its shard; end training on any other error."""
        if isinstance(error, ProtocolError):
            self._outbox.note("protocol", f"a push that does not fit its shard is ignored: {error}")
        else:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, UsageError):  # its message names the cause
            self._outbox.fail(error)
            return
        failure = UsageError(f"a part of the parameter server failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        self._outbox.fail(failure)
