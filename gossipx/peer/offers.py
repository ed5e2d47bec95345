"""Offers: the two-phase protocol that pushes and pairs share.

One peer, the initiator, offers an exchange; the other, the acceptor, takes it up when it has room. The initiator alone
decides whether the exchange takes effect, so it happens on both sides or on neither, even if messages are lost,
repeated or late::

    PushRequest, PairRequest   initiator → acceptor   an offer; Accept, or Busy: the initiator tries another peer
    TakeRequest                acceptor → initiator   fetches its model, as of the offer
    SettleRequest              acceptor → initiator   "I have it"; Accept settles the exchange

Nothing is mixed before the exchange is settled, and until then the initiator may give up: it then rejects the
SettleRequest. Requests may be repeated: each names the offer by the initiator's incarnation and number, and an offer is
settled once. The acceptor is in doubt only while its SettleRequest has no reply. It repeats the request until it has
one or the initiator is gone; if it mixed the model without a reply, the exchange might take effect on one side only.
The acceptor of a pair, whose training may be blocked meanwhile, stops after the transfer deadline plus peer_timeout,
and then mixes the model anyway.
"""

from __future__ import annotations

import abc
import enum
import itertools
import math
from collections.abc import Hashable

from gossipx.peer.exchange import Exchange, PeerContext
from gossipx.peer.membership import FIRST_BACKOFF
from gossipx.protocol import effects, messages
from gossipx.protocol.events import Received

OFFER_SHARE = 1 / 10
"""Deadline for replies to offers and to a push's SettleRequest, as a share of peer_timeout (3 s of 30 s): these
messages are small, and no model has to be prepared for them."""
OFFER, SETTLE = "offer", "settle"
"""Names of timers: the deadline of the exchange that we initiated, and the next SettleRequest."""


class OfferPhase(enum.Enum):
    """The progress of a model that another peer offered."""

    FETCHING = "the model is being fetched"
    SETTLING = "the model is here; the SettleRequest has no reply"
    SETTLED = "settled; the model is mixed at the next step boundary"
    MIXING = "the model is being mixed"
    OVER = "the exchange is abandoned"


class InboundExchange:
    """An exchange that another peer initiated, from our acceptance to the mix. Methods return the effects to carry out.

    Attributes:
        sender: rank of the initiator.
        ticket: of our request for its model; in a pair, our own model is captured under it too.
        reply: the reply that brought the model.
        fragment: the part of the models that is exchanged.
        phase: its progress.
    """

    def __init__(self, context: PeerContext, offer: Received):
        assert isinstance(offer.request, messages.PushRequest | messages.PairRequest)
        self.sender = offer.sender
        self.ticket = 0
        self.fragment = offer.request.fragment
        self.reply = messages.ModelReply(0)
        self.phase = OfferPhase.FETCHING
        self._incarnation, self._number = offer.request.incarnation, offer.request.number
        self._context = context
        self._fetching = False  # our TakeRequest has no reply yet
        self._settling: int | None = None  # the ticket of our open SettleRequest
        self._is_pair = isinstance(offer.request, messages.PairRequest)  # a pair: our model is fetched too
        self._settle_deadline = math.inf  # set at the end of training: then it is settled without a reply
        self._pair_deadline = math.inf  # the same limit for a pair, also while training

    @property
    def in_doubt(self) -> bool:
        """Whether the model is here and its sender fell silent before it settled the exchange."""
        return self.phase is OfferPhase.SETTLING and self._context.members.others.peek(self.sender).lost

    def repeats(self, offer: Received) -> bool:
        """Return whether ``offer`` repeats the offer of this exchange, or is another request about it."""
        return _names(offer, self.sender, self._incarnation, self._number, self.fragment)

    def start(self, now: float) -> list[effects.Effect]:
        """Request the model."""
        take = messages.TakeRequest(self._incarnation, self._number, fragment=self.fragment)
        deadline = now + self._context.members.patience(self.sender)
        send = self._context.requests.send(self.sender, take, now, deadline)
        self.ticket, self._fetching = send.ticket, True
        return [effects.Capture(send.ticket, fragment=self.fragment), send] if self._is_pair else [send]

    def awaits(self, ticket: int) -> bool:
        """Return whether ``ticket`` is an open request of this exchange."""
        return ticket == self._settling or (ticket == self.ticket and self.phase is OfferPhase.FETCHING)

    def replied(self, ticket: int, reply: messages.Reply, now: float) -> list[effects.Effect]:
        """Handle the reply to a request of this exchange."""
        if ticket == self._settling:
            self._settling = None
            if isinstance(reply, messages.AcceptReply):
                self.phase = OfferPhase.SETTLED
                return []
            return self.forget()
        self._fetching = False
        if isinstance(reply, messages.ModelReply):
            self.reply = reply
            self.phase = OfferPhase.SETTLING
            return self._settle(now)
        return self.forget()

    def failed(self, ticket: int, now: float) -> list[effects.Effect]:
        """Handle a request of this exchange that failed."""
        if ticket == self.ticket:
            self._fetching = False
            return self.decline(now)
        self._settling = None
        sender = self._context.members.others.peek(self.sender)
        if (
            sender.has_ended
            or now >= self._settle_deadline
            or (self._is_pair and (sender.lost or now >= self._pair_deadline))
        ):
            # Nobody is left to settle it. Mixing the model keeps the push-sum weight of a sender that died after it
            # gave half away. A pair blocks other exchanges and perhaps training, so the wait for a sender that is
            # silent, or that we hear but cannot reach, is bounded.
            self.phase = OfferPhase.SETTLED
            return []
        # At the end others wait for us for peer_timeout at most, so retry without long back-offs.
        retry_at = (
            sender.backoff_until if self._settle_deadline == math.inf else now + FIRST_BACKOFF * self._context.timeout
        )
        return [effects.SetTimer(SETTLE, min(retry_at, self._settle_deadline, self._pair_deadline))]

    def retry_settle(self, now: float) -> list[effects.Effect]:
        """Send another SettleRequest if the exchange is in doubt and none is open."""
        return self._settle(now) if self.phase is OfferPhase.SETTLING and self._settling is None else []

    def end(self, now: float) -> list[effects.Effect]:
        """Handle the end of training: abandon a model that has not arrived; else repeat the SettleRequest at once.

        It is repeated for peer_timeout, since others wait for us that long; only once if the sender is already lost.
        """
        if self.phase is OfferPhase.FETCHING:
            return self.decline(now, ended=True)
        if self.phase is not OfferPhase.SETTLING:
            return []
        lost = self._context.members.others.peek(self.sender).lost
        self._settle_deadline = now if lost else now + self._context.timeout
        return self._settle(now)

    def decline(self, now: float, ended: bool = False) -> list[effects.Effect]:
        """Abandon the exchange and tell the initiator, so that it need not wait; ``ended``: because training ended."""
        declined = messages.SettleRequest(self._incarnation, self._number, taken=False, ended=ended)
        send = self._context.requests.send(self.sender, declined, now, now + self._context.timeout * OFFER_SHARE)
        return [*self.forget(), send]

    def forget(self) -> list[effects.Effect]:
        """Abandon the exchange. If the model is still being fetched, its ticket is released when the reply arrives."""
        self.phase = OfferPhase.OVER
        self._settling = None
        return [] if self._fetching else [effects.Forget(self.ticket)]

    def _settle(self, now: float) -> list[effects.Effect]:
        request = messages.SettleRequest(self._incarnation, self._number, taken=True)
        patience = self._context.timeout * OFFER_SHARE
        if self._is_pair:  # the initiator replies once it has our model
            patience = self._context.members.patience(self.sender, outgoing=True)
            self._pair_deadline = min(self._pair_deadline, now + patience + self._context.timeout)
        send = self._context.requests.send(self.sender, request, now, min(now + patience, self._pair_deadline))
        self._settling = send.ticket
        return [send]


