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
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from gossipx.actor import Answered, Received
from gossipx.effects import Answer, Capture, Effect, Forget
from gossipx.messages import BusyReply, ModelReply, PullRequest
from gossipx.peer.giving import Giving
from gossipx.peer.requests import Requests

GIVING = 0.0008
"""Seconds that one model which is given takes from training, whatever its size: the most that was seen, with steps of
0.5 ms (``bin/bench exchange --only served``)."""
SAVED = 0.2
"""Seconds whose share of training is saved up while nobody asks."""


class Serving:
    """One peer's answers to pulls. Each method says what is to be done.

    Args:
        most: pulls that are answered at a time.
        share: of training's time that answers may take; 1: no limit.
        requests: the role's, for tickets; ``giving`` too.

    Attributes:
        turned_away: pulls that were answered by "busy".
    """

    def __init__(self, most: int, share: float, requests: Requests, giving: Giving):
        self.turned_away = 0
        self._most = most
        self._apart = GIVING / share if share < 1 else 0.0  # seconds from one model that is given to the next
        self._free_at = -math.inf  # when the next may be, had nothing been saved up
        self._requests = requests
        self._giving = giving
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
        return [*effects, self._giving.answer(event, ModelReply(step), self._ticket, now, patience, begins)]

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
