"""Gathering: at START, FINISH and DONE peers wait for each other, and while JOINING for one that has a model.

Whoever enters such a stage tells all others by an ArriveRequest, and each answers how far it has come itself. A peer
waits until all have come as far, or peer_timeout has passed. One that does not answer is told again after a rest; one
that is lost is asked whether it is back, but not waited for.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from gossipx.peer.membership import Membership, Requests
from gossipx.protocol.effects import Effect, Note, Send, SetTimer
from gossipx.protocol.events import Answered, Received
from gossipx.protocol.messages import ArriveRequest, HereReply, Stage

BARRIER = "gather"
"""The timer of the whole wait."""
ANNOUNCE = "announce"
"""The timers after which a peer is told again: this, a space and its rank."""


class Barrier:
    """One peer's waits for the others, one at a time. Each method says what is to be done, or how far it has come.

    Args:
        members: the role's; ``requests`` too.
        timeout: peer_timeout, in seconds.

    Attributes:
        on: others are waited for.
    """

    def __init__(self, members: Membership, requests: Requests, timeout: float):
        self.on = False
        self._members = members
        self._requests = requests
        self._timeout = timeout
        self._deadline = 0.0
        self._arrival = ArriveRequest(Stage.JOINING, 0)  # what the others are told
        self._telling: dict[Hashable, int] = {}  # answers with our figures, and to whom

    # --- waiting ----------------------------------------------------------------------------------

    def begin(self, arrival: ArriveRequest, now: float) -> list[Effect]:
        """Tell all others of ``arrival``, and wait until they have come as far too, or the time is over."""
        self.on = True
        self._arrival = arrival
        others = self._members.others
        return self.go_on((rank for rank in others if others[rank].stage is not Stage.LEFT), now)

    def go_on(self, ranks: Iterable[int], now: float) -> list[Effect]:
        """Wait for peer_timeout from now on, and tell ``ranks``."""
        self._deadline = now + self._timeout
        told = [self.tell(rank, self._arrival, now) for rank in ranks]
        return [*told, SetTimer(BARRIER, self._deadline)]

    def tell(self, rank: int, arrival: ArriveRequest, now: float) -> Send:
        """Tell ``rank`` how far we have come; its answer tells how far it has."""
        # One that is lost may be back, but is not waited for as long again.
        patience = self._timeout / (10 if self._members.others[rank].lost else 1)
        return self._requests.send(rank, arrival, now, now + patience)

    def again(self, rank: int, now: float) -> list[Effect]:
        """A rest after a fault of ``rank`` is over: it is told again, unless it is known to have come."""
        unsure = self._arrival.stage is Stage.JOINING and self._members.others[rank].silent_since is not None
        if self.on and (unsure or not self._has_come(rank)):
            return [self.tell(rank, self._arrival, now)]
        return []

    def retry_at(self, rank: int, at: float) -> SetTimer:
        """Look at ``rank`` again at ``at``."""
        return SetTimer(f"{ANNOUNCE} {rank}", at)

    def end(self) -> None:
        """Nobody is waited for any more."""
        self.on = False

    # --- who has come -----------------------------------------------------------------------------

    def _has_come(self, rank: int) -> bool:
        other, stage = self._members.others[rank], self._arrival.stage
        # After DONE this peer is gone: whoever does not know its figures by then would wait for them in vain.
        return other.stage is not None and other.stage >= stage and (stage < Stage.DONE or other.knows)

    def complete(self) -> bool:
        """Whether nobody is to be waited for any longer."""
        if not all(self._has_come(rank) for rank in self._members.awaited()):
            return False
        # One that is lost is being asked whether it is back.
        return not any(self._members.others[rank].lost for rank in self._requests.asked(ArriveRequest))

    def absent(self) -> list[int]:
        """Ranks that are waited for."""
        return [rank for rank in self._members.awaited() if not self._has_come(rank)]

    def late(self) -> list[Effect]:
        """The time is over: who has not come by now?"""
        absent = self.absent()
        names = ", ".join(map(str, absent))
        text = f"no longer waiting for peer {names} at {self._arrival.stage.name}: not there within peer_timeout"
        return [Note("absent", text)] if absent else []

    # --- what the others tell ---------------------------------------------------------------------

    def arrived(self, event: Received, stage: Stage) -> None:
        """Another tells how far it has come, and is answered that we are at ``stage``."""
        assert isinstance(event.request, ArriveRequest)
        request = event.request
        self._members.others[event.sender].came_to(request.stage, request.incarnation, request.report)
        if stage is Stage.DONE:
            self._telling[event.key] = event.sender

    def answered(self, event: Answered) -> None:
        """An answer was handed over, or not: if it was one with our figures, whoever asked knows them."""
        told = self._telling.pop(event.key, None)
        if told is not None and event.whole:
            self._members.others[told].knows = True

    def replied(self, to: int, request: ArriveRequest, reply: HereReply) -> None:
        """Another answers how far it has come."""
        other = self._members.others[to]
        other.first = reply.stage if other.first is None else other.first
        other.stage = reply.stage if other.stage is None else max(reply.stage, other.stage)
        other.report = reply.report or other.report
        other.knows = other.knows or request.stage is Stage.DONE

    def failed(self, to: int) -> list[Effect]:
        """Another could not be told."""
        again = min(self._members.others[to].backoff_until, self._deadline)
        return [self.retry_at(to, again)] if self.on else []
