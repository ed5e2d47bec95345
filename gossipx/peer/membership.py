"""What a peer knows of the others: how far they have come, and whom it does not ask for a while.

Our requests that are not answered yet.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from gossipx.protocol.effects import Send
from gossipx.protocol.events import Fault
from gossipx.protocol.messages import Request, Stage
from gossipx.topology.schedules import Schedule

REST_FIRST = 1 / 100
"""Share of ``peer_timeout`` (0.3 s of 30 s) that a peer is left alone after a fault; doubled with each further."""
REST_LONGEST = 1 / 4
"""... and the longest such rest, so that a partition's end is noticed soon."""
REFUSALS = 3
"""A peer that was here before and whose address refuses this often in a row is lost: its process is gone."""
MEASURED = 15
"""Transfers whose times a deadline follows: enough for a median, few enough that a change of the network is noticed."""
PATIENCE = 2.0, 4.0
"""A model is waited for 2 · (m + 4 s) seconds, m the median of these and s their deviation: twice what hardly ever is
exceeded, so that a steadily slowing network is noticed before it is too slow."""
DEVIATION = 1.4826
"""Times the median absolute deviation: the standard deviation, where times are normally distributed."""
PATIENCE_LEAST = 1 / 4
"""... but at least this share of peer_timeout (7.5 s of 30 s): a machine may be short of time for a while. Who gives
waits for all of it at least: who takes knows better when to give up."""
PATIENCE_DOUBLINGS = 6
"""Each model that comes too late doubles what the next may take, up to so many times: until one comes, all that is
known is that it takes longer."""


@dataclass
class Transfers:
    """What is known of how models come from another peer to us, or get from us to it.

    Attributes:
        seconds: that the last models took.
        late: models that did not come in time since.
        rate: models a second; None: of none.
    """

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MEASURED))
    late: int = 0
    rate: float | None = None

    def measured(self, seconds: float) -> None:
        """A model took so long; half of the rate is the last one's, as networks change."""
        self.seconds.append(seconds)
        self.late = 0
        if seconds > 0:
            self.rate = ((self.rate or 1 / seconds) + 1 / seconds) / 2


@dataclass
class OtherPeer:
    """One other peer, as far as it is known.

    Attributes:
        first: the stage that it told of first.
        stage: the furthest stage that it told of in this incarnation.
        incarnation: of the peer that last told its stage.
        report: its final figures, once it has some.
        knows: whether it has our final figures.
        faults: requests to it that failed in a row.
        refusals: how many of these found nothing at its address.
        silent_since: when the first of these failed; None while it answers.
        backoff_until: it is not asked before then, unless it is heard of.
        suspended_until: it is not asked for a model before then, since its last one could not be used.
        lost: it is not waited for.
        taken: how models come from it to us.
        given: how models get from us to it.
    """

    first: Stage | None = None
    stage: Stage | None = None
    incarnation: int | None = None
    report: dict[str, Any] = field(default_factory=dict)
    knows: bool = False
    faults: int = 0
    refusals: int = 0
    silent_since: float | None = None
    backoff_until: float = 0.0
    suspended_until: float = 0.0
    lost: bool = False
    taken: Transfers = field(default_factory=Transfers)
    given: Transfers = field(default_factory=Transfers)

    def transfers(self, given: bool) -> Transfers:
        """Of models to it, or from it."""
        return self.given if given else self.taken

    @property
    def silent(self) -> bool:
        """Whether it is lost or has left, or did not answer last time."""
        return self.lost or self.silent_since is not None or self.stage is Stage.LEFT

    @property
    def gone(self) -> bool:
        """Whether its process has ended, as far as can be told: it has left, or nothing is at its address any more."""
        enough = 1 if self.stage is Stage.DONE else REFUSALS
        return self.stage is Stage.LEFT or (self.stage is not None and self.refusals >= enough)

    def may_be_asked(self, now: float) -> bool:
        """Whether it may be asked for its model now."""
        return self.stage is not Stage.LEFT and max(self.backoff_until, self.suspended_until) <= now

    def came_to(self, stage: Stage, incarnation: int, report: dict[str, Any]) -> None:
        """It told that it has reached ``stage``. What an earlier incarnation told counts no longer."""
        self.first = stage if self.first is None else self.first
        if self.incarnation not in (None, incarnation) or self.stage is None or stage > self.stage:
            self.stage, self.report = stage, report
        self.incarnation = incarnation


