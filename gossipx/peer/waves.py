"""One peer's part in waves: which it starts or joins while it trains, and the last one, which is the finish.

A wave has a number. A peer whose policy fires starts one with the highest number that it knows of, plus one, and with
those that it believes to train (peers tell each other that number with how far they have come, so that one that was
started again counts on); its requests tell the others, who take part as soon as they hear of it. So waves that
start together are one wave. Where those who start the same number mean different members, the longer list comes before
the shorter, and of equally long ones the lexicographically smaller; whoever has neither given nor taken a model yet
goes over to the better list, anyone else refuses it, which costs the other a round. A peer is in one wave at a time:
requests of a later one wait until it has taken the mean of this one into its weights.
"""

from __future__ import annotations

from collections.abc import Hashable

from gossipx.peer.membership import Membership, Requests
from gossipx.peer.wave import Wave
from gossipx.protocol.effects import Answer, Effect, Forget, TakeIn
from gossipx.protocol.events import Received
from gossipx.protocol.messages import LAST_WAVE, MAX_WAVE, NotReadyReply, RoundRequest
from gossipx.sync import SyncManager

ROUND_DOUBLINGS = 2
"""How often models that come too late double what a round may take (to 2 min of 30 s): it holds up all of a wave, so
that one peer that is silent now and then is not waited for as long as in a pull."""


