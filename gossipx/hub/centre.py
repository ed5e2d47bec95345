"""The hub's side of elastic averaging: the centre x̃, into which workers' models are taken one after the other.

Each exchange gives the worker the centre as it was, and moves the centre by a share of the same difference (Adaptive
Communication, Algorithm 1, lines 5 and 6)::

    x̃ ← x̃ + β/p · (x_i − x̃)

Eq. 2 is the sum of that over all p workers. The worker moves by α (x̃ − x_i): with β = p·α the sum x_i + x̃ stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from gossipx.peer.membership import Requests
from gossipx.protocol.effects import Answer, Capture, Effect, Keep, Merge
from gossipx.protocol.events import Merged, Received
from gossipx.protocol.messages import CentreRequest, ElasticRequest, ModelReply, NotReadyReply


@dataclass
class _Waiting:
    """A model that is here and not yet in the centre."""

    event: Received
    ticket: int


class Centre:
    """What the hub holds. Each method says what is to be done.

    Args:
        requests: the role's, for tickets.
        share: β/p, what of the difference one exchange moves the centre by.

    Attributes:
        exchanges: models that were taken in.
        step: the most iterations that one of these has seen.
    """

    def __init__(self, requests: Requests, share: float):
        self.exchanges = 0
        self.step = 0
        self.ticket = 0  # under which the centre is held; 0: there is none yet
        self._requests = requests
        self._share = share
        self._latest: dict[int, tuple[int, int]] = {}  # by rank, incarnation and number of its last exchange
        self._merging: _Waiting | None = None
        self._waiting: deque[_Waiting] = deque()

    def begin(self) -> list[Effect]:
        """The run begins: the centre is the model that all begin with, or the one that a checkpoint has kept."""
        if self.ticket:
            return []
        self.ticket = self._requests.ticket()
        return [Capture(self.ticket, saved=True)]

    def state_dict(self) -> dict[str, int]:
        """What is counted, as plain data; the centre itself is held elsewhere."""
        return {"exchanges": self.exchanges, "step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Count on from what :meth:`state_dict` gave."""
        self.exchanges, self.step = state["exchanges"], state["step"]

    def requested(self, event: Received, now: float) -> list[Effect]:
        """A worker brings its model, or asks for the centre."""
        if not self.ticket:
            return [Answer(event.key, NotReadyReply("it has no centre yet"), now + 1)]
        if isinstance(event.request, CentreRequest):
            return [Answer(event.key, ModelReply(self.step), now + event.request.patience, captured=self.ticket)]
        assert isinstance(event.request, ElasticRequest)
        name = event.request.incarnation, event.request.number
        latest = self._latest.get(event.sender)
        if latest is not None and latest[0] == name[0] and latest[1] >= name[1]:
            return [Answer(event.key, NotReadyReply("it has taken that model in already"), now + 1)]
        self._latest[event.sender] = name
        ticket = self._requests.ticket()
        self._waiting.append(_Waiting(event, ticket))
        return [Keep(event.key, ticket), *self._next(now)]

    @property
    def merging(self) -> int | None:
        """Whose model is being taken in."""
        return None if self._merging is None else self._merging.event.sender

    def merged(self, event: Merged, now: float) -> list[Effect] | None:
        """A model was taken in, or not, as it holds NaN or Inf; None: it was none of these."""
        if self._merging is None or event.ticket != self._merging.ticket:
            return None
        self._merging = None
        self.exchanges += event.sound
        return self._next(now)

    def _next(self, now: float) -> list[Effect]:
        """Take the next one in, unless one is being taken in: each must find what the one before has left."""
        if self._merging is not None or not self._waiting:
            return []
        waiting = self._waiting.popleft()
        request = waiting.event.request
        assert isinstance(request, ElasticRequest)
        self._merging = waiting
        self.step = max(self.step, request.step)
        reply, ticket = ModelReply(self.step), waiting.ticket
        # As it is before the merge.
        given = Answer(waiting.event.key, reply, now + request.patience, captured=self.ticket, differs=ticket)
        return [given, Merge(ticket, self.ticket, own=1 - self._share, theirs=self._share)]
