"""Server mode of one peer: dispatches events to the parts of its server and its worker.

A peer may host shards, train as a worker, or both. Separate classes handle the worker's requests, changes of servers
and switches of sync models; this class connects them to the peer role.
"""

from __future__ import annotations

from collections.abc import Iterable

from gossipx.peer.exchange import Exchange, PeerContext
from gossipx.peer.pulls import PullExchange
from gossipx.peer.server_role import Metrics, ServerRole
from gossipx.protocol.effects import Effect, Mix, Note, Resume, SetTimer, Stop
from gossipx.protocol.events import ChangeServers, Event, GradientsReady, Prepared, Received, SwitchSync, TablesRestored
from gossipx.protocol.messages import ArriveRequest, NotReadyReply, Reply, Stage
from gossipx.protocol.server_messages import (
    GradientRequest,
    PauseRequest,
    PlacedReply,
    PlaceRequest,
    PrepareRequest,
    RangesRequest,
    ServerRequest,
    ServersRequest,
    SwitchRequest,
    TablesRequest,
)
from gossipx.server.coordinator import Coordinator
from gossipx.server.hosted_shards import HostedShards
from gossipx.server.migration import Migration, MigrationHost
from gossipx.server.placement import Layout
from gossipx.server.plan import ServerPlan, workers
from gossipx.server.requests import Replies
from gossipx.server.shard import Shard
from gossipx.server.switches import SyncModelSwitch
from gossipx.server.worker import AGAIN, ShardLink, Worker

WATCH = "watch"
"""The timer of the periodic check while pulls wait or servers change."""
WATCH_PERIOD = 1 / 4
"""The period of that check, as a share of peer_timeout: a silent peer is found lost soon after peer_timeout."""


