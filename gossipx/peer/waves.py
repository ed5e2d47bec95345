"""The waves of one peer: those that it starts or joins while training, and the last one, which ends the run.

A wave has a number and a list of members. When the policy fires, a peer starts a wave whose number is one above the
highest it knows of, with all peers that it believes to be training. Peers exchange the highest number in their stage
announcements, so that a restarted peer continues the count. The requests of a wave carry its number and members, and a
peer joins as soon as it receives one, so waves started at the same time merge into one.

If peers start the same number with different members, the longer list wins; of equally long ones, the lexicographically
smaller. A peer that has neither sent nor received a model yet switches to the better list. Any other peer refuses it,
which costs the sender one round. A peer is in one wave at a time: requests of a later wave wait until the mean of the
current one is in its weights.

A wave consists of rounds of pairwise averaging after which all members hold the mean of their models. There is no
coordinator. Every member knows the ranks of the others, so each can compute its partner of every round
(:func:`gossipx.topology.part_in_round`). The averaged model is the one that each peer captured as it entered the wave.
In each round both partners send each other their current average, and merge only after both transfers are complete, so
that the sum of the two models is unchanged. Training steps made meanwhile are added to the mean at the end; nothing
else changes the sum of all models.

A missing partner costs its round, not the wave. Round k ends at the latest 1 + k · ROUND_SLACK times the round timeout
after the start of the wave, so a peer that waited in vain for one partner still meets the next ones in time.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from gossipx.peer.exchange import PeerContext
from gossipx.peer.membership import Requests
from gossipx.protocol import messages
from gossipx.protocol.effects import Answer, ApplyWave, Capture, Effect, Forget, Merge, Note, SetTimer
from gossipx.protocol.events import Answered, Received
from gossipx.topology import RoundPart, part_in_round, wave_rounds

ROUND_DOUBLINGS = 2
"""How often late models may double the timeout of a round (to 2 min for 30 s). This is less than for pulls, as one
intermittent peer holds up the whole wave."""


class WaveSequence:
    """The current wave of a peer, and requests that wait for the next one.

    Args:
        context: state shared by the role's components.

    Attributes:
        current: the wave that this peer takes part in, until its mean is in the weights; the last wave remains.
        lost: rounds of waves while training that were skipped because the partner was missing.
    """

    def __init__(self, context: PeerContext):
        self.current: Wave | None = None
        self.lost = 0
        self._context = context
        self._seen = 0  # highest wave that we took part in, except the last wave
        self._heard = 0  # highest wave that others have announced as over
        self._taking_in = False
        self._last: Wave | None = None  # the last one that was taken in or came to nothing
        self._early: list[Received] = []  # requests of waves that we have not entered

    # --- starting and joining ---------------------------------------------------------------------

    def start(self, step: int, now: float) -> list[Effect]:
        """Start a wave, as our policy fired; do nothing if no other peer seems to train or the numbers are used up."""
        members = tuple(sorted([self._context.rank, *self._context.members.in_training(now)]))
        number = max(self._seen, self._heard) + 1
        may_start = len(members) > 1 and number <= messages.MAX_WAVE
        return self._enter(number, members, step, now) if may_start else []

    def join(self, step: int, now: float) -> list[Effect]:
        """Join the latest wave for which a request is waiting, if any."""
        waiting = [event for event in self._early if _round_request(event).wave != messages.LAST_WAVE]
        if self.current is not None or not waiting:
            return []
        self._early = [event for event in self._early if _round_request(event).wave == messages.LAST_WAVE]
        latest = max(_round_request(event).wave for event in waiting)
        members = min(
            (_round_request(event).members for event in waiting if _round_request(event).wave == latest), key=_order
        )
        effects = self._enter(latest, members, step, now)
        return effects + [effect for event in waiting for effect in self.requested(event, step, now)]

    def finish(
        self, members: tuple[int, ...] | None, step: int, weight: float, now: float, without: int | None = None
    ) -> list[Effect]:
        """Start the last wave.

        Args:
            members: ranks that take part; None: all that have reached the finish.
            step: iterations that our model has seen.
            weight: of our model in the mean.
            without: rank to exclude although it has reached the finish; None: no such rank. If other peers noticed its
                loss before us and have named the members, their list is used.
        """
        early, self._early = self._early, []
        if members is None:
            here = [self._context.rank, *(rank for rank in self._context.members.in_finish() if rank != without)]
            named = [_round_request(event).members for event in early if without is not None and self.may_join(event)]
            members = min(named, key=_order, default=tuple(sorted(here)))
        # No rank counts as missing: a peer at the finish is met even if it was silent before.
        patience = self._patience(members)
        if messages.WHOLE not in self._context.fragment_order:  # the models of measured transfers were fragments
            patience = max(patience, self._context.members.model_timeout)
        self.current = Wave(
            messages.LAST_WAVE, self._context.rank, members, step, self._context.requests, patience, weight=weight
        )
        effects = self.current.begin(now)
        return effects + [effect for event in early for effect in self.current.requested(event, now)]

    def _enter(self, number: int, members: tuple[int, ...], step: int, now: float) -> list[Effect]:
        self.current = wave = self._new_wave(number, members, step, now)
        self._seen = number
        self._context.sync.requested(shared=True)
        return wave.begin(now)

    def _new_wave(self, number: int, members: tuple[int, ...], step: int, now: float) -> Wave:
        missing, fragment = self._context.members.unavailable(now), self._context.fragment_order.of_wave(number)
        patience = self._patience(members)
        return Wave(
            number, self._context.rank, members, step, self._context.requests, patience, missing, fragment=fragment
        )

    def _patience(self, members: tuple[int, ...]) -> float:
        """Return the timeout of a round: peer_timeout where all peers are fast, so that all give up together."""
        others = [rank for rank in members if rank != self._context.rank]
        return max(
            self._context.timeout, self._context.members.longest_patience(others, ROUND_DOUBLINGS) if others else 0.0
        )

    # --- requests ---------------------------------------------------------------------------------

    @property
    def latest(self) -> int:
        """The highest number of a wave known to be over, except the last wave; 0 before the first."""
        under_way = self.current is not None and self.current.number == self._seen
        return max(self._seen - under_way, self._heard)

    def record_over(self, number: int) -> None:
        """Record that wave ``number`` is over for another peer: the next one that we start gets a higher number.

        We may still join that wave, if a peer that is still in it sends a request.
        """
        self._heard = max(self._heard, number)

    def defer(self, event: Received) -> None:
        """Keep ``event`` until we enter the wave that it names."""
        self._early.append(event)

    def requested(self, event: Received, step: int, now: float) -> list[Effect]:
        """Handle a request for our model while training: answer it, let it wait, or switch to its list of members."""
        request, wave = _round_request(event), self.current
        if wave is not None and request.wave == wave.number:
            return self._requested_now(wave, event, step, now)
        if self._last is not None and (request.wave, request.members) == (self._last.number, self._last.members):
            return self._last.requested(event, now)  # no refusal if the partner only tells us of that wave
        if request.wave <= self._seen or not self.may_join(event):
            return [self.refuse(event, "that wave is over", now)]
        self.defer(event)
        return []

    def _requested_now(self, wave: Wave, event: Received, step: int, now: float) -> list[Effect]:
        members = _round_request(event).members
        better = _order(members) < _order(wave.members)
        if not better or wave.has_exchanged or not self.may_join(event):
            return wave.requested(event, now)
        self.lost += wave.lost
        self.current = self._new_wave(wave.number, members, step, now)
        again = [*wave.take_unanswered(), event]
        effects = [Forget(wave.ticket), *self.current.begin(now)]
        return effects + [effect for event in again for effect in self.current.requested(event, now)]

    def may_join(self, event: Received) -> bool:
        """Return whether the named members belong to this run and include both the sender and this peer."""
        members = _round_request(event).members
        return {self._context.rank, event.sender} <= set(members) <= {self._context.rank, *self._context.members.others}

    def refuse(self, event: Received, reason: str, now: float) -> Answer:
        """Return a refusal of ``event``."""
        return Answer(event.key, messages.NotReadyReply(reason), now + self._context.timeout)

    # --- rounds -----------------------------------------------------------------------------------

    def meeting(self, ticket: int) -> Wave | None:
        """Return the current wave if ``ticket`` is our request of its current round."""
        return self.current if self.current is not None and self.current.is_current(ticket) else None

    def answering(self, key: Hashable) -> Wave | None:
        """Return the current wave if ``key`` is the request that its current round answers."""
        return self.current if self.current is not None and self.current.is_answering(key) else None

    def timer_fired(self, now: float) -> list[Effect]:
        """Handle the timer of a round."""
        return [] if self.current is None else self.current.timer_fired(now)

    def peer_left(self, rank: int, now: float) -> list[Effect]:
        """Handle the departure of ``rank``."""
        return [] if self.current is None else self.current.peer_left(rank, now)

    @property
    def lost_at_end(self) -> int:
        """Rounds of the last wave that were skipped because the partner was missing."""
        return self.current.lost if self.current is not None and self.current.number == messages.LAST_WAVE else 0

    # --- completion -------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether the current wave has no round left and its mean must be taken in."""
        return self.current is not None and self.current.over and not self._taking_in

    def take_in(self) -> list[Effect]:
        """Take the wave's mean into our model; close a wave that merged nothing."""
        assert self.current is not None
        if not self.current.merged:
            return [self._close()]
        self._taking_in = True
        return [ApplyWave(self.current.ticket)]

    def close_if_merged(self, ticket: int) -> bool:
        """Close the wave if ``ticket`` is its own, as its mean is in our weights; return whether it was."""
        if self.current is None or self.current.ticket != ticket:
            return False
        self._close()
        return True

    def _close(self) -> Forget:
        wave = self.current
        assert wave is not None
        self._taking_in = wave.number == messages.LAST_WAVE
        if wave.number != messages.LAST_WAVE:
            self.current, self._last = None, wave
            self.lost += wave.lost
            if wave.merged:
                self._context.sync.completed(wave.merged)
            elif wave.ended and not wave.lost:
                self._context.sync.found_nobody()
            else:
                self._context.sync.abandoned()
        return Forget(wave.ticket)

    def give_up(self, reply: messages.Reply, now: float) -> list[Effect]:
        """Abandon the current wave, and answer waiting requests with ``reply``, except those of the last wave."""
        wave, effects = self.current, list[Effect]()
        waiting = [event for event in self._early if _round_request(event).wave != messages.LAST_WAVE]
        self._early = [event for event in self._early if _round_request(event).wave == messages.LAST_WAVE]
        if wave is not None:
            waiting += wave.take_unanswered()
            self.current, self._taking_in = None, False
            self._context.sync.abandoned()
            effects.append(Forget(wave.ticket))
        return effects + [Answer(event.key, reply, now + self._context.timeout) for event in waiting]

    def leave(self, now: float, reason: str = "it leaves") -> list[Effect]:
        """Refuse all waiting requests and take part in no wave any more."""
        waiting = self._early + (self.current.take_unanswered() if self.current else [])
        self._early = []
        return [self.refuse(event, reason, now) for event in waiting]


