"""Switches of sync models during a run, requested at any peer for shards here or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gossipx.errors import UsageError
from gossipx.peer.exchange import PeerContext
from gossipx.protocol.effects import Answer, Effect, Forget, ReportSwitch
from gossipx.protocol.events import Received, SwitchSync
from gossipx.protocol.messages import AcceptReply, NotReadyReply, Reply
from gossipx.protocol.server_messages import SwitchRequest
from gossipx.server.requests import Replies
from gossipx.server.shard import Shard
from gossipx.server.sync_models.models import check_workers, parse


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
            model = parse(sync)
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
