"""The last wave of one peer, which ends the run: all peers get the mean of their models.

It consists of rounds of pairwise averaging. There is no coordinator. Every member knows the ranks of the others, so
each can compute its partner of every round (:func:`gossipx.topology.part_in_round`). In each round both partners send
each other their current average, and merge only after both transfers are complete, so that the sum of the two models is
unchanged.

A missing partner costs its round, not the wave. Round k ends at the latest 1 + k · ROUND_SLACK times the round timeout
after the start of the wave, so a peer that waited in vain for one partner still meets the next ones in time.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from gossipx.peer.exchange import PeerContext
from gossipx.peer.membership import Requests
from gossipx.peer.waves import DOUBLINGS
from gossipx.protocol import messages
from gossipx.protocol.effects import Answer, ApplyWave, Capture, Effect, Forget, Merge, Note, SetTimer
from gossipx.protocol.events import Answered, Received
from gossipx.topology import RoundPart, part_in_round, wave_rounds


class Finish:
    """The last wave of a peer, and requests that come before it.

    Args:
        context: state shared by the role's components.
        after_waves: whether the training had waves.

    Attributes:
        wave: the last wave, once it has begun.
    """

    def __init__(self, context: PeerContext, after_waves: bool):
        self.wave: LastWave | None = None
        self._context = context
        self._after_waves = after_waves
        self._taken_in = False
        self._early: list[Received] = []

    def begin(
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
        self.wave = LastWave(
            self._context.rank, members, step, self._context.requests, self._patience(members), weight=weight
        )
        effects = self.wave.begin(now)
        return effects + [effect for event in early for effect in self.wave.requested(event, now)]

    def _patience(self, members: tuple[int, ...]) -> float:
        """Return the timeout of a round: peer_timeout where all peers are fast, so that all give up together."""
        known = self._context.members
        others = [rank for rank in members if rank != self._context.rank]
        patience = max(self._context.timeout, known.longest_patience(others, DOUBLINGS) if others else 0.0)
        if self._after_waves or messages.WHOLE not in self._context.fragment_order:  # parts of models were measured
            patience = max(patience, known.model_timeout)
        return patience

    def defer(self, event: Received) -> None:
        """Keep ``event`` until the last wave begins."""
        self._early.append(event)

    def may_join(self, event: Received) -> bool:
        """Return whether the named members belong to this run and include both the sender and this peer."""
        members = _round_request(event).members
        return {self._context.rank, event.sender} <= set(members) <= {self._context.rank, *self._context.members.others}

    def meeting(self, ticket: int) -> LastWave | None:
        """Return the wave if ``ticket`` is our request of its current round."""
        return self.wave if self.wave is not None and self.wave.is_current(ticket) else None

    def answering(self, key: Hashable) -> LastWave | None:
        """Return the wave if ``key`` is the request that its current round answers."""
        return self.wave if self.wave is not None and self.wave.is_answering(key) else None

    def timer_fired(self, now: float) -> list[Effect]:
        """Handle the timer of a round."""
        return [] if self.wave is None else self.wave.timer_fired(now)

    def peer_left(self, rank: int, now: float) -> list[Effect]:
        """Handle the departure of ``rank``."""
        return [] if self.wave is None else self.wave.peer_left(rank, now)

    @property
    def lost(self) -> int:
        """Rounds that were skipped because the partner was missing."""
        return 0 if self.wave is None else self.wave.lost

    @property
    def over(self) -> bool:
        """Whether no round is left and the mean must be taken in."""
        return self.wave is not None and self.wave.over and not self._taken_in

    def take_in(self) -> list[Effect]:
        """Take the mean into our model; close a wave that merged nothing."""
        assert self.wave is not None
        self._taken_in = True
        return [ApplyWave(self.wave.ticket) if self.wave.merged else Forget(self.wave.ticket)]

    def is_taken_in(self, ticket: int) -> bool:
        """Return whether ``ticket`` is the wave's, whose mean is in our weights now."""
        return self.wave is not None and self.wave.ticket == ticket

    def leave(self, now: float, reason: str = "it leaves") -> list[Effect]:
        """Refuse all waiting requests."""
        waiting = self._early + (self.wave.take_unanswered() if self.wave else [])
        self._early = []
        return [self.refuse(event, reason, now) for event in waiting]

    def refuse(self, event: Received, reason: str, now: float) -> Answer:
        """Return a refusal of ``event``."""
        return Answer(event.key, messages.NotReadyReply(reason), now + self._context.timeout)


