"""Our requests that are not answered yet."""

from __future__ import annotations

from gossipx.effects import Send
from gossipx.messages import Request


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
