"""The barrier: peers wait for each other in START, FINISH and DONE, and in JOINING for a peer that has a model.

A peer that enters such a stage announces it to all others by an ArriveRequest, and each reply carries the other's own
stage. The barrier is complete when all others have reached the stage; it is given up after peer_timeout. An
announcement that fails is repeated after a back-off. Lost peers get it too, as they may be back; nobody waits for them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from gossipx.peer.membership import Membership, Requests
from gossipx.protocol.effects import Effect, Note, Send, SetTimer
from gossipx.protocol.events import Answered, Received
from gossipx.protocol.messages import ArriveRequest, HereReply, Stage

BARRIER = "gather"
"""Name of the timer that limits the whole wait."""
ANNOUNCE = "announce"
"""Prefix of the timers that repeat an announcement; a space and the rank follow."""


class Barrier:
    """One peer's barriers, one at a time.

    Args:
        members: the role's membership list.
        requests: the role's open requests.
        timeout: peer_timeout, in seconds.

    Attributes:
        active: whether this peer is waiting at a barrier.
    """

    def __init__(self, members: Membership, requests: Requests, timeout: float):
        self.active = False
        self._members = members
        self._requests = requests
        self._timeout = timeout
        self._deadline = 0.0
        self._arrival = ArriveRequest(Stage.JOINING, 0)  # what we announce
        self._reporting: dict[Hashable, int] = {}  # replies under way that carry our figures: request key to rank

    # --- waiting ----------------------------------------------------------------------------------

    def begin(self, arrival: ArriveRequest, now: float) -> list[Effect]:
        """Announce ``arrival`` to all others and start waiting."""
        self.active = True
        self._arrival = arrival
        others = self._members.others
        return self.extend((rank for rank in others if others[rank].stage is not Stage.LEFT), now)

    def extend(self, ranks: Iterable[int], now: float) -> list[Effect]:
        """Announce the stage to ``ranks``, and wait for another peer_timeout."""
        self._deadline = now + self._timeout
        announced = [self.announce(rank, self._arrival, now) for rank in ranks]
        return [*announced, SetTimer(BARRIER, self._deadline)]

    def announce(self, rank: int, arrival: ArriveRequest, now: float) -> Send:
        """Return the request that announces our stage to ``rank``; the reply carries its own."""
        # A lost peer may be back, but gets only a short deadline.
        patience = self._timeout / (10 if self._members.others[rank].lost else 1)
        return self._requests.send(rank, arrival, now, now + patience)

    def retry(self, rank: int, now: float) -> list[Effect]:
        """Repeat the announcement to ``rank`` after its back-off, unless it is known to have arrived."""
        unsure = self._arrival.stage is Stage.JOINING and self._members.others[rank].silent_since is not None
        if self.active and (unsure or not self._has_arrived(rank)):
            return [self.announce(rank, self._arrival, now)]
        return []

    def retry_at(self, rank: int, at: float) -> SetTimer:
        """Return the timer that calls :meth:`retry` for ``rank`` at time ``at``."""
        return SetTimer(f"{ANNOUNCE} {rank}", at)

    def end(self) -> None:
        """Stop waiting."""
        self.active = False

    # --- arrivals ---------------------------------------------------------------------------------

    def _has_arrived(self, rank: int) -> bool:
        other, stage = self._members.others[rank], self._arrival.stage
        # This process exits after DONE: a peer that lacks its figures by then would wait for them in vain.
        return other.stage is not None and other.stage >= stage and (stage < Stage.DONE or other.knows_report)

    def complete(self) -> bool:
        """Return whether no peer remains to be waited for."""
        if not all(self._has_arrived(rank) for rank in self._members.awaited()):
            return False
        # A lost peer may still answer the announcement that is under way.
        return not any(self._members.others[rank].lost for rank in self._requests.open_ranks(ArriveRequest))

    def absent(self) -> list[int]:
        """Return the ranks that are waited for and have not arrived."""
        return [rank for rank in self._members.awaited() if not self._has_arrived(rank)]

    def timed_out(self) -> list[Effect]:
        """Return the note to log when the wait timed out; nothing if all have arrived."""
        absent = self.absent()
        names = ", ".join(map(str, absent))
        text = f"no longer waiting for peer {names} at {self._arrival.stage.name}: peer_timeout has passed"
        return [Note("absent", text)] if absent else []

    # --- messages of the others -------------------------------------------------------------------

    def arrived(self, event: Received, stage: Stage) -> None:
        """Handle the announcement of another peer; our reply says that we are at ``stage``."""
        assert isinstance(event.request, ArriveRequest)
        request = event.request
        self._members.others[event.sender].record_stage(request.stage, request.incarnation, request.report)
        if stage is Stage.DONE:
            self._reporting[event.key] = event.sender

    def answered(self, event: Answered) -> None:
        """Handle the delivery of a reply. A peer that received a reply with our figures needs no further one."""
        announced = self._reporting.pop(event.key, None)
        if announced is not None and event.whole:
            self._members.others[announced].knows_report = True

    def replied(self, to: int, request: ArriveRequest, reply: HereReply) -> None:
        """Handle the reply to an announcement of ours."""
        other = self._members.others[to]
        other.record_stage(reply.stage, reply.incarnation, reply.report)
        other.knows_report = other.knows_report or request.stage is Stage.DONE

    def failed(self, to: int) -> list[Effect]:
        """Handle an announcement that failed: schedule the next attempt."""
        again = min(self._members.others[to].backoff_until, self._deadline)
        return [self.retry_at(to, again)] if self.active else []
