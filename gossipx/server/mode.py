"""Server mode of one peer: what happens reaches the part that it concerns, of those of a server and of a worker."""

from __future__ import annotations

from collections.abc import Sequence

from gossipx.peer.exchange import Exchange, PeerContext
from gossipx.peer.pulls import Pulls
from gossipx.peer.server_role import ServerRole
from gossipx.protocol.effects import Effect, Mix, Note, Resume, SetTimer, Stop
from gossipx.protocol.events import ChangeServers, Prepared, Received, SwitchSync, TablesRestored
from gossipx.protocol.messages import ArriveRequest, NotReadyReply, Reply, Stage
from gossipx.protocol.server_messages import (
    CopyRequest,
    GradientRequest,
    MoveRequest,
    PauseRequest,
    PlacedReply,
    PlaceRequest,
    PrepareRequest,
    RangesRequest,
    RecordRequest,
    ServerRequest,
    ServersRequest,
    SwitchRequest,
    TablesRequest,
    WaitingReply,
    WaitingRequest,
)
from gossipx.server.failover.coordinator import Coordinator
from gossipx.server.failover.copies import Replication
from gossipx.server.failover.deadlock import DeadlockDetector
from gossipx.server.failover.migration import UNDER_WAY, Migration, MigrationHost
from gossipx.server.failover.replica import FOLLOW, RECORDS, Replica
from gossipx.server.hosted_shards import HostedShards
from gossipx.server.placement.layout import Layout
from gossipx.server.replies import Replies
from gossipx.server.settings import ServerSettings
from gossipx.server.shard import Shard
from gossipx.server.sync_models.clock import Clock
from gossipx.server.sync_models.switching import SyncModelSwitch
from gossipx.server.worker import AGAIN, Worker

WATCH = "watch"
"""The timer of the next look at those that pulls wait for."""
LOOK = 1 / 4
"""Share of peer_timeout between two looks: one that is silent is lost soon after peer_timeout has passed."""


