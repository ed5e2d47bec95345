"""The waves of one peer: averages of all models while they train.

All peers hold a *reference* r, bit for bit the same. In a wave, peer i encodes how far its model x_i has moved from r
to its code c_i = C(x_i − r). What the code leaves out stays in the model, and so comes with later waves. Each member is
the *owner* of one shard of the model. It receives the codes of its shard from all others and sends the encoded mean of
them back (a reduce-scatter and an all-gather). With N members a wave moves 2 (N − 1) / N codes per peer. A peer that
has the means of all shards updates r, as all others do, and its model. :mod:`gossipx.compression.wave_coding` has the
formulas.

A wave has a number and a list of members. When the policy fires, a peer starts a wave whose number is one above the
highest it knows of, with all peers that it believes to be training. Peers exchange the highest number in their stage
announcements, so that a restarted peer continues the count. The requests of a wave carry its number and members, and a
peer joins as soon as it receives one, so waves started at the same time merge into one. A peer is in one wave at a
time: requests of a later wave wait until the current one is in its weights. Of two lists of members for one number, the
longer wins, of equally long ones the lexicographically smaller: a peer that has averaged nothing yet switches to it,
and any other refuses it.

Faults cost no more than a shard of a wave. An owner waits for codes until the timeout of the wave; a code that is late
stays in the model of its peer. A peer that gets no mean from an owner asks another member for it, and if that fails
too, it leaves the shard out. If others did not, their references are later than its own: an owner refuses a code that
is measured from an earlier reference than its own. A peer that was refused fetches the later reference whole; so does a
peer that has none, as it was restarted or has joined the run.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field

from gossipx.peer.exchange import PeerContext
from gossipx.protocol import messages
from gossipx.protocol.effects import (
    Answer,
    ApplyWave,
    AverageShard,
    Capture,
    Effect,
    EncodeWave,
    EndWave,
    Forget,
    Keep,
    Note,
    SetTimer,
)
from gossipx.protocol.events import Answered, Received, ShardAveraged, WaveEncoded, WaveEnded

DOUBLINGS = 2
"""How often late models may double the timeout of a wave (to 2 min for 30 s). This is less than for pulls, as one
intermittent peer holds up the whole wave."""
SLACK = 1 / 2
"""Extra time that a member waits for a mean after its owner has stopped waiting, as a share of the timeout."""
ASKED = 2
"""Members that are asked for the mean of a shard whose owner does not reply."""
TIMER = "wave"
"""Name of the timer that ends the wait for codes."""

Ranks = tuple[int, ...]


class ShardState(enum.Enum):
    """The state of one shard in a wave, as a peer knows it."""

    OPEN = "its owner is to reply to our code"
    ASKING = "another member is asked, as its owner does not reply"
    HERE = "its mean is here"
    ABSENT = "it is left out"


@dataclass
class _Shard:
    """One shard in a wave.

    Attributes:
        open: tickets of our requests for its mean.
        asking: the one of them that went to another member than the owner.
        ticket: that of the reply that brought it.
        asked: members that were asked in place of the owner.
        waiting: requests of other members for the mean, while it is open.
    """

    state: ShardState = ShardState.OPEN
    open: set[int] = field(default_factory=set)
    asking: int = 0
    ticket: int = 0
    asked: set[int] = field(default_factory=set)
    waiting: list[Received] = field(default_factory=list)

    @property
    def resolved(self) -> bool:
        """Whether its mean is here or will not come."""
        return self.state in (ShardState.HERE, ShardState.ABSENT)


class Repair:
    """The replacement of this peer's reference by a later one. Methods return the effects to carry out.

    Args:
        context: state shared by the role's components.
        source: the peer that has the later reference.
        fragment: the part of the model that is concerned.

    Attributes:
        ticket: our captured model.
        merged: whether the reference is here, so that the captured model must be written into the weights.
        over: whether nothing is left to wait for.
    """

    def __init__(self, context: PeerContext, source: int, fragment: int):
        self.ticket = context.requests.ticket()
        self.merged = self.over = False
        self._context = context
        self._source = source
        self._request = messages.ReferenceRequest(fragment)
        self._sent = 0

    def begin(self, now: float) -> list[Effect]:
        """Capture our model and request the reference."""
        deadline = now + self._context.members.model_timeout  # measured transfers were of codes
        send = self._context.requests.send(self._source, self._request, now, deadline)
        self._sent = send.ticket
        return [Capture(self.ticket, fragment=self._request.fragment), send]

    def awaits(self, ticket: int) -> bool:
        """Return whether ``ticket`` is our request."""
        return ticket == self._sent and not self.over

    def replied(self, ticket: int, reply: messages.Reply, now: float) -> list[Effect]:
        """Handle the reply to our request."""
        if not isinstance(reply, messages.ReferenceReply):
            return self.failed(ticket, now)
        return [EndWave(self.ticket, reference=ticket)]

    def failed(self, ticket: int, now: float) -> list[Effect]:
        """Give up; the next wave shows whether the reference is still outdated."""
        self.over = True
        return [Forget(ticket)]

    def ended(self, event: WaveEnded, now: float) -> list[Effect]:
        """Handle the end of the update: unless refused, the captured model is ready for the weights."""
        self.over, self.merged = True, not event.poisoned
        if event.poisoned:
            text = "the reference of peer {} holds NaN or Inf: it is not taken"
            return [_poisoned(self._context, self._source, text, now)]
        self._context.counts.add("references")
        text = f"took the reference of peer {self._source}: ours had missed a wave, or there was none"
        return [Note("reference", text)]


class Wave:
    """One peer's part in one wave. Methods return the effects to carry out; check :attr:`over` after each.

    Args:
        context: state shared by the role's components.
        number: of the wave.
        members: ranks that take part, ascending, including ours.
        now: the present time.

    Attributes:
        ticket: of the wave and of our captured model.
        fragment: the part of the model that is averaged.
        merged: whether it has changed our captured model, which must be written into the weights.
        lost: number of shards that were left out, and of codes that our own shard lacks.
        ended: members that said that their training is over, which is no fault.
        over: whether nothing is left to wait for.
        reference: from which our code is measured; None: it is not encoded yet.
        later: a member whose reference is later than ours.
    """

    def __init__(self, context: PeerContext, number: int, members: Ranks, now: float):
        self.number, self.members = number, members
        self.ticket = context.requests.ticket()
        self.fragment = context.fragment_order.of_wave(number)
        self.merged = self.over = False
        self.lost = 0
        self.ended: set[int] = set()
        self.reference: tuple[int, int] | None = None
        self.later: int | None = None
        self._context = context
        self._others = [rank for rank in members if rank != context.rank]
        self._shards = {rank: _Shard() for rank in members}
        known = context.members
        longest = known.model_timeout * 2**DOUBLINGS  # a pause of ours may have been measured as a transfer
        self._patience = max(context.timeout, min(known.longest_patience(self._others, DOUBLINGS), longest))
        self._deadline = now + self._patience
        self._codes: dict[int, int] = {}  # tickets of the codes of our shard that others have uploaded, by rank
        self._without = context.members.unavailable(now)  # ranks whose code is not waited for
        self._askers: list[Received] = []  # requests for the mean of our shard
        self._early: list[Received] = []  # requests that came before our code was encoded
        self._is_averaging = self._has_mean = self._is_ending = self._takes = False
        self._answering: set[Hashable] = set()  # keys of requests that we answer with the mean of our shard

    # --- the beginning ----------------------------------------------------------------------------

    def begin(self) -> list[Effect]:
        """Capture our model and encode what it has moved."""
        founds = self._context.rank == self.members[0]
        encode = EncodeWave(self.ticket, self.number, self.members, founds)
        return [Capture(self.ticket, fragment=self.fragment), encode, SetTimer(TIMER, self._deadline)]

    def encoded(self, event: WaveEncoded, now: float) -> list[Effect]:
        """Upload our codes; without a reference, mark the first member as the one to fetch it from."""
        self.reference = event.reference
        early, self._early = self._early, []
        effects = list[Effect]()
        if self.reference == messages.NO_REFERENCE:
            self.later, self.over = self.members[0], True
            for shard in self._shards.values():
                shard.state = ShardState.ABSENT
        else:
            for owner in self._others:
                effects += self._upload(owner, now)
        for asked in early:
            effects += self.requested(asked, now)
        return [*effects, *self._average(now, at_once=now >= self._deadline)]  # the timer may have fired before

    def _upload(self, owner: int, now: float) -> list[Effect]:
        assert self.reference is not None
        patience = self._deadline + SLACK * self._patience - now
        request = messages.ShardRequest(self.number, self.members, self.fragment, self.reference, (), patience)
        send = self._context.requests.send(owner, request, now, now + patience)
        self._shards[owner].open.add(send.ticket)
        # An owner that others can reach may wait for our code.
        return [send, *(self._ask_another(owner, now) if owner in self._without else [])]

    # --- our shard --------------------------------------------------------------------------------

    def requested(self, event: Received, now: float) -> list[Effect]:
        """Handle a code of our shard, or the request of a member that its owner has not answered."""
        if isinstance(event.request, messages.ShareRequest):
            return self._asked(event, now)
        assert isinstance(event.request, messages.ShardRequest)
        theirs, own = event.request.reference, self._shards[self._context.rank]
        if self.reference is None:
            self._early.append(event)
            return []
        if theirs > self.reference:
            self.later = event.sender
            return [*self._left_out(event.sender, now), self._refuse(event, "its reference is an earlier one", now)]
        if theirs < self.reference:
            outdated = Answer(event.key, messages.OutdatedReply(self.reference), now + self._patience)
            return [*self._left_out(event.sender, now), outdated]
        if self._has_mean and own.state is not ShardState.ABSENT:
            self._answering.add(event.key)
            return [self._share(event, self._context.rank, now)]
        if own.state is ShardState.ABSENT:
            return [self._refuse(event, "it has averaged no other code", now)]
        self._askers.append(event)
        if self._is_averaging or event.sender in self._codes:
            return []
        ticket = self._codes[event.sender] = self._context.requests.ticket()
        return [Keep(event.key, ticket), *self._average(now)]

    def _left_out(self, rank: int, now: float) -> list[Effect]:
        self._without.add(rank)
        return self._average(now)

    def _average(self, now: float, at_once: bool = False) -> list[Effect]:
        """Average our shard once all codes are here that will come; ``at_once``: no longer wait for the others."""
        own, missing = self._shards[self._context.rank], set(self._others) - self._codes.keys()
        if not self.reference or own.resolved or self._is_averaging or (missing - self._without and not at_once):
            return self._end(now)
        if not self._codes:
            own.state = ShardState.ABSENT
            return self._end(now)
        self._is_averaging = True
        return [AverageShard(self.ticket, tuple(sorted(self._codes.items())))]

    def averaged(self, event: ShardAveraged, now: float) -> list[Effect]:
        """Send the mean of our shard to all who have asked for it."""
        poisoned = self._codes.keys() - set(event.counted)
        text = f"the code of peer {{}} holds NaN or Inf: it is not in wave {self.number}"
        notes = [_poisoned(self._context, one, text, now) for one in sorted(poisoned)]
        self.lost += len(self.members) - len(event.counted) - len(self.ended)
        self._has_mean = len(event.counted) > 1
        self._shards[self._context.rank].state = ShardState.OPEN if self._has_mean else ShardState.ABSENT
        askers, self._askers = self._askers, []
        return [*notes, *(effect for one in askers for effect in self.requested(one, now)), *self._end(now)]

    def answered(self, event: Answered, now: float) -> list[Effect]:
        """Handle the end of an answer: the mean of our shard counts once another member has it.

        Else it would be in our reference alone, and others could not ask anybody for it.
        """
        own = self._shards[self._context.rank]
        self._answering.discard(event.key)
        if own.resolved or not self._has_mean or not (event.whole or not self._answering):
            return []
        self.lost += not event.whole
        return self._resolved(self._context.rank, ShardState.HERE if event.whole else ShardState.ABSENT, now)

    def _share(self, event: Received, owner: int, now: float) -> Answer:
        reply, of = messages.ShareReply((), ()), (self.ticket, owner)
        return Answer(event.key, reply, now + self._patience, share=of, fragment=self.fragment)

    # --- the shards of others ---------------------------------------------------------------------

    def awaits(self, ticket: int) -> bool:
        """Return whether ``ticket`` is an open request of this wave."""
        return any(ticket in shard.open and not shard.resolved for shard in self._shards.values())

    def replied(self, ticket: int, reply: messages.Reply, now: float) -> list[Effect]:
        """Handle the reply to a request for the mean of a shard."""
        owner = self._owner_of(ticket)
        match reply:
            case messages.ShareReply():
                self._shards[owner].ticket = ticket
                return self._resolved(owner, ShardState.HERE, now)
            case messages.OutdatedReply():
                self.later = owner
            case messages.HereReply():
                self.ended.add(owner)
            case _:
                return self.failed(ticket, now)
        self._without.add(owner)
        return [Forget(ticket), *self._resolved(owner, ShardState.ABSENT, now), *self._average(now)]

    def failed(self, ticket: int, now: float) -> list[Effect]:
        """Handle a request that failed: ask another member for the mean."""
        owner = self._owner_of(ticket)
        shard = self._shards[owner]
        shard.open.discard(ticket)
        if shard.state is ShardState.OPEN:
            self._without.add(owner)
        another = self._ask_another(owner, now) if shard.state is ShardState.OPEN or ticket == shard.asking else []
        return [Forget(ticket), *another, *self._average(now)]

    def _ask_another(self, owner: int, now: float) -> list[Effect]:
        shard = self._shards[owner]
        waiting, shard.waiting, shard.state = shard.waiting, [], ShardState.ASKING
        refused: list[Effect] = [self._refuse(event, "it has no mean of that shard", now) for event in waiting]
        left = [one for one in self._others if one not in (self._without | shard.asked | {owner})]
        if not left and not shard.asked and shard.open:
            shard.state = ShardState.OPEN  # with nobody else to ask, wait for the owner
            return refused
        if not left or len(shard.asked) == ASKED:
            self.lost += 1
            missed = Note("wave", f"peer {owner} missed wave {self.number}: its shard of the model is left out")
            return [*refused, missed, *self._resolved(owner, ShardState.ABSENT, now)]
        shard.asked.add(left[0])
        request = messages.ShareRequest(self.number, self.members, self.fragment, owner)
        send = self._context.requests.send(left[0], request, now, now + SLACK * self._patience)
        shard.open.add(send.ticket)
        shard.asking = send.ticket
        return [*refused, send]

    def _asked(self, event: Received, now: float) -> list[Effect]:
        assert isinstance(event.request, messages.ShareRequest)
        shard = self._shards.get(event.request.owner)
        if shard is not None and shard.state is ShardState.HERE:
            return [self._share(event, event.request.owner, now)]
        if shard is None or shard.state is not ShardState.OPEN or self.over:
            return [self._refuse(event, "it has no mean of that shard", now)]
        shard.waiting.append(event)
        return []

    def _owner_of(self, ticket: int) -> int:
        return next(owner for owner, shard in self._shards.items() if ticket in shard.open)

    def _resolved(self, owner: int, state: ShardState, now: float) -> list[Effect]:
        shard = self._shards[owner]
        shard.state, waiting = state, shard.waiting
        shard.waiting = []
        return [*(effect for event in waiting for effect in self._asked(event, now)), *self._end(now)]

    # --- the end ----------------------------------------------------------------------------------

    def _end(self, now: float) -> list[Effect]:
        if self.over or self._is_ending or not all(shard.resolved for shard in self._shards.values()):
            return []
        here = {owner: shard.ticket for owner, shard in self._shards.items() if shard.state is ShardState.HERE}
        if not here and not self._has_mean:
            self.over = True
            return []
        self._is_ending, self._takes = True, bool(here)
        with_own = here.pop(self._context.rank, None) is not None
        return [EndWave(self.ticket, tuple(here.items()), with_own)]

    def ended_by(self, event: WaveEnded, now: float) -> list[Effect]:
        """Handle the update of the reference: the captured model is ready for the weights."""
        self.over, self.merged = True, self._takes
        text = f"the mean of peer {{}} holds NaN or Inf: it is not in wave {self.number}"
        return [_poisoned(self._context, owner, text, now) for owner in event.poisoned]

    def timer_fired(self, now: float) -> list[Effect]:
        """Handle the timer, which may be that of an earlier wave."""
        return self._average(now, at_once=True) if now >= self._deadline else []

    def peer_left(self, rank: int, now: float) -> list[Effect]:
        """Handle the departure of ``rank``."""
        if rank not in self._shards:
            return []
        self._without.add(rank)
        left = self._ask_another(rank, now) if self._shards[rank].state is ShardState.OPEN and self.reference else []
        return [*left, *self._average(now)]

    @property
    def has_exchanged(self) -> bool:
        """Whether a mean is made or was received, so that the members can no longer change."""
        return self._is_averaging or any(shard.state is ShardState.HERE for shard in self._shards.values())

    def forget(self) -> list[Effect]:
        """Release everything that is kept for this wave."""
        kept = [] if self._is_averaging else list(self._codes.values())
        here = [] if self._is_ending else [one.ticket for one in self._shards.values() if one.state is ShardState.HERE]
        return [Forget(ticket) for ticket in (*kept, *filter(None, here), self.ticket)]

    def take_unanswered(self) -> list[Received]:
        """Return the requests that are still unanswered, which the caller now owns."""
        held = [*self._early, *self._askers, *(event for shard in self._shards.values() for event in shard.waiting)]
        self._early, self._askers = [], []
        for shard in self._shards.values():
            shard.waiting = []
        return held

    def _refuse(self, event: Received, reason: str, now: float) -> Answer:
        return Answer(event.key, messages.NotReadyReply(reason), now + self._patience)


class WaveSequence:
    """The current wave of a peer, and requests that wait for the next one.

    Args:
        context: state shared by the role's components.

    Attributes:
        current: the wave that this peer takes part in, or the repair of its reference, until it is in the weights.
        lost: shards of waves that were left out because of a fault, and codes that came too late for ours.
    """

    def __init__(self, context: PeerContext):
        self.current: Wave | Repair | None = None
        self.lost = 0
        self._context = context
        self._seen = 0  # highest wave that we took part in
        self._heard = 0  # highest wave that others have announced as over
        self._taking_in = False
        self._last: Wave | None = None  # the last one that is over
        self._early: list[Received] = []  # requests of waves that we have not entered
        self._outdated: list[Received] = []  # requests for our reference

    # --- starting and joining ---------------------------------------------------------------------

    def start(self, now: float) -> list[Effect]:
        """Start a wave, as our policy fired; do nothing if no other peer seems to train or the numbers are used up."""
        members = tuple(sorted([self._context.rank, *self._context.members.in_training(now)]))
        number = max(self._seen, self._heard) + 1
        may_start = self.current is None and len(members) > 1 and number <= messages.MAX_WAVE
        return self._enter(number, members, now) if may_start else []

    def join(self, now: float) -> list[Effect]:
        """Join the latest wave for which a code is waiting, if any."""
        codes = [event for event in self._early if isinstance(event.request, messages.ShardRequest)]
        if self.current is not None or not codes:
            return []
        latest = max(_named(event)[0] for event in codes)
        members = min((_named(event)[1] for event in codes if _named(event)[0] == latest), key=_order)
        waiting, self._early = self._early, []
        effects = self._enter(latest, members, now)
        return effects + [effect for event in waiting for effect in self.requested(event, now)]

    def _enter(self, number: int, members: Ranks, now: float) -> list[Effect]:
        self._seen = number
        self._context.sync.requested(shared=True)
        self.current = wave = Wave(self._context, number, members, now)
        return wave.begin()

    # --- requests ---------------------------------------------------------------------------------

    @property
    def latest(self) -> int:
        """The highest number of a wave known to be over; 0 before the first."""
        under_way = isinstance(self.current, Wave) and self.current.number == self._seen
        return max(self._seen - under_way, self._heard)

    def record_over(self, number: int) -> None:
        """Record that wave ``number`` is over for another peer: the next one that we start gets a higher number.

        We may still join that wave, if a peer that is still in it sends a request.
        """
        self._heard = max(self._heard, number)

    def requested(self, event: Received, now: float) -> list[Effect]:
        """Handle a request of a wave: answer it, let it wait, or switch to its list of members."""
        if isinstance(event.request, messages.ReferenceRequest):
            self._outdated.append(event)
            return self._give(now)
        number, members = _named(event)
        for wave in (self.current, self._last):
            if isinstance(wave, Wave) and (wave.number, wave.members) == (number, members):
                return wave.requested(event, now)
        is_code = isinstance(event.request, messages.ShardRequest)
        if not is_code or not {self._context.rank, event.sender} <= set(members) <= self._run:
            return [self.refuse(event, "it has other members for that wave", now)]
        if isinstance(self.current, Wave) and number == self.current.number:
            return self._switch(self.current, event, now)
        if number <= self._seen:
            return [self.refuse(event, "that wave is over", now)]
        self._early.append(event)
        return []

    def _give(self, now: float) -> list[Effect]:
        """Send our reference to the peers that asked; in a wave they wait, as it would be outdated at once."""
        if isinstance(self.current, Wave) and not self.current.over:
            return []
        asked, self._outdated = self._outdated, []
        reply, patience = messages.ReferenceReply(messages.NO_REFERENCE), self._context.members.patience
        return [
            Answer(
                one.key, reply, now + patience(one.sender, outgoing=True), fragment=messages.fragment_of(one.request)
            )
            for one in asked
        ]

    @property
    def _run(self) -> set[int]:
        return {self._context.rank, *self._context.members.others}

    def _switch(self, wave: Wave, event: Received, now: float) -> list[Effect]:
        """Switch to the members that ``event`` names for our wave, unless ours are better or it is too late."""
        if _order(_named(event)[1]) > _order(wave.members) or wave.has_exchanged:
            return [self.refuse(event, "it has other members for that wave", now)]
        again = [*wave.take_unanswered(), event]
        self.current = better = Wave(self._context, wave.number, _named(event)[1], now)
        effects = [*wave.forget(), *better.begin()]
        return effects + [effect for one in again for effect in self.requested(one, now)]

    def refuse(self, event: Received, reason: str, now: float) -> Answer:
        """Return a refusal of ``event``."""
        return Answer(event.key, messages.NotReadyReply(reason), now + self._context.timeout)

    # --- what is under way ------------------------------------------------------------------------

    def replied(self, ticket: int, reply: messages.Reply, now: float) -> list[Effect]:
        """Handle the reply to a request of a wave."""
        awaited = self.current is not None and self.current.awaits(ticket)
        return self.current.replied(ticket, reply, now) if self.current and awaited else [Forget(ticket)]

    def failed(self, ticket: int, now: float) -> list[Effect]:
        """Handle a request of a wave that failed."""
        awaited = self.current is not None and self.current.awaits(ticket)
        return self.current.failed(ticket, now) if self.current and awaited else [Forget(ticket)]

    def progressed(self, event: WaveEncoded | ShardAveraged | WaveEnded, now: float) -> list[Effect]:
        """Handle the end of a computation."""
        current = self.current
        match event:
            case _ if current is None or current.ticket != event.ticket:
                return []
            case WaveEnded() if isinstance(current, Wave):
                return [*current.ended_by(event, now), *self._give(now)]
            case WaveEnded() if isinstance(current, Repair):
                return current.ended(event, now)
            case WaveEncoded() if isinstance(current, Wave):
                return current.encoded(event, now)
            case ShardAveraged() if isinstance(current, Wave):
                return current.averaged(event, now)
        return []

    def answered(self, event: Answered, now: float) -> list[Effect]:
        """Handle the end of an answer of ours, delivered or not."""
        return self.current.answered(event, now) if isinstance(self.current, Wave) else []

    def timer_fired(self, now: float) -> list[Effect]:
        """Handle the timer of a wave."""
        return self.current.timer_fired(now) if isinstance(self.current, Wave) else []

    def peer_left(self, rank: int, now: float) -> list[Effect]:
        """Handle the departure of ``rank``."""
        return self.current.peer_left(rank, now) if isinstance(self.current, Wave) else []

    # --- completion -------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether nothing is left to wait for, so that the result must be taken in."""
        return self.current is not None and self.current.over and not self._taking_in

    def take_in(self, now: float) -> list[Effect]:
        """Take the result into our model; close a wave without one."""
        assert self.current is not None
        if not self.current.merged:
            return [*self._give(now), *self._close(now)]
        self._taking_in = True
        return [ApplyWave(self.current.ticket)]

    def taken_in(self, ticket: int, now: float) -> list[Effect] | None:
        """Close what has ``ticket``, as it is in our weights; None: it is not ours."""
        return None if self.current is None or self.current.ticket != ticket else self._close(now)

    def _close(self, now: float) -> list[Effect]:
        closed, self.current, self._taking_in = self.current, None, False
        assert closed is not None
        effects = list[Effect]([Forget(closed.ticket)])
        if isinstance(closed, Wave):
            self._last = closed
            self.lost += closed.lost
            effects = [
                *closed.forget(),
                *(self.refuse(one, "that wave is over", now) for one in closed.take_unanswered()),
            ]
            self._record(closed)
            if closed.later is not None:
                self.current = Repair(self._context, closed.later, closed.fragment)
                effects += self.current.begin(now)
        return effects

    def _record(self, wave: Wave) -> None:
        if wave.merged:
            self._context.sync.completed()
        elif wave.ended and not wave.lost:
            self._context.sync.found_nobody()
        else:
            self._context.sync.abandoned(failed=wave.later is None)

    def give_up(self, reply: messages.Reply, now: float) -> list[Effect]:
        """Abandon what is under way, and answer waiting requests with ``reply``."""
        waiting, self._early, self._outdated = [*self._early, *self._outdated], [], []
        current, self.current, self._taking_in = self.current, None, False
        effects = list[Effect]()
        if isinstance(current, Wave):
            waiting += current.take_unanswered()
            self._context.sync.abandoned()
        if current is not None:
            effects += current.forget() if isinstance(current, Wave) else [Forget(current.ticket)]
        return effects + [Answer(event.key, reply, now + self._context.timeout) for event in waiting]


def _poisoned(context: PeerContext, rank: int, text: str, now: float) -> Note:
    """Suspend a peer that sent NaN or Inf; return the note, whose text has its rank."""
    context.counts.add("poisoned")
    if rank != context.rank:  # our own mean may be too large for its dtype
        context.members.others[rank].suspended_until = now + context.timeout
    return Note("poisoned", text.format(rank))


def _named(event: Received) -> tuple[int, Ranks]:
    """Return the wave and the members that a request names."""
    assert isinstance(event.request, messages.ShardRequest | messages.ShareRequest)
    return event.request.wave, event.request.members


def _order(members: Ranks) -> tuple[int, Ranks]:
    """Return the sort key of member lists for one wave: the smaller is the better."""
    return -len(members), members
