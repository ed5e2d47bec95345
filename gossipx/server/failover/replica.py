"""A shard's replica: another peer applies the same records, and takes over when the shard's holder is lost.

This is primary-backup replication of the shard's decisions. The holder waits until the replica has each record before
it acknowledges the input in it, so an acknowledged push survives the loss of either peer. The replica takes over when
it finds the holder gone and a worker that found the same sends it a request; a holder that only paused for a while is
not replaced. A holder whose replica is gone continues alone, until that peer requests a copy again.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Sequence

from gossipx.peer.exchange import PeerContext
from gossipx.peer.membership import FIRST_BACKOFF, LONGEST_BACKOFF
from gossipx.protocol.effects import Answer, Effect, Forget, Keep, SetTimer
from gossipx.protocol.events import Received
from gossipx.protocol.messages import AcceptReply, NotReadyReply, Reply
from gossipx.protocol.server_messages import CopyReply, CopyRequest, RecordRequest
from gossipx.protocol.table_effects import Share, TakeCopy
from gossipx.server.requests import Handler, Replies
from gossipx.server.shard import Records, Shard

RECORDS, FOLLOW = "records", "follow"
"""Timers for sending records again, and for requesting a copy again; each is followed by a space and the shard's index.
"""
MAX_OPEN = 4
"""Maximum number of open records."""


class Standby(Records):
    """The holder's log of a shard, which it sends to the peer with the replica.

    Args:
        shard: its index.
        rank: the peer with the replica.
        replies: the table of reply handlers.
        answered: the handler of the replies to records.
        alone: that peer is gone; nothing is recorded until it requests a copy.
    """

    def __init__(
        self, shard: int, rank: int, context: PeerContext, replies: Replies, answered: Handler, alone: bool = False
    ):
        super().__init__(shard)
        self.rank = rank
        self.enabled = not alone
        self._context = context
        self._replies, self._answered = replies, answered
        self._follows = False
        self._unsafe: dict[int, tuple[RecordRequest, int | None]] = {}  # by number, with its gradient's ticket
        self._open: dict[int, int] = {}  # by ticket, the number of the record that was sent
        self._backing_off = False
        self._delayed: deque[tuple[int, Answer]] = deque()  # delayed answers, each with the record that it waits for

    # --- records ----------------------------------------------------------------------------------

    def write(self, record: RecordRequest, ticket: int | None) -> list[Effect]:
        if not self._follows:
            return []  # the copy will include it
        shared_ticket = None if ticket is None else self._context.requests.ticket()
        self._unsafe[record.number] = record, shared_ticket
        return [] if ticket is None or shared_ticket is None else [Share(ticket, shared_ticket)]

    def delay_answers(self, effects: Sequence[Effect]) -> list[Effect]:
        if not self.enabled or (self._follows and not self._unsafe):
            return list(effects)
        self._delayed += [(self.number - 1, one) for one in effects if isinstance(one, Answer)]
        return [one for one in effects if not isinstance(one, Answer)]

    def send(self, now: float) -> list[Effect]:
        """Send the records that may be sent."""
        effects: list[Effect] = []
        if self._backing_off or not self._follows:
            return effects
        patience = self._context.members.model_timeout
        under_way = set(self._open.values())
        for number, (record, shared_ticket) in self._unsafe.items():
            if len(self._open) >= MAX_OPEN:
                break
            if number in under_way:
                continue
            request = dataclasses.replace(record, patience=patience)
            send = self._replies.send(self.rank, request, now, now + patience, self._answered)
            self._open[send.ticket] = number
            effects += [send] if shared_ticket is None else [Share(shared_ticket, send.ticket), send]
        return effects

    def answered(self, ticket: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle the replica's reply to a record."""
        number = self._open.pop(ticket)
        if not isinstance(reply, AcceptReply):
            return [Forget(ticket), *self._back_off(now)]
        _, shared_ticket = self._unsafe.pop(number)
        done = [Forget(ticket)] if shared_ticket is None else [Forget(ticket), Forget(shared_ticket)]
        return [*done, *self._release()]

    def _back_off(self, now: float) -> list[Effect]:
        self._backing_off = True
        return [SetTimer(f"{RECORDS} {self.shard}", now + FIRST_BACKOFF * self._context.timeout)]

    def retry(self) -> None:
        """Resume sending after the retry delay."""
        self._backing_off = False

    def _release(self) -> list[Effect]:
        """Return the delayed answers whose records the replica has acknowledged."""
        first = next(iter(self._unsafe), self.number)
        effects: list[Effect] = []
        while self._delayed and self._delayed[0][0] < first:
            effects.append(self._delayed.popleft()[1])
        return effects

    # --- the replica ------------------------------------------------------------------------------

    def copy_requested(self, event: Received, shard: Shard, now: float) -> list[Effect]:
        """Handle the other peer's request for a copy, or its sign that it waits for records."""
        request = event.request
        assert isinstance(request, CopyRequest)
        if self._follows and request.copy == self.copy:
            return [Answer(event.key, AcceptReply(), now + request.patience)]
        dropped = self._forget()
        self.enabled = self._follows = True
        self._backing_off = False
        self._happened.clear()  # the copy includes it
        self.copy, self.number = self.copy + 1, 0
        reply = CopyReply(self._context.incarnation, self.copy, json.dumps(shard.state_dict()), 0)
        given = Answer(event.key, reply, now + request.patience, copied_shard=self.shard)
        # An empty record follows the copy; its acknowledgement shows that the copy is safe.
        self._delayed = deque((0, answer) for _, answer in self._delayed)
        return [*dropped, given, *self._made(None, None)]

    def continue_alone(self) -> list[Effect]:
        """Continue without a replica."""
        self.enabled = self._follows = False
        self._happened.clear()
        held = [answer for _, answer in self._delayed]
        self._delayed.clear()
        return [*self._forget(), *held]

    def give_up(self) -> list[Effect]:
        """Refuse all delayed answers, since the other peer has become the holder."""
        refusal = NotReadyReply("another peer now holds this shard")
        refused: list[Effect] = [dataclasses.replace(one, reply=refusal, tables=None) for _, one in self._delayed]
        self._delayed.clear()
        return [*self._forget(), *refused]

    def _forget(self) -> list[Effect]:
        released = [Forget(ticket) for _, ticket in self._unsafe.values() if ticket is not None]
        self._unsafe.clear()
        self._replies.forget(self._open)
        self._open.clear()
        return list(released)


