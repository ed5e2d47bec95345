"""Push-pull: pairs of peers that average their models, both or neither.

Both fetch the model that the other entered the exchange with, and each adds half of the difference, ½ (x_other − x_own
as of entering): what one gains the other loses, so the sum of both is unchanged, and if neither trains meanwhile
(``blocking``) both end equal (Boyd et al., Randomized Gossip Algorithms, 2006, section II: pairwise averaging).

A peer is in one exchange at a time. One that is asked while it is in one says that it is busy. One that has itself
asked and has no answer yet may let another wait for its own: perhaps it finds nobody. Such waits could go round in a
ring, so only an asker of a higher rank is let wait: along each chain of waits ranks fall, and the others are told busy
at once. Two that ask each other are one exchange, that which the lower rank began.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from gossipx.peer.exchange import PeerContext
from gossipx.peer.offers import OFFER, OFFER_SHARE, InboundExchange, Offers, Phase
from gossipx.protocol.effects import Capture, Effect, Forget, Mix, Resume, SetTimer, Wait
from gossipx.protocol.events import Received
from gossipx.protocol.messages import (
    AcceptReply,
    ExchangeRequest,
    ModelReply,
    NotReadyReply,
    PairRequest,
    Reply,
    SettleRequest,
    TakeRequest,
)

SHARE = 0.5
"""Of the other's model: any other would leave the two apart."""


@dataclass
class _OutboundExchange:
    """The exchange that we began.

    Attributes:
        partner: who was asked.
        number: names it.
        offer: the ticket of our PairRequest.
        tried: who was asked so far for this decision.
        fault: one of those failed, rather than said no.
        ticket: of our request for the partner's model, under which ours is captured; None until the partner accepts.
        fetching: that request has no answer yet.
        taken: the partner's model is here.
        asks: the partner's SettleRequests, which wait for that.
        way: from STANDS on it is settled.
    """

    partner: int
    number: int
    offer: int
    tried: frozenset[int]
    fault: bool
    ticket: int | None = None
    fetching: bool = False
    taken: bool = False
    asks: list[Hashable] = field(default_factory=list)
    phase: Phase = Phase.COMING


