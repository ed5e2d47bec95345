"""Pushes: gossiping SGD in which each peer gives its model to a random other, and mixes those it was given.

Jin et al., How to scale distributed deep learning? (2016), the push variant. A push is an offer to be pulled: the
receiver fetches the model when it has room, so that memory, deadlines and checks stay with it. A peer has room for so
many between two of its steps; beyond that others find it busy and choose another. One whose sender falls silent before
it has said that the push stands is kept aside until it says so, or is gone: mixed without, its weight could be in both,
and dropped, in neither.

With push-sum (Kempe, Dobra, Gehrke, Gossip-Based Computation of Aggregate Information, 2003, Protocol Push-Sum; Assran
et al., Stochastic Gradient Push for Distributed Deep Learning, 2019, Algorithm 1) each peer has a weight w, 1 at the
start, and its module holds the de-biased z = x / w. A push gives away half of w; who takes it mixes with the share
w_in / (w + w_in) and adds w_in to its w. So Σ w and Σ w z stay as they are, on directed graphs too. The half leaves
when the exchange is settled; until then nothing is mixed here, so that the model given away is that which the half is
of.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from gossipx.mixing import Mixing
from gossipx.peer.exchange import PeerContext
from gossipx.peer.offers import OFFER, OFFER_SHARE, InboundExchange, Offers, Phase
from gossipx.protocol.effects import Capture, Delivered, Effect, Forget, Mix, Resume, SetTimer, Wait
from gossipx.protocol.events import Answered, Received
from gossipx.protocol.messages import (
    AcceptReply,
    ExchangeRequest,
    ModelReply,
    NotReadyReply,
    PushRequest,
    Reply,
    SettleRequest,
    TakeRequest,
)

LEAST_WEIGHT = 2.0**-20
"""A peer whose push-sum weight is below this gives none away until it has received some: its own training would hardly
count any more. That is 20 pushes in a row without anything taken."""
ASIDE = 1
"""Models kept aside so: memory for one more, for as long as one of many peers cannot be reached. A second takes the
room."""


@dataclass
class _Offer:
    """Our push under way.

    Attributes:
        to: who is to take it.
        number: names it.
        ticket: of the offer; our model is captured under it.
        weight: given away with it.
        tried: who was asked so far for this decision.
        fault: one of those failed, rather than said no.
        answers: to requests for the model that are being handed over.
        taken: it was asked for.
        given: it was handed over.
    """

    to: int
    number: int
    ticket: int
    weight: float
    tried: frozenset[int]
    fault: bool
    answers: set[Hashable] = field(default_factory=set)
    taken: bool = False
    given: bool = False


class Pushes(Offers):
    """One peer's pushes, and what others push to it.

    Args:
        mixing: the share of a received model, without push-sum.
        shares: by rank of who gives it, what that is multiplied by; 1 where none is given.
        push_sum: whether weights are given away.
        room: models that are taken in at a time.
    """

    takes = (PushRequest, TakeRequest, SettleRequest)

    def __init__(self, context: PeerContext, mixing: Mixing, shares: Mapping[int, float], push_sum: bool, room: int):
        super().__init__(context)
        self._mixing = mixing
        self._shares = shares
        self._push_sum = push_sum
        self._room = room
        self._offer: _Offer | None = None
        self._inbound: list[InboundExchange] = []  # what others have offered: what has room, and those kept aside
        self._due: list[InboundExchange] = []  # to be mixed at this boundary: what comes meanwhile is for the next

    @property
    def captured(self) -> int | None:
        return None if self._offer is None else self._offer.ticket

    @property
    def over(self) -> bool:
        return not self._inbound

    # --- ours goes out ----------------------------------------------------------------------------

    def begin(self, now: float) -> list[Effect]:
        if self.weight < LEAST_WEIGHT:
            self._context.sync.skipped += 1
            return []
        to = self._draw(now, given=True)
        if to is None:
            self._context.sync.skipped += 1
            return []
        self._context.sync.requested()
        offered = self._send(to, frozenset(), False, now)
        return [Wait(), *offered] if self._context.blocking else offered

    def _send(self, to: int, tried: frozenset[int], fault: bool, now: float) -> list[Effect]:
        number = next(self._numbers)
        request = PushRequest(self._context.incarnation, number)
        deadline = now + self._context.members.patience(to, given=True)
        send = self._context.requests.send(to, request, now, now + self._context.timeout * OFFER_SHARE)
        weight = self.weight / 2 if self._push_sum else 1.0
        self._offer = _Offer(to, number, send.ticket, weight, tried | {to}, fault)
        return [Capture(send.ticket), send, SetTimer(OFFER, deadline)]

    def _elsewhere(self, now: float, fault: bool = True) -> list[Effect]:
        """This push came to nothing: to another neighbour, if there is one."""
        offer, self._offer = self._offer, None
        assert offer is not None
        fault = fault or offer.fault
        to = self._draw(now, offer.tried, fault, given=True)
        further = self._nowhere(fault) if to is None else self._send(to, offer.tried, fault, now)
        return [Forget(offer.ticket), *further]

    def give_up(self, now: float) -> list[Effect]:
        if self._offer is None:
            return []
        self._context.members.rest(self._offer.to, now)
        return self._elsewhere(now)

    def left(self, rank: int, now: float) -> list[Effect]:
        return self._elsewhere(now) if self._offer and self._offer.to == rank else []

    def requested(self, event: Received, now: float) -> list[Effect]:
        if isinstance(event.request, PushRequest):
            return self._offered(event, now)
        assert isinstance(event.request, ExchangeRequest)
        offer, request = self._offer, event.request
        name = event.sender, request.incarnation, request.number
        if offer is None or name != (offer.to, self._context.incarnation, offer.number):
            if isinstance(request, SettleRequest) and self._has_settled(event):
                return [self._accept(event.key, now)]
            return [self._refuse(event.key, now)]
        if isinstance(request, TakeRequest):
            offer.taken = True
            offer.answers.add(event.key)
            # Whoever carries out the answer knows the step of the model that was captured.
            return [self._context.outgoing.answer(event, ModelReply(0, offer.weight), offer.ticket, now)]
        assert isinstance(request, SettleRequest)
        if not request.taken:
            return [self._refuse(event.key, now), *self._elsewhere(now)]
        self._offer = None
        self._settled[offer.to] = offer.number
        self.last = offer.to
        if self._push_sum:
            self.weight -= offer.weight
        self._context.sync.completed(models=0)
        resume: list[Effect] = [Resume()] if self._context.blocking else []
        return [self._accept(event.key, now), Delivered(offer.ticket), *resume]

    def answered(self, event: Answered, now: float) -> list[Effect]:
        offer = self._offer
        if offer is None or event.key not in offer.answers:
            return []
        offer.answers.discard(event.key)
        offer.given = offer.given or event.whole
        return [] if offer.given or offer.answers else self._elsewhere(now)

    def boundary(self, now: float) -> list[Effect]:
        self._due = [inbound for inbound in self._inbound if inbound.phase is Phase.STANDS]
        return []

    # --- others' come in --------------------------------------------------------------------------

    def _offered(self, event: Received, now: float) -> list[Effect]:
        if self._ending:
            return [self._refuse(event.key, now)]
        if any(inbound.is_of(event) for inbound in self._inbound):
            return [self._accept(event.key, now)]
        # Of one sender the last push alone is known to stand or not: none comes in while it is asked about one before.
        again = any(inbound.sender == event.sender for inbound in self._inbound)
        aside = min(sum(inbound.in_doubt for inbound in self._inbound), ASIDE)
        if again or len(self._inbound) - aside >= self._room:
            return [self._busy(event.key, now)]
        inbound = InboundExchange(self._context, event)
        self._inbound.append(inbound)
        return [self._accept(event.key, now), *inbound.start(now)]

    def _awaiting(self, ticket: int) -> InboundExchange | None:
        return next((inbound for inbound in self._inbound if inbound.awaits(ticket)), None)

    def replied(self, ticket: int, to: int, reply: Reply, now: float) -> list[Effect]:
        if inbound := self._awaiting(ticket):
            return self._looked_at(inbound.replied(ticket, reply, now))
        offer = self._offer
        if offer is None or offer.ticket != ticket:
            return [Forget(ticket)]
        if offer.taken or isinstance(reply, AcceptReply):
            return []  # it is asked for, or will be
        if isinstance(reply, NotReadyReply):
            self._context.members.rest(to, now)
        return self._elsewhere(now, fault=False)

    def failed(self, ticket: int, now: float) -> list[Effect]:
        if inbound := self._awaiting(ticket):
            return self._looked_at(inbound.failed(ticket, now))
        offer = self._offer
        if offer is None or offer.ticket != ticket:
            return [Forget(ticket)]
        return [] if offer.taken else self._elsewhere(now)

    def _looked_at(self, effects: list[Effect]) -> list[Effect]:
        self._inbound = [inbound for inbound in self._inbound if inbound.phase is not Phase.OVER]
        return effects

    def ask_again(self, now: float) -> list[Effect]:
        return [effect for inbound in self._inbound for effect in inbound.ask_again(now)]

    def mix(self, at_boundary: bool) -> Mix | None:
        mixing = any(inbound.phase is Phase.MIXING for inbound in self._inbound)
        some = self._inbound if self._ending else self._due
        inbound = next((inbound for inbound in some if inbound.phase is Phase.STANDS), None)
        if inbound is None or mixing or self._offer is not None or not (at_boundary or self._ending):
            return None
        inbound.phase = Phase.MIXING
        given = inbound.reply.weight
        if self._push_sum:
            return Mix(inbound.ticket, given / (self.weight + given))
        factor = self._shares.get(inbound.sender, 1.0)
        return Mix(inbound.ticket, factor * self._mixing.share(self._context.step, inbound.reply.step))

    def mixed(self, ticket: int) -> bool:
        inbound = next((inbound for inbound in self._inbound if inbound.ticket == ticket), None)
        if inbound is None:
            return False
        if self._push_sum:
            self.weight += inbound.reply.weight
        self._inbound.remove(inbound)
        self._context.sync.retrieved()
        return True

    # --- the end ----------------------------------------------------------------------------------

    def end(self, now: float) -> list[Effect]:
        self._ending = True
        effects = self._withdraw()
        effects += [effect for inbound in self._inbound for effect in inbound.end(now)]
        return self._looked_at(effects)

    def drop(self, now: float) -> list[Effect]:
        effects = self._withdraw()
        for inbound in self._inbound:
            effects += inbound.decline(now) if inbound.phase is Phase.COMING else inbound.forget()
        return self._looked_at(effects)

    def _withdraw(self) -> list[Effect]:
        """Our own push is not to be any more: it will be refused to whoever asks."""
        offer, self._offer = self._offer, None
        self._context.sync.abandoned(failed=False)
        return [] if offer is None else [Forget(offer.ticket)]