def _round_request(event: Received) -> messages.RoundRequest:
    assert isinstance(event.request, messages.RoundRequest)
    return event.request


def _order(members: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the sort key of lists of members: the smaller is the better."""
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
class LastWave:
    """One peer's part in the last wave. Methods return the effects to carry out; check :attr:`over` after each.

    Args:
        rank: this peer's own rank.
        members: ranks that take part, ascending, including ``rank``.
        step: iterations that our model has seen.
        requests: the role's open requests.
        patience: timeout of a round, in seconds.
        weight: of our model in the mean: 1, or the push-sum weight.

    Attributes:
        ticket: our captured model, which becomes the average.
        merged: number of models merged into it.
        weight: sum of the weights of the models in our average.
        lost: number of rounds skipped because the partner was missing.
        missing: ranks that are not waited for.
        over: whether no round is left.
    """

    rank: int
    members: tuple[int, ...]
    step: int
    requests: Requests
    patience: float
    weight: float = 1.0
    merged: int = field(default=0, init=False)
    lost: int = field(default=0, init=False)
    missing: set[int] = field(default_factory=set, init=False)
    over: bool = field(default=False, init=False)
    _began: float = field(default=0.0, init=False)
    _entered: int = field(default=-1, init=False)  # last round that was entered or skipped
    _round: _Round | None = field(default=None, init=False)
    _early: list[Received] = field(default_factory=list, init=False)  # requests of later rounds

    def __post_init__(self) -> None:
        self.ticket = self.requests.ticket()
        self._position = self.members.index(self.rank)
        self._rounds = wave_rounds(len(self.members))

    # --- rounds -----------------------------------------------------------------------------------

    def begin(self, now: float) -> list[Effect]:
        """Capture our model and enter the first round."""
        self._began = now
        return [Capture(self.ticket), *self._next_round(now)]

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
            request = messages.RoundRequest(number, self.members)
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
            if partner not in self.missing:
                return partner, part
            self.lost += 1
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
        own = 0 if current.part.replaces else self.weight
        return [Merge(current.ticket, self.ticket, own, current.weight)]

    # --- receiving --------------------------------------------------------------------------------

    def is_current(self, ticket: int) -> bool:
        """Return whether ``ticket`` is our request of this round."""
        return self._round is not None and self._round.ticket == ticket

    def model_received(self, weight: float, now: float) -> list[Effect]:
        """Handle the partner's model, the mean of models whose weights add up to ``weight``."""
        assert self._round is not None
        if not self._round.part.receives:  # our request only announced the wave
            return [Forget(self._round.ticket)]
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
        text = f"the model of peer {current.partner} holds NaN or Inf: not merged in the finish"
        return [Note("poisoned", text), *self._next_round(now)]

    def partner_lost(self, now: float) -> list[Effect]:
        """Give up the partner for the rest of the wave: one of the two transfers failed.

        The round is lost unless the partner's model has arrived.
        """
        current = self._round
        if current is None or current.is_merging:
            return []
        note = Note("round", f"peer {current.partner} missed a round of the finish")
        self.missing.add(current.partner)
        if current.weight:  # its model is here, only ours was not delivered
            current.is_sent = True
            return [note, *self._complete(now)]
        self.lost += 1
        return [note, *self._next_round(now)]

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
        same = request.members == self.members
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
        current.answering.add(event.key)
        reply = messages.ModelReply(self.step, self.weight)
        return [Answer(event.key, reply, current.deadline, captured=self.ticket)]

    def _refuse(self, event: Received, now: float) -> Answer:
        refusal = messages.NotReadyReply("it is not in that round, or has other members for it")
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
