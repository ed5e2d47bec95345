"""The waves of one peer: those that it starts or joins while training, and the last one, which ends the run.

A wave has a number and a list of members. When the policy fires, a peer starts a wave whose number is one above the
highest it knows of, with all peers that it believes to be training. Peers exchange the highest number in their stage
announcements, so that a restarted peer continues the count. The requests of a wave carry its number and members, and a
peer joins as soon as it receives one, so waves started at the same time merge into one.

If peers start the same number with different members, the longer list wins; of equally long ones, the lexicographically
smaller. A peer that has neither sent nor received a model yet switches to the better list. Any other peer refuses it,
which costs the sender one round. A peer is in one wave at a time: requests of a later wave wait until the mean of the
current one is in its weights.
"""

from __future__ import annotations

from collections.abc import Hashable

from gossipx.peer.membership import Membership, Requests
from gossipx.peer.turns import Turns
from gossipx.peer.wave import Wave
from gossipx.protocol.effects import Answer, ApplyWave, Effect, Forget
from gossipx.protocol.events import Received
from gossipx.protocol.messages import LAST_WAVE, MAX_WAVE, WHOLE, NotReadyReply, RoundRequest
from gossipx.sync import SyncManager

ROUND_DOUBLINGS = 2
"""How often late models may double the timeout of a round (to 2 min for 30 s). This is less than for pulls, as one
intermittent peer holds up the whole wave."""


