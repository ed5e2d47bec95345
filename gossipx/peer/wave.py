"""One wave: pairwise averaging rounds after which all who took part hold the mean of all their models.

Nobody coordinates it. Every peer that takes part knows the others by rank, so each knows whom it meets in which round
(:func:`gossipx.topology.agreement_meeting`). What is averaged is the model that each peer captured as it entered the
wave: in a round both partners give each other what they hold by then, and only when it has crossed does either merge
it, so that the sum of the two stays what it was. The steps that training makes meanwhile are added to the mean at the
end, so that a wave changes the sum of all models by nothing but their own steps.

A partner that does not come costs its round, not the wave. Round k of a wave may last until 1 + k · ROUND_SLACK times
the patience of a round from the wave's beginning: whoever had to give up a silent partner still meets those of the
later rounds in time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from gossipx.peer.membership import Requests
from gossipx.protocol.effects import Answer, Capture, Effect, Forget, Merge, Note, SetTimer
from gossipx.protocol.events import Answered, Received
from gossipx.protocol.messages import LAST_WAVE, HereReply, ModelReply, NotReadyReply, RoundRequest, Stage
from gossipx.topology import Meeting, agreement_meeting, agreement_rounds

TIMER = "round"
"""The timer of the round that a peer is in; a peer is in one at a time."""
ROUND_SLACK = 1 / 2
"""Share of that by which each further round may end later: room for one transfer, and for hearing late."""


@dataclass
class _Round:
    """One peer's view of the round that it is in.

    Attributes:
        number: from 0.
        deadline: when the partner is no longer waited for.
        partner: rank of the peer met.
        ticket: of our own request; None if this peer only gives and does not need to be heard of.
        taken: the partner's model is here, or is not coming.
        weight: of the partner's average, the sum of those of the models in it; 0 if it is not coming.
        given: the partner has our model, or will not have it.
        answering: the partner's request while our answer is under way.
        merging: the partner's model is being merged; the round is as good as over.
    """

    number: int
    deadline: float
    partner: int
    meeting: Meeting
    ticket: int | None
    taken: bool
    weight: float = 0.0
    given: bool = False
    answering: Hashable | None = None
    merging: bool = False


class Wave:
    """One peer's way through the rounds of one wave. Each method says what is to be done; then look at :attr:`over`.

    Args:
        number: of the wave.
        rank: one's own.
        members: ranks that take part, ascending, ``rank`` among them.
        step: iterations that one's own model has seen.
        requests: the role's.
        patience: seconds that a round may take.
        missing: ranks that are not waited for.
        weight: of our model in the mean of all; 1, or push-sum's w.

    Attributes:
        ticket: what our model is held under, from its capture on.
        merged: models that were merged into it.
        lost: rounds that a missing partner cost.
        over: no round is left.
        touched: another has, or may have, our model, or we its: who takes part can no longer change.
    """

    def __init__(
        self,
        number: int,
        rank: int,
        members: tuple[int, ...],
        step: int,
        requests: Requests,
        patience: float,
        missing: Iterable[int] = (),
        weight: float = 1.0,
    ):
        self.number = number
        self.members = members
        self.ticket = requests.ticket()
        self.merged = self.lost = 0
        self.over = self.touched = False
        self._position = members.index(rank)
        self._step = step
        self._requests = requests
        self._patience = patience
        self._began = 0.0
        self._weight = weight  # the sum of those of the models that what we hold is the mean of
        self._rounds = agreement_rounds(len(members))
        # While training, pairs among a power of two share alike, also after a lost round: their sum stays. At the end,
        # and where the schedule makes weights unequal, it is the mean of all models reached that counts.
        self._alike = number != LAST_WAVE and len(members) == 1 << self._rounds
        self._entered = -1  # the last round that we entered or passed by
        self._round: _Round | None = None
        self._missing = set(missing)
        self._held: list[Received] = []  # requests of a later round than ours

    @property
    def name(self) -> str:
        """For a person."""
        return "the finish" if self.number == LAST_WAVE else f"wave {self.number}"

    # --- rounds -----------------------------------------------------------------------------------

    def begin(self, now: float, starts: bool = False) -> list[Effect]:
        """Capture our model and enter the first round.

        Args:
            starts: nobody has heard of this wave yet, so that whoever we meet is told, even if we take nothing from it.
        """
        self._began = now
        return [Capture(self.ticket), *self._next_round(now, starts)]

    def _next_round(self, now: float, starts: bool = False) -> list[Effect]:
        """Enter the next round, if there is one; answer who came to it before us."""
        effects: list[Effect] = []
        step = self._next_meeting()
        if step is None:
            self.over = True
        else:
            partner, meeting = step
            number = self._entered
            deadline = self._began + (1 + number * ROUND_SLACK) * self._patience
            ticket = None
            if meeting.takes or starts:
                send = self._requests.send(partner, RoundRequest(self.number, number, self.members), now, deadline)
                ticket = send.ticket
                effects.append(send)
            taken, given = not meeting.takes, not meeting.gives
            self._round = _Round(number, deadline, partner, meeting, ticket, taken, given=given)
            effects.append(SetTimer(TIMER, deadline))
        for event in self.leave():
            effects += self.requested(event, now)
        return effects

    def _next_meeting(self) -> tuple[int, Meeting] | None:
        """Count on to the next round in which somebody is met; None if there is none: it is over."""
        self._round = None
        while self._entered + 1 < self._rounds:
            self._entered += 1
            meeting = agreement_meeting(self._position, self._entered, len(self.members))
            if meeting is None:
                continue
            partner = self.members[meeting.partner]
            if partner not in self._missing:
                return partner, meeting
            self.lost += 1
        self._entered = self._rounds
        return None

    def _complete(self, now: float) -> list[Effect]:
        """Once both models have crossed, merge; neither partner changes what the other is still to read."""
        current = self._round
        if current is None or current.merging or not (current.taken and current.given):
            return []
        if not current.weight:
            return self._next_round(now)
        assert current.ticket is not None
        current.merging = True
        own, theirs = (1, 1) if self._alike else (0 if current.meeting.whole else self._weight, current.weight)
        return [Merge(current.ticket, self.ticket, own, theirs)]

    # --- the partner's model comes in -------------------------------------------------------------

    def is_current(self, ticket: int) -> bool:
        """Whether ``ticket`` is our request of this round."""
        return self._round is not None and self._round.ticket == ticket

    def taken(self, weight: float, now: float) -> list[Effect]:
        """The partner's model is here, a mean of models whose weights sum up to ``weight``."""
        assert self._round is not None and self._round.ticket is not None
        if not self._round.meeting.takes:  # it was only told of this wave
            return [Forget(self._round.ticket)]
        self.touched = True
        self._round.taken = True
        self._round.weight = weight
        return self._complete(now)

    def was_merged(self, sound: bool, now: float) -> list[Effect]:
        """The partner's model was merged; or it was not, since it is not sound."""
        current = self._round
        assert current is not None
        if sound:
            self.merged += 1
            self._weight = current.weight + (0 if current.meeting.whole else self._weight)
            return self._next_round(now)
        text = f"the model of peer {current.partner} holds NaN or Inf: not merged in {self.name}"
        return [Note("poisoned", text), *self._next_round(now)]

    def partner_lost(self, now: float) -> list[Effect]:
        """The partner did not come, or not whole: the round is lost, and no further one is spent on waiting for it."""
        current = self._round
        if current is None or current.merging:
            return []
        note = Note("round", f"peer {current.partner} did not come to a round of {self.name}")
        self._missing.add(current.partner)
        if current.weight:  # its model is here, only ours did not reach it
            current.given = True
            return [note, *self._complete(now)]
        self.lost += 1
        return [note, *self._next_round(now)]

    def gone(self, rank: int, now: float) -> list[Effect]:
        """``rank`` comes to no further round."""
        self._missing.add(rank)
        return self.partner_lost(now) if self._round is not None and self._round.partner == rank else []

    def timer(self, now: float) -> list[Effect]:
        """The time of a round is over, if it is this one's."""
        return self.partner_lost(now) if self._round is not None and now >= self._round.deadline else []

    @property
    def partner(self) -> int:
        """Whom we meet in this round."""
        assert self._round is not None
        return self._round.partner

    # --- ours goes out ----------------------------------------------------------------------------

    def requested(self, event: Received, now: float) -> list[Effect]:
        """Another asks for our model: give it in the round that both mean, now or when we are there."""
        assert isinstance(event.request, RoundRequest)
        request, current = event.request, self._round
        same = (request.wave, request.members) == (self.number, self.members)
        if same and self._entered < request.round < self._rounds:
            self._held.append(event)
            return []
        if current is None or not same or (request.round, event.sender) != (current.number, current.partner):
            return [self._refuse(event, now)]
        if not current.meeting.gives:  # it tells us of this wave; its model is what we ask for in this round
            return [Answer(event.key, HereReply(Stage.TRAIN), now + self._patience)]
        if current.given or current.merging:
            return [self._refuse(event, now)]
        self.touched = True
        current.answering = event.key
        return [Answer(event.key, ModelReply(self._step, self._weight), current.deadline, captured=self.ticket)]

    def _refuse(self, event: Received, now: float) -> Answer:
        refusal = NotReadyReply("it is not in that round, or not with these peers")
        return Answer(event.key, refusal, now + self._patience)

    def is_answering(self, key: Hashable) -> bool:
        """Whether it is the answer of this round."""
        return self._round is not None and self._round.answering is not None and self._round.answering == key

    def answered(self, event: Answered, now: float) -> list[Effect]:
        """Our answer of this round was handed over, or not."""
        current = self._round
        assert current is not None
        current.answering = None
        current.given = event.whole  # if not, the partner may ask again
        return self._complete(now)

    def leave(self) -> list[Received]:
        """Requests that are still to be answered; they are no longer this wave's."""
        held, self._held = self._held, []
        return held
