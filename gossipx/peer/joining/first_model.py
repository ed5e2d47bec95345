"""Joining: where a new peer's first model comes from.

The peer requests a model from a peer that has one, the lowest rank first, and from the next if that one is busy with
the requests of others (see :mod:`gossipx.peer.serving`). If nobody has one, rank 0 starts with its own and all others
adopt it; if rank 0 does not appear within peer_timeout, the lowest rank present takes its place. With ``init="own"``
all start with their own models, unless others are training already. In a run that resumes from checkpoints, a peer
without one adopts the model of a peer that has one, whatever its rank; so does a peer that joins a run under way.
"""

from __future__ import annotations

from collections import Counter

from gossipx.peer.barrier import Barrier
from gossipx.peer.exchange import PeerContext
from gossipx.peer.membership import FIRST_BACKOFF
from gossipx.protocol.effects import Effect, Forget, Note, Resume, Stop
from gossipx.protocol.messages import ArriveRequest, InitialRequest, Stage


class Joining:
    """The search of one peer for its first model, in stage JOINING.

    Args:
        context: state shared by the role's components.
        barrier: announces this peer and reports which peers answer.
        own: whether all peers start with their own models.

    Attributes:
        must_adopt: whether this peer must adopt a model: the run resumes from checkpoints and it has none, or it
            joins a run under way.
        joins: whether that is the reason.
    """

    def __init__(self, context: PeerContext, barrier: Barrier, own: bool):
        self._context = context
        self._barrier = barrier
        self._own = own
        self.must_adopt = False
        self.joins = False
        self._ticket: int | None = None  # of our open request
        self._source = -1  # rank that it went to
        self._failures: Counter[int] = Counter()  # requests without a usable model, by rank
        self._busy: set[int] = set()  # peers that were busy with others' requests since the last timeout

    def ask(self, now: float) -> list[Effect]:
        """Request the model from a peer that has one, unless a request is open."""
        if self._ticket is not None:
            return []
        sources = [rank for rank in self._sources() if self._context.members.others.peek(rank).may_be_asked(now)]
        if not sources:
            return []
        source = min(sources, key=lambda rank: (self._failures[rank], rank))
        request = self._context.requests.send(source, InitialRequest(), now, now + self._context.members.model_timeout)
        self._ticket, self._source = request.ticket, request.to
        return [request]

    def _sources(self) -> list[int]:
        """Return the ranks that have a model to send, as far as they have told."""
        first = Stage.TRAIN if self._own else Stage.START
        known = self._context.members.others.known.items()
        return [rank for rank, other in known if other.stage is not None and other.stage >= first and not other.is_out]

    def may_begin(self) -> bool:
        """Return whether to start with our own model, since no other peer has one."""
        if self._ticket is not None or self.must_adopt or not (self._own or self._context.rank == 0) or self._sources():
            return False
        peek = self._context.members.others.peek
        return all(peek(rank).stage is not None for _, rank in self._context.requests.opened(ArriveRequest))

    def timed_out(self, now: float) -> list[Effect]:
        """Handle the timeout of the wait for a model; return no effects if this peer must start with its own."""
        peek = self._context.members.others.peek
        here = [rank for rank in self._context.members.awaited() if peek(rank).stage is Stage.JOINING]
        busy = sorted(self._busy.intersection(self._sources()))
        self._busy.clear()
        if self._ticket is None and busy:
            names = ", ".join(map(str, busy))
            note = Note("waiting", f"waiting for the initial model: peer {names} has it, and sends it to others first")
            return [note, *self._barrier.extend(busy, now)]
        if self.must_adopt and self._ticket is None:
            self._barrier.end()
            waited = f"within peer_timeout = {self._context.timeout:g} s"
            if self.joins:
                cause = f"no peer of the run sent its model {waited}"
                return [Stop(f"{cause}: check that they can be reached from here, or raise --peer-timeout"), Resume()]
            cause = f"no peer sent the model of a checkpoint {waited}"
            return [
                Stop(f"{cause}, and this one has no checkpoint: start a peer that has one, or raise --peer-timeout"),
                Resume(),
            ]
        if self._ticket is not None or (here and min(here) < self._context.rank and not self._own):
            # They may have died since they were last heard from: probe them.
            return self._barrier.extend((rank for rank in here if rank < self._context.rank), now)
        if not here and self._context.rank and not self._own:
            self._barrier.end()
            cause = f"no peer sent an initial model within peer_timeout = {self._context.timeout:g} s"
            return [
                Stop(f"{cause}: check that another peer is running, raise --peer-timeout, or use --init own"),
                Resume(),
            ]
        return []

    # --- outcomes ---------------------------------------------------------------------------------

    def awaits(self, ticket: int) -> bool:
        """Return whether ``ticket`` is our request for the model, open or being adopted."""
        return ticket == self._ticket

    def adopted(self, ticket: int) -> bool:
        """Handle an adopted model; return whether it was ours to adopt."""
        return self._close(ticket)

    def poisoned(self, ticket: int) -> int | None:
        """Handle a model that holds NaN or Inf; return the rank of its sender, or None if we did not request it."""
        return self._source if self._close(ticket) else None

    def put_off(self, ticket: int, to: int, now: float) -> list[Effect]:
        """Handle the BusyReply of a peer that sends its model to others: request it from another peer, or again."""
        self._busy.add(to)
        # Not random, as it is after a fault: the same generator chooses partners, which should not depend on the start.
        self._context.members.others[to].backoff_until = now + FIRST_BACKOFF * self._context.timeout
        return self.failed(ticket, to, now)

    def failed(self, ticket: int, to: int, now: float) -> list[Effect]:
        """Handle an InitialRequest that brought no model: request one from another peer."""
        if not self._close(ticket):
            return [Forget(ticket)]
        self._failures[to] += 1
        later = self._barrier.retry_at(to, self._context.members.others.peek(to).backoff_until)
        return [Forget(ticket), later, *self.ask(now)]

    def _close(self, ticket: int) -> bool:
        """Clear the open request; return False if ``ticket`` is another's."""
        if not self.awaits(ticket):
            return False
        self._ticket = None
        return True

    def leave(self) -> None:
        """Ignore a model that still arrives."""
        self._ticket = None
