"""The table work of a driver in server mode: it carries out the effects on the tables of a parameter server.

A table is one parameter tensor; a shard is the part of all tables that one server holds. A thread of its own does the
work in the order of the role's decisions, so that neither training nor the network waits for it. What is received,
such as a pushed gradient, is stored under the ticket by which the role refers to it, until the role forgets the ticket.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from gossipx.errors import CancelledError, GossipxError, ProtocolError, UsageError
from gossipx.memory import Source
from gossipx.protocol.effects import Answer, Pieces, Send
from gossipx.protocol.events import Event, Fault, GradientPoisoned, Prepared, TablesRestored
from gossipx.protocol.messages import NotReadyReply, Reply
from gossipx.protocol.server_messages import (
    GradientRequest,
    RangesRequest,
    TablesReply,
    TablesRequest,
)
from gossipx.protocol.table_effects import (
    ApplyBuffered,
    ApplyGradient,
    BufferGradient,
    DropTables,
    Fetch,
    Fetched,
    FillTables,
    Gather,
    KeepShard,
    PlaceTables,
    PrepareTables,
    Record,
    ReportPrepared,
    RestoreTables,
    TableEffect,
    TakeRanges,
    Unchanged,
)
from gossipx.runtime.driver.clock import DriverClock
from gossipx.runtime.driver.outbox import Outbox, PreparedRequest, nothing
from gossipx.runtime.driver.shards import ShardKeeper
from gossipx.tables.client import ChangeSink, ReplySink, SizedSink, TablesSink
from gossipx.tables.store import Gradient, TableStore

TableRequest = GradientRequest | TablesRequest | RangesRequest
"""Requests that carry tables, gradients or parts of them in the request or the reply."""


@dataclass
class _Fetching:
    """A pull of one bucket of tables that is under way."""

    place: tuple[int, int]
    sink: TablesSink | ChangeSink


SendReply = Callable[[Answer, Reply, Source | None, Callable[[], None]], None]
"""Sends a reply with its payload, and calls back once the payload is no longer read."""


class TableWork:
    """Carries out the effects on tables, and sends the requests about them.

    Args:
        rank: this peer's rank, for the thread's name.
        clock: makes the thread.
        outbox: sends this peer's requests.
        handle: called with the events that result.
        reply: sends a reply.

    Attributes:
        store: the peer's tables; None without a parameter server. Set by the caller.
        keeper: writes the shards' checkpoints and journals; None: nothing is written. Set by the caller.
        gradients: uploaded by other peers, by ticket.
    """

    def __init__(
        self, rank: int, clock: DriverClock, outbox: Outbox, handle: Callable[[Event], None], reply: SendReply
    ):
        self.store: TableStore | None = None
        self.keeper: ShardKeeper | None = None
        self.gradients: dict[int, Gradient] = {}
        self._fetching: dict[int, _Fetching] = {}
        self._ranges: dict[int, SizedSink] = {}
        self._worker = clock.worker(f"gossipx-tables-{rank}", functools.partial(_rejected, outbox))
        self._outbox = outbox
        self._handle = handle
        self._reply = reply

    @property
    def _store(self) -> TableStore:
        assert self.store is not None
        return self.store

    @property
    def raw_pulls(self) -> bool:
        """Whether tables are sent as raw values, with nothing to decode."""
        return self._store.client.raw_pulls

    def forget(self, ticket: int) -> None:
        """Release everything stored under ``ticket``."""
        self._fetching.pop(ticket, None)
        self._ranges.pop(ticket, None)
        if gradient := self.gradients.pop(ticket, None):
            gradient.release()

    def close(self) -> None:
        """Stop the thread. Checkpoints that are queued are still written."""
        self._worker.close(wait=self.keeper is not None)
        if self.keeper is not None:
            self.keeper.close()
        self._handle = self._reply = nothing  # break the reference cycle with the driver

    # --- requests -----------------------------------------------------------------------------------

    def expect(self, send: Send) -> None:
        """Prepare the sink for a pull by the current placement. Called under the driver's lock."""
        match send.request:
            case TablesRequest(shard=shard, bucket=bucket) if bucket >= 0:
                self._fetching[send.ticket] = _Fetching((shard, bucket), self._store.client.sink((shard, bucket)))
            case RangesRequest():
                self._ranges[send.ticket] = self._store.ranges()

    def send(self, send: Send) -> None:
        """Send a request of one of the types of :data:`TableRequest`."""
        self._outbox.send(send, lambda: self._prepared(send), lambda reply: self._arrived(send.ticket, reply))

    def _prepared(self, send: Send) -> PreparedRequest:
        ticket, request = send.ticket, send.request
        match request:
            case GradientRequest():
                return self._push(request)
            case TablesRequest():
                fetching = self._fetching.get(ticket)
                sink = ReplySink() if fetching is None else fetching.sink
                return self._store.client.complete_request(request), sink, None
            case _:
                return request, self._ranges.get(ticket, ReplySink()), None

    def _push(self, request: GradientRequest) -> PreparedRequest:
        """Encode a bucket's gradients just before they are sent."""
        client, place = self._store.client, (request.shard, request.bucket)
        if request.epoch != client.epoch:
            raise CancelledError("the servers were changed before the push was sent")
        try:
            parts, source = client.encode(place)
        except Exception as error:
            _fail(self._outbox, error)
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

    def fetched(self, ticket: int) -> None:
        """Pass the tables received under ``ticket`` to the client. Do nothing if that was done before."""
        fetching = self._fetching.pop(ticket, None)
        if fetching is None:
            return
        try:
            self._store.client.fetched(fetching.place, fetching.sink)
        except Exception as error:
            _fail(self._outbox, error)

    # --- effects ------------------------------------------------------------------------------------

    def do(self, effect: TableEffect) -> None:
        """Carry out an effect, or queue it behind the effects of earlier decisions. Called under the driver's lock."""
        store, put = self._store, self._worker.put
        match effect:
            case Gather():
                store.client.gather()
            case Fetch(buckets):
                store.client.expect(buckets)
            case Unchanged(buckets):
                store.client.unchanged(buckets)
            case Fetched(ticket):
                if self.raw_pulls:  # otherwise the driver decodes them after it releases its lock
                    self.fetched(ticket)
            case ApplyGradient(ticket, scale, buffers):
                gradient = self.gradients.pop(ticket)
                put(lambda: self._report_poisoned(store.apply(gradient, scale, buffers)))
            case BufferGradient(ticket):
                added = self.gradients.pop(ticket)
                put(lambda: self._report_poisoned(store.buffer(added)))
            case ApplyBuffered(shard, sums):
                put(lambda: store.apply_buffer(shard, sums))
            case FillTables(shard):
                put(lambda: store.fill(shard))
            case RestoreTables(shard, epoch) if self.keeper is None:
                put(lambda: self._handle(TablesRestored(shard, epoch, None)))
            case Record() | KeepShard() | RestoreTables():
                if self.keeper is not None:
                    self._keep(self.keeper, effect)
            case _:
                self._move(effect)

    def _report_poisoned(self, sender: int | None) -> None:
        if sender is not None:
            self._handle(GradientPoisoned(sender))

    def _keep(self, keeper: ShardKeeper, effect: Record | KeepShard | RestoreTables) -> None:
        match effect:
            case Record(record, ticket):
                gradient = None if ticket is None else self.gradients[ticket].hold()
                self._worker.put(lambda: keeper.record(record, gradient))
            case KeepShard(shard, clock, state):
                self._worker.put(lambda: keeper.save_checkpoint(shard, clock, state))
            case RestoreTables(shard, epoch):
                self._worker.put(lambda: self._handle(TablesRestored(shard, epoch, keeper.restore_tables(shard))))

    def _move(self, effect: TableEffect) -> None:
        """Carry out an effect of a change of servers."""
        store, put = self._store, self._worker.put
        match effect:
            case PrepareTables(epoch, servers):
                put(lambda: store.prepare(epoch, servers))
            case TakeRanges(ticket, pieces):
                ranges = self._ranges.pop(ticket)
                put(lambda: store.take(ranges, pieces))
            case ReportPrepared(epoch):
                put(lambda: self._handle(Prepared(epoch, self._unwritten() or store.prepared())))
            case PlaceTables(epoch, servers):
                store.switch_client(epoch, servers)
                put(lambda: self._place(epoch, servers))
            case DropTables():
                put(store.drop)

    def _unwritten(self) -> str:
        """Return why shards cannot move yet; empty if they can.

        The next server of a shard writes its checkpoints to the same directory, so ours must be complete first.
        """
        settled = self.keeper is None or self.keeper.settle()
        return "" if settled else "its last checkpoint takes too long to write"

    def _place(self, epoch: int, servers: tuple[int, ...]) -> None:
        self._store.place(epoch, servers)
        if self.keeper is not None:
            self.keeper.place(epoch, servers)

    # --- answers ------------------------------------------------------------------------------------

    def answers(self, answer: Answer) -> bool:
        """Whether an answer is about tables and must be sent by :meth:`answer`."""
        return answer.in_order or isinstance(answer.reply, TablesReply)

    def answer(self, answer: Answer) -> None:
        """Queue an answer behind the effects of earlier decisions. Called under the driver's lock."""
        self._worker.put(lambda: self._answer(answer))

    def _answer(self, answer: Answer) -> None:
        reply = answer.reply
        if answer.tables is not None and isinstance(reply, TablesReply):
            encoded = self._store.encode(answer.tables)
            reply = msgspec.structs.replace(reply, parts=encoded.parts, base=encoded.base)
            self._reply(answer, reply, encoded.source, encoded.release)
        elif answer.pieces is not None and isinstance(reply, TablesReply):
            self._answer_pieces(answer, reply, answer.pieces)
        else:
            self._reply(answer, reply, Source(memoryview(b"")) if isinstance(reply, TablesReply) else None, nothing)

    def _answer_pieces(self, answer: Answer, reply: TablesReply, pieces: Pieces) -> None:
        if unwritten := self._unwritten():
            self._reply(answer, NotReadyReply(unwritten), None, nothing)
            return
        try:
            source = self._store.pack(pieces)
        except GossipxError as error:
            self._reply(answer, NotReadyReply(str(error)), None, nothing)
            return
        self._reply(answer, msgspec.structs.replace(reply, parts=((0, source.view.nbytes),)), source, nothing)


def _rejected(outbox: Outbox, error: Exception) -> None:
    """Log and ignore a push that does not fit its shard; end training on any other error."""
    if isinstance(error, ProtocolError):
        outbox.note("protocol", f"a push that does not fit its shard is ignored: {error}")
    else:
        _fail(outbox, error)


def _fail(outbox: Outbox, error: Exception) -> None:
    if not isinstance(error, UsageError):  # its message names the cause
        failure = UsageError(f"a part of the parameter server failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        error = failure
    outbox.fail(error)
