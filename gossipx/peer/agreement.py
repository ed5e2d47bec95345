"""The agreement that ends a run: pairwise averaging rounds after which all peers hold the mean of all models.

Nobody coordinates it. Every peer that takes part knows the others by rank, so each knows whom it meets in which round
(:func:`gossipx.topology.agreement_meeting`). In a round both partners give each other the model they entered it with,
and only then mix. A partner that does not come within the deadline costs this round, not the run.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from gossipx.actor import Answer, Answered, Effect, Mix, Note, Received, Resume, SetTimer
from gossipx.messages import AgreeRequest, ModelReply, NotReadyReply
from gossipx.peer.requests import Requests
from gossipx.topology import Meeting, agreement_meeting, agreement_rounds

TIMER = "round"
"""Timers of an agreement are named by this and the number of the round."""


@dataclass
class _Round:
    """One peer's view of the round that it is in.

    Attributes:
        partner: rank of the peer met.
        ticket: of our own request, None if this peer only gives.
        taken: the partner's model is here, or is not coming.
        weight: of the partner's average, the sum of those of the models in it; 0 if it is not coming.
        given: the partner has our model, or will not have it.
        answering: the partner's request while our answer is under way.
        mixing: the partner's model is being mixed; the round is as good as over.
    """

    partner: int
    meeting: Meeting
    ticket: int | None
    taken: bool
    weight: float = 0.0
    given: bool = False
    answering: Hashable | None = None
    mixing: bool = False


class Agreement:
    """One peer's way through the rounds. Each method says what is to be done; at the end that is to go on.

    Args:
        rank: one's own.
        members: ranks that take part, ascending, ``rank`` among them.
        step: iterations that one's own model has seen.
        requests: the role's.
        timeout: seconds that a partner is waited for.
        weight: of one's own model in the average of all; 1, or push-sum's w.

    Attributes:
        lost: rounds that a missing partner cost.
    """

    def __init__(
        self, rank: int, members: tuple[int, ...], step: int, requests: Requests, timeout: float, weight: float = 1.0
    ):
        self.lost = 0
        self._members = members
        self._position = members.index(rank)
        self._step = step
        self._requests = requests
        self._timeout = timeout
        self._weight = weight  # the sum of those of the models that our own is the mean of
        self._rounds = agreement_rounds(len(members))
        self._number = -1  # of the round we are in; as many as there are when it is over
        self._round: _Round | None = None
        self._missing: set[int] = set()
        self._held: list[Received] = []  # requests of a later round than ours

    # --- rounds -----------------------------------------------------------------------------------

    def next_round(self, now: float) -> list[Effect]:
        """Enter the first round, or the next; answer who came to it before us."""
        effects: list[Effect] = []
        step = self._next_meeting()
        if step is None:
            effects.append(Resume())
        else:
            partner, meeting = step
            deadline = now + self._timeout
            ticket = None
            if meeting.takes:
                send = self._requests.send(partner, AgreeRequest(self._number, self._members), deadline)
                ticket = send.ticket
                effects.append(send)
            self._round = _Round(partner, meeting, ticket, taken=not meeting.takes, given=not meeting.gives)
            effects.append(SetTimer(f"{TIMER} {self._number}", deadline))
        for event in self.leave():
            effects += self.requested(event, now)
        return effects

    def _next_meeting(self) -> tuple[int, Meeting] | None:
        """Count on to the next round in which somebody is met; None if there is none: it is over."""
        self._round = None
        while self._number + 1 < self._rounds:
            self._number += 1
            meeting = agreement_meeting(self._position, self._number, len(self._members))
            if meeting is None:
                continue
            partner = self._members[meeting.partner]
            if partner not in self._missing:
                return partner, meeting
            self.lost += 1
        self._number = self._rounds
        return None

    def _complete(self, now: float) -> list[Effect]:
        """Once both models have crossed, mix; neither partner changes what the other is still to read."""
        current = self._round
        if current is None or current.mixing or not (current.taken and current.given):
            return []
        if not current.weight:
            return self.next_round(now)
        assert current.ticket is not None
        current.mixing = True
        whole = current.meeting.whole
        return [Mix(current.ticket, 1.0 if whole else current.weight / (self._weight + current.weight))]

    # --- the partner's model comes in -------------------------------------------------------------

    def is_current(self, ticket: int) -> bool:
        """Whether ``ticket`` is our request of this round."""
        return self._round is not None and self._round.ticket == ticket

    def taken(self, weight: float, now: float) -> list[Effect]:
        """The partner's model is here, a mean of models whose weights sum up to ``weight``."""
        assert self._round is not None
        self._round.taken = True
        self._round.weight = weight
        return self._complete(now)

    def mixed(self, now: float) -> list[Effect]:
        """The partner's model is mixed."""
        assert self._round is not None
        self._weight = self._round.weight + (0 if self._round.meeting.whole else self._weight)
        return self.next_round(now)

    def poisoned(self, now: float) -> list[Effect]:
        """The partner's model was not mixed."""
        assert self._round is not None
        text = f"the model of peer {self._round.partner} holds NaN or Inf: not mixed in the finish"
        return [Note("poisoned", text), *self.next_round(now)]

    def partner_lost(self, now: float) -> list[Effect]:
        """The partner did not come, or not whole: the round is lost, and no further one is spent on waiting for it."""
        current = self._round
        if current is None or current.mixing:
            return []
        note = Note("round", f"peer {current.partner} did not come to a round of the finish")
        self._missing.add(current.partner)
        if current.weight:  # its model is here, only ours did not reach it
            current.given = True
            return [note, *self._complete(now)]
        self.lost += 1
        return [note, *self.next_round(now)]

    def timer(self, number: int, now: float) -> list[Effect]:
        """The time of a round is over."""
        return self.partner_lost(now) if number == self._number else []

    # --- ours goes out ----------------------------------------------------------------------------

    def requested(self, event: Received, now: float) -> list[Effect]:
        """Another asks for our model: give it in the round that both mean, now or when we are there."""
        assert isinstance(event.request, AgreeRequest)
        request, current = event.request, self._round
        same = request.members == self._members and request.round < self._rounds
        if same and request.round > self._number:
            self._held.append(event)
            return []
        met = current is not None and current.partner == event.sender and not current.given and not current.mixing
        deadline = now + self._timeout
        if current is None or not (same and met and request.round == self._number):
            refusal = NotReadyReply("it is not in that round, or not with these peers")
            return [Answer(event.key, refusal, deadline)]
        current.answering = event.key
        return [Answer(event.key, ModelReply(self._step, self._weight), deadline)]

    def answered(self, event: Answered, now: float) -> list[Effect]:
        """An answer was handed over, or not."""
        current = self._round
        if current is None or event.key != current.answering:
            return []
        current.answering = None
        current.given = event.whole  # if not, the partner may ask again
        return self._complete(now)

    def leave(self) -> list[Received]:
        """Requests that are still to be answered; they are no longer this agreement's."""
        held, self._held = self._held, []
        return held
