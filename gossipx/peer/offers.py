"""Offers: what pushes and pairs have in common.

One peer offers and thereby begins; the other, when it has room, takes the model that is offered. Each exchange has one
who decides whether it stands, the one who began it: so it happens for both or for neither, whatever is lost, repeated
or late on the way between them::

    PushRequest, PairRequest   began → other   an offer; Accept, or Busy: the one who began chooses another at once
    TakeRequest                other → began   its model comes, as it was when the exchange was entered
    SettleRequest              other → began   "I have it": from Accept on, the exchange stands

Until it is settled nothing is mixed, and whoever began may give up at any time: it then refuses to settle. Requests may
be repeated: each names the offer by the incarnation and number of the one who began, and an offer stands once. The
other is in doubt only while its SettleRequest has no answer. It asks again until there is one, or whoever began is
gone: taken without an answer, a model would stand for one of two alone. That of a pair, which may stand still, asks for
as long as a model may take and peer_timeout more, and then takes it so.
"""

from __future__ import annotations

import abc
import enum
import itertools
import math
from collections.abc import Hashable

from gossipx.peer.exchange import Exchange, PeerContext
from gossipx.peer.membership import REST_FIRST
from gossipx.protocol.effects import Answer, Capture, Effect, Forget, SetTimer
from gossipx.protocol.events import Received
from gossipx.protocol.messages import (
    AcceptReply,
    BusyReply,
    ExchangeRequest,
    ModelReply,
    NotReadyReply,
    PairRequest,
    Reply,
    SettleRequest,
    Stage,
    TakeRequest,
)

OFFER_SHARE = 1 / 10
"""Share of peer_timeout (3 s of 30 s) within which an offer is answered, and whether a push stands: messages are small,
and nothing is fetched for them."""
OFFER, SETTLE = "offer", "settle"
"""Timers: the exchange that we began is given up; it is asked again whether that of another stands."""


class Phase(enum.Enum):
    """How far a model that another offered has come."""

    COMING = "it is being fetched"
    SETTLING = "it is here; whether the exchange stands is asked"
    STANDS = "it is to be mixed at the next step boundary"
    MIXING = "it is being mixed"
    OVER = "it is not coming, or is mixed"


