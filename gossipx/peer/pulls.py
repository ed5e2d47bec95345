"""Pulls: gossiping SGD in which each peer fetches the model of a neighbour, and mixes it at a step boundary.

Jin et al., How to scale distributed deep learning? (2016), the pull variant; Algorithm 2 of Adaptive Communication. A
decision is one pull. A neighbour that is busy, or whose model does not come, is not asked again for it: another is,
until a model is here or none is left. A pull then came to nothing; but one that training waits for, and that found all
busy, asks all of them again a moment later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gossipx.effects import Cancel, Effect, Forget, Mix, Resume, Send, SetTimer, Wait
from gossipx.messages import BusyReply, ModelReply, NotReadyReply, PullRequest, Reply
from gossipx.mixing import Mixing
from gossipx.peer.exchange import Ground

BUSY = "busy"
"""The timer of a blocking pull that found all neighbours busy."""
BUSY_REST = 1 / 10_000
"""Share of peer_timeout (3 ms of 30 s) until it asks again: what a small model takes to be given to another."""


@dataclass
class _Pull:
    """A pull under way. ``reply`` is there once the model has arrived and waits for a step boundary."""

    ticket: int
    to: int
    tried: frozenset[int]
    fault: bool  # one of those that were tried failed, rather than said no
    decided: float  # when the policy has fired
    reply: ModelReply | None = None


class Pulls:
    """One peer's pulls, one at a time. Each method says what is to be done.

    Args:
        mixing: the share of a model that has come.
        shares: by rank of who gives it, what that is multiplied by; 1 where none is given.
        peer_timeout: seconds.
    """

    def __init__(self, ground: Ground, mixing: Mixing, shares: Mapping[int, float], peer_timeout: float):
        self._ground = ground
        self._mixing = mixing
        self._shares = shares
        self._busy_rest = BUSY_REST * peer_timeout
        self._ending = False  # no other neighbour is asked any more
        self._pull: _Pull | None = None

    @property
    def ticket(self) -> int | None:
        """Of the pull under way, until its model is mixed."""
        return None if self._pull is None else self._pull.ticket

    # --- asking -----------------------------------------------------------------------------------

    def begin(self, step: int, now: float) -> list[Effect]:
        """The policy has decided to pull, and no pull is under way; ``step``: iterations that we have done."""
        to = self._ground.members.draw(now)
        if to is None:
            self._ground.sync.skipped += 1
            return []
        self._ground.sync.requested()
        request = self._ask(to, frozenset(), False, now, step, now)
        return [Wait(), request] if self._ground.blocking else [request]

    def _ask(self, to: int, tried: frozenset[int], fault: bool, decided: float, step: int, now: float) -> Send:
        patience = self._ground.members.patience(to)
        send = self._ground.requests.send(to, PullRequest(step, patience), now, now + patience)
        self._pull = _Pull(send.ticket, to, tried | {to}, fault, decided)
        return send

    def _elsewhere(self, step: int, now: float, fault: bool = True) -> list[Effect]:
        """The pull came to nothing, by a fault or since the other is busy: another neighbour, if there is one."""
        pull = self._pull
        assert pull is not None
        fault = fault or pull.fault
        to = self._ground.members.draw(now, besides=pull.tried, again=True)
        if to is not None and not self._ending:
            return [self._ask(to, pull.tried, fault, pull.decided, step, now)]
        longest = max(self._ground.timeout, self._ground.members.patience(pull.to))
        waits = self._ground.blocking and not fault and now - pull.decided < longest
        if waits and not self._ending:  # Algorithm 2 does not go on without a model
            return [SetTimer(BUSY, now + self._busy_rest)]
        self._pull = None
        if fault:
            self._ground.sync.abandoned()
        else:
            self._ground.sync.found_nobody()
        return [Resume()] if self._ground.blocking else []

    def timer(self, step: int, now: float) -> list[Effect]:
        """All neighbours were busy a moment ago, and training waits."""
        if self._pull is None or self._ending:
            return []
        self._pull.tried = frozenset()
        return self._elsewhere(step, now, fault=False)

    # --- what comes of it -------------------------------------------------------------------------

    def replied(self, ticket: int, to: int, reply: Reply, step: int, now: float) -> list[Effect]:
        """A PullRequest was answered."""
        if isinstance(reply, NotReadyReply):
            self._ground.members.rest(to, now)
            return self.failed(ticket, step, now)
        pull = self._pull
        if pull is None or pull.ticket != ticket:  # it is no longer of interest
            return [Forget(ticket)]
        if isinstance(reply, BusyReply):
            return [Forget(ticket), *self._elsewhere(step, now, fault=False)]
        if not isinstance(reply, ModelReply):
            return [Forget(ticket)]
        pull.reply = reply
        mix = self.mix(step) if self._ground.blocking else None
        return [] if mix is None else [mix]

    def failed(self, ticket: int, step: int, now: float) -> list[Effect]:
        """A PullRequest was not answered, or not by a model that is fit to be mixed."""
        forget = Forget(ticket)
        return [forget, *self._elsewhere(step, now)] if ticket == self.ticket else [forget]

    def mix(self, step: int) -> Mix | None:
        """The model that has come, to be mixed now that our own has seen ``step`` iterations; None if none has."""
        pull = self._pull
        if pull is None or pull.reply is None:
            return None
        return Mix(pull.ticket, self._mixing.share(step, pull.reply.step) * self._shares.get(pull.to, 1.0))

    def mixed(self, ticket: int) -> None:
        """The model under ``ticket`` is mixed."""
        if ticket == self.ticket:
            self._ground.sync.completed()
        self._pull = None

    def poisoned(self) -> int:
        """The model that was to be mixed holds NaN or Inf, and was not; returns whose it is."""
        pull, self._pull = self._pull, None
        assert pull is not None
        self._ground.sync.abandoned()
        return pull.to

    # --- the end ----------------------------------------------------------------------------------

    def end(self, step: int) -> Mix | None:
        """Training has ended: mix the model that is here; if there is none, :meth:`leave`."""
        self._ending = True
        return self.mix(step)

    def drop(self) -> list[Effect]:
        """The model is no more what it was, and what is under way would add its difference to the one of before."""
        pull = self._pull
        return [Forget(pull.ticket), *self._give_up()] if pull and pull.reply else self._give_up()

    def leave(self) -> list[Effect]:
        """Pull nothing any more."""
        self._ending = True
        return self._give_up()

    def _give_up(self) -> list[Effect]:
        pull, self._pull = self._pull, None
        return [Cancel(pull.ticket)] if pull and self._ground.requests.is_open(pull.ticket) else []
