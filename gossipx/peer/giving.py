"""Our models on their way to others: how long each may take, and how long it took.

Who asks for a model tells how long it waits, or gives up by itself; but what is kept for it here, a place and a version
of the model, is free again when our own patience ends: nobody holds on to them by asking and not reading.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from gossipx.actor import Answered, Received
from gossipx.effects import Answer
from gossipx.messages import ModelReply, PullRequest, TakeRequest
from gossipx.peer.membership import Membership


class Giving:
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
