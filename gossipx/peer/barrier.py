"""The barrier: peers wait for each other in START, FINISH, COMPARE and DONE, and in JOINING for a peer with a model.

A peer that enters such a stage announces it to all others by an ArriveRequest, and each reply carries the other's own
stage. The barrier is complete when all others have reached the stage; it is given up after peer_timeout. From FINISH on
it is then extended for each peer that answers and makes progress. An announcement that fails is repeated after a
back-off. Lost peers get it too, as they may be back; nobody waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

from gossipx.peer.membership import Membership, Requests
from gossipx.protocol.effects import Effect, Note, Send, SetTimer
from gossipx.protocol.events import Answered, Received
from gossipx.protocol.messages import ArriveRequest, HereReply, Stage

BARRIER = "gather"
"""Name of the timer that limits the whole wait."""
ANNOUNCE = "announce"
"""Prefix of the timers that repeat an announcement; a space and the rank follow."""
STALLED = 20
"""A peer that answers but has made no progress for this many times ``peer_timeout`` (10 min of 30 s) is no longer
waited for: an iteration or an evaluation may take minutes, and a script that hangs would hold up all peers for ever."""
PURPOSES = {Stage.FINISH: "end its training", Stage.COMPARE: "compare its final model", Stage.DONE: "send its figures"}
"""The purpose of each wait from FINISH on, for messages."""


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
        self._deadline = self._until = 0.0
        self._finishing = self._since = 0.0  # when the first wait of the end and the last extension began
        self._arrival = ArriveRequest(Stage.JOINING, 0)  # what we announce
        self._reporting: dict[Hashable, int] = {}  # replies under way that carry our figures: request key to rank
        self._absent_at = 0  # position, modulo their number, of the last rank that was found absent
        self._open_to_lost = 0, 0  # the last announcement to a lost peer that was found open: ticket, rank

    # --- waiting ----------------------------------------------------------------------------------

    def begin(self, arrival: ArriveRequest, now: float, until: float = math.inf) -> list[Effect]:
        """Announce ``arrival`` to all others and start waiting, at most ``until`` that time."""
        self.active = True
        if self._arrival.stage < Stage.FINISH <= arrival.stage:
            self._finishing = now
        self._arrival, self._until = arrival, until
        others = self._members.others
        return self.extend((rank for rank in others if others.peek(rank).stage is not Stage.LEFT), now)

    def extend(self, ranks: Iterable[int], now: float) -> list[Effect]:
        """Announce the stage to ``ranks``, and wait for another peer_timeout."""
        self._since, self._deadline = now, min(now + self._timeout, self._until)
        announced = [self.announce(rank, self._arrival, now) for rank in ranks]
        return [*announced, SetTimer(BARRIER, self._deadline)]

    def announce(self, rank: int, arrival: ArriveRequest, now: float) -> Send:
        """Return the request that announces our stage to ``rank``; the reply carries its own."""
        # A lost peer may be back, but gets only a short deadline.
        patience = self._timeout / (10 if self._members.others.peek(rank).lost else 1)
        return self._requests.send(rank, arrival, now, now + patience)

    def met(self, rank: int, now: float) -> list[Effect]:
        """Announce the stage to a peer that this one has just heard of, if it waits."""
        return [self.announce(rank, self._arrival, now)] if self.active else []

    def retry(self, rank: int, now: float) -> list[Effect]:
        """Repeat the announcement to ``rank`` after its back-off, unless it is known to have arrived."""
        unsure = self._arrival.stage is Stage.JOINING and self._members.others.peek(rank).silent_since is not None
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
        other, stage = self._members.others.peek(rank), self._arrival.stage
        if other.stage is None or other.stage < stage:
            return False
        if other.stage is Stage.COMPARE and other.comparison < self._arrival.comparison:
            return False
        # This process exits after DONE: a peer that lacks its figures by then would wait for them in vain.
        return stage < Stage.DONE or other.knows_report

    def complete(self) -> bool:
        """Return whether no peer remains to be waited for.

        Called after every event. What was missing last time is looked at first, and the search for an absent peer
        continues from there, so that all calls at a barrier look at each peer about twice.
        """
        peek, (ticket, to) = self._members.others.peek, self._open_to_lost
        if self._requests.is_open(ticket) and peek(to).lost:
            return False
        ranks = self._members.others.ranks
        for _ in ranks:
            if self._is_absent(ranks[self._absent_at % len(ranks)]):
                return False
            self._absent_at += 1
        # A lost peer may still answer the announcement that is under way.
        lost = (open_to for open_to in self._requests.opened(ArriveRequest) if peek(open_to[1]).lost)
        self._open_to_lost = next(lost, (0, 0))
        return self._open_to_lost == (0, 0)

    def _is_absent(self, rank: int) -> bool:
        return not self._members.others.peek(rank).is_out and not self._has_arrived(rank)

    def absent(self) -> list[int]:
        """Return the ranks that are waited for and have not arrived."""
        return [rank for rank in self._members.others if self._is_absent(rank)]

    def arrived_ranks(self) -> list[int]:
        """Return the ranks that have arrived, and are neither lost nor have left."""
        return [rank for rank in self._members.awaited() if self._has_arrived(rank)]

    def extend_for_living(self, now: float, needed: bool, serves: bool) -> list[Effect]:
        """Extend the wait, which has timed out, if an absent peer answers and makes progress; else return nothing.

        Args:
            needed: also wait for peers that do not answer, until they are lost: they need this peer.
            serves: the others are still being served, which is no wait to report.
        """
        peek, least = self._members.others.peek, now - STALLED * self._timeout
        absent = self.absent()
        answering = {rank for rank in absent if self._answers(rank)}
        stalled = {rank for rank in answering if max(peek(rank).advanced_at, self._finishing) <= least}
        waiting = set(absent) - stalled if needed else answering - stalled
        if not waiting or now >= self._until:
            return []
        extended = self.extend(absent, now)
        if serves:
            return extended
        purpose = PURPOSES[self._arrival.stage]
        at = ", ".join(f"{rank} (iteration {peek(rank).step})" for rank in sorted(waiting))
        bound = f"until it does, or makes no progress for {STALLED * self._timeout:g} s"
        return [Note("waiting", f"waiting for peer {at} to {purpose}, {bound}"), *extended]

    def _answers(self, rank: int) -> bool:
        """Return whether it has answered, or announced itself, since the wait was last extended."""
        return self._members.others.peek(rank).told_at >= self._since

    def timed_out(self, now: float) -> list[Effect]:
        """Return the note to log when the wait timed out; nothing if all have arrived."""
        absent = self.absent()
        names = ", ".join(map(str, absent))
        reason = "peer_timeout has passed"
        if now >= self._until:
            reason = "finish_timeout has passed"
        elif self._arrival.stage >= Stage.FINISH and any(self._answers(rank) for rank in absent):
            reason = f"it answers, but has made no progress for {STALLED * self._timeout:g} s, 20 times peer_timeout"
        text = f"no longer waiting for peer {names} at {self._arrival.stage.name}: {reason}"
        return [Note("absent", text)] if absent else []

    # --- messages of the others -------------------------------------------------------------------

    def arrived(self, event: Received, stage: Stage, now: float) -> None:
        """Handle the announcement of another peer; our reply says that we are at ``stage``."""
        assert isinstance(event.request, ArriveRequest)
        self._members.others[event.sender].record(event.request, now)
        if stage is Stage.DONE:
            self._reporting[event.key] = event.sender

    def answered(self, event: Answered) -> None:
        """Handle the delivery of a reply. A peer that received a reply with our figures needs no further one."""
        announced = self._reporting.pop(event.key, None)
        if announced is not None and event.whole:
            self._members.others[announced].knows_report = True

    def replied(self, to: int, request: ArriveRequest, reply: HereReply, now: float) -> None:
        """Handle the reply to an announcement of ours."""
        other = self._members.others[to]
        other.record(reply, now)
        other.knows_report = other.knows_report or request.stage is Stage.DONE

    def failed(self, to: int) -> list[Effect]:
        """Handle an announcement that failed: schedule the next attempt."""
        again = min(self._members.others.peek(to).backoff_until, self._deadline)
        return [self.retry_at(to, again)] if self.active else []
