"""The table work of a driver in server mode: it carries out the effects on the tables of a parameter server.

A table is one parameter tensor; a shard is the part of all tables that one server holds. A thread of its own does the
work in the order of the role's decisions, so that neither training nor the network waits for it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gossipx.errors import GossipxError
from gossipx.memory import Source
from gossipx.protocol.effects import Answer
from gossipx.protocol.events import Event, GradientPoisoned, Prepared, TablesRestored
from gossipx.protocol.messages import NotReadyReply, Reply
from gossipx.protocol.server_messages import CopyReply, TablesReply
from gossipx.protocol.table_effects import (
    ApplyBuffer,
    ApplyGradient,
    BufferGradient,
    DropTables,
    Fetch,
    Fetched,
    FillTables,
    Gather,
    KeepShard,
    Pieces,
    PlaceTables,
    PrepareTables,
    Record,
    ReportPrepared,
    RestoreTables,
    Share,
    TableEffect,
    TakeCopy,
    TakeRanges,
    Unchanged,
)
from gossipx.runtime.clock import Clock
from gossipx.runtime.requests import Outbox, nothing
from gossipx.runtime.shards import ShardKeeper
from gossipx.runtime.table_transfers import TableTransfers
from gossipx.tables.store import TableStore

SendReply = Callable[[Answer, Reply, Source | None, Callable[[], None]], None]
"""Sends a reply with its payload, and calls back once the payload is no longer read."""


class TableWork:
    """Carries out the effects on tables.

    Args:
        rank: this peer's rank, for the thread's name.
        clock: makes the thread.
        outbox: sends this peer's requests.
        handle: called with the events that result.
        reply: sends a reply.

    Attributes:
        transfers: tables and gradients that are being sent or received.
        keeper: writes the shards' checkpoints and journals; None: nothing is written. Set by the caller.
    """

    def __init__(self, rank: int, clock: Clock, outbox: Outbox, handle: Callable[[Event], None], reply: SendReply):
        self.keeper: ShardKeeper | None = None
        self.transfers = TableTransfers(outbox)
        self._worker = clock.worker(f"gossipx-tables-{rank}", self.transfers.rejected)
        self._handle = handle
        self._reply = reply

    @property
    def _table_store(self) -> TableStore:
        assert self.transfers.table_store is not None
        return self.transfers.table_store

    @property
    def in_use(self) -> bool:
        """Whether the run has a parameter server."""
        return self.transfers.table_store is not None

    @property
    def raw_pulls(self) -> bool:
        """Whether tables are sent as raw values, with nothing to decode."""
        return self._table_store.client.raw_pulls

    def close(self) -> None:
        """Stop the thread. Checkpoints that are queued are still written."""
        self._worker.close(wait=self.keeper is not None)
        if self.keeper is not None:
            self.keeper.close()
        self._handle = self._reply = nothing  # break the reference cycle with the driver

    # --- effects ------------------------------------------------------------------------------------

    def do(self, effect: TableEffect) -> None:
        """Carry out an effect, or queue it behind the effects of earlier decisions. Called under the driver's lock."""
        table_store, put = self._table_store, self._worker.put
        match effect:
            case Gather():
                table_store.client.gather()
            case Fetch(buckets):
                table_store.client.expect(buckets)
            case Unchanged(buckets):
                table_store.client.unchanged(buckets)
            case Fetched(ticket):
                if self.raw_pulls:  # otherwise the driver decodes them after it releases its lock
                    self.transfers.fetched(ticket)
            case ApplyGradient(ticket, scale, buffers):
                gradient = self.transfers.gradient(ticket)
                put(lambda: self._report_poisoned(table_store.apply(gradient, scale, buffers)))
            case BufferGradient(ticket):
                added = self.transfers.gradient(ticket)
                put(lambda: self._report_poisoned(table_store.buffer(added)))
            case ApplyBuffer(shard, sums):
                put(lambda: table_store.apply_buffer(shard, sums))
            case FillTables(shard):
                put(lambda: table_store.fill(shard))
            case Share(ticket, other):
                self.transfers.share(ticket, other)
            case TakeCopy(ticket, shard):
                copy = self.transfers.copy(ticket)
                put(lambda: table_store.take_copy(shard, copy))
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
                gradient = None if ticket is None else self.transfers.held_gradient(ticket)
                self._worker.put(lambda: keeper.record(record, gradient))
            case KeepShard(shard, clock, state):
                self._worker.put(lambda: keeper.save_checkpoint(shard, clock, state))
            case RestoreTables(shard, epoch):
                self._worker.put(lambda: self._handle(TablesRestored(shard, epoch, keeper.restore_tables(shard))))

    def _move(self, effect: PrepareTables | TakeRanges | ReportPrepared | PlaceTables | DropTables) -> None:
        """Carry out an effect of a change of servers."""
        table_store, put = self._table_store, self._worker.put
        match effect:
            case PrepareTables(epoch, servers):
                put(lambda: table_store.prepare(epoch, servers))
            case TakeRanges(ticket, pieces):
                ranges = self.transfers.ranges(ticket)
                put(lambda: table_store.take(ranges, pieces))
            case ReportPrepared(epoch):
                put(lambda: self._handle(Prepared(epoch, self._unwritten() or table_store.prepared())))
            case PlaceTables(epoch, servers):
                table_store.switch_client(epoch, servers)
                put(lambda: self._place(epoch, servers))
            case DropTables():
                put(table_store.drop)

    def _unwritten(self) -> str:
        """Return why shards cannot move yet; empty if they can.

        The next server of a shard writes its checkpoints to the same directory, so ours must be complete first.
        """
        settled = self.keeper is None or self.keeper.settle()
        return "" if settled else "its last checkpoint takes too long to write"

    def _place(self, epoch: int, servers: tuple[int, ...]) -> None:
        self._table_store.place(epoch, servers)
        if self.keeper is not None:
            self.keeper.place(epoch, servers)

    # --- answers ------------------------------------------------------------------------------------

    def answers(self, answer: Answer) -> bool:
        """Whether an answer is about tables and must be sent by :meth:`answer`."""
        return answer.in_order or isinstance(answer.reply, TablesReply | CopyReply)

    def answer(self, answer: Answer) -> None:
        """Queue an answer behind the effects of earlier decisions. Called under the driver's lock."""
        self._worker.put(lambda: self._answer(answer))

    def _answer(self, answer: Answer) -> None:
        reply = answer.reply
        if answer.tables is not None and isinstance(reply, TablesReply):
            shard = answer.tables.shard
            encoded = self._table_store.encode(answer.tables)
            reply = msgspec.structs.replace(reply, parts=encoded.parts, base=encoded.base)
            self._reply(answer, reply, encoded.source, lambda: self._table_store.release(shard, encoded))
        elif answer.copied_shard is not None and isinstance(reply, CopyReply):
            source = self._table_store.copy(answer.copied_shard)
            self._reply(answer, msgspec.structs.replace(reply, size=source.view.nbytes), source, nothing)
        elif answer.pieces is not None and isinstance(reply, TablesReply):
            self._answer_pieces(answer, reply, answer.pieces)
        else:
            self._reply(answer, reply, Source(memoryview(b"")) if isinstance(reply, TablesReply) else None, nothing)

    def _answer_pieces(self, answer: Answer, reply: TablesReply, pieces: Pieces) -> None:
        if unwritten := self._unwritten():
            self._reply(answer, NotReadyReply(unwritten), None, nothing)
            return
        try:
            source = self._table_store.pack(pieces)
        except GossipxError as error:
            self._reply(answer, NotReadyReply(str(error)), None, nothing)
            return
        self._reply(answer, msgspec.structs.replace(reply, parts=((0, source.view.nbytes),)), source, nothing)