class Waves:
    """Which wave a peer is in, and what waits for the next.

    Args:
        rank: one's own.
        members: the role's; ``requests`` and ``sync`` too.
        timeout: peer_timeout, in seconds.

    Attributes:
        current: the wave that this peer takes part in, until its mean is in the weights; the last one stays.
        lost: rounds of waves while training that a missing partner cost.
    """

    def __init__(self, rank: int, members: Membership, requests: Requests, sync: SyncManager, timeout: float):
        self.current: Wave | None = None
        self.lost = 0
        self._rank = rank
        self._members = members
        self._requests = requests
        self._sync = sync
        self._timeout = timeout
        self._seen = 0  # the highest number of a wave that we took part in, the last one aside
        self._heard = 0  # the highest number of one that others have told to be over
        self._taking_in = False
        self._early: list[Received] = []  # requests of waves that we are not in yet

    # --- beginning --------------------------------------------------------------------------------

    def start(self, step: int, now: float) -> list[Effect]:
        """Our policy fired: start a wave. Nothing if nobody else is known to train, or numbers are used up."""
        members = tuple(sorted([self._rank, *self._members.in_training(now)]))
        number = max(self._seen, self._heard) + 1
        may_start = len(members) > 1 and number <= MAX_WAVE
        return self._enter(number, members, step, now, starts=True) if may_start else []

    def join(self, step: int, now: float) -> list[Effect]:
        """Take part in the latest wave that others have asked for, if there is one."""
        waiting = [event for event in self._early if _asked(event).wave != LAST_WAVE]
        if self.current is not None or not waiting:
            return []
        self._early = [event for event in self._early if _asked(event).wave == LAST_WAVE]
        latest = max(_asked(event).wave for event in waiting)
        members = min((_asked(event).members for event in waiting if _asked(event).wave == latest), key=_order)
        effects = self._enter(latest, members, step, now)
        return effects + [effect for event in waiting for effect in self.requested(event, step, now)]

    def finish(
        self, members: tuple[int, ...] | None, step: int, weight: float, now: float, without: int | None = None
    ) -> list[Effect]:
        """Begin the last wave.

        Args:
            members: who takes part; None: all that are here.
            step: iterations that our model has seen.
            weight: of our model in their mean.
            now: the time.
            without: not this one, though it was here; others may have noticed before us, and have named who takes part.
        """
        early, self._early = self._early, []
        if members is None:
            here = [self._rank, *(rank for rank in self._members.in_finish() if rank != without)]
            named = [_asked(event).members for event in early if without is not None and self.may_join(event)]
            members = min(named, key=_order, default=tuple(sorted(here)))
        # Whoever has come to the last wave is met in it, though it was silent a moment ago.
        self.current = Wave(
            LAST_WAVE, self._rank, members, step, self._requests, self._patience(members), weight=weight
        )
        effects = self.current.begin(now)
        return effects + [effect for event in early for effect in self.current.requested(event, now)]

    def _enter(
        self, number: int, members: tuple[int, ...], step: int, now: float, starts: bool = False
    ) -> list[Effect]:
        self.current = wave = self._made(number, members, step, now)
        self._seen = number
        self._sync.requested(shared=True)
        return wave.begin(now, starts)

    def _made(self, number: int, members: tuple[int, ...], step: int, now: float) -> Wave:
        missing = self._members.not_met(now)
        return Wave(number, self._rank, members, step, self._requests, self._patience(members), missing)

    def _patience(self, members: tuple[int, ...]) -> float:
        """Seconds that a round may take: where all are fast, peer_timeout for all, so that they give up alike."""
        others = (rank for rank in members if rank != self._rank)
        return max([self._timeout, *(self._members.patience(rank, doublings=ROUND_DOUBLINGS) for rank in others)])

    # --- what others ask --------------------------------------------------------------------------

    @property
    def latest(self) -> int:
        """The highest number of a wave while training that we know to be over; 0 of none."""
        under_way = self.current is not None and self.current.number == self._seen
        return max(self._seen - under_way, self._heard)

    def heard_of(self, number: int) -> None:
        """For another, wave ``number`` is over: the next that we start comes after it.

        Those who are still in it may meet us there, if we have not taken part.
        """
        self._heard = max(self._heard, number)

    def hold(self, event: Received) -> None:
        """Answer ``event`` in the wave that it means, once we are in it."""
        self._early.append(event)

    def requested(self, event: Received, step: int, now: float) -> list[Effect]:
        """Another asks for our model in a wave, while we train: go over to its members, or answer, or let it wait."""
        request, wave = _asked(event), self.current
        if wave is not None and request.wave == wave.number:
            return self._requested_now(wave, event, step, now)
        if request.wave <= self._seen or not self.may_join(event):
            return [self.refuse(event, "that wave is over", now)]
        self.hold(event)
        return []

    def _requested_now(self, wave: Wave, event: Received, step: int, now: float) -> list[Effect]:
        members = _asked(event).members
        better = _order(members) < _order(wave.members)
        if not better or wave.touched or not self.may_join(event):
            return wave.requested(event, now)
        self.lost += wave.lost
        self.current = self._made(wave.number, members, step, now)
        again = [*wave.leave(), event]
        effects = [Forget(wave.ticket), *self.current.begin(now)]
        return effects + [effect for event in again for effect in self.current.requested(event, now)]

    def may_join(self, event: Received) -> bool:
        """Whether its members are peers of this run, and both of us among them."""
        members = _asked(event).members
        return {self._rank, event.sender} <= set(members) <= {self._rank, *self._members.others}

    def refuse(self, event: Received, reason: str, now: float) -> Answer:
        """Nothing is given for ``event``."""
        return Answer(event.key, NotReadyReply(reason), now + self._timeout)

    # --- on the way -------------------------------------------------------------------------------

    def meeting(self, ticket: int) -> Wave | None:
        """The wave, if ``ticket`` is our request of the round that it is in."""
        return self.current if self.current is not None and self.current.is_current(ticket) else None

    def answering(self, key: Hashable) -> Wave | None:
        """The wave, if ``key`` is the request that it answers in the round that it is in."""
        return self.current if self.current is not None and self.current.is_answering(key) else None

    def timer(self, now: float) -> list[Effect]:
        """The time of a round may be over."""
        return [] if self.current is None else self.current.timer(now)

    def gone(self, rank: int, now: float) -> list[Effect]:
        """``rank`` has left the run."""
        return [] if self.current is None else self.current.gone(rank, now)

    # --- its end ----------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether a wave has no round left, and is to be taken in."""
        return self.current is not None and self.current.over and not self._taking_in

    def take_in(self) -> list[Effect]:
        """At a step boundary, bring what the wave gave into our model; if it gave nothing, close it."""
        assert self.current is not None
        if not self.current.merged:
            return [self._close()]
        self._taking_in = True
        return [TakeIn(self.current.ticket)]

    def is_taken_in(self, ticket: int) -> bool:
        """Whether ``ticket`` is that of the wave, whose mean is in our weights now; it is closed then."""
        if self.current is None or self.current.ticket != ticket:
            return False
        self._close()
        return True

    def _close(self) -> Forget:
        wave = self.current
        assert wave is not None
        self._taking_in = wave.number == LAST_WAVE
        if wave.number != LAST_WAVE:
            self.current = None
            self.lost += wave.lost
            if wave.merged:
                self._sync.completed(wave.merged)
            else:
                self._sync.abandoned()
        return Forget(wave.ticket)

    def give_up(self, reason: str, now: float) -> list[Effect]:
        """Take no further part in this wave, nor in those that others have asked for; the finish is still to come."""
        wave, effects = self.current, list[Effect]()
        waiting = [event for event in self._early if _asked(event).wave != LAST_WAVE]
        self._early = [event for event in self._early if _asked(event).wave == LAST_WAVE]
        if wave is not None:
            waiting += wave.leave()
            self.current, self._taking_in = None, False
            self._sync.abandoned()
            effects.append(Forget(wave.ticket))
        return effects + [self.refuse(event, reason, now) for event in waiting]

    def leave(self, now: float, reason: str = "it leaves") -> list[Effect]:
        """Take part in nothing any more."""
        waiting = self._early + (self.current.leave() if self.current else [])
        self._early = []
        return [self.refuse(event, reason, now) for event in waiting]


def _asked(event: Received) -> RoundRequest:
    assert isinstance(event.request, RoundRequest)
    return event.request


def _order(members: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Of two lists of members for one wave, the one that is smaller by this is the better."""
    return -len(members), members
