"""Requests to shards elsewhere about their sync models: to switch them, and to find deadlocks.

A *switch* of sync models is requested at any peer. A *deadlock* among shards is caused by a gradient buffer that is
applied by a threshold. With the sync model ``hybrid:wait=true`` a buffer is applied once it holds K gradients (Hybrid
Approach, Algorithm 1, which has one server only), and each worker waits for its own gradient. With several shards, the
workers that could fill the buffer may all wait elsewhere: for the buffer of another shard, or as the fastest at a shard
with bsp, ssp, dsps, drop or pssp. So a buffer is also applied once each worker has a gradient in it or waits at any
shard.

This is complete: if all workers wait, the slowest one waits for a buffer, since every other sync model lets the slowest
continue. To know who waits, a shard with such a buffer keeps a question open to each shard elsewhere. It is answered
when other workers wait there than those that it names, so a shard that nobody asks sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from gossipx.errors import UsageError
from gossipx.peer.exchange import PeerContext
from gossipx.protocol.effects import Answer, Effect, Forget, ReportSwitch
from gossipx.protocol.events import Received, SwitchSync
from gossipx.protocol.messages import AcceptReply, NotReadyReply, Reply
from gossipx.protocol.server_messages import SwitchRequest, WaitingReply, WaitingRequest
from gossipx.server.requests import Deferred, Replies, defer
from gossipx.server.shard import Shard
from gossipx.server.sync_models import check_workers, sync_model_from


class SyncModelSwitch:
    """One peer's part in switches of sync models. Methods return the effects to carry out.

    Args:
        context: the role's.
        replies: the table of reply handlers.
        shards: the hosted shards.
        holder: returns the rank that requests for a shard are sent to.
        workers: number of workers of the run.
        rate: the learning rate, for sync models that depend on it; None: unknown.
        obstacle: returns why no model can be switched now, or an empty string.
    """

    def __init__(
        self,
        context: PeerContext,
        replies: Replies,
        shards: Mapping[int, Shard],
        holder: Callable[[int], int],
        workers: int,
        rate: float | None,
        obstacle: Callable[[], str],
    ):
        self._context = context
        self._replies = replies
        self._shards = shards
        self._holder, self._workers, self._rate, self._obstacle = holder, workers, rate, obstacle
        self._open: dict[int, int] = {}  # the number of the switch, by ticket
        self._problems: dict[int, str] = {}  # of running switches, by number

    def switch(self, event: SwitchSync, count: int, now: float) -> list[Effect]:
        """Handle this peer's request to switch one shard, or all ``count`` of them."""
        wanted = range(count) if event.shard is None else [event.shard]
        if not all(shard < count for shard in wanted):
            return [ReportSwitch(event.number, f"unknown shard: shards are 0 to {count - 1}")]
        effects: list[Effect] = []
        self._problems[event.number] = ""
        for index in wanted:
            if index in self._shards:
                made, problem = self._switch(self._shards[index], event.sync, event.apply, event.pulls)
                effects += made
                self._problems[event.number] = self._problems[event.number] or problem
                continue
            request = SwitchRequest(index, event.sync, event.apply, event.pulls)
            until = now + self._context.timeout
            send = self._replies.send(self._holder(index), request, now, until, self._answered)
            self._open[send.ticket] = event.number
            effects.append(send)
        return [*effects, *self._done(event.number)]

    def _switch(self, shard: Shard, sync: str, apply: str, pulls: str) -> tuple[list[Effect], str]:
        """Switch a hosted shard. Return the effects, and why it failed or an empty string."""
        if obstacle := self._obstacle():
            return [], obstacle
        try:
            model = sync_model_from(sync)
            check_workers(model, self._workers)
            if model.needs_rate and self._rate is not None:
                model = model.resolved(self._rate)
            return shard.switch(model, apply, pulls), ""
        except UsageError as error:
            return [], str(error)

    def requested(self, event: Received, shard: Shard, now: float) -> list[Effect]:
        """Handle another peer's request to switch a hosted shard."""
        request = event.request
        assert isinstance(request, SwitchRequest)
        made, problem = self._switch(shard, request.sync, request.apply, request.pulls)
        reply = NotReadyReply(problem) if problem else AcceptReply()
        return [*made, Answer(event.key, reply, now + self._context.timeout)]

    def _answered(self, ticket: int, to: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle a server's reply."""
        problem = reply.reason if isinstance(reply, NotReadyReply) else ""
        problem = "a server does not answer" if reply is None else problem
        number = self._open.pop(ticket)
        self._problems[number] = self._problems[number] or problem
        return [Forget(ticket), *self._done(number)]

    def _done(self, number: int) -> list[Effect]:
        return [] if number in self._open.values() else [ReportSwitch(number, self._problems.pop(number))]


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