def _round_request(event: Received) -> messages.RoundRequest:
    assert isinstance(event.request, messages.RoundRequest)
    return event.request


def _order(members: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the sort key of member lists for one wave: the smaller is the better."""
    return -len(members), members


TIMER = "round"
"""Name of the timer that ends the current round."""
ROUND_SLACK = 1 / 2
"""Extra time for each further round, as a share of the round timeout: enough for one transfer and a late start."""


@dataclass
class _Round:
    """One peer's view of its current round.

    Attributes:
        number: from 0.
        deadline: time after which the partner is no longer waited for.
        partner: its rank.
        part: which side sends its model, and whether ours is replaced by the received one.
        ticket: of our request. It is made even if this peer only sends: it tells the partner of the wave, and fails at
            once if the partner has crashed, which would otherwise be waited for.
        is_received: whether the partner's model is here, or will not arrive.
        weight: of the partner's average: the sum of the weights of the models in it; 0 if it will not arrive.
        is_sent: whether the partner has our model, or will not get it.
        answering: keys of the partner's requests whose answers are under way: a request may arrive twice.
        is_merging: whether the partner's model is being merged, which ends the round.
    """

    number: int
    deadline: float
    partner: int
    part: RoundPart
    ticket: int
    is_received: bool
    weight: float = 0.0
    is_sent: bool = False
    answering: set[Hashable] = field(default_factory=set)
    is_merging: bool = False


@dataclass(eq=False)
class Wave:
    """One peer's part in one wave. Methods return the effects to carry out; check :attr:`over` after each.

    Args:
        number: of the wave.
        rank: this peer's own rank.
        members: ranks that take part, ascending, including ``rank``.
        step: iterations that our model has seen.
        requests: the role's open requests.
        patience: timeout of a round, in seconds.
        missing: ranks that are not waited for.
        weight: of our model in the mean: 1, or the push-sum weight.
        fragment: the part of the model that is averaged.

    Attributes:
        ticket: our captured model, which becomes the average.
        merged: number of models merged into it.
        weight: sum of the weights of the models in our average.
        lost: number of rounds skipped because the partner was missing.
        ended: partners that said that their training is over: their rounds are skipped and not lost.
        over: whether no round is left.
        has_exchanged: whether a model was sent or received, so that the members can no longer change.
    """

    number: int
    rank: int
    members: tuple[int, ...]
    step: int
    requests: Requests
    patience: float
    missing: set[int] = field(default_factory=set)
    weight: float = 1.0
    fragment: int = messages.WHOLE
    merged: int = field(default=0, init=False)
    lost: int = field(default=0, init=False)
    ended: set[int] = field(default_factory=set, init=False)
    over: bool = field(default=False, init=False)
    has_exchanged: bool = field(default=False, init=False)
    _began: float = field(default=0.0, init=False)
    _entered: int = field(default=-1, init=False)  # last round that was entered or skipped
    _round: _Round | None = field(default=None, init=False)
    _early: list[Received] = field(default_factory=list, init=False)  # requests of later rounds

    def __post_init__(self) -> None:
        self.ticket = self.requests.ticket()
        self._position = self.members.index(self.rank)
        self._rounds = wave_rounds(len(self.members))
        # While training, partners among a power of two average equally, even after a lost round: the sum of models is
        # conserved. In the last wave, or for other sizes, weights make the result the mean of all models reached.
        self._equal_weights = self.number != messages.LAST_WAVE and len(self.members) == 1 << self._rounds

    @property
    def name(self) -> str:
        """The wave's name in log messages."""
        return "the finish" if self.number == messages.LAST_WAVE else f"wave {self.number}"

    # --- rounds -----------------------------------------------------------------------------------

    def begin(self, now: float) -> list[Effect]:
        """Capture our model and enter the first round."""
        self._began = now
        return [Capture(self.ticket, fragment=self.fragment), *self._next_round(now)]

    def _next_round(self, now: float) -> list[Effect]:
        """Enter the next round if there is one, and answer requests that arrived early for it."""
        effects: list[Effect] = []
        upcoming = self._next_part()
        if upcoming is None:
            self.over = True
        else:
            partner, part = upcoming
            number = self._entered
            deadline = self._began + (1 + number * ROUND_SLACK) * self.patience
            request = messages.RoundRequest(self.number, number, self.members, self.fragment)
            send = self.requests.send(partner, request, now, deadline)
            is_received, is_sent = not part.receives, not part.sends
            self._round = _Round(number, deadline, partner, part, send.ticket, is_received, is_sent=is_sent)
            effects += [send, SetTimer(TIMER, deadline)]
        for event in self.take_unanswered():
            effects += self.requested(event, now)
        return effects

    def _next_part(self) -> tuple[int, RoundPart] | None:
        """Advance to the next round with a partner that is not missing; return None after the last round."""
        self._round = None
        while self._entered + 1 < self._rounds:
            self._entered += 1
            part = part_in_round(self._position, self._entered, len(self.members))
            if part is None:
                continue
            partner = self.members[part.partner]
            if partner not in self.missing | self.ended:
                return partner, part
            self.lost += partner in self.missing
        self._entered = self._rounds
        return None

    def _complete(self, now: float) -> list[Effect]:
        """Merge once both transfers are complete, as the partner may still be reading our average before."""
        current = self._round
        if current is None or current.is_merging or not (current.is_received and current.is_sent) or current.answering:
            return []
        if not current.weight:
            return self._next_round(now)
        current.is_merging = True
        own, theirs = (1, 1) if self._equal_weights else (0 if current.part.replaces else self.weight, current.weight)
        return [Merge(current.ticket, self.ticket, own, theirs)]

    # --- receiving --------------------------------------------------------------------------------

    def is_current(self, ticket: int) -> bool:
        """Return whether ``ticket`` is our request of this round."""
        return self._round is not None and self._round.ticket == ticket

    def model_received(self, weight: float, now: float) -> list[Effect]:
        """Handle the partner's model, the mean of models whose weights add up to ``weight``."""
        assert self._round is not None
        if not self._round.part.receives:  # our request only announced the wave
            return [Forget(self._round.ticket)]
        self.has_exchanged = True
        self._round.is_received = True
        self._round.weight = weight
        return self._complete(now)

    def merge_ended(self, sound: bool, now: float) -> list[Effect]:
        """Handle the end of a merge; if not ``sound``, the partner's model held NaN or Inf and was left out."""
        current = self._round
        assert current is not None
        if sound:
            self.merged += 1
            self.weight = current.weight + (0 if current.part.replaces else self.weight)
            return self._next_round(now)
        text = f"the model of peer {current.partner} holds NaN or Inf: not merged in {self.name}"
        return [Note("poisoned", text), *self._next_round(now)]

    def partner_lost(self, now: float) -> list[Effect]:
        """Give up the partner for the rest of the wave: one of the two transfers failed.

        The round is lost unless the partner's model has arrived.
        """
        current = self._round
        if current is None or current.is_merging:
            return []
        note = Note("round", f"peer {current.partner} missed a round of {self.name}")
        self.missing.add(current.partner)
        if current.weight:  # its model is here, only ours was not delivered
            current.is_sent = True
            return [note, *self._complete(now)]
        self.lost += 1
        return [note, *self._next_round(now)]

    def partner_ended(self, now: float) -> list[Effect]:
        """Leave the partner out: its training was over before it knew of the wave, which is no fault."""
        assert self._round is not None
        self.ended.add(self._round.partner)
        return self._next_round(now)

    def peer_left(self, rank: int, now: float) -> list[Effect]:
        """Handle the departure of ``rank``."""
        self.missing.add(rank)
        return self.partner_lost(now) if self._round is not None and self._round.partner == rank else []

    def timer_fired(self, now: float) -> list[Effect]:
        """Handle the round timer, which may be that of an earlier round."""
        return self.partner_lost(now) if self._round is not None and now >= self._round.deadline else []

    @property
    def partner(self) -> int:
        """The rank of the partner in this round."""
        assert self._round is not None
        return self._round.partner

    # --- sending ----------------------------------------------------------------------------------

    def requested(self, event: Received, now: float) -> list[Effect]:
        """Handle a request for our model: answer it in the round that it names, now or once we enter that round."""
        assert isinstance(event.request, messages.RoundRequest)
        request, current = event.request, self._round
        same = (request.wave, request.members) == (self.number, self.members)
        if same and self._entered < request.round < self._rounds:
            self._early.append(event)
            return []
        known = same and request.round < self._rounds
        part = part_in_round(self._position, request.round, len(self.members)) if known else None
        if part is not None and not part.sends:  # the partner asks for nothing: it tells us of the wave
            return [Answer(event.key, messages.HereReply(messages.Stage.TRAIN), now + self.patience)]
        if current is None or not same or (request.round, event.sender) != (current.number, current.partner):
            return [self._refuse(event, now)]
        if current.is_sent or current.is_merging:
            return [self._refuse(event, now)]
        self.has_exchanged = True
        current.answering.add(event.key)
        receiver = None if self.number == messages.LAST_WAVE else (event.sender, request.bases)
        reply = messages.ModelReply(self.step, self.weight)
        return [Answer(event.key, reply, current.deadline, captured=self.ticket, receiver=receiver)]

    def _refuse(self, event: Received, now: float) -> Answer:
        refusal = messages.NotReadyReply("it is not in that round, or has other members for that wave")
        return Answer(event.key, refusal, now + self.patience)

    def is_answering(self, key: Hashable) -> bool:
        """Return whether ``key`` is a request that this round answers."""
        return self._round is not None and key in self._round.answering

    def answered(self, event: Answered, now: float) -> list[Effect]:
        """Handle the end of our answer, delivered or not."""
        current = self._round
        assert current is not None
        current.answering.discard(event.key)
        current.is_sent = current.is_sent or event.whole  # if not, the partner may ask again
        return self._complete(now)

    def take_unanswered(self) -> list[Received]:
        """Return the requests that are still unanswered, which the caller now owns."""
        held, self._early = self._early, []
        return held
