"""Leads a change of servers, and asks for one; what each peer does in it is in
:mod:`gossipx.server.failover.migration`.

Whoever holds shard 0 leads, so that two changes are never led at once: of a second one it says that one is under way.
Before the new layout stands it may give up at any time, as it does when a server is lost, when one cannot prepare its
tables, or when it takes too long; then the old one stands. From then on it tells all until each has heard or is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from gossipx.errors import UsageError
from gossipx.peer.exchange import PeerContext
from gossipx.protocol.effects import Answer, Effect, Forget, Note, Switched
from gossipx.protocol.events import ChangeServers, Received
from gossipx.protocol.messages import AcceptReply, BusyReply, NotReadyReply, Reply, Stage
from gossipx.protocol.server_messages import PauseRequest, PlaceRequest, PrepareRequest, ServersRequest
from gossipx.server.deferred import Deferred, defer, put_off
from gossipx.server.failover.migration import NOT_READY, UNDER_WAY, Migration
from gossipx.server.placement.layout import Layout, order
from gossipx.server.replies import Replies

TABLES = 4
"""Times as long as a model may take, that all tables may take to come to where they are to be: Adam keeps two numbers
of each, and a gradient may wait, in twice as many bytes."""
LONGEST = TABLES + 3
"""... and a change in all: pushes that were begun have to come, and all have to hear what stands."""

LEAVING = -1
"""The number of the change that a server asks for which is about to leave; others' count from 1."""

Name = tuple[int, int]
"""Who asks for a change, and its number there."""


