"""Pulls: plain gossip, in which a peer fetches the model of a neighbour and mixes it at a step boundary.

Jin et al., How to scale distributed deep learning? (2016), the pull variant; Adaptive Communication, Algorithm 2. Each
time the policy fires, one model is fetched. If a neighbour is busy or its model does not arrive, another one is tried,
until none is left and the decision is dropped. But a blocking pull that found all neighbours busy retries them soon.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gossipx.mixing import Mixing
from gossipx.peer.exchange import Exchange, PeerContext
from gossipx.protocol.effects import Cancel, Effect, Forget, Mix, Send, SetTimer, Wait
from gossipx.protocol.messages import BusyReply, ModelReply, NotReadyReply, PullRequest, Reply

BUSY = "busy"
"""Name of the timer that retries a blocking pull after all neighbours were busy."""
BUSY_DELAY = 1 / 10_000
"""Time until that retry, as a share of peer_timeout (3 ms of 30 s): about what a small model takes to be served."""


@dataclass
class _Pull:
    """A pull under way.

    Attributes:
        tried: ranks asked so far for this decision.
        fault: whether one of these failed, rather than declined.
        decided: time when the policy fired.
        fragment: the part of the model that is requested.
        reply: set once the model has arrived and waits to be mixed.
    """

    ticket: int
    to: int
    tried: frozenset[int]
    fault: bool
    decided: float
    fragment: int
    reply: ModelReply | None = None
    mixing: bool = False


class PullExchange(Exchange):
    """The pulls of one peer, one at a time.

    Args:
        mixing: the share of a received model.
        shares: factors on that share, by rank of the sender; 1 for ranks that are missing.
    """

    timers = (BUSY,)

    def __init__(self, context: PeerContext, mixing: Mixing, shares: Mapping[int, float]):
        super().__init__(context)
        self._mixing = mixing
        self._shares = shares
        self._pull: _Pull | None = None

    @property
    def captured_ticket(self) -> int | None:
        return None if self._pull is None else self._pull.ticket

    @property
    def over(self) -> bool:
        return self._pull is None

    # --- requests ---------------------------------------------------------------------------------

    def begin(self, now: float) -> list[Effect]:
        to = self._context.members.draw(now)
        if to is None:
            self._context.sync.skipped += 1
            return []
        self._context.sync.requested()
        request = self._ask(to, frozenset(), False, now, now)
        return [Wait(), request] if self._context.blocking else [request]

    def _ask(self, to: int, tried: frozenset[int], fault: bool, decided: float, now: float) -> Send:
        patience, fragment = self._context.members.patience(to), self._context.fragment_order.next
        request = PullRequest(self._context.step, patience, fragment=fragment)
        send = self._context.requests.send(to, request, now, now + patience)
        self._pull = _Pull(send.ticket, to, tried | {to}, fault, decided, fragment)
        return send

    def _try_next(self, now: float, fault: bool = True) -> list[Effect]:
        """Try another neighbour after a pull that failed or, unless ``fault``, met a busy peer."""
        pull = self._pull
        assert pull is not None
        fault = fault or pull.fault
        to = self._context.members.draw(now, exclude=pull.tried, again=True)
        if to is not None and not self._ending:
            return [self._ask(to, pull.tried, fault, pull.decided, now)]
        longest = max(self._context.timeout, self._context.members.patience(pull.to))
        waits = self._context.blocking and not fault and now - pull.decided < longest
        if waits and not self._ending:  # Algorithm 2 does not continue without a model
            return [SetTimer(BUSY, now + BUSY_DELAY * self._context.timeout)]
        self._pull = None
        return self._give_up_decision(fault)

    def timer_fired(self, name: str, now: float) -> list[Effect]:
        """Retry all neighbours: they were busy a moment ago, and training is blocked."""
        if self._pull is None or self._ending:
            return []
        self._pull.tried = frozenset()
        return self._try_next(now, fault=False)

    # --- outcomes ---------------------------------------------------------------------------------

    def replied(self, ticket: int, to: int, reply: Reply, now: float) -> list[Effect]:
        if isinstance(reply, NotReadyReply):
            self._context.members.back_off(to, now)
            return self.failed(ticket, now)
        pull = self._pull
        if pull is None or pull.ticket != ticket:  # the pull was given up
            return [Forget(ticket)]
        if isinstance(reply, ModelReply):
            pull.reply = reply
            return []
        return [Forget(ticket), *(self._try_next(now, fault=False) if isinstance(reply, BusyReply) else [])]

    def failed(self, ticket: int, now: float) -> list[Effect]:
        return [Forget(ticket), *(self._try_next(now) if ticket == self.captured_ticket else [])]

    def mix(self, at_boundary: bool) -> Mix | None:
        pull = self._pull
        if pull is None or pull.reply is None or pull.mixing:
            return None
        if not (at_boundary or self._ending or self._context.blocking):
            return None
        pull.mixing = True
        share = self._mixing.share(self._context.step, pull.reply.step)
        return Mix(pull.ticket, share * self._shares.get(pull.to, 1.0))

    def mixed(self, ticket: int) -> bool:
        if self._pull is None or ticket != self._pull.ticket:
            return False
        self._context.fragment_order.exchanged(self._pull.fragment)
        self._context.sync.completed()
        self._pull = None
        return True

    def poisoned(self) -> int:
        """Close the pull whose model holds NaN or Inf; return the rank of its sender."""
        pull, self._pull = self._pull, None
        assert pull is not None
        self._context.sync.abandoned()
        return pull.to

    # --- the end ----------------------------------------------------------------------------------

    def end(self, now: float) -> list[Effect]:
        self._ending = True
        return [] if self._pull and self._pull.reply else self.drop(now)

    def diverged(self, now: float) -> list[Effect]:
        return []  # the model may still be mixed once our own is finite again

    def drop(self, now: float) -> list[Effect]:
        pull, self._pull = self._pull, None
        if pull is None:
            return []
        self._context.sync.abandoned(failed=False)
        if pull.reply:
            return [] if pull.mixing else [Forget(pull.ticket)]
        return [Cancel(pull.ticket)] if self._context.requests.is_open(pull.ticket) else []
