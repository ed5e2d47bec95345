"""A peer's part in a change of servers: shards go to other peers while the run goes on, decided purely.

FluentPS, section III-A: "when the number of servers changes, EPS can also rebalance the workloads among the alive
servers". A layout has an epoch, and a change leads from one to the next between two iterations of every worker. Whoever
leads it (:mod:`gossipx.server.failover.coordinator`) asks in this order::

    PauseRequest    all      finish the pushes of an iteration that has begun, begin none; answered once they have come
    PrepareRequest  servers  fetch what is to lie here, by RangesRequest from those that hold it
    PlaceRequest    all      the new layout stands; or the old one still does

While it is paused no push is on its way anywhere, so that a shard's tables and its clock can be handed over as they
are. A server that has been asked for its ranges takes no push any more; pulls are held. What is held or still waits
when the new layout stands is asked for anew, with the same progress. Until then everything of the old one is kept, and
whatever fails, the run goes on by that.

Pushes and pulls name their epoch. To be asked by a later one than one's own, or answered by that, tells as much as a
PlaceRequest: a message of these may be lost, and a peer that was thought lost comes back so. Whoever waits and hears
nothing asks the leader what stands, and, if that is lost, all others.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gossipx.errors import UsageError
from gossipx.peer.exchange import PeerContext
from gossipx.protocol.effects import Answer, Effect, Forget, Note, Resume, Stop, Wait
from gossipx.protocol.events import Prepared, Received
from gossipx.protocol.messages import AcceptReply, BusyReply, NotReadyReply, Reply
from gossipx.protocol.server_messages import (
    GradientRequest,
    PauseRequest,
    PlacedReply,
    PlaceRequest,
    PrepareRequest,
    RangesRequest,
    TablesReply,
    TablesRequest,
)
from gossipx.protocol.table_effects import DropTables, PlaceTables, PrepareTables, ReportPrepared, TakeRanges
from gossipx.server.deferred import Deferred, defer, put_off
from gossipx.server.hosted_shards import HostedShards
from gossipx.server.placement.layout import Batch, Layout, Layouts
from gossipx.server.worker import Worker

AT_A_TIME = 2
"""Batches that are asked for at a time: while one is on its way the next is being made."""
UNDER_WAY = "another change of the servers is under way"
NOT_READY = "its tables are not here yet"


class MigrationHost(abc.ABC):
    """What a change has to know of its peer, and to do there."""

    worker: Worker
    hosted: HostedShards

    @property
    @abc.abstractmethod
    def agreeing(self) -> bool:
        """Whether training is over, and the last tables are being fetched."""

    @abc.abstractmethod
    def go_over(self, layout: Layout, epoch: int, state: str, reply: Reply, now: float) -> list[Effect]:
        """Go over to ``layout``, worker and shards; see :meth:`~gossipx.server.hosted_shards.HostedShards.go_over`."""

    @abc.abstractmethod
    def requested(self, event: Received, now: float) -> list[Effect]:
        """A request that was held is to be answered after all."""


@dataclass
class _Change:
    """A change that this peer takes part in.

    Attributes:
        pausing: is answered once the worker is quiet.
        preparing: is answered once all is here.
        state: of the clock; empty: nothing is being prepared.
        sync: what that goes by.
        asks: batches to be asked for.
        fetching: those that are on their way, by ticket.
        ready: all is here.
        frozen: ranges are being given, or copied: no push is taken.
        alone: since when the leader is lost.
    """

    epoch: int
    layout: Layout
    leader: int
    batches: list[Batch]
    pausing: Deferred | None = None
    preparing: Deferred | None = None
    state: str = ""
    sync: str = ""
    asks: deque[int] = field(default_factory=deque)
    fetching: dict[int, int] = field(default_factory=dict)
    ready: bool = False
    frozen: bool = False
    alone: float | None = None


class Migration:
    """Changes of servers, one at a time, as one peer takes part in them.

    Args:
        layouts: of the run.
        layout: that it begins by.

    Attributes:
        layout, epoch: by which this peer goes.
        host: the peer that takes part.
        decided: up to this epoch all changes are over, carried out or given up.
    """

    def __init__(self, context: PeerContext, host: MigrationHost, layouts: Layouts, layout: Layout):
        self.layout = layout
        self.layouts = layouts
        self.epoch = self.decided = 0
        self._context = context
        self.host = host
        self._change: _Change | None = None
        self._later: tuple[int, Layout] | None = None  # what stands; a worker goes over between two iterations
        self._held: list[tuple[Received, Deferred]] = []
        self._blocked = False  # the training thread waits to begin an iteration's pushes
        self._heard: set[int] = set()  # ranks that have told what stands

    @property
    def busy(self) -> bool:
        """Whether a change is under way."""
        return self._change is not None

    @property
    def frozen(self) -> bool:
        """Whether what lies here is being handed over."""
        return self._change is not None and self._change.frozen

    @property
    def placed(self) -> PlacedReply:
        """What stands."""
        return PlacedReply(self.epoch, self.layout.servers, self.decided)

    # --- the worker -------------------------------------------------------------------------------

    def begins(self) -> list[Effect]:
        """The training thread is about to take an iteration's first gradient; none: it may."""
        if self._change is None:
            return []
        self._blocked = True
        return [Wait()]

    def release(self) -> None:
        """The training thread waits no more: it is about to leave."""
        self._blocked = False

    def look(self, now: float) -> list[Effect]:
        """The worker has gone on: is it what a change waited for?"""
        change = self._change
        if change is None or change.pausing is None or not self.host.worker.quiet:
            return []
        asked, change.pausing = change.pausing, None
        return [asked.answer(AcceptReply())]

    def catch_up(self, now: float) -> list[Effect] | None:
        """Between two iterations: go over to what stands; None: this peer goes by it already."""
        if self._later is None:
            return None
        (epoch, layout), self._later = self._later, None
        self.host.worker.stop()
        return [*self._go_over(epoch, layout, "", now), *self.host.worker.begin(now)]

    # --- pushes and pulls -------------------------------------------------------------------------

    def misplaced(self, event: Received, request: GradientRequest | TablesRequest, now: float) -> list[Effect] | None:
        """What a push or a pull gets that cannot be dealt with now; None: it can."""
        heard: list[Effect] = []
        if request.epoch > self.epoch and self._is_ready_for(request.epoch):
            heard = self.stands(request.epoch, now)
        if request.epoch != self.epoch:
            behind = request.epoch < self.epoch
            reply = self.placed if behind else NotReadyReply("it has not heard of that layout yet")
            return [*heard, Answer(event.key, reply, now + request.patience)]
        if not self.frozen:
            return [*heard, *self.host.requested(event, now)] if heard else None
        if isinstance(request, GradientRequest):
            return [Answer(event.key, NotReadyReply("its tables are being moved"), now + request.patience)]
        self._held.append((event, defer(event.key, request.patience, now)))
        return []

    # --- requests ---------------------------------------------------------------------------------

    def requested(self, event: Received, now: float) -> list[Effect]:
        """Another asks something of a change."""
        match event.request:
            case PauseRequest():
                return self._pause(event, event.request, now)
            case PrepareRequest():
                return self._prepare(event, event.request, now)
            case RangesRequest():
                return self._give(event, event.request, now)
            case PlaceRequest(epoch, servers, decided):
                heard = self.heard(event.sender, epoch, servers, decided, now)
                reply = BusyReply() if self._change else self.placed
                return [*heard, Answer(event.key, reply, now + self._context.timeout)]
        raise AssertionError(event.request)

    def begin(self, epoch: int, layout: Layout, leader: int) -> None:
        """Take part in a change from now on."""
        self._change = _Change(epoch, layout, leader, self.layouts.batches(self.layout, layout))

    def _pause(self, event: Received, request: PauseRequest, now: float) -> list[Effect]:
        asked = defer(event.key, request.patience, now)
        problem = self._takes_part(event.sender, request)
        if problem:
            return [Answer(event.key, NotReadyReply(problem), asked.deadline)]
        assert self._change is not None
        again = put_off(self._change.pausing)
        self._change.pausing = asked
        return [*again, *self.look(now)]

    def _takes_part(self, leader: int, request: PauseRequest) -> str:
        """See that we take part in a change; why not, or nothing."""
        if self._change is not None:
            return "" if (self._change.epoch, self._change.leader) == (request.epoch, leader) else UNDER_WAY
        if request.epoch <= self.decided:
            return "that change is over"
        if self._later is not None or self.host.agreeing:
            return "it trains no more" if self.host.agreeing else "it has not gone over to the last change yet"
        if not self.host.hosted.ready:
            return NOT_READY
        try:
            self.begin(request.epoch, self.layouts.make(request.servers), leader)
        except UsageError as error:
            return str(error)
        return ""

    def _prepare(self, event: Received, request: PrepareRequest, now: float) -> list[Effect]:
        change, asked = self._change, defer(event.key, request.patience, now)
        if change is None or (change.epoch, change.leader) != (request.epoch, event.sender):
            return [Answer(event.key, NotReadyReply("it takes part in no such change"), asked.deadline)]
        if change.ready:
            return [Answer(event.key, AcceptReply(), asked.deadline)]
        again = put_off(change.preparing)
        change.preparing = asked
        if change.state:
            return again
        problem = self._differs(request.sync)
        if problem:
            return [*again, *self._refuse(change, problem)]
        change.state, change.sync, change.frozen = request.state, request.sync, True
        change.asks = deque(n for n, batch in enumerate(change.batches) if batch.target == self._context.rank)
        return [*again, PrepareTables(change.epoch, change.layout.servers), *self._fetch(change, now)]

    def _fetch(self, change: _Change, now: float) -> list[Effect]:
        """Ask for what is to lie here."""
        effects: list[Effect] = []
        patience = self._context.members.longest
        while change.asks and len(change.fetching) < AT_A_TIME:
            number = change.asks.popleft()
            request = RangesRequest(change.epoch, number, change.sync, patience)
            send = self._context.requests.send(change.batches[number].source, request, now, now + patience)
            change.fetching[send.ticket] = number
            effects.append(send)
        return effects if change.fetching else [*effects, ReportPrepared(change.epoch)]

    def _give(self, event: Received, request: RangesRequest, now: float) -> list[Effect]:
        change, deadline = self._change, now + request.patience
        if change is None or change.epoch != request.epoch or request.batch >= len(change.batches):
            return [Answer(event.key, NotReadyReply("it takes part in no such change"), deadline)]
        batch = change.batches[request.batch]
        if (batch.source, batch.target) != (self._context.rank, event.sender):
            return [Answer(event.key, NotReadyReply("these ranges do not move so"), deadline)]
        if problem := self._differs(request.sync):
            return [Answer(event.key, NotReadyReply(problem), deadline)]
        change.frozen = True
        return [Answer(event.key, TablesReply(0, ()), deadline, pieces=batch.plain)]

    def _differs(self, sync: str) -> str:
        """Why shards that lie here cannot become parts of others that go by ``sync``; empty: they can."""
        other = sorted(self.host.hosted.made - {sync})
        if not other:
            return ""
        return (
            f"shards go by '{sync}' and by '{other[0]}': have all go by one, by gossipx server set-sync, and ask again"
        )

    # --- what comes of our own ----------------------------------------------------------------------

    def replied(self, ticket: int, to: int, reply: Reply, now: float) -> list[Effect]:
        """A request of ours was answered: for ranges, or for what stands."""
        if isinstance(reply, PlacedReply):
            heard = self.heard(to, reply.epoch, reply.servers, reply.decided, now)
            return [Forget(ticket), *heard]
        change = self._change
        if change is None or ticket not in change.fetching:
            return [Forget(ticket)]
        number = change.fetching.pop(ticket)
        if isinstance(reply, TablesReply):
            return [TakeRanges(ticket, change.batches[number].plain), *self._fetch(change, now)]
        assert isinstance(reply, NotReadyReply)
        return [Forget(ticket), *self._refuse(change, reply.reason)]

    def failed(self, ticket: int) -> list[Effect]:
        """It was not answered: ranges are asked for again at the next look."""
        if self._change is not None and ticket in self._change.fetching:
            self._change.asks.append(self._change.fetching.pop(ticket))
        return [Forget(ticket)]

    def prepared(self, event: Prepared) -> list[Effect]:
        """All is here, or cannot be."""
        change = self._change
        if change is None or change.epoch != event.epoch:
            return []
        if event.problem:
            return self._refuse(change, event.problem)
        change.ready = True
        asked, change.preparing = change.preparing, None
        return [asked.answer(AcceptReply())] if asked else []

    def _refuse(self, change: _Change, problem: str) -> list[Effect]:
        asked, change.preparing = change.preparing, None
        return [asked.answer(NotReadyReply(problem))] if asked else []

    # --- what stands --------------------------------------------------------------------------------

    def heard(self, sender: int, epoch: int, servers: tuple[int, ...], decided: int, now: float) -> list[Effect]:
        """Another goes by this layout."""
        self._heard.add(sender)
        known, self.decided = self._change, max(self.decided, decided)
        if epoch > self.epoch and (self._later is None or epoch > self._later[0]):
            return self.stands(epoch, now) if self._is_ready_for(epoch) else self._follow(epoch, servers, now)
        if known is not None and known.epoch <= decided:
            return self.give_up(now)
        return []

    def _is_ready_for(self, epoch: int) -> bool:
        """Whether we take part in the change to ``epoch``, and have what is to lie here."""
        change = self._change
        serves = change is not None and self._context.rank in change.layout.servers
        return change is not None and change.epoch == epoch and (change.ready or not serves)

    def stands(self, epoch: int, now: float) -> list[Effect]:
        """The change that we take part in is carried out."""
        change, self._change = self._change, None
        assert change is not None
        return [*self._go_over(epoch, change.layout, change.state, now), *self._go_on(now)]

    def _follow(self, epoch: int, servers: tuple[int, ...], now: float) -> list[Effect]:
        """The others have gone over without us, as they thought us lost, or before we came again."""
        given_up = self.give_up(now) if self._change else []
        if self._context.rank in servers and not self.host.hosted.is_being_restored:
            reason = "the servers were changed, and this peer has not got the tables that it is to hold"
            return [*given_up, Stop(reason), Resume()]
        self._later = epoch, self.layouts.make(servers)
        self.host.worker.leave_out()
        return given_up if self.host.worker.begun else [*given_up, *(self.catch_up(now) or [])]

    def _go_over(self, epoch: int, layout: Layout, state: str, now: float) -> list[Effect]:
        self.epoch, self.layout, self.decided = epoch, layout, max(self.decided, epoch)
        held, self._held = self._held, []
        answers = [asked.answer(self.placed) for _, asked in held]
        return [
            PlaceTables(epoch, layout.servers),
            *answers,
            *self.host.go_over(layout, epoch, state, self.placed, now),
        ]

    def give_up(self, now: float) -> list[Effect]:
        """Nothing changes: everything goes on as before."""
        change, self._change = self._change, None
        assert change is not None
        self.decided = max(self.decided, change.epoch)
        held, self._held = self._held, []
        refusal = NotReadyReply("the change of the servers was given up")
        asked = [one for one in (change.pausing, change.preparing) if one is not None]
        return [
            *(one.answer(refusal) for one in asked),
            *([DropTables()] if change.state else []),
            *(effect for event, _ in held for effect in self.host.requested(event, now)),
            *self._go_on(now),
        ]

    def _go_on(self, now: float) -> list[Effect]:
        """The training thread may begin what it waited to begin."""
        blocked, self._blocked = self._blocked, False
        return [*self.host.worker.gradients_ready([], now), Resume()] if blocked else []

    # --- now and then -------------------------------------------------------------------------------

    def watch(self, now: float) -> list[Effect]:
        """Have those that wait for long ask again, ask again for what did not come, and ask what stands."""
        change = self._change
        if change is None:
            return []
        effects: list[Effect] = []
        for name in ("pausing", "preparing"):
            asked: Deferred | None = getattr(change, name)
            if asked is not None and asked.until <= now:
                setattr(change, name, None)
                effects += put_off(asked)
        late = [asked for _, asked in self._held if asked.until <= now]
        self._held = [one for one in self._held if one[1] not in late]
        effects += [effect for asked in late for effect in put_off(asked)]
        if change.asks:
            effects += self._fetch(change, now)
        return [*effects, *self._ask_what_stands(change, now)]

    def _ask_what_stands(self, change: _Change, now: float) -> list[Effect]:
        rank, others = self._context.rank, self._context.members.others
        if change.leader == rank:
            return []
        if not (others[change.leader].lost or others[change.leader].gone):
            change.alone, ranks = None, [change.leader]
        else:
            change.alone = now if change.alone is None else change.alone
            ranks = self._context.members.awaited()
        if change.alone is not None and now - change.alone >= self._context.timeout:
            note = Note("servers", f"peer {change.leader}, which changed the servers, is lost: they stay as they were")
            return [note, *self.give_up(now)]
        return self._ask_of(ranks, now)

    @property
    def asks(self) -> bool:
        """Whether somebody is being asked what stands."""
        return bool(self._context.requests.asked(PlaceRequest))

    def seek(self, now: float) -> list[Effect]:
        """Ask all others what stands, which may be a change that was before we came."""
        return self._ask_of(self._context.members.awaited(), now)

    @property
    def sure(self) -> bool:
        """Whether all others that are there have told what stands."""
        members = self._context.members
        return all(rank in self._heard or members.is_gone(rank) for rank in members.awaited())

    def _ask_of(self, ranks: Sequence[int], now: float) -> list[Effect]:
        asked = self._context.requests.asked(PlaceRequest)
        question = PlaceRequest(self.epoch, self.layout.servers, self.decided)
        deadline = now + self._context.timeout
        return [self._context.requests.send(to, question, now, deadline) for to in ranks if to not in asked]