class Replica:
    """A shard that is followed here and held by another peer.

    Args:
        shard: newly made; its state is replaced with the holder's.
        holder: its rank.
        replies: the table of reply handlers.
        answered: the handler of the holder's replies.
        initial_holder: this peer will hold the shard unless ``holder`` already does.

    Attributes:
        incarnation: of the holder that the copy came from; -1: no copy yet.
        ticket: of the open request; None: none is open.
        refused: the peers that neither hold nor follow the shard.
    """

    def __init__(
        self,
        shard: Shard,
        holder: int,
        context: PeerContext,
        replies: Replies,
        answered: Handler,
        initial_holder: bool = False,
    ):
        self.shard = shard
        self.holder = holder
        self.initial_holder = initial_holder
        self.incarnation = -1
        self._context = context
        self._replies, self._answered = replies, answered
        shard.records = Records(shard.index, copy=-1)  # no copy yet
        self._ahead: dict[int, tuple[RecordRequest, int]] = {}  # by number, with its gradient's ticket
        self.ticket: int | None = None
        self.refused: set[int] = set()

    @property
    def has_copy(self) -> bool:
        """Whether this peer has a copy and could take over."""
        return self.shard.records.copy >= 0

    def ask(self, now: float, rank: int | None = None) -> list[Effect]:
        """Request a copy from the holder, or from peer ``rank``, or signal that this peer waits for records."""
        if self.ticket is not None:
            return []
        patience = self._context.members.model_timeout
        request = CopyRequest(self.shard.index, self._context.incarnation, self.shard.records.copy, patience)
        send = self._replies.send(self.holder if rank is None else rank, request, now, now + patience, self._answered)
        self.ticket = send.ticket
        return [send]

    def answered(self, ticket: int, to: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle the reply of peer ``to``, which holds the shard if it sends a copy."""
        self.ticket = None
        effects: list[Effect] = []
        if isinstance(reply, CopyReply):
            self.shard.load_state_dict(json.loads(reply.state))
            self.shard.records.copy, self.incarnation, self.initial_holder = reply.copy, reply.incarnation, False
            self.holder = to
            effects += [*self.end(), TakeCopy(ticket, self.shard.index)]
        else:
            effects.append(Forget(ticket))
        return [*effects, self._retry_later(now)]

    def _retry_later(self, now: float) -> SetTimer:
        share = LONGEST_BACKOFF if self.has_copy else FIRST_BACKOFF
        return SetTimer(f"{FOLLOW} {self.shard.index}", now + share * self._context.timeout)

    def record_received(self, event: Received, now: float) -> list[Effect]:
        """Apply a record from the holder, and early records that it makes applicable."""
        record = event.request
        assert isinstance(record, RecordRequest)
        until = now + record.patience
        if not self.has_copy or event.sender != self.holder or record.copy != self.shard.records.copy:
            return [Answer(event.key, NotReadyReply("it does not have the copy that this record follows"), until)]
        done = Answer(event.key, AcceptReply(), until)
        if record.number < self.shard.records.number or record.number in self._ahead:
            return [done]
        ticket = self._context.requests.ticket()
        self._ahead[record.number] = record, ticket
        effects: list[Effect] = [] if record.bucket < 0 else [Keep(event.key, ticket)]
        effects.append(done)
        while self.shard.records.number in self._ahead:
            effects += self.shard.apply_record(*self._ahead.pop(self.shard.records.number))
        return effects

    def end(self) -> list[Effect]:
        """Discard early records, when this peer takes over or receives a new copy. Their inputs were never
        acknowledged.
        """
        dropped: list[Effect] = [Forget(ticket) for _, ticket in self._ahead.values()]
        self._ahead.clear()
        return dropped