class InboundExchange:
    """A model that another peer offered, from its acceptance to the mix. Methods say what is to be done.

    Attributes:
        sender: who offered.
        ticket: of our request for it, under which our own model is captured, too, where that goes the other way.
        reply: it came with this.
        way: how far it has come.
    """

    def __init__(self, context: PeerContext, offer: Received):
        assert isinstance(offer.request, ExchangeRequest)
        self.sender = offer.sender
        self.ticket = 0
        self.reply = ModelReply(0)
        self.phase = Phase.COMING
        self._incarnation, self._number = offer.request.incarnation, offer.request.number
        self._context = context
        self._fetching = False  # our TakeRequest has no answer yet
        self._settling: int | None = None  # the ticket of our open SettleRequest
        self._crosses = isinstance(offer.request, PairRequest)  # our model goes the other way
        self._until = math.inf  # from then on it is decided without an answer,
        self._fruitless = math.inf  # and from then on that of a pair

    @property
    def in_doubt(self) -> bool:
        """Whether it is here, but its sender has fallen silent before it said whether the exchange stands."""
        return self.phase is Phase.SETTLING and self._context.members.others[self.sender].lost

    def is_of(self, offer: Received) -> bool:
        """Whether ``offer`` is the one that this came of, repeated."""
        assert isinstance(offer.request, ExchangeRequest)
        name = offer.request.incarnation, offer.request.number
        return (offer.sender, *name) == (self.sender, self._incarnation, self._number)

    def start(self, now: float) -> list[Effect]:
        """Ask for the model."""
        take = TakeRequest(self._incarnation, self._number)
        deadline = now + self._context.members.patience(self.sender)
        send = self._context.requests.send(self.sender, take, now, deadline)
        self.ticket, self._fetching = send.ticket, True
        return [Capture(send.ticket), send] if self._crosses else [send]

    def awaits(self, ticket: int) -> bool:
        """Whether ``ticket`` is that of an open request of this."""
        return ticket == self._settling or (ticket == self.ticket and self.phase is Phase.COMING)

    def replied(self, ticket: int, reply: Reply, now: float) -> list[Effect]:
        """One of its requests was answered."""
        if ticket == self._settling:
            self._settling = None
            if isinstance(reply, AcceptReply):
                self.phase = Phase.STANDS
                return []
            return self.forget()
        self._fetching = False
        if isinstance(reply, ModelReply):
            self.reply = reply
            self.phase = Phase.SETTLING
            return self._settle(now)
        return self.forget()

    def failed(self, ticket: int, now: float) -> list[Effect]:
        """One of its requests was not answered."""
        if ticket == self.ticket:
            self._fetching = False
            return self.decline(now)
        self._settling = None
        sender = self._context.members.others[self.sender]
        if sender.gone or now >= self._until or (self._crosses and (sender.lost or now >= self._fruitless)):
            # Nobody is left to say. Mixed, no weight is lost with a sender that died after it gave some away. Who
            # waits for the other of a pair is in no other exchange, and may stand still: it does not wait for good for
            # one that is silent, nor for one that is heard and does not hear.
            self.phase = Phase.STANDS
            return []
        # At the end others wait for us no longer than peer_timeout: no long rests any more.
        rest = sender.backoff_until if self._until == math.inf else now + REST_FIRST * self._context.timeout
        return [SetTimer(SETTLE, min(rest, self._until, self._fruitless))]

    def ask_again(self, now: float) -> list[Effect]:
        """Ask whether it stands, if that is to be known and not being asked."""
        return self._settle(now) if self.phase is Phase.SETTLING and self._settling is None else []

    def end(self, now: float) -> list[Effect]:
        """Training has ended: a model that is not here is not waited for; of one that is, it is asked again at once.

        And so for peer_timeout more, as long as others wait for us; once if its sender was silent for so long before.
        """
        if self.phase is Phase.COMING:
            return self.decline(now)
        if self.phase is not Phase.SETTLING:
            return []
        lost = self._context.members.others[self.sender].lost
        self._until = now if lost else now + self._context.timeout
        return self._settle(now)

    def decline(self, now: float) -> list[Effect]:
        """It cannot be taken: the one who offered it need not wait."""
        told = SettleRequest(self._incarnation, self._number, taken=False)
        send = self._context.requests.send(self.sender, told, now, now + self._context.timeout * OFFER_SHARE)
        return [*self.forget(), send]

    def forget(self) -> list[Effect]:
        """It is of no more interest; where it is still being fetched, its answer is forgotten when it comes."""
        self.phase = Phase.OVER
        self._settling = None
        return [] if self._fetching else [Forget(self.ticket)]

    def _settle(self, now: float) -> list[Effect]:
        request = SettleRequest(self._incarnation, self._number, taken=True)
        patience = self._context.timeout * OFFER_SHARE
        if self._crosses:  # it is answered when our model is there: as long as that may take
            patience = self._context.members.patience(self.sender, given=True)
            self._fruitless = min(self._fruitless, now + patience + self._context.timeout)
        send = self._context.requests.send(self.sender, request, now, min(now + patience, self._fruitless))
        self._settling = send.ticket
        return [send]


class Offers(Exchange):
    """Exchanges that one peer offers and another accepts."""

    timers = (OFFER, SETTLE)

    def __init__(self, context: PeerContext):
        super().__init__(context)
        self._numbers = itertools.count(1)
        self._settled: dict[int, int] = {}  # the last offer of ours that stands, by who took it

    @abc.abstractmethod
    def give_up(self, now: float) -> list[Effect]:
        """Give up the exchange that we began: its time is over."""

    @abc.abstractmethod
    def ask_again(self, now: float) -> list[Effect]:
        """Ask a peer again whether its exchange stands: the rest after its silence is over."""

    def timer(self, name: str, now: float) -> list[Effect]:
        return self.give_up(now) if name == OFFER else self.ask_again(now)

    def _draw(
        self, now: float, tried: frozenset[int] = frozenset(), fault: bool = False, given: bool = False
    ) -> int | None:
        """A random neighbour that trains, as far as is known, and may be asked now.

        Args:
            tried: those that were asked for this decision already.
            fault: one of these failed, rather than said no.
            given: a model is to go to it, rather than to come from it.
        """
        others = self._context.members.others
        besides = {rank for rank, other in others.items() if other.stage is not None and other.stage > Stage.TRAIN}
        if tried and not fault and self.last is not None:
            # Where all are busy nearly always, the one who is free is the last partner, and pairs or rings would stay
            # by themselves for good.
            besides.add(self.last)
        return self._context.members.draw(now, besides=tried | besides, again=bool(tried), given=given)

    def _has_settled(self, event: Received) -> bool:
        """Whether ``event`` asks again about an offer of ours that stands."""
        assert isinstance(event.request, ExchangeRequest)
        number = event.request.number
        return event.request.incarnation == self._context.incarnation and self._settled.get(event.sender) == number

    def _accept(self, key: Hashable, now: float) -> Answer:
        return self._answer(key, AcceptReply(), now)

    def _busy(self, key: Hashable, now: float) -> Answer:
        return self._answer(key, BusyReply(), now)

    def _refuse(self, key: Hashable, now: float) -> Answer:
        return self._answer(key, NotReadyReply("there is no such exchange any more"), now)
