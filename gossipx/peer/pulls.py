"""Pulls: gossiping SGD in which each peer fetches the model of a neighbour, and mixes it at a step boundary.

Jin et al., How to scale distributed deep learning? (2016), the pull variant; Algorithm 2 of Adaptive Communication. A
decision is one pull. A neighbour that is busy, or whose model does not come, is not asked again for it: another is,
until a model is here or none is left. A pull then came to nothing; but one that training waits for, and that found all
busy, asks all of them again a moment later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gossipx.mixing import Mixing
from gossipx.peer.exchange import Exchange, PeerContext
from gossipx.protocol.effects import Cancel, Effect, Forget, Mix, Send, SetTimer, Wait
from gossipx.protocol.messages import BusyReply, ModelReply, NotReadyReply, PullRequest, Reply

BUSY = "busy"
"""The timer of a blocking pull that found all neighbours busy."""
BUSY_REST = 1 / 10_000
"""Share of peer_timeout (3 ms of 30 s) until it asks again: what a small model takes to be given to another."""


@dataclass
class _Pull:
    """A pull under way. ``reply`` is there once the model has arrived and waits to be mixed."""

    ticket: int
    to: int
    tried: frozenset[int]
    fault: bool  # one of those that were tried failed, rather than said no
    decided: float  # when the policy has fired
    reply: ModelReply | None = None
    mixing: bool = False


class Pulls(Exchange):
    """One peer's pulls, one at a time: the exchange of plain gossip.

    Args:
        mixing: the share of a model that has come.
        shares: by rank of the peer that gives it, what that is multiplied by; 1 where none is given.
    """

    timers = (BUSY,)

    def __init__(self, context: PeerContext, mixing: Mixing, shares: Mapping[int, float]):
        super().__init__(context)
        self._mixing = mixing
        self._shares = shares
        self._pull: _Pull | None = None

    @property
    def captured(self) -> int | None:
        return None if self._pull is None else self._pull.ticket

    @property
    def over(self) -> bool:
        return self._pull is None

    # --- asking -----------------------------------------------------------------------------------

    def begin(self, now: float) -> list[Effect]:
        to = self._context.members.draw(now)
        if to is None:
            self._context.sync.skipped += 1
            return []
        self._context.sync.requested()
        request = self._ask(to, frozenset(), False, now, now)
        return [Wait(), request] if self._context.blocking else [request]

    def _ask(self, to: int, tried: frozenset[int], fault: bool, decided: float, now: float) -> Send:
        patience = self._context.members.patience(to)
        send = self._context.requests.send(to, PullRequest(self._context.step, patience), now, now + patience)
        self._pull = _Pull(send.ticket, to, tried | {to}, fault, decided)
        return send

    def _elsewhere(self, now: float, fault: bool = True) -> list[Effect]:
        """Ask another neighbour, if there is one: the pull came to nothing, by a fault or since the other is busy."""
        pull = self._pull
        assert pull is not None
        fault = fault or pull.fault
        to = self._context.members.draw(now, besides=pull.tried, again=True)
        if to is not None and not self._ending:
            return [self._ask(to, pull.tried, fault, pull.decided, now)]
        longest = max(self._context.timeout, self._context.members.patience(pull.to))
        waits = self._context.blocking and not fault and now - pull.decided < longest
        if waits and not self._ending:  # Algorithm 2 does not continue without a model
            return [SetTimer(BUSY, now + BUSY_REST * self._context.timeout)]
        self._pull = None
        return self._nowhere(fault)

    def timer(self, name: str, now: float) -> list[Effect]:
        """Ask again: all neighbours were busy a moment ago, and training waits."""
        if self._pull is None or self._ending:
            return []
        self._pull.tried = frozenset()
        return self._elsewhere(now, fault=False)

    # --- what comes of it -------------------------------------------------------------------------

    def replied(self, ticket: int, to: int, reply: Reply, now: float) -> list[Effect]:
        if isinstance(reply, NotReadyReply):
            self._context.members.rest(to, now)
            return self.failed(ticket, now)
        pull = self._pull
        if pull is None or pull.ticket != ticket:  # it is no longer of interest
            return [Forget(ticket)]
        if isinstance(reply, ModelReply):
            pull.reply = reply
            return []
        return [Forget(ticket), *(self._elsewhere(now, fault=False) if isinstance(reply, BusyReply) else [])]

    def failed(self, ticket: int, now: float) -> list[Effect]:
        return [Forget(ticket), *(self._elsewhere(now) if ticket == self.captured else [])]

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
        if ticket != self.captured:
            return False
        self._context.sync.completed()
        self._pull = None
        return True

    def poisoned(self) -> int:
        """Close the pull whose model holds NaN or Inf; return the peer that gave it."""
        pull, self._pull = self._pull, None
        assert pull is not None
        self._context.sync.abandoned()
        return pull.to

    # --- the end ----------------------------------------------------------------------------------

    def end(self, now: float) -> list[Effect]:
        self._ending = True
        return [] if self._pull and self._pull.reply else self.drop(now)

    def unsound(self, now: float) -> list[Effect]:
        return []  # the model that comes may still be mixed after a step that is sound again

    def drop(self, now: float) -> list[Effect]:
        pull, self._pull = self._pull, None
        if pull is None:
            return []
        self._context.sync.abandoned(failed=False)
        if pull.reply:
            return [] if pull.mixing else [Forget(pull.ticket)]
        return [Cancel(pull.ticket)] if self._context.requests.is_open(pull.ticket) else []
