"""The interface of exchanges: how one peer trades models with another when its policy fires.

Pulls, pushes, pairs, the hub and the parameter server each implement it, so that :mod:`gossipx.peer.training` drives
all of them in the same way.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable
from dataclasses import dataclass

from gossipx.figures import Counters
from gossipx.peer.fragment_order import FragmentOrder
from gossipx.peer.membership import Membership, Requests
from gossipx.peer.serving import Outgoing
from gossipx.protocol.effects import Answer, Effect, Mix, Resume
from gossipx.protocol.events import Answered, Received
from gossipx.protocol.messages import Reply
from gossipx.sync import SyncManager


@dataclass
class PeerContext:
    """State shared by the components of one role.

    Attributes:
        rank: this peer's own rank.
        incarnation: distinguishes this process from an earlier one of the same rank.
        timeout: peer_timeout, in seconds.
        blocking: whether training waits for each exchange.
        fragment_order: chooses the fragment of our model that is exchanged next.
        counts: the role's.
        step: iterations that our model has seen.
    """

    rank: int
    incarnation: int
    timeout: float
    blocking: bool
    members: Membership
    outgoing: Outgoing
    requests: Requests
    sync: SyncManager
    fragment_order: FragmentOrder
    counts: Counters
    step: int = 0


class Exchange(abc.ABC):
    """The exchanges of one peer in one mode. Methods return the effects to carry out.

    Attributes:
        request_types: the types of requests that it sends and answers.
        timers: names of its timers.
        weight: push-sum weight w of our model; 1 without push-sum.
        last: rank of the last partner; None before the first exchange.
    """

    request_types: tuple[type, ...] = ()
    timers: tuple[str, ...] = ()
    weight: float = 1.0

    def __init__(self, context: PeerContext):
        self._context = context
        self.last: int | None = None
        self._ending = False  # training has ended: start no exchange

    # --- in every mode ------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def captured_ticket(self) -> int | None:
        """The ticket of the captured model that drift is measured from; None if no exchange is under way."""

    @property
    @abc.abstractmethod
    def over(self) -> bool:
        """Whether no exchange is left that the end of training must wait for."""

    @abc.abstractmethod
    def begin(self, now: float) -> list[Effect]:
        """Start an exchange: the policy has fired and none of our own is under way."""

    @abc.abstractmethod
    def replied(self, ticket: int, to: int, reply: Reply, now: float) -> list[Effect]:
        """Handle the reply to a request of an exchange."""

    @abc.abstractmethod
    def failed(self, ticket: int, now: float) -> list[Effect]:
        """Handle a request that failed, or whose model holds NaN or Inf."""

    @abc.abstractmethod
    def mix(self, at_boundary: bool) -> Mix | None:
        """Return the effect that mixes a received model, or None. Each model is returned once.

        Args:
            at_boundary: a step has just finished; otherwise training may be in the middle of one.
        """

    @abc.abstractmethod
    def mixed(self, ticket: int) -> bool:
        """Close the exchange whose model was mixed; return False if ``ticket`` is not one of ours."""

    @abc.abstractmethod
    def end(self, now: float) -> list[Effect]:
        """Start no more exchanges and abandon what may be; the caller then waits until :attr:`over`."""

    @abc.abstractmethod
    def drop(self, now: float) -> list[Effect]:
        """Abandon all exchanges: our model was replaced, or this peer leaves."""

    # --- in some modes ------------------------------------------------------------------------------

    def requested(self, event: Received, now: float) -> list[Effect]:
        """Handle a request of a type in :attr:`request_types`."""
        return []

    def answered(self, event: Answered, now: float) -> list[Effect]:
        """Handle the end of an answer of ours, delivered or not."""
        return []

    def peer_left(self, rank: int, now: float) -> list[Effect]:
        """Handle a peer that has left the run."""
        return []

    def step_ended(self, now: float) -> list[Effect]:
        """Handle the end of a step, before :meth:`mix` is called."""
        return []

    def diverged(self, now: float) -> list[Effect]:
        """Handle the end of a step that left NaN or Inf in our model; called instead of :meth:`step_ended`."""
        return self.drop(now)

    def timer_fired(self, name: str, now: float) -> list[Effect]:
        """Handle the expiry of one of :attr:`timers`."""
        return []

    # --- for implementations ------------------------------------------------------------------------

    def _give_up_decision(self, fault: bool) -> list[Effect]:
        """Give up the decision of the policy; ``fault``: a neighbour failed, rather than all declined."""
        if fault:
            self._context.sync.abandoned()
        else:
            self._context.sync.found_nobody()
        return [Resume()] if self._context.blocking else []

    def _answer(self, key: Hashable, reply: Reply, now: float) -> Answer:
        return Answer(key, reply, now + self._context.timeout)
