"""Pushes: each peer sends its model to a random neighbour, and mixes those that it receives.

Jin et al., How to scale distributed deep learning? (2016), the push variant. A push is an offer to be fetched: the
receiver pulls the model when it has room, so that it controls memory, deadlines and checks. A peer takes in a bounded
number of models between two steps and answers further offers with Busy; the sender then tries another peer. A push
whose sender falls silent before it is settled is kept until the sender settles it or is gone: if it were mixed
unsettled, its weight could count on both sides; if it were dropped, on neither.

With push-sum (Kempe, Dobra, Gehrke, Gossip-Based Computation of Aggregate Information, 2003, Protocol Push-Sum; Assran
et al., Stochastic Gradient Push for Distributed Deep Learning, 2019, Algorithm 1) each peer has a weight w, initially
1, and its module holds the de-biased z = x / w. A push transfers half of w; the receiver mixes with the share w_in / (w
+ w_in) and adds w_in to its own w. So Σ w and Σ w z are conserved, also on directed graphs. The half leaves when the
push is settled. Until then the sender mixes nothing, so that the transferred weight belongs to the model that was sent.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from gossipx.mixing import Mixing
from gossipx.peer.exchange import PeerContext
from gossipx.peer.offers import OFFER, OFFER_SHARE, InboundExchange, OfferPhase, Offers
from gossipx.protocol import messages
from gossipx.protocol.effects import Capture, Effect, Forget, Mix, MoveReference, Resume, SetTimer, Wait
from gossipx.protocol.events import Answered, Received

LEAST_WEIGHT = 2.0**-20
"""A peer with a smaller push-sum weight pushes nothing until it has received some: its own training would hardly count
any more. That is 20 pushes in a row without receiving one."""
MAX_IN_DOUBT = 1
"""Number of models in doubt, as their senders are silent, that are kept in addition to the room for pushes."""


@dataclass
class _Offer:
    """Our push under way.

    Attributes:
        to: rank of the receiver.
        number: of the offer.
        fragment: the part of our model that is pushed.
        ticket: of the offer; our model is captured under it.
        weight: push-sum weight that goes with it.
        tried: ranks asked so far for this decision.
        fault: whether one of these failed, rather than declined.
        answers: keys of the TakeRequests whose answers are being delivered.
        is_requested: whether the receiver has requested the model.
        is_delivered: whether the model was delivered.
    """

    to: int
    number: int
    fragment: int
    ticket: int
    weight: float
    tried: frozenset[int]
    fault: bool
    answers: set[Hashable] = field(default_factory=set)
    is_requested: bool = False
    is_delivered: bool = False


class PushExchange(Offers):
    """The pushes of one peer, and those that it receives.

    Args:
        mixing: the share of a received model, without push-sum.
        shares: factors on that share, by rank of the sender; 1 for ranks that are missing.
        push_sum: whether pushes transfer push-sum weights.
        max_pushes: number of pushes taken in at a time.
    """

    request_types = (messages.PushRequest, messages.TakeRequest, messages.SettleRequest)

    def __init__(
        self, context: PeerContext, mixing: Mixing, shares: Mapping[int, float], push_sum: bool, max_pushes: int
    ):
        super().__init__(context)
        self._mixing = mixing
        self._shares = shares
        self._push_sum = push_sum
        self._max_pushes = max_pushes
        self._offer: _Offer | None = None
        self._inbound: list[InboundExchange] = []  # accepted offers, including those in doubt
        self._due: list[InboundExchange] = []  # settled before this step boundary: mixed at it

    @property
    def captured_ticket(self) -> int | None:
        return None if self._offer is None else self._offer.ticket

    @property
    def over(self) -> bool:
        return not self._inbound

    # --- outbound ---------------------------------------------------------------------------------

    def begin(self, now: float) -> list[Effect]:
        if self.weight < LEAST_WEIGHT:
            self._context.sync.skipped += 1
            return []
        to = self._draw(now, outgoing=True)
        if to is None:
            self._context.sync.skipped += 1
            return []
        self._context.sync.requested()
        offered = self._send(to, frozenset(), False, now)
        return [Wait(), *offered] if self._context.blocking else offered

    def _send(self, to: int, tried: frozenset[int], fault: bool, now: float) -> list[Effect]:
        number, fragment = next(self._numbers), self._context.fragment_order.next
        request = messages.PushRequest(self._context.incarnation, number, fragment)
        deadline = now + self._context.members.patience(to, outgoing=True)
        send = self._context.requests.send(to, request, now, now + self._context.timeout * OFFER_SHARE)
        weight = self.weight / 2 if self._push_sum else 1.0
        self._offer = _Offer(to, number, fragment, send.ticket, weight, tried | {to}, fault)
        return [Capture(send.ticket, fragment=fragment), send, SetTimer(OFFER, deadline)]

    def _try_next(self, now: float, fault: bool = True) -> list[Effect]:
        """Offer the model to another neighbour after a push that came to nothing."""
        offer, self._offer = self._offer, None
        assert offer is not None
        fault = fault or offer.fault
        to = self._draw(now, offer.tried, fault, outgoing=True)
        further = self._give_up_decision(fault) if to is None else self._send(to, offer.tried, fault, now)
        return [Forget(offer.ticket), *further]

    def give_up(self, now: float) -> list[Effect]:
        if self._offer is None:
            return []
        self._context.members.back_off(self._offer.to, now)
        return self._try_next(now)

    def peer_left(self, rank: int, now: float) -> list[Effect]:
        return self._try_next(now) if self._offer and self._offer.to == rank else []

    def requested(self, event: Received, now: float) -> list[Effect]:
        if isinstance(event.request, messages.PushRequest):
            return self._offered(event, now)
        assert isinstance(event.request, messages.ExchangeRequest)
        offer, request = self._offer, event.request
        if offer is None or not self._is_about(event, offer.to, offer.number, offer.fragment):
            if isinstance(request, messages.SettleRequest) and self._is_settled(event):
                return [self._accept(event.key, now)]
            return [self._refuse(event.key, now)]
        if isinstance(request, messages.TakeRequest):
            offer.is_requested = True
            offer.answers.add(event.key)
            # The driver fills in the step of the captured model.
            return [self._context.outgoing.answer(event, messages.ModelReply(0, offer.weight), offer.ticket, now)]
        assert isinstance(request, messages.SettleRequest)
        if not request.taken:
            return [self._refuse(event.key, now), *self._try_next(now, fault=not request.ended)]
        self._offer = None
        self._settled[offer.to] = offer.number
        self.last = offer.to
        self._context.fragment_order.exchanged(offer.fragment)
        if self._push_sum:
            self.weight -= offer.weight
        self._context.sync.completed(models=0)
        resume: list[Effect] = [Resume()] if self._context.blocking else []
        return [self._accept(event.key, now), MoveReference(offer.ticket), *resume]

    def answered(self, event: Answered, now: float) -> list[Effect]:
        offer = self._offer
        if offer is None or event.key not in offer.answers:
            return []
        offer.answers.discard(event.key)
        offer.is_delivered = offer.is_delivered or event.whole
        return [] if offer.is_delivered or offer.answers else self._try_next(now)

    def step_ended(self, now: float) -> list[Effect]:
        self._due = [inbound for inbound in self._inbound if inbound.phase is OfferPhase.SETTLED]
        return []

    # --- inbound ----------------------------------------------------------------------------------

    def _offered(self, event: Received, now: float) -> list[Effect]:
        if self._ending:
            return [self._refuse(event.key, now)]
        if any(inbound.repeats(event) for inbound in self._inbound):
            return [self._accept(event.key, now)]
        # A sender remembers only its last settled push, so accept none while an earlier one of it is in doubt.
        again = any(inbound.sender == event.sender for inbound in self._inbound)
        in_doubt = min(sum(inbound.in_doubt for inbound in self._inbound), MAX_IN_DOUBT)
        if again or len(self._inbound) - in_doubt >= self._max_pushes:
            return [self._busy(event.key, now)]
        inbound = InboundExchange(self._context, event)
        self._inbound.append(inbound)
        return [self._accept(event.key, now), *inbound.start(now)]

    def _awaiting(self, ticket: int) -> InboundExchange | None:
        return next((inbound for inbound in self._inbound if inbound.awaits(ticket)), None)

    def replied(self, ticket: int, to: int, reply: messages.Reply, now: float) -> list[Effect]:
        if inbound := self._awaiting(ticket):
            return self._prune(inbound.replied(ticket, reply, now))
        offer = self._offer
        if offer is None or offer.ticket != ticket:
            return [Forget(ticket)]
        if offer.is_requested or isinstance(reply, messages.AcceptReply):
            return []  # the receiver has sent its TakeRequest, or will
        if isinstance(reply, messages.NotReadyReply):
            self._context.members.back_off(to, now)
        return self._try_next(now, fault=False)

    def failed(self, ticket: int, now: float) -> list[Effect]:
        if inbound := self._awaiting(ticket):
            return self._prune(inbound.failed(ticket, now))
        offer = self._offer
        if offer is None or offer.ticket != ticket:
            return [Forget(ticket)]
        return [] if offer.is_requested else self._try_next(now)

    def _prune(self, effects: list[Effect]) -> list[Effect]:
        self._inbound = [inbound for inbound in self._inbound if inbound.phase is not OfferPhase.OVER]
        return effects

    def retry_settle(self, now: float) -> list[Effect]:
        return [effect for inbound in self._inbound for effect in inbound.retry_settle(now)]

    def mix(self, at_boundary: bool) -> Mix | None:
        mixing = any(inbound.phase is OfferPhase.MIXING for inbound in self._inbound)
        candidates = self._inbound if self._ending else self._due
        inbound = next((inbound for inbound in candidates if inbound.phase is OfferPhase.SETTLED), None)
        if inbound is None or mixing or self._offer is not None or not (at_boundary or self._ending):
            return None
        inbound.phase = OfferPhase.MIXING
        weight = inbound.reply.weight
        if self._push_sum:
            return Mix(inbound.ticket, weight / (self.weight + weight))
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
        return self._prune(effects)

    def drop(self, now: float) -> list[Effect]:
        effects = self._withdraw()
        for inbound in self._inbound:
            effects += inbound.decline(now) if inbound.phase is OfferPhase.FETCHING else inbound.forget()
        return self._prune(effects)

    def _withdraw(self) -> list[Effect]:
        """Drop our push: later requests of the receiver are rejected."""
        offer, self._offer = self._offer, None
        self._context.sync.abandoned(failed=False)
        return [] if offer is None else [Forget(offer.ticket)]
