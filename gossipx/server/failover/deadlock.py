"""Detection of deadlocks among shards, whose cause is a gradient buffer that is applied by a threshold.

With the sync model ``hybrid:wait=true`` a buffer is applied once it holds K gradients (Hybrid Approach, Algorithm 1,
which has one server only), and each worker waits for its own gradient. With several shards, the workers that could fill
the buffer may all wait elsewhere: for the buffer of another shard, or as the fastest at a shard with bsp, ssp, dsps,
drop or pssp. So a buffer is also applied once each worker has a gradient in it or waits at any shard.

This is complete: if all workers wait, the slowest one waits for a buffer, since every other sync model lets the slowest
continue. To know who waits, a shard with such a buffer keeps a question open to each shard elsewhere. It is answered
when other workers wait there than those that it names, so a shard that nobody asks sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from gossipx.peer.exchange import PeerContext
from gossipx.protocol.effects import Effect, Forget
from gossipx.protocol.events import Received
from gossipx.protocol.messages import NotReadyReply, Reply
from gossipx.protocol.server_messages import WaitingReply, WaitingRequest
from gossipx.server.requests import Deferred, Replies, defer
from gossipx.server.shard import Shard


class DeadlockDetector:
    """Finds and resolves deadlocks of the hosted shards, and answers the questions of others.

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
        self._asked: dict[int, int] = {}  # by shard elsewhere, the rank that has our question or has failed to answer
        self._failed: set[int] = set()
        self._known: dict[int, tuple[tuple[int, int], ...]] = {}  # by shard elsewhere, the workers that wait there
        self._questions: list[tuple[Deferred, WaitingRequest]] = []  # of others, not answered yet

    @property
    def is_asked(self) -> bool:
        """Whether a question of another peer is open."""
        return bool(self._questions)

    def requested(self, event: Received, now: float) -> list[Effect]:
        """Handle another peer's question; :meth:`check` answers it."""
        assert isinstance(event.request, WaitingRequest)
        self._questions.append((defer(event.key, event.request.patience, now), event.request))
        return []

    def check(self, size: int, now: float) -> list[Effect]:
        """Apply buffers, answer questions and ask others, after any event that may have created a deadlock.

        Args:
            size: the number of shards.
        """
        elsewhere = set(range(size)) - set(self._shards)
        effects: list[Effect] = []
        for shard in self._shards.values():
            if shard.clock.awaits_gradients:
                waits = [one for index in elsewhere for one in self._known.get(index, ())]
                here = [one for other in self._shards.values() for one in other.clock.blocked]
                effects += shard.resolve_deadlock([*waits, *here])
        effects += self._answer(now)
        if any(shard.clock.awaits_gradients for shard in self._shards.values()):
            effects += [self._ask(index, now) for index in elsewhere if self._asked.get(index) != self._holder(index)]
        self._known = {index: waits for index, waits in self._known.items() if index in self._asked}
        return effects

    def _answer(self, now: float) -> list[Effect]:
        """Answer the questions for which there is news, and those that have waited for long."""
        effects: list[Effect] = []
        questions, self._questions = self._questions, []
        for deferred, request in questions:
            shard = self._shards.get(request.shard)
            if shard is None:
                effects.append(deferred.answer(NotReadyReply("it does not hold this shard")))
            elif shard.clock.blocked != request.known or deferred.put_off_at <= now:
                effects.append(deferred.answer(WaitingReply(shard.clock.blocked)))
            else:
                self._questions.append((deferred, request))
        return effects

    def _ask(self, index: int, now: float) -> Effect:
        self._asked[index] = rank = self._holder(index)
        question = WaitingRequest(index, self._known.get(index, ()), self._context.timeout)
        return self._replies.send(rank, question, now, now + question.patience, partial(self._answered, index))

    def _answered(self, index: int, ticket: int, to: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle the reply of another shard's holder; :meth:`check` asks again."""
        if self._asked.get(index) == to:
            if isinstance(reply, WaitingReply):
                del self._asked[index]
                self._known[index] = reply.workers
            else:
                self._failed.add(index)
                self._known.pop(index, None)
        return [Forget(ticket)]

    def repeat_failed(self) -> None:
        """Let the next :meth:`check` ask the questions again that have failed."""
        for index in self._failed:
            self._asked.pop(index, None)
        self._failed.clear()
