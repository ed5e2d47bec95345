"""The coordinator of a change of servers, and the requests for one.

The peer that holds shard 0 leads every change, so two changes never run at once; it refuses a second one. It pauses all
peers, has the new servers fetch their tables, and then puts the new layout in force. Until then it aborts the change if
a server is lost, if a server cannot prepare its tables, or after a timeout, and the old layout stays in force.
Afterwards it informs all peers, until each has acknowledged or is lost. Each peer's part is in
:mod:`gossipx.server.migration`.

A *change* replaces the *layout*, which says which peer hosts which shard; the *migration* of a peer is its part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from gossipx.errors import UsageError
from gossipx.peer.exchange import PeerContext
from gossipx.protocol.effects import Answer, Effect, Forget, Note, ReportOutcome
from gossipx.protocol.events import ChangeServers, Received
from gossipx.protocol.messages import BusyReply, NotReadyReply, Reply, Stage
from gossipx.protocol.server_messages import PauseRequest, PlaceRequest, PrepareRequest, ServersRequest
from gossipx.server.migration import NOT_READY, UNDER_WAY, Migration
from gossipx.server.placement import Layout, server_order
from gossipx.server.requests import Deferred, Replies, defer, outcome, put_off
from gossipx.server.sync_models import check_shards

TABLES = 4
"""The timeout for moving all tables, as a multiple of the time for one model: Adam keeps two numbers per element, and a
buffered gradient takes twice as many bytes.
"""
LONGEST = TABLES + 3
"""The timeout of a whole change, in the same unit: pushes in flight must arrive, and all peers must hear the outcome.
"""

LEAVING = -1
"""The number of the change that a server requests before it leaves; other changes are numbered from 1."""

Name = tuple[int, int]
"""Identifies a change: the rank that requests it, and its number there."""


@dataclass
class _LedChange:
    """A change that this peer leads.

    Attributes:
        name: identifies the change.
        epoch: of the new layout.
        members: the ranks that take part.
        phase: the type of the requests that are being sent.
        todo: the ranks that have not acknowledged yet.
        until: when the phase times out.
        state: of shard 0's clock, for the new shards.
        sync: the sync model of all shards.
        open: of the open requests, the receiver by ticket.
        requester: the request to answer with the outcome; None: its sender will repeat it.
    """

    name: Name
    epoch: int
    layout: Layout
    members: set[int]
    phase: type
    todo: set[int]
    until: float
    state: str = ""
    sync: str = ""
    open: dict[int, int] = field(default_factory=dict)
    requester: Deferred | None = None


@dataclass
class _LocalRequest:
    """A change requested on this peer.

    Attributes:
        number: identifies the request, together with this peer's rank.
        until: when to stop asking.
    """

    servers: tuple[int, ...]
    number: int
    until: float


class Coordinator:
    """The changes that this peer leads, and those that it requests.

    Args:
        replies: the table of reply handlers.
        migration: this peer's part in changes.
        obstacle: why this run's tables cannot be moved, in one line; empty: they can.
    """

    def __init__(self, context: PeerContext, replies: Replies, migration: Migration, obstacle: str):
        self._context = context
        self._replies = replies
        self._migration = migration
        self._obstacle = obstacle
        self._change: _LedChange | None = None
        self._last: tuple[Name, str] | None = None  # the last change that this peer led, and why it failed
        self._submitted: dict[int, _LocalRequest] = {}
        self._tickets: dict[int, int] = {}  # by ticket, the local request that was sent

    @property
    def busy(self) -> bool:
        """Whether it leads a change, or waits for a requested one."""
        return self._change is not None or bool(self._submitted)

    # --- requesting ------------------------------------------------------------------------------

    def submit(self, event: ChangeServers, now: float) -> list[Effect]:
        """Request a change on behalf of this peer's user."""
        size = len(self._context.members.others) + 1
        servers = tuple(sorted(event.servers))
        if problem := self._problem_with(servers, size):
            return self._outcome(event.number, problem)
        until = now + LONGEST * self._context.members.model_timeout
        self._submitted[event.number] = _LocalRequest(servers, self._context.requests.ticket(), until)
        return self._ask_leader(event.number, now)

    def leave(self, training: Sequence[int], now: float) -> list[Effect]:
        """Request that other peers take over this peer's shards before it leaves: the other servers, or else one that
        trains.
        """
        others = self._context.members.others
        rest = [rank for rank in self._migration.layout.servers if rank in others and not others[rank].silent]
        return self.submit(ChangeServers(LEAVING, tuple(rest or training[:1])), now)

    @property
    def leaving(self) -> bool:
        """Whether this peer must not leave yet: others are taking over its shards, or it leads a change that it has
        requested itself.
        """
        return LEAVING in self._submitted or (self._change is not None and self._change.name[0] == self._context.rank)

    def _outcome(self, number: int, problem: str) -> list[Effect]:
        if number != LEAVING:
            return [ReportOutcome(number, problem)]
        return [Note("", f"this peer leaves without handing over its shards: {problem}")] if problem else []

    def _problem_with(self, servers: tuple[int, ...], size: int) -> str:
        if not servers:
            return "name at least one server"
        if len(set(servers)) < len(servers):
            return f"the servers {_ranks_text(servers)} name a peer twice"
        wrong = [rank for rank in servers if not 0 <= rank < size]
        if wrong:
            return f"there is no peer {wrong[0]}: ranks are 0 to {size - 1}"
        if set(servers) == set(self._migration.layout.servers):
            return f"the servers are already {_ranks_text(servers)}"
        return self._obstacle

    def _ask_leader(self, number: int, now: float) -> list[Effect]:
        leader = self._migration.layout.servers[0]
        if number == LEAVING and self._context.members.is_gone(leader):
            del self._submitted[number]
            return self._outcome(number, f"peer {leader}, which holds shard 0, is gone")
        local_request, patience = self._submitted[number], self._context.timeout
        request = ServersRequest(local_request.number, local_request.servers, patience)
        handler = partial(self._request_answered, number)
        send = self._replies.send(leader, request, now, now + patience, handler)
        self._tickets[send.ticket] = number
        return [send]

    def _request_answered(self, number: int, ticket: int, to: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle the leader's reply: the outcome of a change, or that it is still running."""
        del self._tickets[ticket]
        if number in self._submitted and self._context.members.is_gone(to):
            return [Forget(ticket), *self._ask_leader(number, now)]
        if reply is None or number not in self._submitted:
            return [Forget(ticket)]  # :meth:`watch` sends it again
        if isinstance(reply, BusyReply):
            return [Forget(ticket), *self._ask_leader(number, now)]
        problem = reply.reason if isinstance(reply, NotReadyReply) else ""
        if number == LEAVING and problem == UNDER_WAY:
            return [Forget(ticket)]  # :meth:`watch` sends it again
        del self._submitted[number]
        return [Forget(ticket), *self._outcome(number, problem)]

    # --- leading ---------------------------------------------------------------------------------

    def requested(self, event: Received, request: ServersRequest, now: float) -> list[Effect]:
        """Handle a request for a change: start it, or answer with the outcome if it is over."""
        name, deadline = (event.sender, request.number), now + request.patience
        if self._change is not None and self._change.name == name:
            # Its sender asks again, so the request from before is put off: this one waits for the outcome in its place.
            again = put_off(self._change.requester)
            self._change.requester = defer(event.key, request.patience, now)
            return again
        if self._last is not None and self._last[0] == name:
            return [Answer(event.key, outcome(self._last[1]), deadline)]
        problem = self._cannot_lead(request.servers)
        if problem:
            return [Answer(event.key, NotReadyReply(problem), deadline)]
        try:
            sync_model = self._migration.host.hosted.shards[0].clock.model
            check_shards(sync_model, len(request.servers))
            layout = self._migration.layouts.make(server_order(self._migration.layout.servers, request.servers))
        except UsageError as error:
            return [Answer(event.key, NotReadyReply(str(error)), deadline)]
        epoch = max(self._migration.epoch, self._migration.decided) + 1  # also above those of aborted changes
        others = self._context.members.others
        members = {rank for rank in self._context.members.awaited() if others.peek(rank).stage is not None}
        members.add(self._context.rank)
        until = now + self._context.members.model_timeout
        self._change = _LedChange(name, epoch, layout, members, PauseRequest, set(members), until)
        self._change.requester = defer(event.key, request.patience, now)
        self._migration.begin(epoch, layout, self._context.rank)
        return self._ask(self._change, now)

    def _cannot_lead(self, servers: Sequence[int]) -> str:
        if self._change is not None or self._migration.busy:
            return UNDER_WAY
        if self._migration.layout.servers[0] != self._context.rank:
            return "the servers have just been changed: try again"
        if not self._migration.host.hosted.ready:
            return f"peer {self._context.rank}: {NOT_READY}"
        if set(servers) == set(self._migration.layout.servers):
            return f"the servers are already {_ranks_text(servers)}"
        for rank in {*servers, *self._migration.layout.servers} - {self._context.rank}:
            other = self._context.members.others.get(rank)
            if other is None or other.lost or other.stage is None or other.stage > Stage.FINISH:
                return f"peer {rank} is not a member of the run"
        return self._obstacle

    def _ask(self, change: _LedChange, now: float) -> list[Effect]:
        """Send the phase's request to all members that have not acknowledged it and have none open."""
        effects: list[Effect] = []
        patience = self._context.timeout
        for rank in sorted(change.todo - set(change.open.values())):
            request: PauseRequest | PrepareRequest | PlaceRequest
            if change.phase is PauseRequest:
                request = PauseRequest(change.epoch, change.layout.servers, patience)
            elif change.phase is PrepareRequest:
                request = PrepareRequest(change.epoch, change.state, change.sync, patience)
            else:
                request = PlaceRequest(self._migration.epoch, self._migration.layout.servers, self._migration.decided)
            send = self._replies.send(rank, request, now, now + patience, self._answered)
            change.open[send.ticket] = rank
            effects.append(send)
        return effects

    def _answered(self, ticket: int, to: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle a member's reply. An unanswered request is repeated by :meth:`watch`, unless the member is lost."""
        change = self._change
        assert change is not None
        del change.open[ticket]
        if reply is None:
            return [Forget(ticket), *self.check_members(now)]
        if isinstance(reply, NotReadyReply) and change.phase is not PlaceRequest:
            return [Forget(ticket), *self._abort(change, f"peer {to}: {reply.reason}", now)]
        if isinstance(reply, BusyReply):
            return [Forget(ticket), *self._ask(change, now)]
        change.todo.discard(to)
        return [Forget(ticket), *self._next_phase(change, now)]

    def check_members(self, now: float) -> list[Effect]:
        """Handle members that are lost or have left."""
        change = self._change
        if change is None:
            return []
        if change.phase is not PlaceRequest and not self._migration.busy:
            return self._abort(change, "another peer aborted it, because it considered this peer lost", now)
        gone = {rank for rank in change.members if self._context.members.is_gone(rank)}
        served = gone & {*change.layout.servers, *self._migration.layout.servers}
        if served and change.phase is not PlaceRequest:
            return self._abort(change, f"peer {min(served)} is lost", now)
        change.members -= gone
        change.todo -= gone
        return self._next_phase(change, now)

    def _next_phase(self, change: _LedChange, now: float) -> list[Effect]:
        """Enter the next phase if all members have acknowledged."""
        if change.todo:
            return []
        timeout = self._context.members.model_timeout
        if change.phase is PauseRequest:
            change.phase, change.todo, change.until = PrepareRequest, set(change.layout.servers), now + TABLES * timeout
            change.state, change.sync = self._migration.host.hosted.hand_over()
            return self._ask(change, now)
        if change.phase is PrepareRequest:
            change.phase, change.todo, change.until = PlaceRequest, change.members - {self._context.rank}, now + timeout
            text = f"the servers are now {_ranks_text(sorted(change.layout.servers))}, at epoch {change.epoch}"
            return [
                Note("", text),
                *self._migration.commit(change.epoch, now),
                *self._ask(change, now),
                *self._next_phase(change, now),
            ]
        return self._finish(change, "")

    def _abort(self, change: _LedChange, problem: str, now: float) -> list[Effect]:
        """Abort the change. The old layout stays in force; members that do not hear of it will ask."""
        self._replies.forget(change.open)
        change.phase, change.todo, change.open = PlaceRequest, change.members - {self._context.rank}, {}
        aborted = self._migration.abort(now) if self._migration.busy else []
        sent = self._ask(change, now)
        # The members are told, and their replies do not matter.
        return [Note("", f"the servers stay as they were: {problem}"), *aborted, *sent, *self._finish(change, problem)]

    def _finish(self, change: _LedChange, problem: str) -> list[Effect]:
        self._change, self._last = None, (change.name, problem)
        self._replies.forget(change.open)
        return [] if change.requester is None else [change.requester.answer(outcome(problem))]

    # --- timers -----------------------------------------------------------------------------------

    def watch(self, now: float) -> list[Effect]:
        """Repeat unanswered requests, and abort a phase that has timed out."""
        effects: list[Effect] = []
        for number, local_request in list(self._submitted.items()):
            if local_request.until <= now:
                del self._submitted[number]
                effects += self._outcome(number, "the peer that holds shard 0 does not answer")
            elif number not in self._tickets.values():
                effects += self._ask_leader(number, now)
        change = self._change
        if change is None:
            return effects
        if now >= change.until and change.phase is PlaceRequest:
            return [*effects, *self._finish(change, "")]  # the others hear of it with their next push or pull
        if now >= change.until:
            late = ", ".join(map(str, sorted(change.todo)))
            what = "pause" if change.phase is PauseRequest else "receive its tables"
            return [*effects, *self._abort(change, f"peer {late} did not {what} in time (--peer-timeout)", now)]
        if change.requester is not None and change.requester.put_off_at <= now:
            effects += put_off(change.requester)
            change.requester = None
        return [*effects, *self._ask(change, now)]


def _ranks_text(servers: Sequence[int]) -> str:
    return ",".join(map(str, servers))
