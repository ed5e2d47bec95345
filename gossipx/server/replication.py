"""The replication of shards: which shards a peer holds, which it replicates, and how these roles change.

A shard with a replica has two peers: its holder serves it, and the other one follows the holder's records. This is
primary-backup replication of the shard's decisions. The holder waits until the replica has each record before it
acknowledges the input in it, so an acknowledged push survives the loss of either peer. The replica takes over when it
finds the holder gone and a worker that found the same sends it a request; a holder that only paused for a while is not
replaced. A holder whose replica is gone continues alone, until that peer requests a copy again.

The settings name the first pair. When one of the two is lost, the holder chooses the next living peer for the replica,
and announces the pair to all peers. A restarted peer that its settings name as a holder cannot know whether the shard
has moved on. So it asks every living peer for a copy, and starts the shard anew only if none holds or follows it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from gossipx.peer.exchange import PeerContext
from gossipx.peer.membership import FIRST_BACKOFF, LONGEST_BACKOFF
from gossipx.protocol.effects import Answer, Effect, Forget, Keep, Note, SetTimer
from gossipx.protocol.events import Received
from gossipx.protocol.messages import AcceptReply, BusyReply, NotReadyReply, Reply, Stage
from gossipx.protocol.server_messages import (
    CopyReply,
    CopyRequest,
    HoldersRequest,
    RecordRequest,
    ServerRequest,
)
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
            request = msgspec.structs.replace(record, patience=patience)
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

    def copy_requested(self, event: Received, request: CopyRequest, shard: Shard, now: float) -> list[Effect]:
        """Handle the other peer's request for a copy, or its sign that it waits for records."""
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
        refused: list[Effect] = [msgspec.structs.replace(one, reply=refusal, tables=None) for _, one in self._delayed]
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

    def record_received(self, event: Received, record: RecordRequest, now: float) -> list[Effect]:
        """Apply a record from the holder, and early records that it makes applicable."""
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


NOBODY = -1
"""In place of a rank: no peer has the replica."""


@dataclass
class _Pair:
    """The two peers of a replicated shard.

    Attributes:
        number: of changes of the pair; of two pairs, the one with the higher number is in force.
        replica: the rank with the replica; :data:`NOBODY`: none.
        heard: the peers that have acknowledged the pair, each with its incarnation at that time.
        telling: the peers that are being told.
    """

    number: int
    holder: int
    replica: int
    heard: dict[int, int | None] = field(default_factory=dict)
    telling: set[int] = field(default_factory=set)

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self.holder,) if self.replica == NOBODY else (self.holder, self.replica)

    @property
    def order(self) -> tuple[int, int]:
        return self.number, self.holder