class Pairs(Offers):
    """One peer's pairwise averaging: at most one of an exchange that it began and one that another did."""

    takes = (PairRequest, TakeRequest, SettleRequest)

    def __init__(self, context: PeerContext):
        super().__init__(context)
        self._outbound: _OutboundExchange | None = None
        self._inbound: InboundExchange | None = None
        self._decided = False  # the exchange under way is, or stands for, one that we have decided
        self._held: list[Received] = []  # an offer, and its repetitions, that waits for ours or for a step boundary

    @property
    def captured(self) -> int | None:
        if self._inbound:
            return self._inbound.ticket
        return self._outbound.ticket if self._outbound else None

    @property
    def over(self) -> bool:
        return self._inbound is None and self._outbound is None

    # --- entering ---------------------------------------------------------------------------------

    def begin(self, now: float) -> list[Effect]:
        to = self._draw(now)
        if to is None:
            self._context.sync.skipped += 1
            return []
        self._context.sync.requested()
        self._decided = True
        asked = self._ask(to, frozenset(), False, now)
        return [Wait(), *asked] if self._context.blocking else asked

    def _ask(self, to: int, tried: frozenset[int], fault: bool, now: float) -> list[Effect]:
        number = next(self._numbers)
        # Where exchanges block, one that is asked answers at its next step boundary.
        patience = self._context.timeout * (1 if self._context.blocking else OFFER_SHARE)
        send = self._context.requests.send(to, PairRequest(self._context.incarnation, number), now, now + patience)
        self._outbound = _OutboundExchange(to, number, send.ticket, tried | {to}, fault)
        return [send]

    def _accepted(self, now: float) -> list[Effect]:
        """The partner has accepted, or asks for our model already: enter."""
        begun = self._outbound
        assert begun is not None
        if begun.ticket is not None:
            return []
        comes, goes = (self._context.members.patience(begun.partner, given) for given in (False, True))
        take = TakeRequest(self._context.incarnation, begun.number)
        send = self._context.requests.send(begun.partner, take, now, now + comes)
        begun.ticket, begun.fetching = send.ticket, True
        held, self._held = self._held, []
        return [
            Capture(send.ticket),
            send,
            SetTimer(OFFER, now + max(comes, goes)),
            *(self._busy(event.key, now) for event in held),
        ]

    def _offered(self, event: Received, now: float) -> list[Effect]:
        if self._ending:
            return [self._refuse(event.key, now)]
        if self._inbound:
            return [self._accept(event.key, now) if self._inbound.is_of(event) else self._busy(event.key, now)]
        begun = self._outbound
        if begun is None:
            # Mid-step, training would go on between entering and the mix, and leave the two apart.
            return self._hold(event, now) if self._context.blocking else self._enter([event], now)
        if begun.ticket is None and begun.partner == event.sender and self._context.rank > event.sender:
            self._outbound = None  # it answers our own offer by "busy", or has done so
            return self._enter([event], now)
        waits = begun.ticket is None and begun.partner != event.sender and self._context.rank < event.sender
        return self._hold(event, now) if waits else [self._busy(event.key, now)]

    def _hold(self, event: Received, now: float) -> list[Effect]:
        """Let it wait, if it is the only one that does."""
        first = self._held[0] if self._held else event
        if (event.sender, event.request) != (first.sender, first.request):
            return [self._busy(event.key, now)]
        self._held.append(event)
        return []

    def _enter(self, offers: list[Received], now: float) -> list[Effect]:
        """Take up another's offer."""
        if not self._context.sync.in_flight:
            self._context.sync.requested()  # for the other it is a retrieval, and so it is for us
        self._inbound = InboundExchange(self._context, offers[0])
        answers = [self._accept(event.key, now) for event in offers]
        wait: list[Effect] = [Wait()] if self._context.blocking else []
        held, self._held = self._held, []
        rest = [self._busy(event.key, now) for event in held if event not in offers]
        return [*wait, *answers, *self._inbound.start(now), *rest]

    def boundary(self, now: float) -> list[Effect]:
        return self._enter(list(self._held), now) if self._held and self.over else []

    # --- the exchange that we began -----------------------------------------------------------------

    def _elsewhere(self, now: float, fault: bool = True) -> list[Effect]:
        """It came to nothing: take up an offer that waits, or ask another neighbour, if there is one."""
        begun = self._outbound
        assert begun is not None
        effects = self._withdraw(now)
        if self._held:
            return [*effects, *self._enter(list(self._held), now)]
        fault = fault or begun.fault
        to = self._draw(now, begun.tried, fault)
        if to is not None:
            return [*effects, *self._ask(to, begun.tried, fault, now)]
        self._decided = False
        return [*effects, *self._nowhere(fault)]

    def _withdraw(self, now: float) -> list[Effect]:
        """It is not to be any more: it will be refused to whoever asks, and a model still to come is forgotten then."""
        begun, self._outbound = self._outbound, None
        if begun is None:
            return []
        refused = [self._refuse(key, now) for key in begun.asks]
        return [*refused, *([] if begun.ticket is None or begun.fetching else [Forget(begun.ticket)])]

    def give_up(self, now: float) -> list[Effect]:
        begun = self._outbound
        if begun is None or begun.ticket is None or begun.phase is not Phase.COMING:
            return []
        self._context.members.rest(begun.partner, now)
        return self._elsewhere(now)

    def ask_again(self, now: float) -> list[Effect]:
        return self._inbound.ask_again(now) if self._inbound else []

    def left(self, rank: int, now: float) -> list[Effect]:
        begun = self._outbound
        return self._elsewhere(now) if begun and begun.partner == rank and begun.phase is Phase.COMING else []

    def requested(self, event: Received, now: float) -> list[Effect]:
        if isinstance(event.request, PairRequest):
            return self._offered(event, now)
        assert isinstance(event.request, ExchangeRequest)
        begun, request = self._outbound, event.request
        if self._inbound and self._inbound.is_of(event) and isinstance(request, TakeRequest):
            return [self._context.outgoing.answer(event, ModelReply(0), self._inbound.ticket, now)]
        name = event.sender, request.incarnation, request.number
        if begun is None or name != (begun.partner, self._context.incarnation, begun.number):
            if isinstance(request, SettleRequest) and self._has_settled(event):
                return [self._accept(event.key, now)]
            return [self._refuse(event.key, now)]
        if isinstance(request, TakeRequest):
            entered = self._accepted(now)
            assert begun.ticket is not None
            return [*entered, self._context.outgoing.answer(event, ModelReply(0), begun.ticket, now)]
        assert isinstance(request, SettleRequest)
        if begun.phase is not Phase.COMING:
            return [self._accept(event.key, now)]
        if not request.taken:
            return [self._refuse(event.key, now), *self._elsewhere(now)]
        begun.asks.append(event.key)
        return self._settle(now)

    def _settle(self, now: float) -> list[Effect]:
        """From here on the exchange stands, if both models are where they should be."""
        begun = self._outbound
        assert begun is not None
        if not (begun.taken and begun.asks):
            return []
        begun.phase = Phase.STANDS
        self._settled[begun.partner] = begun.number
        asks, begun.asks = begun.asks, []
        return [self._accept(key, now) for key in asks]

    # --- both -------------------------------------------------------------------------------------

    def replied(self, ticket: int, to: int, reply: Reply, now: float) -> list[Effect]:
        if self._inbound and self._inbound.awaits(ticket):
            return self._looked_at(self._inbound.replied(ticket, reply, now))
        begun = self._outbound
        if begun is not None and ticket == begun.offer:
            if isinstance(reply, AcceptReply):
                return self._accepted(now)
            if begun.ticket is not None:
                return []  # its request for our model was there first
            if isinstance(reply, NotReadyReply):
                self._context.members.rest(to, now)
            return self._elsewhere(now, fault=False)
        if begun is not None and ticket == begun.ticket:
            begun.fetching = False
            begun.taken = isinstance(reply, ModelReply)
            return self._settle(now) if begun.taken else self._elsewhere(now)
        return [Forget(ticket)]

    def failed(self, ticket: int, now: float) -> list[Effect]:
        if self._inbound and self._inbound.awaits(ticket):
            return self._looked_at(self._inbound.failed(ticket, now))
        begun = self._outbound
        if begun is not None and ticket == begun.offer:
            return self._elsewhere(now) if begun.ticket is None else []  # its request for our model was there first
        if begun is not None and ticket == begun.ticket:
            begun.fetching = False
            return self._elsewhere(now)
        return [Forget(ticket)]

    def _looked_at(self, effects: list[Effect]) -> list[Effect]:
        """After something has happened to the model that another offered."""
        if self._inbound is None or self._inbound.phase is not Phase.OVER:
            return effects
        self._inbound = None
        failed, self._decided = self._decided, False
        self._context.sync.abandoned(failed=failed)
        return [*effects, Resume()] if self._context.blocking and not self._ending else effects

    def mix(self, at_boundary: bool) -> Mix | None:
        if not (at_boundary or self._ending or self._context.blocking):
            return None
        current = self._inbound or self._outbound
        if current is None or current.phase is not Phase.STANDS or current.ticket is None:
            return None
        current.phase = Phase.MIXING
        return Mix(current.ticket, SHARE)

    def mixed(self, ticket: int) -> bool:
        current = self._inbound or self._outbound
        if current is None or current.ticket != ticket:
            return False
        self.last = self._inbound.sender if self._inbound else self._outbound.partner if self._outbound else None
        self._inbound = self._outbound = None
        self._decided = False
        self._context.sync.completed()
        return True

    # --- the end ----------------------------------------------------------------------------------

    def end(self, now: float) -> list[Effect]:
        self._ending = True
        self._decided = False  # what is given up now has not failed
        effects: list[Effect] = [self._refuse(event.key, now) for event in self._held]
        self._held = []
        if self._outbound and self._outbound.phase is Phase.COMING:
            effects += self._withdraw(now)
        if self._inbound:
            effects += self._inbound.end(now)
        effects = self._looked_at(effects)
        if self.over:
            self._context.sync.abandoned(failed=False)
        return effects

    def drop(self, now: float) -> list[Effect]:
        self._decided = False
        effects: list[Effect] = [self._refuse(event.key, now) for event in self._held]
        self._held = []
        effects += self._withdraw(now)
        if self._inbound:
            effects += self._inbound.decline(now) if self._inbound.phase is Phase.COMING else self._inbound.forget()
            self._inbound = None
        self._context.sync.abandoned(failed=False)
        return effects