class Membership:
    """The other peers of a run.

    Args:
        rank: one's own.
        size: peers in the run.
        schedule: whose turn it is, and over which graph.
        peer_timeout: seconds, see :class:`~gossipx.peer.settings.PeerSettings`.
        rng: for draws and for the jitter of rests.
        model_timeout: seconds that a model is waited for as long as none has been measured, if longer than that.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        schedule: Schedule,
        peer_timeout: float,
        rng: random.Random,
        model_timeout: float = 0.0,
    ) -> None:
        self.others = {other: OtherPeer() for other in range(size) if other != rank}
        self._rank = rank
        self._schedule = schedule
        self._neighbours = schedule.topology.neighbours[rank]
        self._round = -1  # exchanges that were wanted so far; the schedule's round
        self._timeout = peer_timeout
        self._model_timeout = max(peer_timeout, model_timeout)
        self._rng = rng

    def draw(self, now: float, besides: Collection[int] = (), again: bool = False, given: bool = False) -> int | None:
        """The neighbour that the schedule gives, of those that may be asked now; or None.

        Args:
            besides: not these.
            again: for the round of the last draw, in which those that were asked gave nothing.
            given: a model is to go to it, rather than to come from it.
        """
        others = self.others
        self._round += not again
        free = [
            rank
            for rank in self._neighbours
            if rank not in besides and others[rank].may_be_asked(now) and others[rank].stage is not Stage.DONE
        ]
        rates = {rank: rate for rank in free if (rate := others[rank].transfers(given).rate) is not None}
        return self._schedule.partner(self._rank, self._round, free, self._rng, rates)

    def measured(self, rank: int, seconds: float, given: bool = False) -> None:
        """A model took ``seconds`` from ``rank`` to us, from its request on; ``given``: from us to ``rank``."""
        self.others[rank].transfers(given).measured(seconds)

    def patience(self, rank: int, given: bool = False, doublings: int = PATIENCE_DOUBLINGS) -> float:
        """Seconds that a model from ``rank`` (``given``: to it) is waited for: by those of its last, else of all's.

        Those that have come too late since double it, up to ``doublings`` times.
        """
        transfers = self.others[rank].transfers(given)
        measured = transfers.seconds or [
            seconds for one in self.others.values() for seconds in one.transfers(given).seconds
        ]
        patience = self._model_timeout
        if measured:
            usual = median(measured)
            deviation = DEVIATION * median(abs(seconds - usual) for seconds in measured)
            least = self._timeout * (1 if given else PATIENCE_LEAST)
            patience = max(least, PATIENCE[0] * (usual + PATIENCE[1] * deviation))
        return float(patience * 2 ** min(transfers.late, doublings))

    @property
    def longest(self) -> float:
        """Seconds that a model is waited for of which nothing is known."""
        return self._model_timeout

    def was_late(self, rank: int, given: bool = False) -> None:
        """A model from ``rank`` (``given``: to it) did not come in time."""
        self.others[rank].transfers(given).late += 1

    def in_training(self, now: float) -> list[int]:
        """Ranks that are believed to train, ascending, and can be counted on: a wave that begins now is theirs."""
        begun = (Stage.START, Stage.TRAIN)  # START is the last that is told before FINISH
        out = self.not_met(now)
        return [rank for rank, other in self.others.items() if other.stage in begun and rank not in out]

    def in_finish(self) -> list[int]:
        """Ranks that are known to have come to the finish, ascending: the last wave is theirs."""
        return [rank for rank in self.awaited() if self.others[rank].stage in (Stage.FINISH, Stage.AGREE)]

    def not_met(self, now: float) -> set[int]:
        """Ranks that are met in no wave that begins now: who is silent, until it is heard of again, or set aside."""
        return {rank for rank, other in self.others.items() if other.silent or other.suspended_until > now}

    def state_dict(self) -> dict[str, Any]:
        """What draws depend on beside the generator, as plain data: the round, and how fast models came and went."""
        others = {
            str(rank): [[list(one.seconds), one.late, one.rate] for one in (other.taken, other.given)]
            for rank, other in self.others.items()
        }
        return {"round": self._round, "others": others}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave. Who is there is found out anew."""
        self._round = state["round"]
        for rank, both in state["others"].items():
            taken, given = (Transfers(deque(seconds, MEASURED), late, rate) for seconds, late, rate in both)
            self.others[int(rank)].taken, self.others[int(rank)].given = taken, given

    def to_probe(self, now: float) -> list[int]:
        """Who is asked for a sign of life as a wave begins: those that are silent, and one other at random.

        Whoever never meets a peer in a round would otherwise never learn that it is gone.
        """
        free = [r for r, other in self.others.items() if other.may_be_asked(now) and other.stage is not Stage.DONE]
        silent = [rank for rank in free if self.others[rank].silent]
        heard = [rank for rank in free if not self.others[rank].silent]
        return silent + ([self._rng.choice(heard)] if heard else [])

    @property
    def had_begun(self) -> bool:
        """Whether others were training already when we came."""
        return any(other.first is not None and other.first >= Stage.TRAIN for other in self.others.values())

    def alive(self) -> int:
        """Peers that are not lost and have not left, oneself included."""
        return 1 + sum(not other.lost and other.stage is not Stage.LEFT for other in self.others.values())

    def is_gone(self, rank: int) -> bool:
        """Whether another is lost, or its process has ended as far as can be told; False of oneself."""
        other = self.others.get(rank)
        return other is not None and (other.lost or other.gone)

    def awaited(self) -> list[int]:
        """Ranks that are neither lost nor have left."""
        return [rank for rank, other in self.others.items() if not other.lost and other.stage is not Stage.LEFT]

    def heard(self, rank: int) -> None:
        """``rank`` answered or asked: it lives."""
        other = self.others[rank]
        other.faults = other.refusals = 0
        other.silent_since = None
        other.backoff_until = 0.0
        other.lost = False

    def rest(self, rank: int, now: float) -> float:
        """Leave ``rank`` alone for a while, longer each time; returns until when."""
        other = self.others[rank]
        pause = min(REST_FIRST * 2**other.faults, REST_LONGEST) * self._timeout
        other.faults = min(other.faults + 1, 30)  # 2**30 is far beyond the longest rest
        other.backoff_until = now + pause * self._rng.uniform(0.5, 1.5)
        return other.backoff_until

    def failed(self, rank: int, fault: Fault, now: float) -> bool:
        """A request to ``rank`` failed.

        Returns:
            True if that peer is lost from now on and was not before.
        """
        other = self.others[rank]
        if fault is not Fault.LOCAL:  # which says nothing about it
            other.refusals = other.refusals + 1 if fault is Fault.UNREACHABLE else 0
        if other.silent_since is None:
            other.silent_since = now
        self.rest(rank, now)
        silent = now - other.silent_since >= self._timeout
        ended = other.stage in (Stage.DONE, Stage.LEFT)  # it goes when it has told its figures
        if other.lost or ended or not (other.gone or silent):
            return False
        other.lost = True
        return True


class Requests:
    """Numbers what a role asks of others, and knows what of it is open."""

    def __init__(self) -> None:
        self._last = 0
        self._open: dict[int, tuple[int, Request, float]] = {}

    def send(self, to: int, request: Request, now: float, deadline: float) -> Send:
        """Ask ``to``: the effect, whose ticket is open from now on."""
        ticket = self.ticket()
        self._open[ticket] = (to, request, now)
        return Send(ticket, to, request, deadline)

    def ticket(self) -> int:
        """A ticket that no request has."""
        self._last += 1
        return self._last

    def close(self, ticket: int) -> tuple[int, Request, float]:
        """It was answered or has failed; whom it went to, what it was, and when it went out."""
        return self._open.pop(ticket)

    def is_open(self, ticket: int) -> bool:
        """Whether it is still to be answered."""
        return ticket in self._open

    def asked(self, kind: type[Request]) -> set[int]:
        """To whom requests of a kind are open."""
        return {to for to, request, _ in self._open.values() if isinstance(request, kind)}