class ServerMode(Exchange, ServerRole, MigrationHost):
    """One peer of a run with a parameter server.

    Args:
        clocks: of the shards that this peer holds or has replicas of, by shard.

    Attributes:
        holding: the shards that lie here.
        shards: these, by index.
        moving: its part in changes of servers.
        leading: those that it leads, or asks for.
    """

    takes = (
        *(GradientRequest, TablesRequest, SwitchRequest, WaitingRequest, RecordRequest, CopyRequest),
        *(ServersRequest, PauseRequest, PrepareRequest, RangesRequest, PlaceRequest),
    )
    timers = (AGAIN, WATCH, RECORDS, FOLLOW)

    def __init__(self, context: PeerContext, pulls: Pulls, settings: ServerSettings, clocks: dict[int, Clock]):
        super().__init__(context)
        self._settings = settings
        self._replies = Replies(context.requests)
        self.hosted = HostedShards(context, settings)
        self.shards = self.hosted.shards
        self._trains = settings.trains or context.rank not in settings.servers
        self.migration = Migration(context, self, settings.layouts, settings.layout)
        self.coordinator = Coordinator(context, self._replies, self.migration, settings.fixed)
        self._replication = Replication(context, self._replies, self.shards, self._training)
        for index, clock in clocks.items():
            shard = self.hosted.make(index, clock, settings.layout)
            others = [rank for rank in settings.holders[index] if rank != context.rank]
            if others:
                begins = settings.holders[index][0] == context.rank
                self._replication.follow(shard, others[0], begins)
            else:
                self.shards[index] = shard
        asking = context, self._replies
        shape = settings.holders, settings.layout.buckets
        self.worker = Worker(*asking, self._worker_answered, *shape, settings.overlap, settings.syncs)
        self._sync_model_switch = SyncModelSwitch(
            *asking, self.shards, self.worker.holder, settings.rate, self._obstacle
        )
        self._deadlock_detector = DeadlockDetector(*asking, self.shards, self.worker.holder)
        self._agreeing = False
        self._watching = False
        self._sought = False  # a server is gone, and the others were asked whether there are others by now

    @property
    def replicas(self) -> dict[int, Replica]:
        """Shards that this peer follows, or of which it is not known yet who holds them."""
        return self._replication.replicas

    @property
    def _servers(self) -> tuple[int, ...]:
        """By shard, the rank that holds it, or did so as the run began."""
        return self.migration.layout.servers

    @property
    def _holders(self) -> Sequence[tuple[int, ...]]:
        """By shard, the ranks that may hold it."""
        return [(rank,) for rank in self._servers] if self.migration.epoch else self._settings.holders

    @property
    def captured(self) -> int | None:
        return None

    @property
    def over(self) -> bool:
        return self.worker.idle

    @property
    def gives(self) -> bool:
        return self._trains

    @property
    def attends(self) -> bool:
        return bool(self.shards or self.replicas) or not self._trains

    @property
    def awaits_all(self) -> bool:
        return True

    @property
    def keep_at(self) -> int:
        """The iteration after which a checkpoint is to be taken, where servers say so; 0: none yet."""
        return self.worker.keep_at

    @property
    def taken_in(self) -> int:
        return self.hosted.taken_in

    @property
    def delayed_pulls(self) -> int:
        return self.hosted.delayed_pulls

    @property
    def counted(self) -> dict[str, tuple[int, float]]:
        return {tag: figure for shard in self.shards.values() for tag, figure in shard.counted.items()}

    # --- the worker -------------------------------------------------------------------------------

    def begun(self, now: float) -> list[Effect]:
        begun = self.hosted.begun(now)
        begun += self.migration.seek(now) if self.hosted.unsure else []
        begun += self._replication.begin(now)
        return self._watched([*begun, *(self.worker.begin(now) if self._trains else [])], now)

    def _made_sure(self, now: float) -> list[Effect]:
        """Once all others have told what stands, and it is what stood at the beginning, our shards begin."""
        return self.hosted.begin(now) if self.hosted.unsure and self.migration.sure else []

    def tables_restored(self, event: TablesRestored, now: float) -> list[Effect]:
        return self._watched(self.hosted.tables_restored(event, self._training(), now), now)

    def begin(self, now: float) -> list[Effect]:
        return []

    def boundary(self, now: float) -> list[Effect]:
        over = self.migration.catch_up(now)
        return over if over is not None else self._gone_on(self.worker.iteration_done(now), now)

    def gradients_ready(self, buckets: Sequence[tuple[int, int]], now: float) -> list[Effect]:
        if not buckets and (waits := self.migration.begins()):
            return waits
        return self._gone_on(self.worker.gradients_ready(buckets, now), now)

    def replied(self, ticket: int, to: int, reply: Reply, now: float) -> list[Effect]:
        handled = self._replies.handle(ticket, reply, now)
        if handled is None:  # it is of a change, or of no interest any more
            handled = [*self.migration.replied(ticket, to, reply, now), *self._made_sure(now), *self._stopped()]
        return self._watched(handled, now)

    def failed(self, ticket: int, now: float) -> list[Effect]:
        handled = self._replies.handle(ticket, None, now)
        if handled is None:
            handled = [*self.migration.failed(ticket), *self._stopped()]
        return self._watched(handled, now)

    def _worker_answered(self, ticket: int, to: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle the answer to a push or a pull."""
        heard: list[Effect] = []
        if isinstance(reply, PlacedReply):  # before the worker, which goes on by what stands
            heard = self.migration.heard(to, reply.epoch, reply.servers, reply.decided, now)
        went = self._gone_on(self.worker.answered(ticket, reply, now), now)
        if reply is None:
            return [*went, *self._unagreed(), *self._server_lost(now)]
        return [*heard, *self._answered_all(went, now)]

    def _server_lost(self, now: float) -> list[Effect]:
        """A server has not answered. If nobody is left that holds its shard, others may hold all by now."""
        if not any(map(self._are_gone, self._holders)) or self.migration.asks:
            return []
        seeks = not self._settings.fixed and not (self._sought and self._settings.lost == "stop")
        asked = self.migration.seek(now) if seeks else []
        self._sought = True
        return asked or self._stopped()

    def _stopped(self) -> list[Effect]:
        """A server is gone for good, as far as the others know, and that is to end training."""
        gone = [holders[0] for holders in self._holders if self._are_gone(holders)]
        if not gone or not self._sought or self.migration.asks or self._settings.lost != "stop":
            return []
        return [Stop(f"the server, peer {gone[0]}, is gone, and --server-lost is stop"), Resume()]

    def _gone_on(self, effects: list[Effect], now: float) -> list[Effect]:
        """The worker has gone on."""
        return [*effects, *self.migration.look(now)]

    def _unagreed(self) -> list[Effect]:
        """At the end, a server that is gone is not waited for: it holds nothing any more."""
        gone = any(map(self._are_gone, self._holders))
        if not (self._agreeing and gone):
            return []
        self._agreeing = False
        return [
            *self.worker.give_up(),
            Note("tables", "a server is gone before it gave its last tables: this peer keeps those that it has"),
            Resume(),
        ]

    def _are_gone(self, ranks: Sequence[int]) -> bool:
        """Whether nobody is left of those that hold a shard or its replica."""
        return all(map(self._context.members.is_gone, ranks))

    def _answered_all(self, effects: list[Effect], now: float) -> list[Effect]:
        if not self.worker.idle:
            return effects
        if self._agreeing:
            self._agreeing = False
            return [*effects, Resume()]
        return [*effects, *self.look(now)] if self._ending else effects

    def mix(self, at_boundary: bool) -> Mix | None:
        return None

    def mixed(self, ticket: int) -> bool:
        return False

    # --- the server -------------------------------------------------------------------------------

    def requested(self, event: Received, now: float) -> list[Effect]:
        request = event.request
        if isinstance(request, ServersRequest):
            return self._watched(self.coordinator.asked(event, request, now), now)
        if isinstance(request, MoveRequest):
            return self._watched(self.migration.requested(event, now), now)
        assert isinstance(request, ServerRequest)
        if isinstance(request, GradientRequest | TablesRequest):
            misplaced = self.migration.misplaced(event, request, now)
            if misplaced is not None:
                return self._watched(misplaced, now)
        if isinstance(request, RecordRequest):
            return self._replication.recorded(event, now)
        effects = self._replication.step_in(event.sender, request, now)
        shard = self.shards.get(request.shard)
        if shard is None:
            follows = request.shard in self._replication.replicas
            told = "it holds a replica only" if follows else "it holds no such shard: give all peers the same"
            return [self._answer(event.key, NotReadyReply(told), now)]
        return [*effects, *self._asked(event, shard, now)]

    def _asked(self, event: Received, shard: Shard, now: float) -> list[Effect]:
        """Somebody asks for something of a shard that is held here."""
        request = event.request
        if isinstance(request, CopyRequest):
            return self._watched(self._replication.asked_for(event, shard, now), now)
        if isinstance(request, SwitchRequest):
            return self._watched(self._sync_model_switch.asked(event, shard, now), now)
        if isinstance(request, WaitingRequest):
            return [self._answer(event.key, WaitingReply(tuple(shard.clock.stuck.items())), now)]
        if shard.begun and event.sender not in self._training() and isinstance(request, TablesRequest):
            return shard.give(event, now)
        return self._watched(shard.requested(event, now), now)

    # --- members ------------------------------------------------------------------------------------

    def _training(self) -> list[int]:
        """Ranks whose pushes may be waited for."""
        members = self._context.members
        ranks = [
            rank
            for rank in members.awaited()
            if rank in self._workers() and (members.others[rank].stage or Stage.JOINING) < Stage.FINISH
        ]
        own = self._trains and not (self._ending and self.worker.idle)
        return [*ranks, self._context.rank] if own else ranks

    def _workers(self) -> list[int]:
        return self._settings.workers(len(self._context.members.others) + 1)

    def look(self, now: float) -> list[Effect]:
        training = self._training()
        looked = [effect for shard in self.shards.values() for effect in shard.look(training)]
        return self._watched([*looked, *self._made_sure(now), *self.coordinator.look(now)], now)

    def lost(self, rank: int, now: float) -> list[Effect]:
        gone = any(rank in holders and self._are_gone(holders) for holders in self._holders)
        effects = [*(self._server_lost(now) if gone else []), *self._replication.lost(rank)]
        return [*effects, *self.worker.lost(rank, now), *self.look(now), *self._unagreed()]

    def left(self, rank: int, now: float) -> list[Effect]:
        return self.lost(rank, now)

    def timer(self, name: str, now: float) -> list[Effect]:
        what, _, shard = name.partition(" ")
        if what == AGAIN:
            return self.worker.again(int(shard), now)
        if what in (RECORDS, FOLLOW):
            return self._watched(self._replication.due(what, int(shard), now), now)
        self._watching = False
        asked = self._context.requests.asked(ArriveRequest)
        here = ArriveRequest(Stage.TRAIN if not self._ending else Stage.FINISH, self._context.incarnation)
        signs: list[Effect] = [
            self._context.requests.send(rank, here, now, now + self._context.timeout)
            for rank in self._held_up_by()
            if rank not in asked
        ]
        self._deadlock_detector.again()
        put_off = [effect for shard in self.shards.values() for effect in shard.put_off(now)]
        again = self.migration.seek(now) if self.hosted.unsure else []
        return self._watched([*put_off, *signs, *again, *self.migration.watch(now), *self.coordinator.watch(now)], now)

    def _held_up_by(self) -> set[int]:
        """Others that pulls wait for."""
        return {rank for shard in self.shards.values() for rank in shard.holding_up if rank != self._context.rank}

    def _watched(self, effects: list[Effect], now: float) -> list[Effect]:
        """Where pulls wait for somebody, see now and then that it is still there; and what the clock is due for."""
        effects = effects + self.hosted.keep(now)  # after all else
        effects += self._deadlock_detector.look(len(self._servers), now)
        effects += self._replication.send(now)
        changes = self.migration.busy or self.coordinator.busy or self.hosted.unsure
        waits = changes or any(shard.waiting for shard in self.shards.values())
        if self._watching or not waits:
            return effects
        self._watching = True
        return [*effects, SetTimer(WATCH, now + LOOK * self._context.timeout)]

    # --- other sync models --------------------------------------------------------------------------

    def switch(self, event: SwitchSync, now: float) -> list[Effect]:
        return self._watched(self._sync_model_switch.switch(event, len(self._servers), now), now)

    def _obstacle(self) -> str:
        return UNDER_WAY if self.migration.busy else ""

    # --- other servers ------------------------------------------------------------------------------

    def change(self, event: ChangeServers, now: float) -> list[Effect]:
        return self._watched(self.coordinator.submit(event, now), now)

    def hand_over_all(self, now: float) -> list[Effect]:
        self.worker.stop()
        self.migration.release()
        training = [rank for rank in self._training() if rank != self._context.rank]
        kept = self.hosted.keep(now, leaves=True)
        if not (self.shards and training and self.hosted.ready) or self._agreeing or self._settings.fixed:
            return kept
        return self._watched([*kept, *self.migration.look(now), *self.coordinator.leave(training, now)], now)

    @property
    def stays(self) -> bool:
        return self.coordinator.leaving

    def prepared(self, event: Prepared, now: float) -> list[Effect]:
        return self.migration.prepared(event)

    @property
    def agreeing(self) -> bool:
        return self._agreeing

    def go_over(self, layout: Layout, epoch: int, state: str, reply: Reply, now: float) -> list[Effect]:
        self._sought = False
        held = self.hosted.go_over(layout, epoch, state, reply, now)
        went = self._gone_on(self.worker.go_over(layout.servers, layout.buckets, epoch, now), now)
        return [*held, *went, *self.look(now)]

    def beginning(self) -> list[Shard]:
        """Shards that are this peer's to begin with: they may be brought back before it joins."""
        return [*self.shards.values(), *(one.shard for one in self.replicas.values() if one.begins)]

    # --- the end ----------------------------------------------------------------------------------

    def end(self, now: float) -> list[Effect]:
        self._ending = True
        self.worker.stop()
        return [*self.look(now), *self.migration.look(now)]

    def drop(self, now: float) -> list[Effect]:
        return []

    def unsound(self, now: float) -> list[Effect]:
        return self.boundary(now)  # the others count on its pushes, and its next tables may be sound again

    def agree(self, now: float) -> list[Effect] | None:
        """The end is what the servers hold: each takes it as its own model."""
        self._agreeing = True
        return [*self.hosted.keep(now, last=True), *self._answered_all(self.worker.begin(now), now)]
