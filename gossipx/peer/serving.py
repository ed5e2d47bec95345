"""Serving: how a peer answers the pulls of others, under limits on concurrency, memory and time.

At most ``most`` pulls are answered at a time, one per peer; further ones get Busy, and their senders try another peer.
To avoid starvation, a peer that was turned away has precedence: each peer that was served after it is told Busy once
too, until the waiting peer returns. A slot is thus hardly ever left unused for a peer that does not return.

All pulls of one fragment under way get the same captured version of it, so one copy is enough. Others may join until
the first receiver has all of it; after that, only while it is still the latest version. So no peer gets a model that is
older than one transfer.

Each served model costs training a moment. While a peer trains, models are therefore spaced so that these moments stay a
small share of its time, and a peer that pulls more often waits for its turn. In blocking mode there is no limit.

A requester states how long it waits, but the slot and the captured model are released after our own deadline: a peer
cannot hold them by requesting a model and not reading it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from gossipx.figures import Counters
from gossipx.peer.membership import Membership, Requests
from gossipx.protocol.effects import Answer, Capture, Effect, Forget
from gossipx.protocol.events import Answered, Received
from gossipx.protocol.messages import BusyReply, ModelReply, PullRequest, TakeRequest

SECONDS_PER_MODEL = 0.0008
"""Seconds of training time that serving one model costs, whatever its size: the maximum measured, with steps of 0.5 ms
(``bin/bench exchange --only served``)."""
SAVED = 0.2
"""Seconds for which unused serving time accumulates."""
INITIAL_MODELS = 2
"""Initial models sent at a time. Peers that have adopted one send it on, so that N peers have it after about log N
transfers. With one at a time, equal links would spread it fastest, but a slow receiver would hold up all others."""


@dataclass
class _Version:
    """The captured version of one fragment of the model that pulls under way get.

    Attributes:
        ticket: it is captured under this.
        step: iterations that it has seen.
        is_delivered: whether a receiver has all of it.
        keys: of the requests that are being answered.
    """

    ticket: int
    step: int
    is_delivered: bool = False
    keys: set[Hashable] = field(default_factory=set)


class Serving:
    """The answers of one peer to pulls. Methods return the effects to carry out.

    Args:
        most: pulls that are answered at a time.
        share: share of training time that answers may take; 1: no limit.
        requests: the role's open requests, which allocate tickets.
        outgoing: the role's models under way.
        counts: counts the pulls that are turned away.
    """

    def __init__(self, most: int, share: float, requests: Requests, outgoing: Outgoing, counts: Counters):
        self._most = most
        self._spacing = SECONDS_PER_MODEL / share if share < 1 else 0.0  # seconds between served models
        self._free_at = -math.inf  # when the next may be served, ignoring saved time
        self._requests = requests
        self._outgoing = outgoing
        self._counts = counts
        self._served: dict[Hashable, int] = {}  # request key to rank
        self._versions: dict[int, _Version] = {}  # by fragment
        self._number = 0  # of the last pull that was answered or turned away
        self._turns: dict[int, int] = {}  # by rank, the number of its last answer
        self._waiting: dict[int, int] = {}  # by rank turned away since, the number of that pull; ascending
        self._made_way: dict[int, tuple[int, int]] = {}  # by rank, the numbers of the last pull and of its own last
        # answer when it was last asked to make way for others

    def requested(self, event: Received, step: int, now: float, trains: bool) -> list[Effect]:
        """Handle a pull.

        Args:
            step: iterations that our model has seen.
            trains: whether this peer is training, so that models must be spaced.
        """
        assert isinstance(event.request, PullRequest)
        patience, fragment = event.request.patience, event.request.fragment
        version = self._versions.get(fragment)
        has_room = self._has_room_for(event.sender, version, step)
        self._number += 1
        self._waiting.pop(event.sender, None)
        if not has_room:
            self._counts.add("busy_answers")
            self._waiting[event.sender] = self._number
            return [Answer(event.key, BusyReply(), now + patience)]
        effects: list[Effect] = []
        if version is None:
            version = self._versions[fragment] = _Version(self._requests.ticket(), step)
            effects.append(Capture(version.ticket, fragment=fragment))
        version.keys.add(event.key)
        self._served[event.key] = event.sender
        self._turns[event.sender] = self._number
        begins = self._turn(now) if trains else 0.0
        return [*effects, self._outgoing.answer(event, ModelReply(step), version.ticket, now, patience, begins)]

    def _turn(self, now: float) -> float:
        """Reserve the time at which the next model may be served."""
        begins = max(self._free_at, now - SAVED)
        self._free_at = begins + self._spacing
        return max(begins, now)

    def _has_room_for(self, sender: int, version: _Version | None, step: int) -> bool:
        if len(self._served) >= self._most or sender in self._served.values():
            return False
        if version is not None and version.is_delivered and step > version.step:
            return False
        return not self._makes_way(sender)

    def _makes_way(self, sender: int) -> bool:
        """Return whether a peer that was turned away has precedence: it was last served before ``sender`` was, and
        ``sender`` has not made way for it yet.
        """
        own, turn_of = self._turns.get(sender, 0), self._turns.get
        if not own:
            return False
        seen, own_then = self._made_way.get(sender, (0, own))
        self._made_way[sender] = self._number, own
        for rank, number in reversed(self._waiting.items()):
            if number <= seen:
                break
            if turn_of(rank, 0) < own:
                return True
        # Those turned away earlier had precedence then, unless they were served later than sender at that time.
        return own > own_then and any(own_then <= turn_of(rank, 0) < own for rank in self._waiting)

    def answered(self, event: Answered) -> list[Effect]:
        """Handle the end of an answer, delivered or not; ignore those to other requests."""
        if self._served.pop(event.key, None) is None:
            return []
        fragment, version = next(item for item in self._versions.items() if event.key in item[1].keys)
        version.keys.discard(event.key)
        version.is_delivered = version.is_delivered or event.whole
        if version.keys:
            return []
        del self._versions[fragment]
        return [Forget(version.ticket)]


class Outgoing:
    """Our models under way to others, except those of waves: their deadlines and transfer times.

    Args:
        members: the role's membership list.
    """

    def __init__(self, members: Membership):
        self._members = members
        self._under_way: dict[Hashable, tuple[int, float, float]] = {}  # by request key: receiver, start, timeout
        self._initial: set[Hashable] = set()  # keys of the initial models under way

    def answer(
        self,
        event: Received,
        reply: ModelReply,
        captured: int,
        now: float,
        at_most: float = math.inf,
        begins: float = 0.0,
    ) -> Answer:
        """Return the effect that answers ``event`` with the model captured under ticket ``captured``.

        Args:
            at_most: seconds that the requester waits.
            begins: earliest time at which the model is sent.
        """
        patience = self._members.patience(event.sender, outgoing=True)
        since = max(begins, now)
        self._under_way[event.key] = event.sender, since, patience
        bases = event.request.bases if isinstance(event.request, PullRequest | TakeRequest) else ()
        by, receiver = min(since + patience, now + at_most), (event.sender, bases)
        return Answer(event.key, reply, by, captured=captured, begins=begins, receiver=receiver)

    def answer_initial(self, event: Received, step: int, now: float) -> Answer:
        """Return the effect that answers a peer without a model, by ours of iteration ``step`` or by Busy."""
        by = now + self._members.model_timeout
        if len(self._initial) >= INITIAL_MODELS:
            return Answer(event.key, BusyReply(), by)
        self._initial.add(event.key)
        return Answer(event.key, ModelReply(step), by, whole_model=True)

    def answered(self, event: Answered, now: float) -> None:
        """Record the transfer time of an answer, or that it missed its deadline."""
        self._initial.discard(event.key)
        if event.key not in self._under_way:
            return
        to, since, patience = self._under_way.pop(event.key)
        if event.whole:
            self._members.record_transfer(to, now - since, now, outgoing=True)
        elif now - since >= patience:
            self._members.record_late(to, outgoing=True)
