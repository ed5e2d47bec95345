"""One wave: rounds of pairwise averaging after which all members hold the mean of their models.

There is no coordinator. Every member knows the ranks of the others, so each can compute its partner of every round
(:func:`gossipx.topology.part_in_round`). The averaged model is the one that each peer captured as it entered the
wave. In each round both partners send each other their current average, and merge only after both transfers are
complete, so that the sum of the two models is unchanged. Training steps made meanwhile are added to the mean at the
end; nothing else changes the sum of all models.

A missing partner costs its round, not the wave. Round k ends at the latest 1 + k · ROUND_SLACK times the round timeout
after the start of the wave, so a peer that waited in vain for one partner still meets the next ones in time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from gossipx.peer.membership import Requests
from gossipx.protocol.effects import Answer, Capture, Effect, Forget, Merge, Note, SetTimer
from gossipx.protocol.events import Answered, Received
from gossipx.protocol.messages import LAST_WAVE, WHOLE, HereReply, ModelReply, NotReadyReply, RoundRequest, Stage
from gossipx.topology import RoundPart, part_in_round, wave_rounds

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
        over: whether no round is left.
        has_exchanged: whether a model was sent or received, so that the members can no longer change.
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
        fragment: int = WHOLE,
    ):
        self.number = number
        self.members = members
        self.ticket = requests.ticket()
        self.merged = self.lost = 0
        self.over = self.has_exchanged = False
        self._fragment = fragment
        self._position = members.index(rank)
        self._step = step
        self._requests = requests
        self._patience = patience
        self._began = 0.0
        self.weight = weight
        self._rounds = wave_rounds(len(members))
        # While training, partners among a power of two average equally, even after a lost round: the sum of models is
        # conserved. In the last wave, or for other sizes, weights make the result the mean of all models reached.
        self._equal_weights = number != LAST_WAVE and len(members) == 1 << self._rounds
        self._entered = -1  # last round that was entered or skipped
        self._round: _Round | None = None
        self._missing = set(missing)
        self._early: list[Received] = []  # requests of later rounds

    @property
    def name(self) -> str:
        """The wave's name in log messages."""
        return "the finish" if self.number == LAST_WAVE else f"wave {self.number}"

    # --- rounds -----------------------------------------------------------------------------------

    def begin(self, now: float) -> list[Effect]:
        """Capture our model and enter the first round."""
        self._began = now
        return [Capture(self.ticket, fragment=self._fragment), *self._next_round(now)]

    def _next_round(self, now: float) -> list[Effect]:
        """Enter the next round if there is one, and answer requests that arrived early for it."""
        effects: list[Effect] = []
        upcoming = self._next_part()
        if upcoming is None:
            self.over = True
        else:
            partner, part = upcoming
            number = self._entered
            deadline = self._began + (1 + number * ROUND_SLACK) * self._patience
            request = RoundRequest(self.number, number, self.members, self._fragment)
            send = self._requests.send(partner, request, now, deadline)
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
            if partner not in self._missing:
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
        self._missing.add(current.partner)
        if current.weight:  # its model is here, only ours was not delivered
            current.is_sent = True
            return [note, *self._complete(now)]
        self.lost += 1
        return [note, *self._next_round(now)]

    def peer_left(self, rank: int, now: float) -> list[Effect]:
        """Handle the departure of ``rank``."""
        self._missing.add(rank)
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
        assert isinstance(event.request, RoundRequest)
        request, current = event.request, self._round
        same = (request.wave, request.members) == (self.number, self.members)
        if same and self._entered < request.round < self._rounds:
            self._early.append(event)
            return []
        known = same and request.round < self._rounds
        part = part_in_round(self._position, request.round, len(self.members)) if known else None
        if part is not None and not part.sends:  # the partner asks for nothing: it tells us of the wave
            return [Answer(event.key, HereReply(Stage.TRAIN), now + self._patience)]
        if current is None or not same or (request.round, event.sender) != (current.number, current.partner):
            return [self._refuse(event, now)]
        if current.is_sent or current.is_merging:
            return [self._refuse(event, now)]
        self.has_exchanged = True
        current.answering.add(event.key)
        receiver = None if self.number == LAST_WAVE else (event.sender, request.bases)
        reply = ModelReply(self._step, self.weight)
        return [Answer(event.key, reply, current.deadline, captured=self.ticket, receiver=receiver)]

    def _refuse(self, event: Received, now: float) -> Answer:
        refusal = NotReadyReply("it is not in that round, or has other members for that wave")
        return Answer(event.key, refusal, now + self._patience)

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
