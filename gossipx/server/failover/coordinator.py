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
from gossipx.peer.exchange import Ground
from gossipx.protocol.effects import Answer, Effect, Forget, Note, Switched
from gossipx.protocol.events import ChangeServers, Received
from gossipx.protocol.messages import AcceptReply, BusyReply, NotReadyReply, Reply, Stage
from gossipx.protocol.server_messages import PauseRequest, PlaceRequest, PrepareRequest, ServersRequest
from gossipx.server.deferred import Deferred, defer, put_off
from gossipx.server.failover.migration import NOT_READY, UNDER_WAY, Moving
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
class _Led:
    """A change that this peer leads.

    Attributes:
        name: of who asked for it.
        members: ranks that take part.
        phase: what they are asked for now.
        todo: those that have not said yes.
        open: of these, by ticket, those that are being asked.
        until: it is given up if it takes longer.
        asker: the request that is answered by what came of it; None: its sender is to ask again.
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
    asker: Deferred | None = None


@dataclass
class _Wish:
    """A change that somebody here has asked for."""

    servers: tuple[int, ...]
    number: int  # as it is asked for
    until: float


class Leading:
    """Changes that this peer leads, and those that it asks for.

    Args:
        replies: takes the handlers of its requests.
        moving: its part in them.
        obstacle: why tables of this run cannot be moved, in one line; empty: they can.
    """

    def __init__(self, ground: Ground, replies: Replies, moving: Moving, obstacle: str):
        self._ground = ground
        self._replies = replies
        self._moving = moving
        self._obstacle = obstacle
        self._led: _Led | None = None
        self._last: tuple[Name, str] | None = None  # the last change that was led, and what came of it
        self._wishes: dict[int, _Wish] = {}
        self._tickets: dict[int, int] = {}  # by ticket, the wish that it asks for

    @property
    def leads(self) -> bool:
        """Whether it leads a change that is not over."""
        return self._led is not None

    @property
    def busy(self) -> bool:
        """Whether it leads a change, or waits for one."""
        return self._led is not None or bool(self._wishes)

    # --- to ask for one -----------------------------------------------------------------------------

    def wish(self, event: ChangeServers, now: float) -> list[Effect]:
        """Somebody here asks for a change."""
        size = len(self._ground.members.others) + 1
        servers = tuple(sorted(event.servers))
        if problem := self._wrong(servers, size):
            return self._came_to(event.number, problem)
        until = now + LONGEST * self._ground.members.longest
        self._wishes[event.number] = _Wish(servers, self._ground.requests.ticket(), until)
        return self._ask_leader(event.number, now)

    def leave(self, training: Sequence[int], now: float) -> list[Effect]:
        """We are about to leave: others are to hold what lies here, the other servers or else one that trains."""
        others = self._ground.members.others
        rest = [rank for rank in self._moving.layout.servers if rank in others and not others[rank].silent]
        return self.wish(ChangeServers(LEAVING, tuple(rest or training[:1])), now)

    @property
    def leaving(self) -> bool:
        """Whether what lies here is still being handed over, as we are about to leave."""
        return LEAVING in self._wishes or (self._led is not None and self._led.name[0] == self._ground.rank)

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
        if set(servers) == set(self._moving.layout.servers):
            return f"the servers are {_told(servers)} already"
        return self._obstacle

    def _ask_leader(self, number: int, now: float) -> list[Effect]:
        wish, patience = self._wishes[number], self._ground.timeout
        request = ServersRequest(wish.number, wish.servers, patience)
        handler = partial(self._wish_answered, number)
        send = self._replies.send(self._moving.layout.servers[0], request, now, now + patience, handler)
        self._tickets[send.ticket] = number
        return [send]

    def _wish_answered(self, number: int, ticket: int, to: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle the leader's word of what came of a change, or that it is still under way."""
        del self._tickets[ticket]
        if reply is None or number not in self._wishes:
            return [Forget(ticket)]  # the leader is asked again at the next look
        if isinstance(reply, BusyReply):
            return [Forget(ticket), *self._ask_leader(number, now)]
        problem = reply.reason if isinstance(reply, NotReadyReply) else ""
        if number == LEAVING and problem == UNDER_WAY:
            return [Forget(ticket)]  # it is asked for again at the next look
        del self._wishes[number]
        return [Forget(ticket), *self._came_to(number, problem)]

    # --- to lead one --------------------------------------------------------------------------------

    def asked(self, event: Received, request: ServersRequest, now: float) -> list[Effect]:
        """A change is asked for."""
        name, deadline = (event.sender, request.number), now + request.patience
        if self._led is not None and self._led.name == name:
            again = put_off(self._led.asker)
            self._led.asker = defer(event.key, request.patience, now)
            return again
        if self._last is not None and self._last[0] == name:
            return [Answer(event.key, _reply(self._last[1]), deadline)]
        problem = self._cannot_lead(request.servers)
        if problem:
            return [Answer(event.key, NotReadyReply(problem), deadline)]
        try:
            layout = self._moving.layouts.make(order(self._moving.layout.servers, request.servers))
        except UsageError as error:
            return [Answer(event.key, NotReadyReply(str(error)), deadline)]
        epoch = max(self._moving.epoch, self._moving.decided) + 1
        others = self._ground.members.others
        members = {rank for rank in self._ground.members.awaited() if others[rank].stage is not None}
        members.add(self._ground.rank)
        until = now + self._ground.members.longest
        self._led = _Led(name, epoch, layout, members, PauseRequest, set(members), until)
        self._led.asker = defer(event.key, request.patience, now)
        self._moving.begin(epoch, layout, self._ground.rank)
        return self._ask(self._led, now)

    def _cannot_lead(self, servers: Sequence[int]) -> str:
        if self._led is not None or self._moving.busy:
            return UNDER_WAY
        if self._moving.layout.servers[0] != self._ground.rank:
            return "the servers have just been changed: ask again"
        if not self._moving.home.holding.ready:
            return f"peer {self._ground.rank}: {NOT_READY}"
        if set(servers) == set(self._moving.layout.servers):
            return f"the servers are {_told(servers)} already"
        for rank in {*servers, *self._moving.layout.servers} - {self._ground.rank}:
            other = self._ground.members.others.get(rank)
            if other is None or other.lost or other.stage is None or other.stage > Stage.FINISH:
                return f"peer {rank} is not there"
        return self._obstacle

    def _ask(self, led: _Led, now: float) -> list[Effect]:
        """Ask all that have not said yes and are not being asked."""
        effects: list[Effect] = []
        patience = self._ground.timeout
        for rank in sorted(led.todo - set(led.open.values())):
            request: PauseRequest | PrepareRequest | PlaceRequest
            if led.phase is PauseRequest:
                request = PauseRequest(led.epoch, led.layout.servers, patience)
            elif led.phase is PrepareRequest:
                request = PrepareRequest(led.epoch, led.state, led.sync, patience)
            else:
                request = PlaceRequest(self._moving.epoch, self._moving.layout.servers, self._moving.decided)
            send = self._replies.send(rank, request, now, now + patience, self._answered)
            led.open[send.ticket] = rank
            effects.append(send)
        return effects

    def _answered(self, ticket: int, to: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle a peer's answer. One that has not answered is asked again at the next look, unless it is lost."""
        led = self._led
        assert led is not None
        del led.open[ticket]
        if reply is None:
            return [Forget(ticket), *self.look(now)]
        if isinstance(reply, NotReadyReply) and led.phase is not PlaceRequest:
            return [Forget(ticket), *self._give_up(led, f"peer {to}: {reply.reason}", now)]
        if isinstance(reply, BusyReply):
            return [Forget(ticket), *self._ask(led, now)]
        led.todo.discard(to)
        return [Forget(ticket), *self._go_on(led, now)]

    def look(self, now: float) -> list[Effect]:
        """A peer may have been lost, or have left."""
        led, others = self._led, self._ground.members.others
        if led is None:
            return []
        if led.phase is not PlaceRequest and not self._moving.busy:
            return self._give_up(led, "it was given up by another peer, which thought this one lost", now)
        gone = {rank for rank in led.members if rank in others and (others[rank].lost or others[rank].gone)}
        served = gone & {*led.layout.servers, *self._moving.layout.servers}
        if served and led.phase is not PlaceRequest:
            return self._give_up(led, f"peer {min(served)} is lost", now)
        led.members -= gone
        led.todo -= gone
        return self._go_on(led, now)

    def _go_on(self, led: _Led, now: float) -> list[Effect]:
        """Go to the next phase, if all have said yes."""
        if led.todo:
            return []
        longest = self._ground.members.longest
        if led.phase is PauseRequest:
            led.phase, led.todo, led.until = PrepareRequest, set(led.layout.servers), now + TABLES * longest
            led.state, led.sync = self._moving.home.holding.hand_over()
            return self._ask(led, now)
        if led.phase is PrepareRequest:
            led.phase, led.todo, led.until = PlaceRequest, led.members - {self._ground.rank}, now + longest
            told = f"the servers are {_told(sorted(led.layout.servers))} now, at epoch {led.epoch}"
            return [Note("", told), *self._moving.stands(led.epoch, now), *self._ask(led, now), *self._go_on(led, now)]
        return self._finish(led, "")

    def _give_up(self, led: _Led, problem: str, now: float) -> list[Effect]:
        """What was stands; those that do not hear of it ask."""
        self._replies.forget(led.open)
        led.phase, led.todo, led.open = PlaceRequest, led.members - {self._ground.rank}, {}
        given_up = self._moving.give_up(now) if self._moving.busy else []
        told = self._ask(led, now)
        return [Note("", f"the servers stay as they were: {problem}"), *given_up, *told, *self._finish(led, problem)]

    def _finish(self, led: _Led, problem: str) -> list[Effect]:
        self._led, self._last = None, (led.name, problem)
        self._replies.forget(led.open)
        return [] if led.asker is None else [led.asker.answer(_reply(problem))]

    # --- now and then -------------------------------------------------------------------------------

    def watch(self, now: float) -> list[Effect]:
        """Ask again whoever has not answered, and give up what takes too long."""
        effects: list[Effect] = []
        for number, wish in list(self._wishes.items()):
            if wish.until <= now:
                del self._wishes[number]
                effects += self._came_to(number, "the peer that holds shard 0 does not answer")
            elif number not in self._tickets.values():
                effects += self._ask_leader(number, now)
        led = self._led
        if led is None:
            return effects
        if now >= led.until and led.phase is PlaceRequest:
            return [*effects, *self._finish(led, "")]  # those that have not heard will hear it by their next request
        if now >= led.until:
            late = ", ".join(map(str, sorted(led.todo)))
            what = "paused" if led.phase is PauseRequest else "got its tables"
            return [*effects, *self._give_up(led, f"peer {late} has not {what} in time (--peer-timeout)", now)]
        if led.asker is not None and led.asker.until <= now:
            effects += put_off(led.asker)
            led.asker = None
        return [*effects, *self._ask(led, now)]


def _reply(problem: str) -> Reply:
    return NotReadyReply(problem) if problem else AcceptReply()


def _told(servers: Sequence[int]) -> str:
    return ",".join(map(str, servers))
