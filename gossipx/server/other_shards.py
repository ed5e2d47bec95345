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
from dataclasses import dataclass, field
from functools import partial

from gossipx.errors import UsageError
from gossipx.peer.exchange import PeerContext
from gossipx.protocol.effects import Answer, Effect, Forget, ReportSwitch
from gossipx.protocol.events import Received, SwitchSync
from gossipx.protocol.messages import NotReadyReply, Reply
from gossipx.protocol.server_messages import SwitchRequest, WaitingReply, WaitingRequest
from gossipx.server.requests import Deferred, Replies, defer, outcome
from gossipx.server.shard import Shard
from gossipx.server.sync_models import check_workers, sync_model_from


@dataclass
class SyncModelSwitch:
    """One peer's part in switches of sync models. Methods return the effects to carry out.

    Attributes:
        context: the role's.
        replies: the table of reply handlers.
        shards: the hosted shards.
        holder: returns the rank that requests for a shard are sent to.
        workers: number of workers of the run.
        rate: the learning rate, for sync models that depend on it; None: unknown.
        obstacle: returns why no model can be switched now, or an empty string.
    """

    context: PeerContext
    replies: Replies
    shards: Mapping[int, Shard]
    holder: Callable[[int], int]
    workers: int
    rate: float | None
    obstacle: Callable[[], str]
    _open: dict[int, int] = field(default_factory=dict)  # the number of the switch, by ticket
    _problems: dict[int, str] = field(default_factory=dict)  # of running switches, by number

    def switch(self, event: SwitchSync, count: int, now: float) -> list[Effect]:
        """Handle this peer's request to switch one shard, or all ``count`` of them."""
        wanted = range(count) if event.shard is None else [event.shard]
        if not all(shard < count for shard in wanted):
            return [ReportSwitch(event.number, f"unknown shard: shards are 0 to {count - 1}")]
        effects: list[Effect] = []
        self._problems[event.number] = ""
        for index in wanted:
            if index in self.shards:
                made, problem = self._switch(self.shards[index], event.sync, event.apply, event.pulls)
                effects += made
                self._problems[event.number] = self._problems[event.number] or problem
                continue
            request = SwitchRequest(index, event.sync, event.apply, event.pulls)
            until = now + self.context.timeout
            send = self.replies.send(self.holder(index), request, now, until, self._answered)
            self._open[send.ticket] = event.number
            effects.append(send)
        return [*effects, *self._done(event.number)]

    def _switch(self, shard: Shard, sync: str, apply: str, pulls: str) -> tuple[list[Effect], str]:
        """Switch a hosted shard. Return the effects, and why it failed or an empty string."""
        if obstacle := self.obstacle():
            return [], obstacle
        try:
            model = sync_model_from(sync)
            check_workers(model, self.workers)
            if model.needs_rate and self.rate is not None:
                model = model.resolved(self.rate)
            return shard.switch(model, apply, pulls), ""
        except UsageError as error:
            return [], str(error)

    def requested(self, event: Received, request: SwitchRequest, shard: Shard, now: float) -> list[Effect]:
        """Handle another peer's request to switch a hosted shard."""
        made, problem = self._switch(shard, request.sync, request.apply, request.pulls)
        return [*made, Answer(event.key, outcome(problem), now + self.context.timeout)]

    def _answered(self, ticket: int, to: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle a server's reply."""
        problem = reply.reason if isinstance(reply, NotReadyReply) else ""
        problem = "a server does not answer" if reply is None else problem
        number = self._open.pop(ticket)
        self._problems[number] = self._problems[number] or problem
        return [Forget(ticket), *self._done(number)]

    def _done(self, number: int) -> list[Effect]:
        return [] if number in self._open.values() else [ReportSwitch(number, self._problems.pop(number))]


@dataclass
class DeadlockDetector:
    """Finds and resolves deadlocks of the hosted shards, and answers the questions of others.

    Attributes:
        context: the role's.
        replies: the table of reply handlers.
        shards: the hosted shards.
        holder: returns the rank that requests for a shard are sent to.
    """

    context: PeerContext
    replies: Replies
    shards: Mapping[int, Shard]
    holder: Callable[[int], int]
    _asked: dict[int, int] = field(default_factory=dict)  # by shard elsewhere, who has our question or failed to answer
    _failed: set[int] = field(default_factory=set)
    _known: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)  # by shard elsewhere, who waits there
    _questions: list[tuple[Deferred, WaitingRequest]] = field(default_factory=list)  # of others, not answered yet

    @property
    def is_asked(self) -> bool:
        """Whether a question of another peer is open."""
        return bool(self._questions)

    def requested(self, event: Received, request: WaitingRequest, now: float) -> list[Effect]:
        """Handle another peer's question; :meth:`check` answers it."""
        self._questions.append((defer(event.key, request.patience, now), request))
        return []

    def check(self, size: int, now: float) -> list[Effect]:
        """Apply buffers, answer questions and ask others, after any event that may have created a deadlock.

        Args:
            size: the number of shards.
        """
        elsewhere = set(range(size)) - set(self.shards)
        effects: list[Effect] = []
        for shard in self.shards.values():
            if shard.clock.awaits_gradients:
                waits = [one for index in elsewhere for one in self._known.get(index, ())]
                here = [one for other in self.shards.values() for one in other.clock.blocked]
                effects += shard.resolve_deadlock([*waits, *here])
        effects += self._answer(now)
        if any(shard.clock.awaits_gradients for shard in self.shards.values()):
            effects += [self._ask(index, now) for index in elsewhere if self._asked.get(index) != self.holder(index)]
        self._known = {index: waits for index, waits in self._known.items() if index in self._asked}
        return effects

    def _answer(self, now: float) -> list[Effect]:
        """Answer the questions for which there is news, and those that have waited for long."""
        effects: list[Effect] = []
        questions, self._questions = self._questions, []
        for deferred, request in questions:
            shard = self.shards.get(request.shard)
            if shard is None:
                effects.append(deferred.answer(NotReadyReply("it does not hold this shard")))
            elif shard.clock.blocked != request.known or deferred.put_off_at <= now:
                effects.append(deferred.answer(WaitingReply(shard.clock.blocked)))
            else:
                self._questions.append((deferred, request))
        return effects

    def _ask(self, index: int, now: float) -> Effect:
        self._asked[index] = rank = self.holder(index)
        question = WaitingRequest(index, self._known.get(index, ()), self.context.timeout)
        return self.replies.send(rank, question, now, now + question.patience, partial(self._answered, index))

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
