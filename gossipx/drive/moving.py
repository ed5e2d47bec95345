"""What a driver does when servers come or go: with the tables of shards, in the order of the decisions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gossipx.actor import (
    Answer,
    DropTables,
    Event,
    Pieces,
    PlaceTables,
    Prepared,
    PrepareTables,
    TakeRanges,
    TellPrepared,
)
from gossipx.drive.lane import Lane
from gossipx.drive.shards import ShardKeeper
from gossipx.drive.transfers import Transfers
from gossipx.errors import GossipxError
from gossipx.memory import Source
from gossipx.messages import NotReadyReply, Reply, TablesReply
from gossipx.storage.desk import Desk

MoveEffect = PrepareTables | TakeRanges | TellPrepared | PlaceTables | DropTables


class Moves:
    """Carries out what a change of servers asks for.

    Args:
        tables: does what is done to tables.
        transfers: of the peer, with its tables.
        tell: told of what has come of it.
        answer: gives an answer, with its payload.
    """

    def __init__(
        self,
        tables: Lane,
        transfers: Transfers,
        tell: Callable[[Event], None],
        answer: Callable[[Answer, Reply, Source | None], None],
    ):
        self._tables = tables
        self._transfers = transfers
        self._tell = tell
        self._answer = answer

    def at_once(self, effect: MoveEffect, keeper: ShardKeeper | None) -> None:
        """Do it, or have it done after all that was decided before; for the thread that decides.

        Args:
            keeper: of shards' checkpoints; None: there are none.
        """
        desk = self._desk
        match effect:
            case PrepareTables(epoch, servers):
                self._tables.put(lambda: desk.prepare(epoch, servers))
            case TakeRanges(ticket, pieces):
                ranges = self._transfers.ranges(ticket)
                self._tables.put(lambda: desk.take(ranges, pieces))
            case TellPrepared(epoch):
                self._tables.put(lambda: self._tell(Prepared(epoch, desk.prepared())))
            case PlaceTables(epoch, servers):
                desk.go_over(epoch, servers)
                self._tables.put(lambda: self._place(epoch, servers, keeper))
            case DropTables():
                self._tables.put(desk.drop)

    def _place(self, epoch: int, servers: tuple[int, ...], keeper: ShardKeeper | None) -> None:
        self._desk.place(epoch)
        if keeper is not None:
            keeper.servers = servers

    def give(self, answer: Answer, pieces: Pieces) -> None:
        """Answer by what belongs to these pieces, after all that was decided before."""
        self._tables.put(lambda: self._give(answer, pieces))

    def _give(self, answer: Answer, pieces: Pieces) -> None:
        assert isinstance(answer.reply, TablesReply)
        try:
            source = self._desk.pack(pieces)
        except GossipxError as error:
            self._answer(answer, NotReadyReply(str(error)), None)
            return
        self._answer(answer, dataclasses.replace(answer.reply, parts=((0, source.view.nbytes),)), source)

    @property
    def _desk(self) -> Desk:
        assert self._transfers.desk is not None
        return self._transfers.desk