@dataclass
class _CoordinatedMigration:
    """A change that this peer leads.

    Attributes:
        name: of who asked for it.
        members: ranks that take part.
        phase: what they are asked for now.
        todo: those that have not said yes.
        open: of these, by ticket, those that are being asked.
        until: it is given up if it takes longer.
        requester: the request that is answered by what came of it; None: its sender is to ask again.
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
    """A change that somebody here has asked for."""

    servers: tuple[int, ...]
    number: int  # as it is asked for
    until: float


class Coordinator:
    """Changes that this peer leads, and those that it asks for.

    Args:
        replies: takes the handlers of its requests.
        moving: its part in them.
        obstacle: why tables of this run cannot be moved, in one line; empty: they can.
    """

    def __init__(self, context: PeerContext, replies: Replies, migration: Migration, obstacle: str):
        self._context = context
        self._replies = replies
        self._migration = migration
        self._obstacle = obstacle
        self._run: _CoordinatedMigration | None = None
        self._last: tuple[Name, str] | None = None  # the last change that was led, and what came of it
        self._submitted: dict[int, _LocalRequest] = {}
        self._tickets: dict[int, int] = {}  # by ticket, the wish that it asks for

    @property
    def leads(self) -> bool:
        """Whether it leads a change that is not over."""
        return self._run is not None

    @property
    def busy(self) -> bool:
        """Whether it leads a change, or waits for one."""
        return self._run is not None or bool(self._submitted)

    # --- to ask for one -----------------------------------------------------------------------------

    def submit(self, event: ChangeServers, now: float) -> list[Effect]:
        """Somebody here asks for a change."""
        size = len(self._context.members.others) + 1
        servers = tuple(sorted(event.servers))
        if problem := self._wrong(servers, size):
            return self._came_to(event.number, problem)
        until = now + LONGEST * self._context.members.longest
        self._submitted[event.number] = _LocalRequest(servers, self._context.requests.ticket(), until)
        return self._ask_leader(event.number, now)

    def leave(self, training: Sequence[int], now: float) -> list[Effect]:
        """We are about to leave: others are to hold what lies here, the other servers or else one that trains."""
        others = self._context.members.others
        rest = [rank for rank in self._migration.layout.servers if rank in others and not others[rank].silent]
        return self.submit(ChangeServers(LEAVING, tuple(rest or training[:1])), now)

    @property
    def leaving(self) -> bool:
        """Whether what lies here is still being handed over, as we are about to leave."""
        return LEAVING in self._submitted or (self._run is not None and self._run.name[0] == self._context.rank)

    def _came_to(self, number: int, problem: str) -> list[Effect]:
        if number != LEAVING:
            return [Switched(number, problem)]
        return [Note("", f"leaves with the shards that it holds: {problem}")] if problem else []

    def _wrong(self, servers: tuple[int, ...], size: int) -> str:
        if not servers:
            return "name one server at least"
        if len(set(servers)) < len(servers):
            return f"the servers {_told(servers)} name a peer twice"
        wrong = [rank for rank in servers if not 0 <= rank < size]
        if wrong:
            return f"{wrong[0]} is no peer: ranks are 0 to {size - 1}"
        if set(servers) == set(self._migration.layout.servers):
            return f"the servers are {_told(servers)} already"
        return self._obstacle

    def _ask_leader(self, number: int, now: float) -> list[Effect]:
        local_request, patience = self._submitted[number], self._context.timeout
        request = ServersRequest(local_request.number, local_request.servers, patience)
        handler = partial(self._wish_answered, number)
        send = self._replies.send(self._migration.layout.servers[0], request, now, now + patience, handler)
        self._tickets[send.ticket] = number
        return [send]

    def _wish_answered(self, number: int, ticket: int, to: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle the leader's word of what came of a change, or that it is still under way."""
        del self._tickets[ticket]
        if reply is None or number not in self._submitted:
            return [Forget(ticket)]  # the leader is asked again at the next look
        if isinstance(reply, BusyReply):
            return [Forget(ticket), *self._ask_leader(number, now)]
        problem = reply.reason if isinstance(reply, NotReadyReply) else ""
        if number == LEAVING and problem == UNDER_WAY:
            return [Forget(ticket)]  # it is asked for again at the next look
        del self._submitted[number]
        return [Forget(ticket), *self._came_to(number, problem)]

    # --- to lead one --------------------------------------------------------------------------------

    def asked(self, event: Received, request: ServersRequest, now: float) -> list[Effect]:
        """A change is asked for."""
        name, deadline = (event.sender, request.number), now + request.patience
        if self._run is not None and self._run.name == name:
            again = put_off(self._run.requester)
            self._run.requester = defer(event.key, request.patience, now)
            return again
        if self._last is not None and self._last[0] == name:
            return [Answer(event.key, _reply(self._last[1]), deadline)]
        problem = self._cannot_lead(request.servers)
        if problem:
            return [Answer(event.key, NotReadyReply(problem), deadline)]
        try:
            layout = self._migration.layouts.make(order(self._migration.layout.servers, request.servers))
        except UsageError as error:
            return [Answer(event.key, NotReadyReply(str(error)), deadline)]
        epoch = max(self._migration.epoch, self._migration.decided) + 1
        others = self._context.members.others
        members = {rank for rank in self._context.members.awaited() if others[rank].stage is not None}
        members.add(self._context.rank)
        until = now + self._context.members.longest
        self._run = _CoordinatedMigration(name, epoch, layout, members, PauseRequest, set(members), until)
        self._run.requester = defer(event.key, request.patience, now)
        self._migration.begin(epoch, layout, self._context.rank)
        return self._ask(self._run, now)

    def _cannot_lead(self, servers: Sequence[int]) -> str:
        if self._run is not None or self._migration.busy:
            return UNDER_WAY
        if self._migration.layout.servers[0] != self._context.rank:
            return "the servers have just been changed: ask again"
        if not self._migration.host.hosted.ready:
            return f"peer {self._context.rank}: {NOT_READY}"
        if set(servers) == set(self._migration.layout.servers):
            return f"the servers are {_told(servers)} already"
        for rank in {*servers, *self._migration.layout.servers} - {self._context.rank}:
            other = self._context.members.others.get(rank)
            if other is None or other.lost or other.stage is None or other.stage > Stage.FINISH:
                return f"peer {rank} is not there"
        return self._obstacle

    def _ask(self, run: _CoordinatedMigration, now: float) -> list[Effect]:
        """Ask all that have not said yes and are not being asked."""
        effects: list[Effect] = []
        patience = self._context.timeout
        for rank in sorted(run.todo - set(run.open.values())):
            request: PauseRequest | PrepareRequest | PlaceRequest
            if run.phase is PauseRequest:
                request = PauseRequest(run.epoch, run.layout.servers, patience)
            elif run.phase is PrepareRequest:
                request = PrepareRequest(run.epoch, run.state, run.sync, patience)
            else:
                request = PlaceRequest(self._migration.epoch, self._migration.layout.servers, self._migration.decided)
            send = self._replies.send(rank, request, now, now + patience, self._answered)
            run.open[send.ticket] = rank
            effects.append(send)
        return effects

    def _answered(self, ticket: int, to: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle a peer's answer. One that has not answered is asked again at the next look, unless it is lost."""
        run = self._run
        assert run is not None
        del run.open[ticket]
        if reply is None:
            return [Forget(ticket), *self.look(now)]
        if isinstance(reply, NotReadyReply) and run.phase is not PlaceRequest:
            return [Forget(ticket), *self._give_up(run, f"peer {to}: {reply.reason}", now)]
        if isinstance(reply, BusyReply):
            return [Forget(ticket), *self._ask(run, now)]
        run.todo.discard(to)
        return [Forget(ticket), *self._go_on(run, now)]

    def look(self, now: float) -> list[Effect]:
        """A peer may have been lost, or have left."""
        run, others = self._run, self._context.members.others
        if run is None:
            return []
        if run.phase is not PlaceRequest and not self._migration.busy:
            return self._give_up(run, "it was given up by another peer, which thought this one lost", now)
        gone = {rank for rank in run.members if rank in others and (others[rank].lost or others[rank].gone)}
        served = gone & {*run.layout.servers, *self._migration.layout.servers}
        if served and run.phase is not PlaceRequest:
            return self._give_up(run, f"peer {min(served)} is lost", now)
        run.members -= gone
        run.todo -= gone
        return self._go_on(run, now)

    def _go_on(self, run: _CoordinatedMigration, now: float) -> list[Effect]:
        """Go to the next phase, if all have said yes."""
        if run.todo:
            return []
        longest = self._context.members.longest
        if run.phase is PauseRequest:
            run.phase, run.todo, run.until = PrepareRequest, set(run.layout.servers), now + TABLES * longest
            run.state, run.sync = self._migration.host.hosted.hand_over()
            return self._ask(run, now)
        if run.phase is PrepareRequest:
            run.phase, run.todo, run.until = PlaceRequest, run.members - {self._context.rank}, now + longest
            told = f"the servers are {_told(sorted(run.layout.servers))} now, at epoch {run.epoch}"
            return [
                Note("", told),
                *self._migration.stands(run.epoch, now),
                *self._ask(run, now),
                *self._go_on(run, now),
            ]
        return self._finish(run, "")

    def _give_up(self, run: _CoordinatedMigration, problem: str, now: float) -> list[Effect]:
        """What was stands; those that do not hear of it ask."""
        self._replies.forget(run.open)
        run.phase, run.todo, run.open = PlaceRequest, run.members - {self._context.rank}, {}
        given_up = self._migration.give_up(now) if self._migration.busy else []
        told = self._ask(run, now)
        return [Note("", f"the servers stay as they were: {problem}"), *given_up, *told, *self._finish(run, problem)]

    def _finish(self, run: _CoordinatedMigration, problem: str) -> list[Effect]:
        self._run, self._last = None, (run.name, problem)
        self._replies.forget(run.open)
        return [] if run.requester is None else [run.requester.answer(_reply(problem))]

    # --- now and then -------------------------------------------------------------------------------

    def watch(self, now: float) -> list[Effect]:
        """Ask again whoever has not answered, and give up what takes too long."""
        effects: list[Effect] = []
        for number, local_request in list(self._submitted.items()):
            if local_request.until <= now:
                del self._submitted[number]
                effects += self._came_to(number, "the peer that holds shard 0 does not answer")
            elif number not in self._tickets.values():
                effects += self._ask_leader(number, now)
        run = self._run
        if run is None:
            return effects
        if now >= run.until and run.phase is PlaceRequest:
            return [*effects, *self._finish(run, "")]  # those that have not heard will hear it by their next request
        if now >= run.until:
            late = ", ".join(map(str, sorted(run.todo)))
            what = "paused" if run.phase is PauseRequest else "got its tables"
            return [*effects, *self._give_up(run, f"peer {late} has not {what} in time (--peer-timeout)", now)]
        if run.requester is not None and run.requester.until <= now:
            effects += put_off(run.requester)
            run.requester = None
        return [*effects, *self._ask(run, now)]


def _reply(problem: str) -> Reply:
    return NotReadyReply(problem) if problem else AcceptReply()


def _told(servers: Sequence[int]) -> str:
    return ",".join(map(str, servers))
