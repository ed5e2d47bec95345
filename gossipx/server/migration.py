"""A peer's part in a change of servers: shards move to other peers while the run continues, decided purely.

FluentPS, section III-A: "when the number of servers changes, EPS can also rebalance the workloads among the alive
servers". Every layout has an epoch, and a change leads from one layout to the next between two iterations of every
worker. The leader (:mod:`gossipx.server.coordinator`) sends, in this order::

    PauseRequest    all      finish all pushes up to the current iteration, begin no other; acknowledged after that
    PrepareRequest  servers  fetch the tables of the new layout by RangesRequest from the peers that hold them
    PlaceRequest    all      the new layout is in force, or the old one still is

While all peers are paused no push is in flight, so a shard's tables and clock can be handed over as they are. A server
that sends or receives ranges refuses pushes and holds pulls. Pulls that still wait when the new layout comes into force
are sent again, with the same progress. Until then everything of the old layout is kept: if anything fails, the run
continues with it.

Pushes and pulls name their epoch. A request or reply of a later epoch informs its receiver as a PlaceRequest does, so a
lost PlaceRequest does no harm, and a peer that was considered lost returns this way. A peer that waits without news
asks the leader which layout is in force, by a PlaceRequest with its own, or all other peers if the leader is lost.
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
from gossipx.server.hosted_shards import HostedShards
from gossipx.server.placement import Batch, Layout, Layouts
from gossipx.server.requests import Deferred, Replies, defer, outcome, put_off
from gossipx.server.worker import Worker

MAX_OPEN = 2
"""Maximum number of open RangesRequests: while one batch is in flight, the next is being made."""
UNDER_WAY = "another change of the servers is under way"
NOT_READY = "its tables are not here yet"


class MigrationHost(abc.ABC):
    """The peer that takes part in a change, as the migration sees it."""

    worker: Worker
    hosted: HostedShards

    @property
    @abc.abstractmethod
    def is_finishing(self) -> bool:
        """Whether training is over, and the last tables are being pulled."""

    @abc.abstractmethod
    def switch_layout(self, layout: Layout, epoch: int, state: str, reply: Reply, now: float) -> list[Effect]:
        """Switch to ``layout``. Shards here get the clocks ``state`` (JSON; empty: on disk), and pulls ``reply``."""

    @abc.abstractmethod
    def requested(self, event: Received, now: float) -> list[Effect]:
        """Handle a request that was held during the change."""

    @abc.abstractmethod
    def layout_answered(self, now: float) -> list[Effect]:
        """Handle the outcome of a question about the layout in force."""


@dataclass
class _Change:
    """A change that this peer takes part in.

    Attributes:
        epoch, layout: the new ones.
        leader: the rank that leads the change.
        batches: all pieces that move between peers.
        pausing: the PauseRequest to acknowledge once the worker is quiet.
        preparing: the PrepareRequest to acknowledge once all pieces have arrived.
        state: the clocks of the new shards, as JSON; empty until the PrepareRequest arrives.
        sync: the sync model of all shards.
        pending: batches to request.
        fetching: the batches of open requests, by ticket.
        ready: all pieces have arrived.
        problem: why they cannot arrive; empty: they can.
        frozen: ranges are being sent or received, so pushes are refused.
        leader_lost_at: since when the leader is lost; None: it is not.
    """

    epoch: int
    layout: Layout
    leader: int
    batches: list[Batch]
    pausing: Deferred | None = None
    preparing: Deferred | None = None
    state: str = ""
    sync: str = ""
    pending: deque[int] = field(default_factory=deque)
    fetching: dict[int, int] = field(default_factory=dict)
    ready: bool = False
    problem: str = ""
    frozen: bool = False
    leader_lost_at: float | None = None


class Migration:
    """One peer's part in changes of servers, of which one runs at a time.

    Args:
        layouts: makes the run's layouts.
        layout: the first.

    Attributes:
        layout, epoch: in force at this peer.
        host: the peer that takes part.
        decided: all changes up to this epoch are over, committed or aborted.
    """

    def __init__(self, context: PeerContext, replies: Replies, host: MigrationHost, layouts: Layouts, layout: Layout):
        self.layout = layout
        self.layouts = layouts
        self.epoch = self.decided = 0
        self._context = context
        self._replies = replies
        self.host = host
        self._change: _Change | None = None
        self._next_layout: tuple[int, Layout] | None = None  # in force elsewhere, from the next iteration on here
        self._held: list[tuple[Received, Deferred]] = []
        self._blocked = False  # the training thread waits to begin an iteration's pushes
        self._confirmed: set[int] = set()  # ranks that have named the layout in force

    @property
    def busy(self) -> bool:
        """Whether a change is running."""
        return self._change is not None

    @property
    def frozen(self) -> bool:
        """Whether this peer's tables are being handed over."""
        return self._change is not None and self._change.frozen

    @property
    def placed(self) -> PlacedReply:
        """The layout in force, as a reply."""
        return PlacedReply(self.epoch, self.layout.servers, self.decided)

    # --- the worker -------------------------------------------------------------------------------

    def before_iteration(self) -> list[Effect]:
        """Block the training thread before an iteration's first gradient while a change is running."""
        if self._change is None:
            return []
        self._blocked = True
        return [Wait()]

    def release(self) -> None:
        """Forget that the training thread is blocked: it is about to leave."""
        self._blocked = False

    def worker_advanced(self, now: float) -> list[Effect]:
        """Acknowledge the PauseRequest if the worker has become quiet. Let it push what it has gathered before."""
        change = self._change
        if change is None or change.pausing is None:
            return []
        pushed = self.host.worker.push_gathered(now)
        if not self.host.worker.quiet:
            return pushed
        asked, change.pausing = change.pausing, None
        return [asked.answer(AcceptReply())]

    def catch_up(self, now: float) -> list[Effect] | None:
        """Switch to a layout that others put in force, between two iterations; None: this peer is up to date."""
        if self._next_layout is None:
            return None
        (epoch, layout), self._next_layout = self._next_layout, None
        self.host.worker.stop()
        return [*self._switch_layout(epoch, layout, "", now), *self.host.worker.begin(now)]

    # --- pushes and pulls -------------------------------------------------------------------------

    def divert(self, event: Received, request: GradientRequest | TablesRequest, now: float) -> list[Effect] | None:
        """Answer or hold a push or a pull that cannot be served now; None: it can."""
        learned: list[Effect] = []
        if request.epoch > self.epoch and self._is_ready_for(request.epoch):
            learned = self.commit(request.epoch, now)
        if request.epoch != self.epoch:
            behind = request.epoch < self.epoch
            reply = self.placed if behind else NotReadyReply("it does not know this layout yet")
            return [*learned, Answer(event.key, reply, now + request.patience)]
        if not self.frozen:
            return [*learned, *self.host.requested(event, now)] if learned else None
        if isinstance(request, GradientRequest):
            return [Answer(event.key, NotReadyReply("its tables are being moved"), now + request.patience)]
        self._held.append((event, defer(event.key, request.patience, now)))
        return []

    # --- requests ---------------------------------------------------------------------------------

    def requested(self, event: Received, now: float) -> list[Effect]:
        """Handle a request that belongs to a change."""
        match event.request:
            case PauseRequest():
                return self._pause(event, event.request, now)
            case PrepareRequest():
                return self._prepare(event, event.request, now)
            case RangesRequest():
                return self._send_ranges(event, event.request, now)
            case PlaceRequest():
                learned = self.learn_layout(event.sender, event.request, now)
                reply = BusyReply() if self._change else self.placed
                return [*learned, Answer(event.key, reply, now + self._context.timeout)]
        raise AssertionError(event.request)

    def begin(self, epoch: int, layout: Layout, leader: int) -> None:
        """Take part in a change from now on."""
        self._change = _Change(epoch, layout, leader, self.layouts.batches(self.layout, layout))

    def _pause(self, event: Received, request: PauseRequest, now: float) -> list[Effect]:
        asked = defer(event.key, request.patience, now)
        problem = self._try_to_join(event.sender, request)
        if problem:
            return [Answer(event.key, NotReadyReply(problem), asked.deadline)]
        assert self._change is not None
        replaced = put_off(self._change.pausing)  # the leader has repeated its request
        self._change.pausing = asked
        return [*replaced, *self.worker_advanced(now)]

    def _try_to_join(self, leader: int, request: PauseRequest) -> str:
        """Join the change if possible. Return why it is not, or an empty string."""
        if self._change is not None:
            return "" if (self._change.epoch, self._change.leader) == (request.epoch, leader) else UNDER_WAY
        if request.epoch <= self.decided:
            return "that change is over"
        if self._next_layout is not None or self.host.is_finishing:
            return "it no longer trains" if self.host.is_finishing else "it has not switched to the last layout yet"
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
            return [Answer(event.key, NotReadyReply("it does not take part in this change"), asked.deadline)]
        if change.ready or change.problem:
            return [asked.answer(outcome(change.problem))]
        replaced = put_off(change.preparing)
        change.preparing = asked
        if change.state:
            return replaced
        problem = self._sync_conflict(request.sync)
        if problem:
            return [*replaced, *self._prepared(change, problem)]
        change.state, change.sync, change.frozen = request.state, request.sync, True
        change.pending = deque(n for n, batch in enumerate(change.batches) if batch.target == self._context.rank)
        return [*replaced, PrepareTables(change.epoch, change.layout.servers), *self._fetch(change, now)]

    def _fetch(self, change: _Change, now: float) -> list[Effect]:
        """Request the pieces that will lie here."""
        effects: list[Effect] = []
        patience = self._context.members.model_timeout
        while change.pending and len(change.fetching) < MAX_OPEN:
            number = change.pending.popleft()
            request = RangesRequest(change.epoch, number, change.sync, patience)
            source = change.batches[number].source
            send = self._replies.send(source, request, now, now + patience, self._ranges_answered)
            change.fetching[send.ticket] = number
            effects.append(send)
        return effects if change.fetching else [*effects, ReportPrepared(change.epoch)]

    def _send_ranges(self, event: Received, request: RangesRequest, now: float) -> list[Effect]:
        """Answer with the values of a batch: the driver sends the ranges in ``pieces`` as the reply's payload."""
        change, deadline = self._change, now + request.patience
        if change is None or change.epoch != request.epoch or request.batch >= len(change.batches):
            return [Answer(event.key, NotReadyReply("it does not take part in this change"), deadline)]
        batch = change.batches[request.batch]
        if (batch.source, batch.target) != (self._context.rank, event.sender):
            return [Answer(event.key, NotReadyReply("these ranges do not move between these peers"), deadline)]
        if problem := self._sync_conflict(request.sync):
            return [Answer(event.key, NotReadyReply(problem), deadline)]
        change.frozen = True
        return [Answer(event.key, TablesReply(0, ()), deadline, pieces=batch.plain)]

    def _sync_conflict(self, sync: str) -> str:
        """Return why the hosted shards cannot be merged with others of the sync model ``sync``; empty: they can."""
        other = sorted(self.host.hosted.sync_settings - {sync})
        if not other:
            return ""
        return f"shards have different sync models, '{sync}' and '{other[0]}': use gossipx server set-sync first"

    # --- replies -----------------------------------------------------------------------------------

    def _ranges_answered(self, ticket: int, to: int, reply: Reply | None, now: float) -> list[Effect]:
        change = self._change
        if change is None or ticket not in change.fetching:
            return [Forget(ticket)]
        number = change.fetching.pop(ticket)
        if isinstance(reply, TablesReply):
            return [TakeRanges(ticket, change.batches[number].plain), *self._fetch(change, now)]
        if reply is None:
            change.pending.append(number)  # :meth:`watch` sends it again
            return [Forget(ticket)]
        assert isinstance(reply, NotReadyReply)
        return [Forget(ticket), *self._prepared(change, reply.reason)]

    def _layout_answered(self, ticket: int, to: int, reply: Reply | None, now: float) -> list[Effect]:
        learned = self.learn_layout(to, reply, now) if isinstance(reply, PlacedReply) else []
        return [Forget(ticket), *learned, *self.host.layout_answered(now)]

    def prepared(self, event: Prepared) -> list[Effect]:
        """Handle the end of preparation: all tables are here, or they cannot be."""
        change = self._change
        if change is None or change.epoch != event.epoch:
            return []
        return self._prepared(change, change.problem or event.problem)

    def _prepared(self, change: _Change, problem: str) -> list[Effect]:
        """Answer the PrepareRequest, or its repetition: all tables are here, or cannot be because of ``problem``."""
        change.ready, change.problem = not problem, problem
        asked, change.preparing = change.preparing, None
        return [asked.answer(outcome(problem))] if asked else []

    # --- layout in force ------------------------------------------------------------------------------

    def learn_layout(self, sender: int, news: PlaceRequest | PlacedReply, now: float) -> list[Effect]:
        """Handle the news that another peer uses this layout."""
        epoch, decided = news.epoch, news.decided
        self._confirmed.add(sender)
        known, self.decided = self._change, max(self.decided, decided)
        if epoch > self.epoch and (self._next_layout is None or epoch > self._next_layout[0]):
            return self.commit(epoch, now) if self._is_ready_for(epoch) else self._follow(epoch, news.servers, now)
        if known is not None and known.epoch <= decided:
            return self.abort(now)
        return []

    def _is_ready_for(self, epoch: int) -> bool:
        """Return whether this peer takes part in the change to ``epoch``, and has the tables that it will hold."""
        change = self._change
        serves = change is not None and self._context.rank in change.layout.servers
        return change is not None and change.epoch == epoch and (change.ready or not serves)

    def commit(self, epoch: int, now: float) -> list[Effect]:
        """Put the new layout in force."""
        change, self._change = self._change, None
        assert change is not None
        return [*self._switch_layout(epoch, change.layout, change.state, now), *self._unblock(now)]

    def _follow(self, epoch: int, servers: tuple[int, ...], now: float) -> list[Effect]:
        """Adopt a layout that others put in force while this peer was considered lost, or before it joined."""
        aborted = self.abort(now) if self._change else []
        if self._context.rank in servers and not self._context.members.has_joined_late:
            reason = "the servers were changed, and this peer does not have its new tables"
            return [*aborted, Stop(reason), Resume()]
        self._next_layout = epoch, self.layouts.make(servers)
        self.host.worker.drop_iteration()
        return aborted if self.host.worker.is_mid_iteration else [*aborted, *(self.catch_up(now) or [])]

    def _switch_layout(self, epoch: int, layout: Layout, state: str, now: float) -> list[Effect]:
        self.epoch, self.layout, self.decided = epoch, layout, max(self.decided, epoch)
        held, self._held = self._held, []
        return [
            PlaceTables(epoch, layout.servers),
            *(asked.answer(self.placed) for _, asked in held),
            *self.host.switch_layout(layout, epoch, state, self.placed, now),
        ]

    def abort(self, now: float) -> list[Effect]:
        """Abort the change and continue with the old layout."""
        change, self._change = self._change, None
        assert change is not None
        self.decided = max(self.decided, change.epoch)
        held, self._held = self._held, []
        refusal = NotReadyReply("the change of the servers was aborted")
        asked = [one for one in (change.pausing, change.preparing) if one is not None]
        return [
            *(one.answer(refusal) for one in asked),
            *([DropTables()] if change.state else []),
            *(effect for event, _ in held for effect in self.host.requested(event, now)),
            *self._unblock(now),
        ]

    def _unblock(self, now: float) -> list[Effect]:
        """Unblock the training thread, if it waits to begin an iteration, which has no gradient yet."""
        blocked, self._blocked = self._blocked, False
        return [*self.host.worker.gradients_ready([], now), Resume()] if blocked else []

    # --- timers -----------------------------------------------------------------------------------

    def watch(self, now: float) -> list[Effect]:
        """Have old deferred requests sent again, repeat failed requests, and ask which layout is in force."""
        change = self._change
        if change is None:
            return []
        effects: list[Effect] = []
        for name in ("pausing", "preparing"):
            asked: Deferred | None = getattr(change, name)
            if asked is not None and asked.put_off_at <= now:
                setattr(change, name, None)
                effects += put_off(asked)
        late = [asked for _, asked in self._held if asked.put_off_at <= now]
        self._held = [one for one in self._held if one[1] not in late]
        effects += [effect for asked in late for effect in put_off(asked)]
        effects += self._fetch(change, now) if change.pending else []
        return [*effects, *self._ask_layout_in_force(change, now)]

    def _ask_layout_in_force(self, change: _Change, now: float) -> list[Effect]:
        if change.leader == self._context.rank:
            return []
        if not self._context.members.is_gone(change.leader):
            change.leader_lost_at, ranks = None, [change.leader]
        else:
            change.leader_lost_at = now if change.leader_lost_at is None else change.leader_lost_at
            ranks = self._context.members.awaited()
        if change.leader_lost_at is not None and now - change.leader_lost_at >= self._context.timeout:
            text = f"peer {change.leader}, which led the change of the servers, is lost: they stay as they were"
            return [Note("servers", text), *self.abort(now)]
        return self._ask_layout_of(ranks, now)

    @property
    def is_asking_for_layout(self) -> bool:
        """Whether a question about the layout in force is open."""
        return bool(self._context.requests.open_ranks(PlaceRequest))

    def ask_layout(self, now: float) -> list[Effect]:
        """Ask all other peers which layout is in force; it may have changed before this peer joined."""
        return self._ask_layout_of(self._context.members.awaited(), now)

    @property
    def is_confirmed(self) -> bool:
        """Whether all other members have named the layout in force."""
        members = self._context.members
        return all(rank in self._confirmed or members.is_gone(rank) for rank in members.awaited())

    def _ask_layout_of(self, ranks: Sequence[int], now: float) -> list[Effect]:
        asked, deadline = self._context.requests.open_ranks(PlaceRequest), now + self._context.timeout
        question, send = PlaceRequest(self.epoch, self.layout.servers, self.decided), self._replies.send
        return [send(to, question, now, deadline, self._layout_answered) for to in ranks if to not in asked]
