"""Requests that are answered later.

A sender cannot tell a peer that is slow to answer from one that is gone. So a request that has waited for half of its
sender's patience is put off: the sender is told to ask again.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from gossipx.protocol.effects import Answer, Effect
from gossipx.protocol.messages import BusyReply, Reply


@dataclass(frozen=True)
class Deferred:
    """A request that is not answered yet.

    Attributes:
        key: of the request.
        deadline: its sender waits until then.
        until: it is to be put off then.
    """

    key: Hashable
    deadline: float
    until: float = math.inf

    def answer(self, reply: Reply) -> Answer:
        """Return the effect that answers it."""
        return Answer(self.key, reply, self.deadline)


def defer(key: Hashable, patience: float, now: float) -> Deferred:
    """Answer a request later, whose sender waits for ``patience`` seconds."""
    return Deferred(key, now + patience, now + patience / 2)


def put_off(deferred: Deferred | None) -> list[Effect]:
    """Have a request sent again, if there is one."""
    return [] if deferred is None else [deferred.answer(BusyReply())]