class ServerMode(Exchange, ServerRole, MigrationHost):
    """One peer of a run with a parameter server.

    Args:
        plan: the same on all peers.

    Attributes:
        hosted: the shards hosted here.
        shards: the same, by index.
        migration: this peer's part in changes of servers.
        coordinator: the changes of servers that this peer requests or leads.
    """

    request_types = (
        *(GradientRequest, TablesRequest, SwitchRequest),
        *(ServersRequest, PauseRequest, PrepareRequest, RangesRequest, PlaceRequest),
    )
    timers = (AGAIN, WATCH)
    captured_ticket = None
    awaits_all = True

    def __init__(self, context: PeerContext, pulls: PullExchange, plan: ServerPlan):
        super().__init__(context)
        self._plan = plan
        self._settings = plan.settings
        self.trains = not plan.settings.servers_only or context.rank not in plan.layout.servers
        self._replies = Replies(context.requests)
        self.hosted = HostedShards(context, plan)
        self.shards = self.hosted.shards
        self.migration = Migration(context, self._replies, self, plan.layouts, plan.layout)
        self.coordinator = Coordinator(context, self._replies, self.migration, plan.fixed)
        for index in plan.shards_of(context.rank):
            self.shards[index] = self.hosted.make(index, plan.layout)
        common = context, self._replies
        links = [ShardLink(*one) for one in zip(plan.layout.servers, plan.layout.buckets, plan.syncs, strict=True)]
        self.worker = Worker(*common, self._worker_answered, links, plan.settings.overlap)
        self._sync_model_switch = SyncModelSwitch(
            *common, self.shards, self.worker.holder, len(self._workers()), plan.rate, self.migration
        )
        self._serves = False  # all peers have reached START
        self._finishing = False
        self._watching = False
        self._asked_for_layout = False  # a server is lost, and the other peers were asked for a newer layout

    @property
    def _servers(self) -> tuple[int, ...]:
        """For each shard, the rank that holds it in the current layout."""
        return self.migration.layout.servers

    @property
    def _gone(self) -> list[int]:
        """The lost servers."""
        return [rank for rank in self._servers if self._context.members.is_gone(rank)]

    @property
    def over(self) -> bool:
        return self.worker.idle

    @property
    def is_needed_at_finish(self) -> bool:
        return bool(self.shards) or not self.trains

    @property
    def contributions(self) -> int:
        return self.hosted.contributions

    @property
    def delayed_pulls(self) -> int:
        return self.hosted.delayed_pulls

    @property
    def metrics(self) -> Metrics:
        return self.hosted.metrics

    # --- the worker -------------------------------------------------------------------------------

    def start_serving(self, now: float) -> list[Effect]:
        self._serves = True
        effects = self.hosted.start_serving(now)
        effects += self.migration.ask_layout(now) if self.hosted.unconfirmed else []
        began = self.worker.begin(now, self._context.step - 1) if self.trains else []
        return self._follow_up([*effects, *began], now)

    def _begin_confirmed(self, now: float) -> list[Effect]:
        """Start the shards of a peer that joined late, once all others have confirmed that the layout is unchanged."""
        return self.hosted.start_shards(now) if self.hosted.unconfirmed and self.migration.is_confirmed else []

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case GradientsReady(buckets):
                waits = [] if buckets else self.migration.before_iteration()
                return waits or self._worker_advanced(self.worker.gradients_ready(buckets, now), now)
            case Prepared():
                return self.migration.prepared(event)
            case TablesRestored():
                return self._follow_up(self.hosted.tables_restored(event, self._training(), now), now)
            case SwitchSync():
                return self._follow_up(self._sync_model_switch.switch(event, now), now)
            case ChangeServers():
                return self._follow_up(self.coordinator.submit(event, now), now)
        return []

    def begin(self, now: float) -> list[Effect]:
        return []

    def initial_model_requested(self, event: Received, now: float) -> list[Effect] | None:
        """Refuse a server that was restarted, if this peer does not train: our model is still the initial one."""
        if self.trains or not self._serves or event.sender not in self._servers:
            return None
        return [self._answer(event.key, NotReadyReply("it only serves and has no model of its own"), now)]

    def step_ended(self, now: float) -> list[Effect]:
        over = self.migration.catch_up(now)
        return over if over is not None else self._worker_advanced(self.worker.iteration_done(now), now)

    def replied(self, ticket: int, to: int, reply: Reply, now: float) -> list[Effect]:
        return self._follow_up(self._replies.handle(ticket, reply, now), now)

    def failed(self, ticket: int, now: float) -> list[Effect]:
        return self._follow_up(self._replies.handle(ticket, None, now), now)

    def layout_answered(self, now: float) -> list[Effect]:
        return [*self._begin_confirmed(now), *self._stop_lost()]

    def _worker_answered(self, ticket: int, to: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle the outcome of a push or a pull."""
        # The migration learns of a new layout before the worker, which continues with it.
        learned = self.migration.learn_layout(to, reply, now) if isinstance(reply, PlacedReply) else []
        went = self._worker_advanced(self.worker.answered(ticket, reply, now), now)
        if reply is None:
            return [*went, *self._give_up_lost(), *self._server_lost(now)]
        if isinstance(reply, NotReadyReply):  # the holder may be considered lost by mistake
            went = [*went, *self._ask_for_signs(self._gone, now)]
        return [*learned, *self._answered_all(went, now)]

    def _server_lost(self, now: float) -> list[Effect]:
        """Handle a lost server: ask the other peers for a newer layout first."""
        if not self._gone or self.migration.is_asking_for_layout:
            return []
        seeks = not self._plan.fixed and not (self._asked_for_layout and self._settings.server_lost == "stop")
        questions = self.migration.ask_layout(now) if seeks else []
        self._asked_for_layout = True
        return questions or self._stop_lost()

    def _stop_lost(self) -> list[Effect]:
        """Stop training if a server is lost for good and --server-lost is stop."""
        gone = self._gone
        if (
            not gone
            or not self._asked_for_layout
            or self.migration.is_asking_for_layout
            or self._settings.server_lost != "stop"
        ):
            return []
        return [Stop(f"peer {gone[0]}, a server, is lost, and --server-lost is stop"), Resume()]

    def _worker_advanced(self, effects: list[Effect], now: float) -> list[Effect]:
        """Tell the migration that the worker has advanced: it may wait for that."""
        return [*effects, *self.migration.worker_advanced(now)]

    def _give_up_lost(self) -> list[Effect]:
        """Stop waiting for a lost server's last tables at the end of the run."""
        if not (self._finishing and self._gone):
            return []
        self._finishing = False
        return [
            *self.worker.give_up(),
            Note("tables", "a server was lost before it sent its last tables: this peer keeps its own"),
            Resume(),
        ]

    def _answered_all(self, effects: list[Effect], now: float) -> list[Effect]:
        if not self.worker.idle:
            return effects
        if self._finishing:
            self._finishing = False
            return [*effects, Resume()]
        return [*effects, *self.members_changed(now)] if self._ending else effects

    def mix(self, at_boundary: bool) -> Mix | None:
        return None

    def mixed(self, ticket: int) -> bool:
        return False

    # --- the server -------------------------------------------------------------------------------

    def requested(self, event: Received, now: float) -> list[Effect]:
        match event.request:
            case ServersRequest() as request:
                effects = self.coordinator.requested(event, request, now)
            case PauseRequest() | PrepareRequest() | RangesRequest() | PlaceRequest():
                effects = self.migration.requested(event, now)
            case GradientRequest() | TablesRequest() as request:
                diverted = self.migration.divert(event, request, now)
                effects = self._shard_requested(event, request, now) if diverted is None else diverted
            case SwitchRequest() as request:
                effects = self._shard_requested(event, request, now)
            case _:
                raise AssertionError(event.request)
        return self._follow_up(effects, now)

    def _shard_requested(self, event: Received, request: ServerRequest, now: float) -> list[Effect]:
        """Handle a request for one shard."""
        shard = self.shards.get(request.shard)
        if shard is None:
            refusal = NotReadyReply("it does not hold this shard: start all peers alike")
            return [self._answer(event.key, refusal, now)]
        match request:
            case SwitchRequest():
                return self._sync_model_switch.requested(event, request, shard, now)
            case TablesRequest() if shard.is_serving and event.sender not in self._training():
                return shard.answer_at_once(event, request, now)
            case GradientRequest() | TablesRequest():
                return shard.requested(event, request, now)
        raise AssertionError(request)

    # --- members ------------------------------------------------------------------------------------

    def _training(self) -> list[int]:
        """Return the ranks whose pushes may be waited for."""
        members, workers = self._context.members, set(self._workers())
        ranks = [
            rank
            for rank in members.awaited()
            if rank in workers and (members.others.peek(rank).stage or Stage.JOINING) < Stage.FINISH
        ]
        own = self.trains and not (self._ending and self.worker.idle)
        return [*ranks, self._context.rank] if own else ranks

    def _workers(self) -> list[int]:
        return workers(self._settings, self._plan.layout.servers, len(self._context.members.others) + 1)

    def members_changed(self, now: float) -> list[Effect]:
        training = self._training()
        removed = [effect for shard in self.shards.values() for effect in shard.update_members(training)]
        changed = [*removed, *self._begin_confirmed(now)]
        return self._follow_up([*changed, *self.worker.send_ready(now), *self.coordinator.check_members(now)], now)

    def peer_lost(self, rank: int, now: float) -> list[Effect]:
        lost = self._server_lost(now) if rank in self._gone else []
        return [*lost, *self.members_changed(now), *self._give_up_lost()]

    def peer_left(self, rank: int, now: float) -> list[Effect]:
        return self.peer_lost(rank, now)

    def timer_fired(self, name: str, now: float) -> list[Effect]:
        what, _, shard = name.partition(" ")
        if what == AGAIN:
            return self.worker.retry(int(shard), now)
        self._watching = False
        signs = self._ask_for_signs(self._held_up_by(), now)
        put_off = [effect for shard in self.shards.values() for effect in shard.put_off(now)]
        waits = [self._waits_for(shard) for shard in self.shards.values() if put_off and shard.holding_up]
        again = self.migration.ask_layout(now) if self.hosted.unconfirmed else []
        return self._follow_up(
            [*put_off, *waits, *signs, *again, *self.migration.watch(now), *self.coordinator.watch(now)], now
        )

    def _waits_for(self, shard: Shard) -> Note:
        """Report whose pushes the pulls of a shard have waited for."""
        ranks = ", ".join(map(str, shard.holding_up))
        what = "the next gradient" if shard.clock.awaits_gradients else f"iteration {shard.clock.clock}"
        return Note("held up", f"pulls from shard {shard.index} wait for {what} of peer {ranks}")

    def _ask_for_signs(self, ranks: Iterable[int], now: float) -> list[Effect]:
        """Ask peers for a sign of life, unless they were asked already."""
        asked = self._context.requests.open_ranks(ArriveRequest)
        here = ArriveRequest(Stage.TRAIN if not self._ending else Stage.FINISH, self._context.incarnation)
        until = now + self._context.timeout
        return [self._context.requests.send(rank, here, now, until) for rank in ranks if rank not in asked]

    def _held_up_by(self) -> set[int]:
        """Return the other ranks that pulls wait for."""
        return {rank for shard in self.shards.values() for rank in shard.holding_up if rank != self._context.rank}

    def _follow_up(self, effects: list[Effect], now: float) -> list[Effect]:
        """Add what follows any event: due checkpoints, and the periodic check."""
        effects = effects + self.hosted.checkpoint()  # last, so that checkpoints include this event
        changes = self.migration.busy or self.coordinator.busy or self.hosted.unconfirmed
        waits = changes or any(shard.waiting for shard in self.shards.values())
        if self._watching or not waits:
            return effects
        self._watching = True
        return [*effects, SetTimer(WATCH, now + WATCH_PERIOD * self._context.timeout)]

    # --- other servers ------------------------------------------------------------------------------

    def hand_over_all(self, now: float) -> list[Effect]:
        self.worker.stop()
        self.migration.release()
        training = [rank for rank in self._training() if rank != self._context.rank]
        kept = self.hosted.checkpoint(leaves=True)
        if not (self.shards and training and self.hosted.ready) or self._finishing or self._plan.fixed:
            return kept
        return self._follow_up(
            [*kept, *self.migration.worker_advanced(now), *self.coordinator.leave(training, now)], now
        )

    @property
    def is_handing_over(self) -> bool:
        return self.coordinator.leaving

    @property
    def is_finishing(self) -> bool:
        return self._finishing

    def switch_layout(self, layout: Layout, epoch: int, state: str, reply: Reply, now: float) -> list[Effect]:
        self._asked_for_layout = False
        held = self.hosted.switch_layout(layout, epoch, state, reply, now)
        went = self._worker_advanced(self.worker.switch_layout(layout.servers, layout.buckets, epoch, now), now)
        return [*held, *went, *self.members_changed(now)]

    def beginning(self) -> list[Shard]:
        """Return the shards that this peer holds at the start of the run; they may be restored before it joins."""
        return [*self.shards.values()]

    # --- the end ----------------------------------------------------------------------------------

    def end(self, now: float) -> list[Effect]:
        self._ending = True
        self.worker.stop()
        pushed = self.worker.push_gathered(now)
        return [*pushed, *self.members_changed(now), *self.migration.worker_advanced(now)]

    def drop(self, now: float) -> list[Effect]:
        return []

    def diverged(self, now: float) -> list[Effect]:
        return self.step_ended(now)  # others wait for its pushes, and the next tables may be finite again

    def fetch_final_model(self, now: float) -> list[Effect] | None:
        """Pull the servers' final tables, which become every worker's final model."""
        self._finishing = True
        return [*self.hosted.checkpoint(last=True), *self._answered_all(self.worker.begin(now), now)]
