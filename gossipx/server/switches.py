"""Switches of sync models, which any peer may request for any shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gossipx.errors import UsageError
from gossipx.peer.exchange import PeerContext
from gossipx.protocol.effects import Answer, Effect, Forget, ReportOutcome
from gossipx.protocol.events import Received, SwitchSync
from gossipx.protocol.messages import NotReadyReply, Reply
from gossipx.protocol.server_messages import SwitchRequest
from gossipx.server.migration import UNDER_WAY, Migration
from gossipx.server.requests import Replies, outcome
from gossipx.server.shard import Shard
from gossipx.server.sync_models import check_shards, check_workers, sync_model_from


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
        migration: this peer's part in changes of servers, during which no model can be switched.
    """

    context: PeerContext
    replies: Replies
    shards: Mapping[int, Shard]
    holder: Callable[[int], int]
    workers: int
    rate: float | None
    migration: Migration
    _open: dict[int, int] = field(default_factory=dict)  # the number of the switch, by ticket
    _problems: dict[int, str] = field(default_factory=dict)  # of running switches, by number

    def switch(self, event: SwitchSync, now: float) -> list[Effect]:
        """Handle this peer's request to switch one shard, or all of them."""
        count = len(self.migration.layout.servers)
        wanted = range(count) if event.shard is None else [event.shard]
        if not all(shard < count for shard in wanted):
            return [ReportOutcome(event.number, f"unknown shard: shards are 0 to {count - 1}")]
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
        if self.migration.busy:
            return [], UNDER_WAY
        try:
            model = sync_model_from(sync)
            check_workers(model, self.workers)
            check_shards(model, len(self.migration.layout.servers))
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
        return [] if number in self._open.values() else [ReportOutcome(number, self._problems.pop(number))]
