"""A shard's replica: another peer does what happens to the shard, and holds it once its holder is gone.

Primary-backup replication of the shard's decisions. Whoever holds the shard has each record followed before it answers
what the record is of, so a push that was answered outlives either of the two. The replica takes the holder's place when
it finds it gone and a worker, which goes there as it finds the same, asks for it: one that was only asleep for a while
is not asked. A holder that finds its replica gone goes on alone, until that asks for a copy again.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Sequence

from gossipx.peer.exchange import PeerContext
from gossipx.peer.membership import REST_FIRST, REST_LONGEST
from gossipx.protocol.effects import Answer, Effect, Forget, Keep, SetTimer
from gossipx.protocol.events import Received
from gossipx.protocol.messages import AcceptReply, NotReadyReply, Reply
from gossipx.protocol.server_messages import CopyReply, CopyRequest, RecordRequest
from gossipx.protocol.table_effects import Share, TakeCopy
from gossipx.server.failover.records import Records
from gossipx.server.replies import Handler, Replies
from gossipx.server.shard import Shard

RECORDS, FOLLOW = "records", "follow"
"""Timers: records are sent again, the holder is asked again; each with a space and the shard's index."""
AT_A_TIME = 4
"""Records that are on their way at a time."""


class Standby(Records):
    """The holder's dealings with the peer that has the replica, or is to have it.

    Args:
        shard: its index.
        rank: of that peer.
        replies, answered: the table of handlers, and that of its requests.
        alone: it is gone: nothing is kept for it until it asks for a copy.
    """

    def __init__(
        self, shard: int, rank: int, context: PeerContext, replies: Replies, answered: Handler, alone: bool = False
    ):
        super().__init__(shard)
        self.rank = rank
        self.wanted = not alone
        self._context = context
        self._replies, self._answered = replies, answered
        self._follows = False
        self._unsafe: dict[int, tuple[RecordRequest, int | None]] = {}  # by number, with its gradient's ticket
        self._open: dict[int, int] = {}  # by ticket, the number of the record that is on its way
        self._rests = False
        self._held: deque[tuple[int, Answer]] = deque()  # answers, each with the last record that they tell of

    # --- records ----------------------------------------------------------------------------------

    def taken(self, record: RecordRequest, ticket: int | None) -> list[Effect]:
        if not self._follows:
            return []  # the copy will have it
        kept = None if ticket is None else self._context.requests.ticket()
        self._unsafe[record.number] = record, kept
        return [] if ticket is None or kept is None else [Share(ticket, kept)]

    def safe(self, effects: Sequence[Effect]) -> list[Effect]:
        if not self.wanted or (self._follows and not self._unsafe):
            return list(effects)
        self._held += [(self.number - 1, one) for one in effects if isinstance(one, Answer)]
        return [one for one in effects if not isinstance(one, Answer)]

    def send(self, now: float) -> list[Effect]:
        """Send what may be sent."""
        effects: list[Effect] = []
        if self._rests or not self._follows:
            return effects
        patience = self._context.members.longest
        under_way = set(self._open.values())
        for number, (record, kept) in self._unsafe.items():
            if len(self._open) >= AT_A_TIME:
                break
            if number in under_way:
                continue
            told = dataclasses.replace(record, patience=patience)
            send = self._replies.send(self.rank, told, now, now + patience, self._answered)
            self._open[send.ticket] = number
            effects += [send] if kept is None else [Share(kept, send.ticket), send]
        return effects

    def answered(self, ticket: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle the replica's answer to a record."""
        number = self._open.pop(ticket)
        if not isinstance(reply, AcceptReply):
            return [Forget(ticket), *self._rest(now)]
        _, kept = self._unsafe.pop(number)
        done = [Forget(ticket)] if kept is None else [Forget(ticket), Forget(kept)]
        return [*done, *self._release()]

    def _rest(self, now: float) -> list[Effect]:
        self._rests = True
        return [SetTimer(f"{RECORDS} {self.shard}", now + REST_FIRST * self._context.timeout)]

    def again(self) -> None:
        """The rest is over; :meth:`send` follows."""
        self._rests = False

    def _release(self) -> list[Effect]:
        """Give the answers that tell of nothing that the replica lacks."""
        first = next(iter(self._unsafe), self.number)
        effects: list[Effect] = []
        while self._held and self._held[0][0] < first:
            effects.append(self._held.popleft()[1])
        return effects

    # --- who follows ------------------------------------------------------------------------------

    def copied(self, event: Received, shard: Shard, now: float) -> list[Effect]:
        """The other peer asks for a copy, or tells that it waits for a record."""
        request = event.request
        assert isinstance(request, CopyRequest)
        if self._follows and request.copy == self.copy:
            return [Answer(event.key, AcceptReply(), now + request.patience)]
        dropped = self._forget()
        self.wanted = self._follows = True
        self._rests = False
        self._happened.clear()  # the copy has it
        self.copy, self.number = self.copy + 1, 0
        reply = CopyReply(self._context.incarnation, self.copy, json.dumps(shard.state_dict()), 0)
        given = Answer(event.key, reply, now + request.patience, copies=self.shard)
        # What the copy has is safe once the first record after it is followed: one of nothing.
        self._held = deque((0, answer) for _, answer in self._held)
        return [*dropped, given, *self._made(None, None)]

    def gone(self) -> list[Effect]:
        """The other peer is gone: nothing waits for it."""
        self.wanted = self._follows = False
        self._happened.clear()
        held = [answer for _, answer in self._held]
        self._held.clear()
        return [*self._forget(), *held]

    def give_up(self) -> list[Effect]:
        """The other peer holds the shard by now: what was not answered is to be asked of it."""
        told = NotReadyReply("another peer holds this shard by now")
        refused: list[Effect] = [dataclasses.replace(one, reply=told, tables=None) for _, one in self._held]
        self._held.clear()
        return [*self._forget(), *refused]

    def _forget(self) -> list[Effect]:
        kept = [Forget(ticket) for _, ticket in self._unsafe.values() if ticket is not None]
        self._unsafe.clear()
        self._replies.forget(self._open)
        self._open.clear()
        return list(kept)


class Replica:
    """A shard that another peer holds, and which is followed here.

    Args:
        shard: as it was made; it becomes the holder's.
        holder: its rank.
        replies, answered: the table of handlers, and that of its requests.
        begins: nobody may hold the shard yet, and it is ours to begin with then.

    Attributes:
        incarnation: of the holder that the copy is of.
        ticket: of the open request; None: none is.
    """

    def __init__(
        self, shard: Shard, holder: int, context: PeerContext, replies: Replies, answered: Handler, begins: bool = False
    ):
        self.shard = shard
        self.holder = holder
        self.begins = begins
        self.incarnation = -1
        self._context = context
        self._replies, self._answered = replies, answered
        shard.records = Records(shard.index, copy=-1)  # there is none
        self._ahead: dict[int, tuple[RecordRequest, int]] = {}  # by number, each with its gradient's ticket
        self.ticket: int | None = None

    @property
    def has_copy(self) -> bool:
        """Whether it could hold the shard."""
        return self.shard.records.copy >= 0

    def ask(self, now: float) -> list[Effect]:
        """Ask for a copy, or tell that it waits for records."""
        if self.ticket is not None:
            return []
        patience = self._context.members.longest
        request = CopyRequest(self.shard.index, self._context.incarnation, self.shard.records.copy, patience)
        send = self._replies.send(self.holder, request, now, now + patience, self._answered)
        self.ticket = send.ticket
        return [send]

    def answered(self, ticket: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle the holder's answer."""
        self.ticket = None
        effects: list[Effect] = []
        if isinstance(reply, CopyReply):
            self.shard.load_state_dict(json.loads(reply.state))
            self.shard.records.copy, self.incarnation, self.begins = reply.copy, reply.incarnation, False
            effects += [*self.end(), TakeCopy(ticket, self.shard.index)]
        else:
            effects.append(Forget(ticket))
        return [*effects, self._later(now)]

    def _later(self, now: float) -> SetTimer:
        share = REST_LONGEST if self.has_copy else REST_FIRST
        return SetTimer(f"{FOLLOW} {self.shard.index}", now + share * self._context.timeout)

    def recorded(self, event: Received, now: float) -> list[Effect]:
        """The holder tells what has happened."""
        record = event.request
        assert isinstance(record, RecordRequest)
        until = now + record.patience
        if not self.has_copy or event.sender != self.holder or record.copy != self.shard.records.copy:
            return [Answer(event.key, NotReadyReply("it has not the copy that this goes on from"), until)]
        done = Answer(event.key, AcceptReply(), until)
        if record.number < self.shard.records.number or record.number in self._ahead:
            return [done]
        ticket = self._context.requests.ticket()
        self._ahead[record.number] = record, ticket
        effects: list[Effect] = [] if record.bucket < 0 else [Keep(event.key, ticket)]
        effects.append(done)
        while self.shard.records.number in self._ahead:
            effects += self.shard.follow(*self._ahead.pop(self.shard.records.number))
        return effects

    def end(self) -> list[Effect]:
        """It is followed no more, or from another copy on; what came out of turn was never answered for to a worker."""
        dropped: list[Effect] = [Forget(ticket) for _, ticket in self._ahead.values()]
        self._ahead.clear()
        return dropped
