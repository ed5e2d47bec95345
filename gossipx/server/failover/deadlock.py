"""Deadlocks among shards: each of two gradient buffers waits for workers that wait for the other one.

Where a worker goes on when its gradient is applied, and a buffer is applied when it has K gradients (Hybrid Approach,
Algorithm 1, which knows one server), two shards may have different gradients in their buffers: workers 0 and 1 wait
for a third gradient at one, workers 2 and 3 at the other. As soon as a pull waits at a shard, that asks the others who
waits there; if that is everybody else, its buffer is applied as it is. Of the events that lead there one is the last,
and the shard at which that is finds all others as they stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from gossipx.peer.exchange import PeerContext
from gossipx.protocol.effects import Effect, Forget
from gossipx.protocol.messages import Reply
from gossipx.protocol.server_messages import WaitingReply, WaitingRequest
from gossipx.server.replies import Replies
from gossipx.server.shard import Shard


@dataclass
class _Round:
    """The others are asked once.

    Attributes:
        of: the shard's :attr:`gossipx.server.sync_models.clock.Clock.moment` by which it began.
        elsewhere: by worker that waits at another shard, the iteration that it has pushed last.
        open: tickets of questions that are not answered.
        whole: whether all have answered so far.
    """

    of: object
    elsewhere: dict[int, int]
    open: set[int] = field(default_factory=set)
    whole: bool = True


class DeadlockDetector:
    """Finds them, and has them end.

    Args:
        context: of the role.
        replies: takes the handlers of its questions.
        shards: that lie here.
        holder: gives the rank that a shard is asked of.
    """

    def __init__(
        self, context: PeerContext, replies: Replies, shards: Mapping[int, Shard], holder: Callable[[int], int]
    ):
        self._context = context
        self._replies = replies
        self._shards = shards
        self._holder = holder
        self._rounds: dict[int, _Round] = {}

    def look(self, size: int, now: float) -> list[Effect]:
        """After any event: ask where it is not known yet whether workers wait elsewhere.

        Args:
            size: how many shards there are.
        """
        effects: list[Effect] = []
        for index, shard in list(self._shards.items()):
            effects += self._look(index, shard, size, now)
        return effects

    def _look(self, index: int, shard: Shard, size: int, now: float) -> list[Effect]:
        known = self._rounds.get(index)
        if size < 2 or not shard.clock.stuck or (known is not None and known.of == shard.clock.moment):
            return []
        here = [other.clock.stuck for number, other in self._shards.items() if number != index]
        begun = self._rounds[index] = _Round(shard.clock.moment, {})
        for stuck in here:
            begun.elsewhere.update(stuck)
        asks: list[Effect] = []
        for other in set(range(size)) - set(self._shards):
            question = WaitingRequest(other)
            handler = partial(self._answered, index, begun)
            send = self._replies.send(self._holder(other), question, now, now + self._context.timeout, handler)
            begun.open.add(send.ticket)
            asks.append(send)
        return [*asks, *self._ended(index, begun)]

    def _answered(
        self, index: int, asked: _Round, ticket: int, to: int, reply: Reply | None, now: float
    ) -> list[Effect]:
        """Handle the answer of another shard's holder."""
        asked.open.discard(ticket)
        if self._rounds.get(index) is not asked:
            return [Forget(ticket)]  # there is a later round
        if isinstance(reply, WaitingReply):
            asked.elsewhere.update(reply.workers)
        else:
            asked.whole = False
        return [Forget(ticket), *(self._ended(index, asked) if reply is not None else [])]

    def _ended(self, index: int, asked: _Round) -> list[Effect]:
        shard = self._shards.get(index)
        if asked.open or shard is None or shard.clock.moment != asked.of:
            return []
        return shard.waited_for(asked.elsewhere)

    def again(self) -> None:
        """Ask anew where an answer has not come; :meth:`look` follows."""
        self._rounds = {index: one for index, one in self._rounds.items() if one.whole or one.open}
