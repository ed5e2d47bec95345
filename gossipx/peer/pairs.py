"""Push-pull: two peers average their models, both of them or neither.

Each fetches the model that the other entered the exchange with, and adds half of the difference, ½ (x_other − x_own as
of entering), or with a lossy codec a smaller share of it. One gains what the other loses, so the sum of both models is
unchanged. If neither trains meanwhile (``blocking``), both end up equal (Boyd et al., Randomized Gossip Algorithms,
2006, section II: pairwise averaging).

A peer takes part in one exchange at a time, and answers further offers with Busy. An initiator without a reply yet may
let an offer wait, since its own may come to nothing. To prevent a cycle of such waits, only an offer from a higher rank
may wait: ranks then fall along each chain of waits, and all other offers are answered with Busy at once. If two peers
send each other offers, the lower rank's counts.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from gossipx.mixing import Mixing
from gossipx.peer.exchange import PeerContext
from gossipx.peer.offers import OFFER, OFFER_SHARE, InboundExchange, OfferPhase, Offers
from gossipx.protocol import messages
from gossipx.protocol.effects import Capture, Effect, Forget, Mix, Resume, SetTimer, Wait
from gossipx.protocol.events import Received


@dataclass
class _OutboundExchange:
    """The exchange that we initiated.

    Attributes:
        partner: rank of the acceptor.
        number: of the offer.
        fragment: the part of the models that is exchanged.
        offer: ticket of our PairRequest.
        tried: ranks asked so far for this decision.
        fault: whether one of these failed, rather than declined.
        ticket: of our request for the partner's model; ours is captured under it. None until the partner accepts.
        is_fetching: whether that request has no reply yet.
        has_model: whether the partner's model is here.
        settle_keys: keys of the partner's SettleRequests, which we answer once the model is here.
        phase: SETTLED once the exchange takes effect.
    """

    partner: int
    number: int
    fragment: int
    offer: int
    tried: frozenset[int]
    fault: bool
    ticket: int | None = None
    is_fetching: bool = False
    has_model: bool = False
    settle_keys: list[Hashable] = field(default_factory=list)
    phase: OfferPhase = OfferPhase.FETCHING


class PairExchange(Offers):
    """Pairwise averaging of one peer: at most one outbound and one inbound exchange.

    Args:
        mixing: the share of the other model; any other value than ½ leaves the two models apart.
    """

    request_types = (messages.PairRequest, messages.TakeRequest, messages.SettleRequest)

    def __init__(self, context: PeerContext, mixing: Mixing):
        super().__init__(context)
        self._mixing = mixing
        self._outbound: _OutboundExchange | None = None
        self._inbound: InboundExchange | None = None
        self._decided = False  # the current exchange serves a decision of our own policy
        self._waiting: list[Received] = []  # a waiting offer and its repetitions

    @property
    def captured_ticket(self) -> int | None:
        if self._inbound:
            return self._inbound.ticket
        return self._outbound.ticket if self._outbound else None

    @property
    def over(self) -> bool:
        return self._inbound is None and self._outbound is None

    # --- offers -----------------------------------------------------------------------------------

    def begin(self, now: float) -> list[Effect]:
        to = self._draw(now)
        if to is None:
            self._context.sync.skipped += 1
            return []
        self._context.sync.requested(shared=True)
        self._decided = True
        asked = self._ask(to, frozenset(), False, now)
        return [Wait(), *asked] if self._context.blocking else asked

    def _ask(self, to: int, tried: frozenset[int], fault: bool, now: float) -> list[Effect]:
        number, fragment = next(self._numbers), self._context.fragment_order.next
        # In blocking mode a peer replies at its next step boundary.
        patience = self._context.timeout * (1 if self._context.blocking else OFFER_SHARE)
        request = messages.PairRequest(self._context.incarnation, number, fragment)
        send = self._context.requests.send(to, request, now, now + patience)
        self._outbound = _OutboundExchange(to, number, fragment, send.ticket, tried | {to}, fault)
        return [send]

    def _accepted(self, now: float) -> list[Effect]:
        """Enter the exchange: the partner has accepted, or requests our model already."""
        outbound = self._outbound
        assert outbound is not None
        if outbound.ticket is not None:
            return []
        incoming, outgoing = (self._context.members.patience(outbound.partner, sending) for sending in (False, True))
        take = messages.TakeRequest(self._context.incarnation, outbound.number, fragment=outbound.fragment)
        send = self._context.requests.send(outbound.partner, take, now, now + incoming)
        outbound.ticket, outbound.is_fetching = send.ticket, True
        waiting, self._waiting = self._waiting, []
        return [
            Capture(send.ticket, fragment=outbound.fragment),
            send,
            SetTimer(OFFER, now + max(incoming, outgoing)),
            *(self._busy(event.key, now) for event in waiting),
        ]

    def _offered(self, event: Received, now: float) -> list[Effect]:
        if self._ending:
            return [self._refuse(event.key, now)]
        if self._inbound:
            return [self._accept(event.key, now) if self._inbound.repeats(event) else self._busy(event.key, now)]
        outbound = self._outbound
        if outbound is None:
            # Entered in mid-step, a blocking exchange would see training between capture and mix.
            return self._hold(event, now) if self._context.blocking else self._enter([event], now)
        if outbound.ticket is None and outbound.partner == event.sender and self._context.rank > event.sender:
            self._outbound = None  # our own offer is answered with Busy
            return self._enter([event], now)
        waits = outbound.ticket is None and outbound.partner != event.sender and self._context.rank < event.sender
        return self._hold(event, now) if waits else [self._busy(event.key, now)]

    def _hold(self, event: Received, now: float) -> list[Effect]:
        """Let the offer wait, unless another one already does."""
        first = self._waiting[0] if self._waiting else event
        if (event.sender, event.request) != (first.sender, first.request):
            return [self._busy(event.key, now)]
        self._waiting.append(event)
        return []

    def _enter(self, offers: list[Received], now: float) -> list[Effect]:
        """Accept the waiting offers, which are repetitions of one."""
        if not self._context.sync.in_flight:
            self._context.sync.requested(shared=True)  # it counts as a retrieval on both sides
        self._inbound = InboundExchange(self._context, offers[0])
        answers = [self._accept(event.key, now) for event in offers]
        wait: list[Effect] = [Wait()] if self._context.blocking else []
        waiting, self._waiting = self._waiting, []
        rest = [self._busy(event.key, now) for event in waiting if event not in offers]
        return [*wait, *answers, *self._inbound.start(now), *rest]

    def step_ended(self, now: float) -> list[Effect]:
        return self._enter(list(self._waiting), now) if self._waiting and self.over else []

    # --- the outbound exchange --------------------------------------------------------------------

    def _try_next(self, now: float, fault: bool = True) -> list[Effect]:
        """Replace a failed outbound exchange: accept the waiting offer, or send one to another neighbour."""
        outbound = self._outbound
        assert outbound is not None
        effects = self._withdraw(now)
        if self._waiting:
            return [*effects, *self._enter(list(self._waiting), now)]
        fault = fault or outbound.fault
        to = self._draw(now, outbound.tried, fault)
        if to is not None:
            return [*effects, *self._ask(to, outbound.tried, fault, now)]
        self._decided = False
        return [*effects, *self._give_up_decision(fault)]

    def _withdraw(self, now: float) -> list[Effect]:
        """Drop the outbound exchange: later requests of the partner are rejected, a late model is released."""
        outbound, self._outbound = self._outbound, None
        if outbound is None:
            return []
        refused = [self._refuse(key, now) for key in outbound.settle_keys]
        return [*refused, *([] if outbound.ticket is None or outbound.is_fetching else [Forget(outbound.ticket)])]

    def give_up(self, now: float) -> list[Effect]:
        outbound = self._outbound
        if outbound is None or outbound.ticket is None or outbound.phase is not OfferPhase.FETCHING:
            return []
        self._context.members.back_off(outbound.partner, now)
        return self._try_next(now)

    def retry_settle(self, now: float) -> list[Effect]:
        return self._inbound.retry_settle(now) if self._inbound else []

    def peer_left(self, rank: int, now: float) -> list[Effect]:
        outbound = self._outbound
        return (
            self._try_next(now)
            if outbound and outbound.partner == rank and outbound.phase is OfferPhase.FETCHING
            else []
        )

    def requested(self, event: Received, now: float) -> list[Effect]:
        if isinstance(event.request, messages.PairRequest):
            return self._offered(event, now)
        assert isinstance(event.request, messages.ExchangeRequest)
        outbound, request = self._outbound, event.request
        if self._inbound and self._inbound.repeats(event) and isinstance(request, messages.TakeRequest):
            return [self._context.outgoing.answer(event, messages.ModelReply(0), self._inbound.ticket, now)]
        if outbound is None or not self._is_about(event, outbound.partner, outbound.number, outbound.fragment):
            if isinstance(request, messages.SettleRequest) and self._is_settled(event):
                return [self._accept(event.key, now)]
            return [self._refuse(event.key, now)]
        if isinstance(request, messages.TakeRequest):
            entered = self._accepted(now)
            assert outbound.ticket is not None
            return [*entered, self._context.outgoing.answer(event, messages.ModelReply(0), outbound.ticket, now)]
        assert isinstance(request, messages.SettleRequest)
        if outbound.phase is not OfferPhase.FETCHING:
            return [self._accept(event.key, now)]
        if not request.taken:
            return [self._refuse(event.key, now), *self._try_next(now, fault=not request.ended)]
        outbound.settle_keys.append(event.key)
        return self._settle(now)

    def _settle(self, now: float) -> list[Effect]:
        """Settle the exchange if both models have arrived."""
        outbound = self._outbound
        assert outbound is not None
        if not (outbound.has_model and outbound.settle_keys):
            return []
        outbound.phase = OfferPhase.SETTLED
        self._settled[outbound.partner] = outbound.number
        settle_keys, outbound.settle_keys = outbound.settle_keys, []
        return [self._accept(key, now) for key in settle_keys]

    # --- both directions --------------------------------------------------------------------------

    def replied(self, ticket: int, to: int, reply: messages.Reply, now: float) -> list[Effect]:
        if self._inbound and self._inbound.awaits(ticket):
            return self._prune(
                self._inbound.replied(ticket, reply, now), fault=not isinstance(reply, messages.BusyReply)
            )
        outbound = self._outbound
        if outbound is not None and ticket == outbound.offer:
            if isinstance(reply, messages.AcceptReply):
                return self._accepted(now)
            if outbound.ticket is not None:
                return []  # overtaken by the partner's TakeRequest
            if isinstance(reply, messages.NotReadyReply):
                self._context.members.back_off(to, now)
            return self._try_next(now, fault=False)
        if outbound is not None and ticket == outbound.ticket:
            outbound.is_fetching = False
            outbound.has_model = isinstance(reply, messages.ModelReply)
            if outbound.has_model:
                return self._settle(now)
            return self._try_next(now, fault=not isinstance(reply, messages.BusyReply))
        return [Forget(ticket)]

    def failed(self, ticket: int, now: float) -> list[Effect]:
        if self._inbound and self._inbound.awaits(ticket):
            return self._prune(self._inbound.failed(ticket, now))
        outbound = self._outbound
        if outbound is not None and ticket == outbound.offer:
            return self._try_next(now) if outbound.ticket is None else []  # overtaken
        if outbound is not None and ticket == outbound.ticket:
            outbound.is_fetching = False
            return self._try_next(now)
        return [Forget(ticket)]

    def _prune(self, effects: list[Effect], fault: bool = True) -> list[Effect]:
        """Clear the inbound exchange if it was abandoned; ``fault``: it failed, rather than was declined."""
        if self._inbound is None or self._inbound.phase is not OfferPhase.OVER:
            return effects
        self._inbound = None
        decided, self._decided = self._decided, False
        if decided and not fault:
            self._context.sync.found_nobody()
        else:
            self._context.sync.abandoned(failed=decided)
        return [*effects, Resume()] if self._context.blocking and not self._ending else effects

    def mix(self, at_boundary: bool) -> Mix | None:
        if not (at_boundary or self._ending or self._context.blocking):
            return None
        current = self._inbound or self._outbound
        if current is None or current.phase is not OfferPhase.SETTLED or current.ticket is None:
            return None
        current.phase = OfferPhase.MIXING
        step = self._context.step
        return Mix(current.ticket, self._mixing.share(step, step))

    def mixed(self, ticket: int) -> bool:
        current = self._inbound or self._outbound
        if current is None or current.ticket != ticket:
            return False
        self.last = self._inbound.sender if self._inbound else self._outbound.partner if self._outbound else None
        self._context.fragment_order.exchanged(current.fragment)
        self._inbound = self._outbound = None
        self._decided = False
        self._context.sync.completed()
        return True

    # --- the end ----------------------------------------------------------------------------------

    def end(self, now: float) -> list[Effect]:
        self._ending = True
        self._decided = False  # an exchange that is given up from here on is not a failure
        effects: list[Effect] = [self._refuse(event.key, now) for event in self._waiting]
        self._waiting = []
        if self._outbound and self._outbound.phase is OfferPhase.FETCHING:
            effects += self._withdraw(now)
        if self._inbound:
            effects += self._inbound.end(now)
        effects = self._prune(effects)
        if self.over:
            self._context.sync.abandoned(failed=False)
        return effects

    def drop(self, now: float) -> list[Effect]:
        self._decided = False
        effects: list[Effect] = [self._refuse(event.key, now) for event in self._waiting]
        self._waiting = []
        effects += self._withdraw(now)
        if self._inbound:
            effects += (
                self._inbound.decline(now) if self._inbound.phase is OfferPhase.FETCHING else self._inbound.forget()
            )
            self._inbound = None
        self._context.sync.abandoned(failed=False)
        return effects
