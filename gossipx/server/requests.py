"""Open requests in server mode: our own, until they are answered, and those of others that are answered later.

A peer in server mode has many open requests, for several purposes. Each part registers a handler when it sends a
request, so that its reply goes straight to that part.

A sender cannot tell a slow peer from a dead one. So when a request has waited for half of its sender's timeout, it is
answered with a BusyReply, which asks the sender to send it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from gossipx.peer.membership import Requests
from gossipx.protocol.effects import Answer, Effect, Forget, Send
from gossipx.protocol.messages import AcceptReply, BusyReply, NotReadyReply, Reply, Request

Handler = Callable[[int, int, Reply | None, float], list[Effect]]
"""A function that handles the outcome of a request: its ticket, the rank it was sent to, the reply (None: it failed),
and the time.
"""


class Replies:
    """The handlers of open requests, by ticket.

    Args:
        requests: the role's open requests; numbers what is sent.
    """

    def __init__(self, requests: Requests):
        self._requests = requests
        self._handlers: dict[int, tuple[int, Handler]] = {}

    def send(self, to: int, request: Request, now: float, deadline: float, handler: Handler) -> Send:
        """Return the effect that sends a request, and register ``handler`` for its outcome."""
        send = self._requests.send(to, request, now, deadline)
        self._handlers[send.ticket] = to, handler
        return send

    def forget(self, tickets: Iterable[int]) -> None:
        """Drop the handlers of requests whose outcome no longer matters."""
        for ticket in tickets:
            self._handlers.pop(ticket, None)

    def handle(self, ticket: int, reply: Reply | None, now: float) -> list[Effect]:
        """Call the handler of a request that was answered or failed, unless the outcome no longer matters."""
        if ticket not in self._handlers:
            return [Forget(ticket)]
        to, handler = self._handlers.pop(ticket)
        return handler(ticket, to, reply, now)


def outcome(problem: str) -> Reply:
    """Return the reply to a request that has succeeded, or has failed because of ``problem``."""
    return NotReadyReply(problem) if problem else AcceptReply()


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
