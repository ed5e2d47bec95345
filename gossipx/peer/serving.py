"""What others pull from a peer: how many at once, whose turn it is, and of which version.

At most so many pulls are answered at a time, one of each peer; whoever comes beyond that is told that this peer is busy
and chooses another. Who was turned away has precedence, should it ask again, over all that were served after it: each
of these is told once that this peer is busy too. So nobody is turned away for good, and a place is hardly kept free for
one that does not come back.

All that are served at a time are given one and the same version of the model, so that no more than one older than the
last step boundary is kept, however many ask. Others join in until the first of them has it whole; from then on it is
given only if it is still the latest. So nobody is given a model older than one transfer.

Each model that is given takes a moment from training. While a peer trains, models follow one another so that these
moments stay a small share of its time; who asks more often waits for his turn. A peer that waits for exchanges itself
has no such moments to lose.

Our models on their way to others: how long each may take, and how long it took.

Who asks for a model tells how long it waits, or gives up by itself; but what is kept for it here, a place and a version
of the model, is free again when our own patience ends: nobody holds on to them by asking and not reading.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from gossipx.peer.membership import Membership, Requests
from gossipx.protocol.effects import Answer, Capture, Effect, Forget
from gossipx.protocol.events import Answered, Received
from gossipx.protocol.messages import BusyReply, ModelReply, PullRequest, TakeRequest

SECONDS_PER_MODEL = 0.0008
"""Seconds that one model which is given takes from training, whatever its size: the most that was seen, with steps of
0.5 ms (``bin/bench exchange --only served``)."""
SAVED = 0.2
"""Seconds whose share of training is saved up while nobody asks."""


class Serving:
    """One peer's answers to pulls. Each method says what is to be done.

    Args:
        most: pulls that are answered at a time.
        share: of training's time that answers may take; 1: no limit.
        requests: the role's, for tickets; ``outgoing`` too.

    Attributes:
        turned_away: pulls that were answered by "busy".
    """

    def __init__(self, most: int, share: float, requests: Requests, outgoing: Outgoing):
        self.turned_away = 0
        self._most = most
        self._apart = (
            SECONDS_PER_MODEL / share if share < 1 else 0.0
        )  # seconds from one model that is given to the next
        self._free_at = -math.inf  # when the next may be, had nothing been saved up
        self._requests = requests
        self._outgoing = outgoing
        self._served: dict[Hashable, int] = {}  # ranks, by the keys of their requests
        self._ticket = 0  # of the version that these are given
        self._step = 0  # ... and the iterations that it has seen
        self._given = False  # one of these has it
        self._turns: dict[int, int] = {}  # the last time each rank was served, counted in answers
        self._waiting: dict[int, set[int]] = {}  # who has made way for each that was turned away since

    def requested(self, event: Received, step: int, now: float, trains: bool) -> list[Effect]:
        """Another pulls; ``step``: iterations that our model has seen; ``trains``: whether an answer holds up more."""
        assert isinstance(event.request, PullRequest)
        patience = event.request.patience
        if not self._has_room_for(event.sender, step):
            self.turned_away += 1
            self._waiting[event.sender] = set()
            return [Answer(event.key, BusyReply(), now + patience)]
        effects: list[Effect] = []
        if not self._served:
            self._ticket, self._step, self._given = self._requests.ticket(), step, False
            effects.append(Capture(self._ticket))
        self._served[event.key] = event.sender
        self._turns[event.sender] = 1 + max(self._turns.values(), default=0)
        self._waiting.pop(event.sender, None)
        begins = self._turn(now) if trains else 0.0
        return [*effects, self._outgoing.answer(event, ModelReply(step), self._ticket, now, patience, begins)]

    def _turn(self, now: float) -> float:
        """When the next model may be given."""
        begins = max(self._free_at, now - SAVED)
        self._free_at = begins + self._apart
        return max(begins, now)

    def _has_room_for(self, sender: int, step: int) -> bool:
        if len(self._served) >= self._most or sender in self._served.values():
            return False
        if self._served and self._given and step > self._step:
            return False
        own = self._turns.get(sender, 0)
        before = [yielded for rank, yielded in self._waiting.items() if self._turns.get(rank, 0) < own]
        makes_way = any(sender not in yielded for yielded in before)
        for yielded in before:
            yielded.add(sender)
        return not makes_way

    def answered(self, event: Answered) -> list[Effect]:
        """An answer was handed over, or not; nothing if it is none of these."""
        if self._served.pop(event.key, None) is None:
            return []
        self._given = self._given or event.whole
        return [] if self._served else [Forget(self._ticket)]


class Outgoing:
    """One peer's models under way to others, all but first ones and those of waves.

    Args:
        members: the role's.
    """

    def __init__(self, members: Membership):
        self._members = members
        self._under_way: dict[Hashable, tuple[int, float, float]] = {}  # to whom, since when, and our patience

    def answer(
        self,
        event: Received,
        reply: ModelReply,
        captured: int,
        now: float,
        at_most: float = math.inf,
        begins: float = 0.0,
    ) -> Answer:
        """Give the model held under ticket ``captured`` to whoever asks by ``event``.

        Args:
            at_most: seconds that it is waited for there.
            begins: when to hand it over, if that is later than now.
        """
        patience = self._members.patience(event.sender, given=True)
        since = max(begins, now)
        self._under_way[event.key] = event.sender, since, patience
        bases = event.request.bases if isinstance(event.request, PullRequest | TakeRequest) else ()
        by, taker = min(since + patience, now + at_most), (event.sender, bases)
        return Answer(event.key, reply, by, captured=captured, begins=begins, taker=taker)

    def answered(self, event: Answered, now: float) -> None:
        """An answer was handed over, or not."""
        if event.key not in self._under_way:
            return
        to, since, patience = self._under_way.pop(event.key)
        if event.whole:
            self._members.measured(to, now - since, given=True)
        elif now - since >= patience:
            self._members.was_late(to, given=True)
