"""The agreement that ends a run: pairwise averaging rounds after which all peers hold the mean of all models.

Nobody coordinates it. Every peer that takes part knows the others by rank, so each knows whom it meets in which round
(:func:`gossipx.topology.agreement_meeting`). In a round both partners give each other the model they entered it with,
and only then mix. A partner that does not come within the deadline costs this round, not the run.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from gossipx.messages import AgreeRequest
from gossipx.topology import Meeting, agreement_meeting, agreement_rounds


@dataclass
class Round:
    """One peer's view of the round that it is in.

    Attributes:
        partner: rank of the peer met.
        ticket: of our own request, None if this peer only gives.
        taken: the partner's model is here, or is not coming.
        weight: models in the partner's average; 0 if it is not coming.
        given: the partner has our model, or will not have it.
        answering: the partner's request while our answer is under way.
        mixing: the partner's model is being mixed; the round is as good as over.
    """

    partner: int
    meeting: Meeting
    ticket: int | None
    taken: bool
    weight: int = 0
    given: bool = False
    answering: Hashable | None = None
    mixing: bool = False


class Agreement:
    """Where a peer stands in an agreement.

    Args:
        rank: one's own.
        members: ranks that take part, ascending, ``rank`` among them.

    Attributes:
        weight: how many peers' models one's own is the mean of.
        number: the round one is in, from 0; ``rounds`` when it is over.
        lost: rounds that a missing partner cost.
    """

    def __init__(self, rank: int, members: tuple[int, ...]):
        self.members = members
        self.weight = 1
        self.number = -1
        self.rounds = agreement_rounds(len(members))
        self.round: Round | None = None
        self.lost = 0
        self.missing: set[int] = set()
        self._position = members.index(rank)

    @property
    def over(self) -> bool:
        """Whether all rounds are done."""
        return self.number >= self.rounds

    def next_meeting(self) -> tuple[int, Meeting] | None:
        """Enter the next round in which somebody is met; None if there is none: it is over."""
        self.round = None
        while self.number + 1 < self.rounds:
            self.number += 1
            meeting = agreement_meeting(self._position, self.number, len(self.members))
            if meeting is None:
                continue
            partner = self.members[meeting.partner]
            if partner not in self.missing:
                return partner, meeting
            self.lost += 1
        self.number = self.rounds
        return None

    def share(self) -> float:
        """The share of the partner's model in the mean of the two."""
        assert self.round is not None
        return 1.0 if self.round.meeting.whole else self.round.weight / (self.weight + self.round.weight)

    def mixed(self) -> None:
        """The partner's model is in."""
        assert self.round is not None
        self.weight = self.round.weight + (0 if self.round.meeting.whole else self.weight)

    def wants(self, sender: int, request: AgreeRequest) -> str:
        """What to do with a request: ``answer`` it now, ``hold`` it until its round, or ``refuse`` it."""
        if request.members != self.members or request.round >= self.rounds or request.round < self.number:
            return "refuse"
        if request.round > self.number:
            return "hold"
        current = self.round
        at_hand = current is not None and current.partner == sender and not current.given and not current.mixing
        return "answer" if at_hand else "refuse"
