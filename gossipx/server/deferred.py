"""Requests that are answered later.

A sender cannot tell a slow peer from a dead one. So when a request has waited for half of its sender's timeout, it is
answered with a BusyReply, which asks the sender to send it again.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from gossipx.protocol.effects import Answer, Effect
from gossipx.protocol.messages import BusyReply, Reply


@dataclass(frozen=True)
class Deferred:
    """A request that has not been answered yet.

    Attributes:
        key: identifies the request.
        deadline: when its sender gives up.
        put_off_at: when to answer with a BusyReply; infinite: never.
    """

    key: Hashable
    deadline: float
    put_off_at: float = math.inf

    def answer(self, reply: Reply) -> Answer:
        """Return the effect that answers the request."""
        return Answer(self.key, reply, self.deadline)


def defer(key: Hashable, patience: float, now: float) -> Deferred:
    """Return a deferred request whose sender waits for ``patience`` seconds."""
    return Deferred(key, now + patience, now + patience / 2)


def put_off(deferred: Deferred | None) -> list[Effect]:
    """Answer a request, if there is one, with a BusyReply, so that its sender sends it again."""
    return [] if deferred is None else [deferred.answer(BusyReply())]
