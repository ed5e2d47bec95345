"""The hub's side of elastic averaging: the centre x̃, into which the workers' models are merged one after the other.

Each exchange returns the centre as it was to the worker, and moves it by a share of the same difference (Adaptive
Communication, Algorithm 1, lines 5 and 6)::

    x̃ ← x̃ + β/p · (x_i − x̃)

Eq. 2 is the sum of that over all p workers. The worker moves by α (x̃ − x_i): β = p·α conserves the sum x_i + x̃.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from gossipx.peer.membership import Requests
from gossipx.protocol.effects import Answer, Capture, Effect, Keep, Merge
from gossipx.protocol.events import Merged, Received
from gossipx.protocol.messages import BusyReply, CentreRequest, ElasticRequest, ModelReply, NotReadyReply


@dataclass
class _Waiting:
    """A worker's model that has arrived and is not yet merged."""

    event: Received
    ticket: int


class Centre:
    """The centre, held by the hub. Methods return the effects to carry out.

    Args:
        requests: the role's open requests, which allocate tickets.
        share: β/p, the share of the difference by which one exchange moves the centre.

    Attributes:
        exchanges: number of models merged.
        step: highest number of iterations that a merged model has seen.
        ticket: the captured model that is the centre; 0: none yet.
    """

    def __init__(self, requests: Requests, share: float):
        self.exchanges = 0
        self.step = 0
        self.ticket = 0
        self._requests = requests
        self._share = share
        self._latest: dict[int, tuple[int, int]] = {}  # by rank: incarnation and number of its last exchange
        self._merging: _Waiting | None = None
        self._waiting: deque[_Waiting] = deque()

    def begin(self) -> list[Effect]:
        """Create the centre, as the run starts: the initial model, or the centre saved in a checkpoint."""
        if self.ticket:
            return []
        self.ticket = self._requests.ticket()
        return [Capture(self.ticket, saved=True)]

    def state_dict(self) -> dict[str, int]:
        """Return the counters as plain data; the driver saves the centre itself."""
        return {"exchanges": self.exchanges, "step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore :meth:`state_dict`."""
        self.exchanges, self.step = state["exchanges"], state["step"]

    def requested(self, event: Received, now: float) -> list[Effect]:
        """Handle an ElasticRequest or a CentreRequest."""
        assert isinstance(event.request, ElasticRequest | CentreRequest)
        if not self.ticket:
            # A worker may start before the last message of the START barrier reaches the hub.
            return [Answer(event.key, BusyReply(), now + event.request.patience)]
        if isinstance(event.request, CentreRequest):
            return [Answer(event.key, ModelReply(self.step), now + event.request.patience, captured=self.ticket)]
        name = event.request.incarnation, event.request.number
        latest = self._latest.get(event.sender)
        if latest is not None and latest[0] == name[0] and latest[1] >= name[1]:
            return [Answer(event.key, NotReadyReply("it has already merged that model"), now + 1)]
        self._latest[event.sender] = name
        ticket = self._requests.ticket()
        self._waiting.append(_Waiting(event, ticket))
        return [Keep(event.key, ticket), *self._next(now)]

    @property
    def merging(self) -> int | None:
        """The rank of the worker whose model is being merged; None if none is."""
        return None if self._merging is None else self._merging.event.sender

    def merged(self, event: Merged, now: float) -> list[Effect] | None:
        """Handle the end of a merge; it failed if the model holds NaN or Inf. Return None if the merge is not ours."""
        if self._merging is None or event.ticket != self._merging.ticket:
            return None
        self._merging = None
        self.exchanges += event.sound
        return self._next(now)

    def _next(self, now: float) -> list[Effect]:
        """Start the next merge unless one is under way: each exchange must see the result of the one before."""
        if self._merging is not None or not self._waiting:
            return []
        waiting = self._waiting.popleft()
        request = waiting.event.request
        assert isinstance(request, ElasticRequest)
        self._merging = waiting
        self.step = max(self.step, request.step)
        reply, ticket = ModelReply(self.step), waiting.ticket
        # The answer comes before the merge, so it carries the centre as it was.
        given = Answer(waiting.event.key, reply, now + request.patience, captured=self.ticket)
        return [given, Merge(ticket, self.ticket, own=1 - self._share, theirs=self._share)]
