"""Detection of deadlocks among shards whose gradient buffers wait for each other's workers.

With the hybrid sync model, workers continue once their gradients are applied, and a buffer is applied once it has K
gradients (Hybrid Approach, Algorithm 1, which has one server only). Two shards may have different gradients in their
buffers: workers 0 and 1 wait for a third gradient at one shard, workers 2 and 3 at the other. So whenever a pull waits
at a shard, the shard asks all others which workers wait there. If no worker is left that could fill its buffer, it
applies the buffer as it is. The last event that leads to a deadlock starts such a round, and that round sees the final
state of all other shards.
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
    """One round of questions to all other shards.

    Attributes:
        version: the :attr:`gossipx.server.sync_models.clock.Clock.wait_version` at which it began.
        elsewhere: for each worker that waits at another shard, the last iteration that it pushed.
        open: tickets of unanswered questions.
        complete: no question has failed.
    """

    version: object
    elsewhere: dict[int, int]
    open: set[int] = field(default_factory=set)
    complete: bool = True


class DeadlockDetector:
    """Finds deadlocks of the hosted shards and resolves them.

    Args:
        context: the role's.
        replies: the table of reply handlers.
        shards: the hosted shards.
        holder: returns the rank that requests for a shard are sent to.
    """

    def __init__(
        self, context: PeerContext, replies: Replies, shards: Mapping[int, Shard], holder: Callable[[int], int]
    ):
        self._context = context
        self._replies = replies
        self._shards = shards
        self._holder = holder
        self._rounds: dict[int, _Round] = {}

    def check(self, size: int, now: float) -> list[Effect]:
        """Ask the other shards, after any event, where that may have created a deadlock.

        Args:
            size: the number of shards.
        """
        effects: list[Effect] = []
        for index, shard in list(self._shards.items()):
            effects += self._check(index, shard, size, now)
        return effects

    def _check(self, index: int, shard: Shard, size: int, now: float) -> list[Effect]:
        known = self._rounds.get(index)
        if size < 2 or not shard.clock.stuck or (known is not None and known.version == shard.clock.wait_version):
            return []
        here = [other.clock.stuck for number, other in self._shards.items() if number != index]
        started = self._rounds[index] = _Round(shard.clock.wait_version, {})
        for stuck in here:
            started.elsewhere.update(stuck)
        asks: list[Effect] = []
        for other in set(range(size)) - set(self._shards):
            question = WaitingRequest(other)
            handler = partial(self._answered, index, started)
            send = self._replies.send(self._holder(other), question, now, now + self._context.timeout, handler)
            started.open.add(send.ticket)
            asks.append(send)
        return [*asks, *self._ended(index, started)]

    def _answered(
        self, index: int, round_: _Round, ticket: int, to: int, reply: Reply | None, now: float
    ) -> list[Effect]:
        """Handle the reply of another shard's holder."""
        round_.open.discard(ticket)
        if self._rounds.get(index) is not round_:
            return [Forget(ticket)]  # a later round has begun
        if isinstance(reply, WaitingReply):
            round_.elsewhere.update(reply.workers)
        else:
            round_.complete = False
        return [Forget(ticket), *(self._ended(index, round_) if reply is not None else [])]

    def _ended(self, index: int, round_: _Round) -> list[Effect]:
        shard = self._shards.get(index)
        if round_.open or shard is None or shard.clock.wait_version != round_.version:
            return []
        return shard.resolve_deadlock(round_.elsewhere)

    def repeat_failed(self) -> None:
        """Discard rounds with a failed question, so that the next :meth:`check` repeats them."""
        self._rounds = {index: one for index, one in self._rounds.items() if one.complete or one.open}