class WaveSequence:
    """The current wave of a peer, and requests that wait for the next one.

    Args:
        rank: this peer's own rank.
        members: the role's membership list.
        requests: the role's open requests.
        sync: counts waves as retrievals.
        timeout: peer_timeout, in seconds.
        turns: says which fragment of the model a wave averages.

    Attributes:
        current: the wave that this peer takes part in, until its mean is in the weights; the last wave remains.
        lost: rounds of waves while training that were skipped because the partner was missing.
    """

    def __init__(
        self,
        rank: int,
        members: Membership,
        requests: Requests,
        sync: SyncManager,
        timeout: float,
        turns: Turns | None = None,
    ):
        self.current: Wave | None = None
        self.lost = 0
        self._rank = rank
        self._members = members
        self._requests = requests
        self._sync = sync
        self._timeout = timeout
        self._turns = turns or Turns()
        self._seen = 0  # highest wave that we took part in, except the last wave
        self._heard = 0  # highest wave that others have announced as over
        self._taking_in = False
        self._last: Wave | None = None  # the last one that was taken in or came to nothing
        self._early: list[Received] = []  # requests of waves that we have not entered

    # --- starting and joining ---------------------------------------------------------------------

    def start(self, step: int, now: float) -> list[Effect]:
        """Start a wave, as our policy fired; do nothing if no other peer seems to train or the numbers are used up."""
        members = tuple(sorted([self._rank, *self._members.in_training(now)]))
        number = max(self._seen, self._heard) + 1
        may_start = len(members) > 1 and number <= MAX_WAVE
        return self._enter(number, members, step, now) if may_start else []

    def join(self, step: int, now: float) -> list[Effect]:
        """Join the latest wave for which a request is waiting, if any."""
        waiting = [event for event in self._early if _round_request(event).wave != LAST_WAVE]
        if self.current is not None or not waiting:
            return []
        self._early = [event for event in self._early if _round_request(event).wave == LAST_WAVE]
        latest = max(_round_request(event).wave for event in waiting)
        members = min(
            (_round_request(event).members for event in waiting if _round_request(event).wave == latest), key=_order
        )
        effects = self._enter(latest, members, step, now)
        return effects + [effect for event in waiting for effect in self.requested(event, step, now)]

    def finish(
        self, members: tuple[int, ...] | None, step: int, weight: float, now: float, without: int | None = None
    ) -> list[Effect]:
        """Start the last wave.

        Args:
            members: ranks that take part; None: all that have reached the finish.
            step: iterations that our model has seen.
            weight: of our model in the mean.
            without: rank to exclude although it has reached the finish; None: no such rank. If other peers noticed its
                loss before us and have named the members, their list is used.
        """
        early, self._early = self._early, []
        if members is None:
            here = [self._rank, *(rank for rank in self._members.in_finish() if rank != without)]
            named = [_round_request(event).members for event in early if without is not None and self.may_join(event)]
            members = min(named, key=_order, default=tuple(sorted(here)))
        # No rank counts as missing: a peer at the finish is met even if it was silent before.
        patience = self._patience(members)
        if WHOLE not in self._turns:  # the models of measured transfers were fragments
            patience = max(patience, self._members.model_timeout)
        self.current = Wave(LAST_WAVE, self._rank, members, step, self._requests, patience, weight=weight)
        effects = self.current.begin(now)
        return effects + [effect for event in early for effect in self.current.requested(event, now)]

    def _enter(self, number: int, members: tuple[int, ...], step: int, now: float) -> list[Effect]:
        self.current = wave = self._new_wave(number, members, step, now)
        self._seen = number
        self._sync.requested(shared=True)
        return wave.begin(now)

    def _new_wave(self, number: int, members: tuple[int, ...], step: int, now: float) -> Wave:
        missing, fragment = self._members.unavailable(now), self._turns.of_wave(number)
        patience = self._patience(members)
        return Wave(number, self._rank, members, step, self._requests, patience, missing, fragment=fragment)

    def _patience(self, members: tuple[int, ...]) -> float:
        """Return the timeout of a round: peer_timeout where all peers are fast, so that all give up together."""
        others = [rank for rank in members if rank != self._rank]
        return max(self._timeout, self._members.longest_patience(others, ROUND_DOUBLINGS) if others else 0.0)

    # --- requests ---------------------------------------------------------------------------------

    @property
    def latest(self) -> int:
        """The highest number of a wave known to be over, except the last wave; 0 before the first."""
        under_way = self.current is not None and self.current.number == self._seen
        return max(self._seen - under_way, self._heard)

    def record_over(self, number: int) -> None:
        """Record that wave ``number`` is over for another peer: the next one that we start gets a higher number.

        We may still join that wave, if a peer that is still in it sends a request.
        """
        self._heard = max(self._heard, number)

    def defer(self, event: Received) -> None:
        """Keep ``event`` until we enter the wave that it names."""
        self._early.append(event)

    def requested(self, event: Received, step: int, now: float) -> list[Effect]:
        """Handle a request for our model while training: answer it, let it wait, or switch to its list of members."""
        request, wave = _round_request(event), self.current
        if wave is not None and request.wave == wave.number:
            return self._requested_now(wave, event, step, now)
        if self._last is not None and (request.wave, request.members) == (self._last.number, self._last.members):
            return self._last.requested(event, now)  # no refusal if the partner only tells us of that wave
        if request.wave <= self._seen or not self.may_join(event):
            return [self.refuse(event, "that wave is over", now)]
        self.defer(event)
        return []

    def _requested_now(self, wave: Wave, event: Received, step: int, now: float) -> list[Effect]:
        members = _round_request(event).members
        better = _order(members) < _order(wave.members)
        if not better or wave.has_exchanged or not self.may_join(event):
            return wave.requested(event, now)
        self.lost += wave.lost
        self.current = self._new_wave(wave.number, members, step, now)
        again = [*wave.take_unanswered(), event]
        effects = [Forget(wave.ticket), *self.current.begin(now)]
        return effects + [effect for event in again for effect in self.current.requested(event, now)]

    def may_join(self, event: Received) -> bool:
        """Return whether the named members belong to this run and include both the sender and this peer."""
        members = _round_request(event).members
        return {self._rank, event.sender} <= set(members) <= {self._rank, *self._members.others}

    def refuse(self, event: Received, reason: str, now: float) -> Answer:
        """Return a refusal of ``event``."""
        return Answer(event.key, NotReadyReply(reason), now + self._timeout)

    # --- rounds -----------------------------------------------------------------------------------

    def meeting(self, ticket: int) -> Wave | None:
        """Return the current wave if ``ticket`` is our request of its current round."""
        return self.current if self.current is not None and self.current.is_current(ticket) else None

    def answering(self, key: Hashable) -> Wave | None:
        """Return the current wave if ``key`` is the request that its current round answers."""
        return self.current if self.current is not None and self.current.is_answering(key) else None

    def timer_fired(self, now: float) -> list[Effect]:
        """Handle the timer of a round."""
        return [] if self.current is None else self.current.timer_fired(now)

    def peer_left(self, rank: int, now: float) -> list[Effect]:
        """Handle the departure of ``rank``."""
        return [] if self.current is None else self.current.peer_left(rank, now)

    @property
    def lost_at_end(self) -> int:
        """Rounds of the last wave that were skipped because the partner was missing."""
        return self.current.lost if self.current is not None and self.current.number == LAST_WAVE else 0

    # --- completion -------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether the current wave has no round left and its mean must be taken in."""
        return self.current is not None and self.current.over and not self._taking_in

    def take_in(self) -> list[Effect]:
        """Take the wave's mean into our model; close a wave that merged nothing."""
        assert self.current is not None
        if not self.current.merged:
            return [self._close()]
        self._taking_in = True
        return [ApplyWave(self.current.ticket)]

    def close_if_taken_in(self, ticket: int) -> bool:
        """Close the wave if ``ticket`` is its own, as its mean is in our weights; return whether it was."""
        if self.current is None or self.current.ticket != ticket:
            return False
        self._close()
        return True

    def _close(self) -> Forget:
        wave = self.current
        assert wave is not None
        self._taking_in = wave.number == LAST_WAVE
        if wave.number != LAST_WAVE:
            self.current, self._last = None, wave
            self.lost += wave.lost
            if wave.merged:
                self._sync.completed(wave.merged)
            else:
                self._sync.abandoned()
        return Forget(wave.ticket)

    def give_up(self, reason: str, now: float) -> list[Effect]:
        """Abandon the current wave and refuse waiting requests, except those of the last wave."""
        wave, effects = self.current, list[Effect]()
        waiting = [event for event in self._early if _round_request(event).wave != LAST_WAVE]
        self._early = [event for event in self._early if _round_request(event).wave == LAST_WAVE]
        if wave is not None:
            waiting += wave.take_unanswered()
            self.current, self._taking_in = None, False
            self._sync.abandoned()
            effects.append(Forget(wave.ticket))
        return effects + [self.refuse(event, reason, now) for event in waiting]

    def leave(self, now: float, reason: str = "it leaves") -> list[Effect]:
        """Refuse all waiting requests and take part in no wave any more."""
        waiting = self._early + (self.current.take_unanswered() if self.current else [])
        self._early = []
        return [self.refuse(event, reason, now) for event in waiting]


def _round_request(event: Received) -> RoundRequest:
    assert isinstance(event.request, RoundRequest)
    return event.request


def _order(members: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the sort key of member lists for one wave: the smaller is the better."""
    return -len(members), members
