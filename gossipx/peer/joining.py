"""Joining: where a peer's first model comes from.

It takes the model of whoever has one, the lowest rank first. If nobody has, rank 0 begins with its own, and the others
take that; where rank 0 does not come, the lowest rank that is here takes its part once peer_timeout has passed. With
``init="own"`` all begin with their own, unless others train already. In a run that goes on from checkpoints a peer that
has none takes the model of one that has, whatever its rank.
"""

from __future__ import annotations

from collections import Counter

from gossipx.peer.barrier import Barrier
from gossipx.peer.membership import Membership, Requests
from gossipx.peer.settings import PeerSettings
from gossipx.protocol.effects import Effect, Forget, Resume, Stop
from gossipx.protocol.messages import ArriveRequest, InitialRequest, Stage


class Joining:
    """One peer's way to its first model, while it waits in JOINING.

    Args:
        rank: one's own.
        members: the role's; ``requests`` and ``barrier`` too.
        model_timeout: seconds that the model is waited for.

    Attributes:
        others_begin: the run goes on from checkpoints, of which this peer has none: it never begins with its own model.
    """

    def __init__(
        self,
        rank: int,
        members: Membership,
        requests: Requests,
        barrier: Barrier,
        settings: PeerSettings,
        model_timeout: float,
    ):
        self._rank = rank
        self._members = members
        self._requests = requests
        self._barrier = barrier
        self._timeout = settings.peer_timeout
        self._model_timeout = model_timeout
        self._own = settings.init == "own"
        self.others_begin = False
        self._ticket: int | None = None  # of our request for the model
        self._source = -1  # ... and who was asked for it
        self._failures: Counter[int] = Counter()  # by rank, its answers without a model that we could take

    def ask(self, now: float) -> list[Effect]:
        """Ask whoever has a model for it, unless one is asked already."""
        if self._ticket is not None:
            return []
        first = Stage.TRAIN if self._own else Stage.START
        sources = [
            rank
            for rank, other in self._members.others.items()
            if other.stage is not None and other.stage >= first and other.may_be_asked(now) and not other.lost
        ]
        if not sources:
            return []
        # All that join ask the same peer, unless that one does not give: its loop may be busy for long.
        source = min(sources, key=lambda rank: (self._failures[rank], rank))
        request = self._requests.send(source, InitialRequest(), now, now + self._model_timeout)
        self._ticket, self._source = request.ticket, request.to
        return [request]

    def may_begin(self) -> bool:
        """Whether we begin with our own model, as it is known that nobody has one to give."""
        asked = self._requests.asked(ArriveRequest)
        known = all(rank not in asked or other.stage is not None for rank, other in self._members.others.items())
        first = self._own or self._rank == 0
        return self._ticket is None and first and known and not self.others_begin

    def late(self, now: float) -> list[Effect]:
        """peer_timeout has passed without a model; no effects: we are the lowest rank that is here, and begin."""
        others = self._members.others
        here = [rank for rank in self._members.awaited() if others[rank].stage is Stage.JOINING]
        if self.others_begin and self._ticket is None:
            self._barrier.end()
            waited = f"no peer gave the model of a checkpoint within peer_timeout = {self._timeout:g} s"
            return [
                Stop(f"{waited}, and this one has none: is any that has one running? Raise --peer-timeout"),
                Resume(),
            ]
        if self._ticket is not None or (here and min(here) < self._rank and not self._own):
            # They may have died since they were heard of: ask.
            return self._barrier.go_on((rank for rank in here if rank < self._rank), now)
        if not here and self._rank and not self._own:
            self._barrier.end()
            waited = f"no peer gave a model to begin with within peer_timeout = {self._timeout:g} s"
            return [Stop(f"{waited}: is any other running? Raise --peer-timeout, or --init own"), Resume()]
        return []

    # --- what comes of it -------------------------------------------------------------------------

    def awaits(self, ticket: int) -> bool:
        """Whether ``ticket`` is that of the model that is on its way, or being adopted."""
        return ticket == self._ticket

    def adopted(self, ticket: int) -> bool:
        """A model is in our weights; returns whether it was this one."""
        return self._close(ticket)

    def poisoned(self, ticket: int) -> int | None:
        """A model holds NaN or Inf, and is not taken; if it was this one, returns whose it is."""
        return self._source if self._close(ticket) else None

    def failed(self, ticket: int, to: int, now: float) -> list[Effect]:
        """An InitialRequest was not answered, or by no model: another is asked, if there is one."""
        if not self._close(ticket):
            return [Forget(ticket)]
        self._failures[to] += 1
        later = self._barrier.retry_at(to, self._members.others[to].backoff_until)
        return [Forget(ticket), later, *self.ask(now)]

    def _close(self, ticket: int) -> bool:
        """Whether ``ticket`` is that of the model; it is under way no more."""
        if not self.awaits(ticket):
            return False
        self._ticket = None
        return True

    def leave(self) -> None:
        """A model that still comes is forgotten."""
        self._ticket = None