class Offers(Exchange):
    """Exchanges that one peer offers and another accepts."""

    timers = (OFFER, SETTLE)

    def __init__(self, context: PeerContext):
        super().__init__(context)
        self._numbers = itertools.count(1)
        self._settled: dict[int, int] = {}  # number of our last settled offer, by acceptor

    @abc.abstractmethod
    def give_up(self, now: float) -> list[effects.Effect]:
        """Abandon the exchange that we initiated: its deadline has passed."""

    @abc.abstractmethod
    def retry_settle(self, now: float) -> list[effects.Effect]:
        """Repeat the open SettleRequests: a back-off is over."""

    def timer_fired(self, name: str, now: float) -> list[effects.Effect]:
        return self.give_up(now) if name == OFFER else self.retry_settle(now)

    def _draw(
        self, now: float, tried: frozenset[int] = frozenset(), fault: bool = False, outgoing: bool = False
    ) -> int | None:
        """Return a neighbour that seems to be training and may be asked now, or None.

        Args:
            tried: ranks that were asked for this decision already.
            fault: whether one of these failed, rather than declined.
            outgoing: whether our model goes to the partner, rather than the partner's to us.
        """
        exclude = tried
        if tried and not fault and self.last is not None:
            # When nearly all peers are busy, the one that is free is the last partner: without this, the same pairs or
            # rings would repeat for ever.
            exclude = tried | {self.last}
        return self._context.members.draw(now, exclude, again=bool(tried), outgoing=outgoing, in_training=True)

    def _is_about(self, event: Received, partner: int, number: int, fragment: int) -> bool:
        """Return whether ``event`` is a request of ``partner`` about our offer of this number."""
        return _names(event, partner, self._context.incarnation, number, fragment)

    def _is_settled(self, event: Received) -> bool:
        """Return whether ``event`` repeats the SettleRequest of an offer that is settled."""
        assert isinstance(event.request, messages.ExchangeRequest)
        number = event.request.number
        return event.request.incarnation == self._context.incarnation and self._settled.get(event.sender) == number

    def _accept(self, key: Hashable, now: float) -> effects.Answer:
        return self._answer(key, messages.AcceptReply(), now)

    def _busy(self, key: Hashable, now: float) -> effects.Answer:
        return self._answer(key, messages.BusyReply(), now)

    def _refuse(self, key: Hashable, now: float) -> effects.Answer:
        """Return the answer to a request about an exchange that we have given up: Busy, if training has ended."""
        if self._ending:  # which is no failure of the partner's exchange
            return self._busy(key, now)
        return self._answer(key, messages.NotReadyReply("the exchange was given up"), now)


def _names(event: Received, sender: int, incarnation: int, number: int, fragment: int) -> bool:
    """Return whether a request of ``sender`` names the offer with this incarnation, number and fragment."""
    request = event.request
    assert isinstance(request, messages.ExchangeRequest)
    if not isinstance(request, messages.SettleRequest) and request.fragment != fragment:
        return False
    return (event.sender, request.incarnation, request.number) == (sender, incarnation, number)