@dataclass
class Replication:
    """One peer's part in all replicated shards. Methods return the effects to carry out.

    Attributes:
        context: the role's.
        replies: the table of reply handlers.
        shards: the hosted shards; changed here.
        training: returns the ranks that train.
        first: by shard, the rank of its first holder, followed by that of its replica if it has one.
        fresh: makes a shard in its initial state, given its index.
        start: starts a shard in its initial state.
        use_holders: makes this peer's worker use other holders of a shard.
        ask_for_signs: asks peers for a sign of life.
        replicas: the shards that this peer follows, or whose holder is not known yet.
    """

    context: PeerContext
    replies: Replies
    shards: dict[int, Shard]
    training: Callable[[], Sequence[int]]
    first: Sequence[tuple[int, ...]]
    fresh: Callable[[int], Shard]
    start: Callable[[Shard, float], list[Effect]]
    use_holders: Callable[[int, tuple[int, ...]], None]
    ask_for_signs: Callable[[set[int], float], list[Effect]]
    replicas: dict[int, Replica] = field(default_factory=dict)

    def __post_init__(self) -> None:
        paired = ((index, ranks) for index, ranks in enumerate(self.first) if len(ranks) > 1)
        self._pairs = {index: _Pair(0, ranks[0], ranks[1]) for index, ranks in paired}

    @property
    def holders(self) -> list[tuple[int, ...]]:
        """For each shard, the ranks that may hold it."""
        first = enumerate(self.first)
        return [self._pairs[index].ranks if index in self._pairs else ranks for index, ranks in first]

    def follow(self, shard: Shard, holder: int, initial_holder: bool = False) -> Replica:
        """Follow a shard that ``holder`` serves; an ``initial_holder`` will hold it unless another peer does."""
        answered = partial(self._copy_answered, shard.index)
        self.replicas[shard.index] = Replica(shard, holder, self.context, self.replies, answered, initial_holder)
        return self.replicas[shard.index]

    def begin(self, now: float) -> list[Effect]:
        """Request a copy of every replicated shard, once all peers have reached START."""
        return [effect for replica in self.replicas.values() for effect in replica.ask(now)]

    def _standby(self, index: int) -> Standby | None:
        shard = self.shards.get(index)
        return shard.records if shard is not None and isinstance(shard.records, Standby) else None

    # --- the pair of peers -------------------------------------------------------------------------

    def _set_pair(self, index: int, pair: _Pair) -> None:
        self._pairs[index] = pair
        self.use_holders(index, pair.ranks)

    def _candidates(self) -> list[int]:
        """Return the ranks that may take a replica, the next one first."""
        members, own = self.context.members, self.context.rank
        living = [rank for rank in members.awaited() if not members.is_gone(rank)]
        stages = {rank: members.others.peek(rank).stage for rank in living}
        there = [rank for rank, stage in stages.items() if stage is not None and Stage.START <= stage <= Stage.FINISH]
        return sorted(there, key=lambda rank: (rank < own, rank))

    def _choose(self, index: int) -> list[Effect]:
        """Choose a peer for the replica of a shard that is held here."""
        standby = self._standby(index)
        if standby is None or not self.training():
            return []
        chosen = next(iter(self._candidates()), NOBODY)
        was = self._pairs[index]
        if was.holder == self.context.rank and was.replica == chosen == NOBODY:
            return []
        return [*self._pair_with(index, chosen), self._note_choice(index, chosen)]

    def _note_choice(self, index: int, chosen: int) -> Note:
        if chosen == NOBODY:
            return Note("", f"shard {index} has no replica any more: no other peer is left")
        return Note("", f"peer {chosen} now has the replica of shard {index}")

    def _pair_with(self, index: int, replica: int) -> list[Effect]:
        """Make ``replica`` the other peer of a shard that is held here."""
        standby = self._standby(index)
        assert standby is not None
        effects = standby.continue_alone() if standby.rank != replica else []
        standby.rank = replica
        self._set_pair(index, _Pair(self._pairs[index].number + 1, self.context.rank, replica))
        return effects

    def _tell(self, now: float) -> list[Effect]:
        """Announce the pairs of the shards held here to the peers that have not acknowledged them."""
        effects: list[Effect] = []
        members = self.context.members
        for index in self.shards:
            pair = self._pairs.get(index)
            if pair is None or not pair.number:
                continue
            for rank in self._candidates():
                other = members.others.peek(rank)
                known = rank in pair.heard and pair.heard[rank] == other.incarnation
                if known or rank in pair.telling or not other.may_be_asked(now):
                    continue
                request = HoldersRequest(index, pair.number, pair.holder, pair.replica)
                answered = partial(self._told, pair, other.incarnation)
                effects.append(self.replies.send(rank, request, now, now + self.context.timeout, answered))
                pair.telling.add(rank)
        return effects

    def _told(
        self, pair: _Pair, incarnation: int | None, ticket: int, to: int, reply: Reply | None, now: float
    ) -> list[Effect]:
        pair.telling.discard(to)
        if isinstance(reply, AcceptReply):
            pair.heard[to] = incarnation
        elif reply is not None:
            self.context.members.back_off(to, now)
        return [Forget(ticket)]

    def holders_announced(self, event: Received, request: HoldersRequest, now: float) -> list[Effect]:
        """Handle the announcement of a shard's pair by its holder."""
        index, done = request.shard, Answer(event.key, AcceptReply(), now + self.context.timeout)
        pair = _Pair(request.number, request.holder, request.replica)
        if index not in self._pairs or pair.order <= self._pairs[index].order:
            return [done]
        self._set_pair(index, pair)
        own, standby = self.context.rank, self._standby(index)
        effects: list[Effect] = []
        if standby is not None and pair.holder != own:
            effects += self._give_up_shard(index, standby, pair.holder)
        replica = self.replicas.get(index)
        if replica is not None and (pair.replica != own or replica.holder != pair.holder):
            effects += self._drop_replica(index)
        if pair.replica == own and index not in self.replicas:
            effects += self.follow(self.fresh(index), pair.holder).ask(now)
        return [done, *effects]

    def _drop_replica(self, index: int) -> list[Effect]:
        replica = self.replicas.pop(index)
        self.replies.forget(() if replica.ticket is None else (replica.ticket,))
        return replica.end()

    # --- requests --------------------------------------------------------------------------------

    def step_in(self, sender: int, request: ServerRequest, now: float) -> list[Effect]:
        """Become the holder of a replicated shard if a peer requests it and its holder is gone."""
        replica = self.replicas.get(request.shard)
        if replica is None or isinstance(request, RecordRequest):
            return []
        gone = self.context.members.is_gone(replica.holder)
        if isinstance(request, CopyRequest):  # the holder has restarted and lost its state, or is gone
            other = sender == replica.holder and request.incarnation != replica.incarnation
            steps_in = (other or gone) and replica.has_copy
        else:  # a request from our own worker proves nothing if others train: we may be the isolated peer
            others = set(self.training()) - {self.context.rank} if sender == self.context.rank else set()
            if gone and others:
                return self.ask_for_signs(self._unheard(others, now), now)
            steps_in = gone and (replica.has_copy or self._may_start(replica))
        return self._take_over(request.shard, now) if steps_in else []

    def _unheard(self, ranks: set[int], now: float) -> set[int]:
        """Return those of ``ranks`` that may have died unnoticed, as nothing was asked of them lately."""
        members, least = self.context.members, now - LONGEST_BACKOFF * self.context.timeout
        return {rank for rank in ranks if members.others.peek(rank).told_at <= least}

    def _may_start(self, replica: Replica) -> bool:
        """Return whether no other peer can hold the shard: all have said so, or this peer was there from the start."""
        return not self.context.members.has_joined_late or not set(self._candidates()) - replica.refused

    def _take_over(self, index: int, now: float) -> list[Effect]:
        """Become the holder of a shard that was followed."""
        replica = self.replicas[index]
        had_copy = replica.has_copy  # the shard's records say so, and are replaced below
        dropped = self._drop_replica(index)
        shard = self.shards[index] = replica.shard
        gone = self.context.members.is_gone(replica.holder)
        answered = partial(self._record_answered, index)
        alone = gone or not replica.initial_holder
        shard.records = Standby(index, replica.holder, self.context, self.replies, answered, alone)
        text = f"this peer now holds shard {index}, from clock {shard.clock.clock}: peer {replica.holder} is gone"
        note = [] if replica.initial_holder else [Note("", text)]
        # A holder that has restarted gets the replica; else the next peer does.
        paired = self._choose(index) if gone else self._pair_with(index, replica.holder) if note else []
        if not had_copy:  # no known peer has held it
            return [*dropped, *note, *self.start(shard, now), *paired]
        return [*dropped, *note, *shard.serve(now), *shard.update_members(self.training()), *paired]

    def record_received(self, event: Received, request: RecordRequest, now: float) -> list[Effect]:
        """Handle a record of what happened to a shard."""
        if request.shard in self.replicas:
            return self.replicas[request.shard].record_received(event, request, now)
        held = request.shard in self.shards
        reply = BusyReply() if held else NotReadyReply("it has no replica of this shard: start all peers alike")
        return [Answer(event.key, reply, now + request.patience)]

    def copy_requested(self, event: Received, request: CopyRequest, shard: Shard, now: float) -> list[Effect]:
        """Handle a request for a copy of a shard that is held here."""
        standby = self._standby(shard.index)
        if standby is None or not shard.is_serving:
            return [Answer(event.key, NotReadyReply("it has no copy of this shard"), now + request.patience)]
        paired: list[Effect] = []
        if standby.rank == NOBODY:
            paired = [*self._pair_with(shard.index, event.sender), self._note_choice(shard.index, event.sender)]
        if event.sender != standby.rank:
            return [Answer(event.key, AcceptReply(), now + request.patience)]  # the shard lives, with another replica
        return [*paired, *standby.copy_requested(event, request, shard, now)]

    def is_followed(self, index: int) -> bool:
        """Return whether this peer has a copy of a shard that another peer holds."""
        return index in self.replicas and self.replicas[index].has_copy

    # --- replies ---------------------------------------------------------------------------------

    def _record_answered(self, index: int, ticket: int, to: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle the reply to a record of a shard that is held here."""
        standby = self._standby(index)
        assert standby is not None
        if isinstance(reply, BusyReply):
            return [Forget(ticket), *self._step_down(index, standby, now)]
        return standby.answered(ticket, reply, now)

    def _copy_answered(self, index: int, ticket: int, to: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle a peer's reply to a request for a copy. It may make this peer the holder."""
        replica = self.replicas[index]
        effects = replica.answered(ticket, to, reply, now)
        if replica.has_copy or isinstance(reply, CopyReply):
            return effects
        if isinstance(reply, AcceptReply):  # another peer holds the shard, and has another replica
            return [*effects, *self._drop_replica(index)]
        if not self.context.members.has_joined_late:
            return [*effects, *(self._take_over(index, now) if replica.initial_holder else [])]
        replica.refused.add(to)
        if left := [rank for rank in self._candidates() if rank not in replica.refused]:
            return [*effects, *replica.ask(now, left[0])]
        return [*effects, *(self._take_over(index, now) if replica.initial_holder else [])]

    def _give_up_shard(self, index: int, standby: Standby, holder: int) -> list[Effect]:
        """Stop holding a shard, since another peer does."""
        shard = self.shards.pop(index)
        text = f"peer {holder} now holds shard {index}, because it considered this peer lost"
        return [*standby.give_up(), *shard.step_down(), Note("", text)]

    def _step_down(self, index: int, standby: Standby, now: float) -> list[Effect]:
        """Follow a shard from now on, since its replica has become the holder."""
        shard = self.shards[index]
        return [*self._give_up_shard(index, standby, standby.rank), *self.follow(shard, standby.rank).ask(now)]

    # --- losses and timers ------------------------------------------------------------------------

    def peer_lost(self, rank: int) -> list[Effect]:
        """Choose other peers for a lost peer's replicas."""
        lost = [index for index in self.shards if (one := self._standby(index)) is not None and one.rank == rank]
        return [effect for index in lost for effect in self._choose(index)]

    def members_changed(self) -> list[Effect]:
        """Choose a peer for shards without a replica, as one may have joined."""
        without = [index for index in self.shards if (one := self._standby(index)) is not None and one.rank == NOBODY]
        return [effect for index in without if self._candidates() for effect in self._choose(index)]

    def timer_fired(self, what: str, index: int, now: float) -> list[Effect]:
        """Handle a timer: request a copy again, or resume sending records."""
        if what == FOLLOW:  # without training workers, nothing more happens to the shard
            return self.replicas[index].ask(now) if index in self.replicas and self.training() else []
        if standby := self._standby(index):
            standby.retry()
        return []

    def send(self, now: float) -> list[Effect]:
        """Send the records and announcements that may be sent."""
        records = [effect for index in self.shards if (one := self._standby(index)) for effect in one.send(now)]
        return [*records, *self._tell(now)]
