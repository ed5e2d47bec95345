"""The interface of exchanges: what a policy that fires begins, and how it proceeds.

Each mode of gossip, and a hub or a parameter server, implements it, so that training follows one course in all of them.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable
from dataclasses import dataclass

from gossipx.peer.membership import Membership, Requests
from gossipx.peer.serving import Outgoing
from gossipx.protocol.effects import Answer, Effect, Mix, Resume
from gossipx.protocol.events import Answered, Received
from gossipx.protocol.messages import Reply
from gossipx.sync import SyncManager


@dataclass
class PeerContext:
    """What the parts of a role share: its other parts, its peer_timeout, and whether exchanges block.

    Attributes:
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
    step: int = 0


class Exchange(abc.ABC):
    """All exchanges of one peer in one mode. Each method returns the effects to carry out.

    Attributes:
        takes: the kinds of requests that it sends and answers.
        timers: names of its timers.
        weight: push-sum's w of our own model; 1 without push-sum.
        last: the partner of the last exchange that we have begun, or of the last pair; None: there was none yet.
    """

    takes: tuple[type, ...] = ()
    timers: tuple[str, ...] = ()
    weight: float = 1.0

    def __init__(self, context: PeerContext):
        self._context = context
        self.last: int | None = None
        self._ending = False  # no exchange begins any more

    # --- in every mode ------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def captured(self) -> int | None:
        """The ticket under which our model is captured for the exchange that our drift counts from."""

    @property
    @abc.abstractmethod
    def over(self) -> bool:
        """Whether the end of training has nothing to wait for."""

    @abc.abstractmethod
    def begin(self, now: float) -> list[Effect]:
        """Begin an exchange: the policy has fired, and nothing that it began before is under way."""

    @abc.abstractmethod
    def replied(self, ticket: int, to: int, reply: Reply, now: float) -> list[Effect]:
        """Handle the reply to a request of an exchange."""

    @abc.abstractmethod
    def failed(self, ticket: int, now: float) -> list[Effect]:
        """Handle a request of an exchange that has no answer, or a model that holds NaN or Inf."""

    @abc.abstractmethod
    def mix(self, at_boundary: bool) -> Mix | None:
        """Return the model to mix now, if there is one; each is returned once.

        Args:
            at_boundary: a step was just done; otherwise training may be in the middle of one.
        """

    @abc.abstractmethod
    def mixed(self, ticket: int) -> bool:
        """Close the exchange whose model is mixed now; return whether it was one of these."""

    @abc.abstractmethod
    def end(self, now: float) -> list[Effect]:
        """Give up what may be given up, since training has ended; it waits for the rest until this is :attr:`over`."""

    @abc.abstractmethod
    def drop(self, now: float) -> list[Effect]:
        """Mix nothing of what is under way: our model was replaced, or we leave."""

    # --- in some modes ------------------------------------------------------------------------------

    def requested(self, event: Received, now: float) -> list[Effect]:
        """Handle a request of one of the kinds in :attr:`takes`."""
        return []

    def answered(self, event: Answered, now: float) -> list[Effect]:
        """Note that an answer was handed over, or was not."""
        return []

    def left(self, rank: int, now: float) -> list[Effect]:
        """Note that another peer has left."""
        return []

    def boundary(self, now: float) -> list[Effect]:
        """Note that a step is done."""
        return []

    def unsound(self, now: float) -> list[Effect]:
        """Note that a step is done after which our own model holds NaN or Inf."""
        return self.drop(now)

    def timer(self, name: str, now: float) -> list[Effect]:
        """Handle one of :attr:`timers`."""
        return []

    # --- for implementations ------------------------------------------------------------------------

    def _nowhere(self, fault: bool) -> list[Effect]:
        """Give up what the policy decided; ``fault``: a neighbour failed, rather than all said no."""
        if fault:
            self._context.sync.abandoned()
        else:
            self._context.sync.found_nobody()
        return [Resume()] if self._context.blocking else []

    def _answer(self, key: Hashable, reply: Reply, now: float) -> Answer:
        return Answer(key, reply, now + self._context.timeout)
