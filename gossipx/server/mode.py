"""Server mode of one peer: what happens reaches the part that it concerns, of those of a server and of a worker."""

from __future__ import annotations

from collections.abc import Sequence

from gossipx.peer.exchange import Exchange, Ground
from gossipx.peer.pulls import Pulls
from gossipx.peer.server_role import ServerRole
from gossipx.protocol.effects import Effect, Mix, Note, Resume, SetTimer, Stop
from gossipx.protocol.events import CameBack, ChangeServers, Prepared, Received, SwitchSync
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
from gossipx.server.failover.coordinator import Leading
from gossipx.server.failover.copies import Copies
from gossipx.server.failover.deadlock import Deadlocks
from gossipx.server.failover.migration import UNDER_WAY, Home, Moving
from gossipx.server.failover.replica import FOLLOW, RECORDS, Replica
from gossipx.server.holding import Holding
from gossipx.server.placement.layout import Layout
from gossipx.server.replies import Replies
from gossipx.server.settings import ServerSettings
from gossipx.server.shard import Shard
from gossipx.server.sync_models.clock import Clock
from gossipx.server.sync_models.switching import Switching
from gossipx.server.worker import AGAIN, Worker

WATCH = "watch"
"""The timer of the next look at those that pulls wait for."""
LOOK = 1 / 4
"""Share of peer_timeout between two looks: one that is silent is lost soon after peer_timeout has passed."""


class ServerMode(Exchange, ServerRole, Home):
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

    def __init__(self, ground: Ground, pulls: Pulls, settings: ServerSettings, clocks: dict[int, Clock]):
        super().__init__(ground)
        self._settings = settings
        self._replies = Replies(ground.requests)
        self.holding = Holding(ground, settings)
        self.shards = self.holding.shards
        self._trains = settings.trains or ground.rank not in settings.servers
        self.moving = Moving(ground, self, settings.layouts, settings.layout)
        self.leading = Leading(ground, self._replies, self.moving, settings.fixed)
        self._copies = Copies(ground, self._replies, self.shards, self._training)
        for index, clock in clocks.items():
            shard = self.holding.make(index, clock, settings.layout)
            others = [rank for rank in settings.holders[index] if rank != ground.rank]
            if others:
                begins = settings.holders[index][0] == ground.rank
                self._copies.follow(shard, others[0], begins)
            else:
                self.shards[index] = shard
        asking = ground, self._replies
        shape = settings.holders, settings.layout.buckets
        self.worker = Worker(*asking, self._worker_answered, *shape, settings.overlap, settings.syncs)
        self._switching = Switching(*asking, self.shards, self.worker.holder, settings.rate, self._hindered)
        self._deadlocks = Deadlocks(*asking, self.shards, self.worker.holder)
        self._agreeing = False
        self._watching = False
        self._sought = False  # a server is gone, and the others were asked whether there are others by now

    @property
    def replicas(self) -> dict[int, Replica]:
        """Shards that this peer follows, or of which it is not known yet who holds them."""
        return self._copies.replicas

    @property
    def _servers(self) -> tuple[int, ...]:
        """By shard, the rank that holds it, or did so as the run began."""
        return self.moving.layout.servers

    @property
    def _holders(self) -> Sequence[tuple[int, ...]]:
        """By shard, the ranks that may hold it."""
        return [(rank,) for rank in self._servers] if self.moving.epoch else self._settings.holders

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
        return self.holding.taken_in

    @property
    def delayed_pulls(self) -> int:
        return self.holding.delayed_pulls

    @property
    def counted(self) -> dict[str, tuple[int, float]]:
        return {tag: figure for shard in self.shards.values() for tag, figure in shard.counted.items()}

    # --- the worker -------------------------------------------------------------------------------

    def begun(self, now: float) -> list[Effect]:
        begun = self.holding.begun(now)
        begun += self.moving.seek(now) if self.holding.unsure else []
        begun += self._copies.begin(now)
        return self._watched([*begun, *(self.worker.begin(now) if self._trains else [])], now)

    def _made_sure(self, now: float) -> list[Effect]:
        """Once all others have told what stands, and it is what stood at the beginning, our shards begin."""
        return self.holding.begin(now) if self.holding.unsure and self.moving.sure else []

    def came_back(self, event: CameBack, now: float) -> list[Effect]:
        return self._watched(self.holding.came_back(event, self._training(), now), now)

    def begin(self, now: float) -> list[Effect]:
        return []

    def boundary(self, now: float) -> list[Effect]:
        over = self.moving.catch_up(now)
        return over if over is not None else self._gone_on(self.worker.iteration_done(now), now)

    def gradients_ready(self, buckets: Sequence[tuple[int, int]], now: float) -> list[Effect]:
        if not buckets and (waits := self.moving.begins()):
            return waits
        return self._gone_on(self.worker.gradients_ready(buckets, now), now)

    def replied(self, ticket: int, to: int, reply: Reply, now: float) -> list[Effect]:
        handled = self._replies.handle(ticket, reply, now)
        if handled is None:  # it is of a change, or of no interest any more
            handled = [*self.moving.replied(ticket, to, reply, now), *self._made_sure(now), *self._stopped()]
        return self._watched(handled, now)

    def failed(self, ticket: int, now: float) -> list[Effect]:
        handled = self._replies.handle(ticket, None, now)
        if handled is None:
            handled = [*self.moving.failed(ticket), *self._stopped()]
        return self._watched(handled, now)

    def _worker_answered(self, ticket: int, to: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle the answer to a push or a pull."""
        heard: list[Effect] = []
        if isinstance(reply, PlacedReply):  # before the worker, which goes on by what stands
            heard = self.moving.heard(to, reply.epoch, reply.servers, reply.decided, now)
        went = self._gone_on(self.worker.answered(ticket, reply, now), now)
        if reply is None:
            return [*went, *self._unagreed(), *self._bereft(now)]
        return [*heard, *self._answered_all(went, now)]

    def _bereft(self, now: float) -> list[Effect]:
        """A server has not answered. If nobody is left that holds its shard, others may hold all by now."""
        if not any(map(self._are_gone, self._holders)) or self.moving.asks:
            return []
        seeks = not self._settings.fixed and not (self._sought and self._settings.lost == "stop")
        asked = self.moving.seek(now) if seeks else []
        self._sought = True
        return asked or self._stopped()

    def _stopped(self) -> list[Effect]:
        """A server is gone for good, as far as the others know, and that is to end training."""
        gone = [holders[0] for holders in self._holders if self._are_gone(holders)]
        if not gone or not self._sought or self.moving.asks or self._settings.lost != "stop":
            return []
        return [Stop(f"the server, peer {gone[0]}, is gone, and --server-lost is stop"), Resume()]

    def _gone_on(self, effects: list[Effect], now: float) -> list[Effect]:
        """The worker has gone on."""
        return [*effects, *self.moving.look(now)]

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
        return all(map(self._ground.members.is_gone, ranks))

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
            return self._watched(self.leading.asked(event, request, now), now)
        if isinstance(request, MoveRequest):
            return self._watched(self.moving.requested(event, now), now)
        assert isinstance(request, ServerRequest)
        if isinstance(request, GradientRequest | TablesRequest):
            misplaced = self.moving.misplaced(event, request, now)
            if misplaced is not None:
                return self._watched(misplaced, now)
        if isinstance(request, RecordRequest):
            return self._copies.recorded(event, now)
        effects = self._copies.step_in(event.sender, request, now)
        shard = self.shards.get(request.shard)
        if shard is None:
            follows = request.shard in self._copies.replicas
            told = "it holds a replica only" if follows else "it holds no such shard: give all peers the same"
            return [self._answer(event.key, NotReadyReply(told), now)]
        return [*effects, *self._asked(event, shard, now)]

    def _asked(self, event: Received, shard: Shard, now: float) -> list[Effect]:
        """Somebody asks for something of a shard that is held here."""
        request = event.request
        if isinstance(request, CopyRequest):
            return self._watched(self._copies.asked_for(event, shard, now), now)
        if isinstance(request, SwitchRequest):
            return self._watched(self._switching.asked(event, shard, now), now)
        if isinstance(request, WaitingRequest):
            return [self._answer(event.key, WaitingReply(tuple(shard.clock.stuck.items())), now)]
        if shard.begun and event.sender not in self._training() and isinstance(request, TablesRequest):
            return shard.give(event, now)
        return self._watched(shard.requested(event, now), now)

    # --- members ------------------------------------------------------------------------------------

    def _training(self) -> list[int]:
        """Ranks whose pushes may be waited for."""
        members = self._ground.members
        ranks = [
            rank
            for rank in members.awaited()
            if rank in self._workers() and (members.others[rank].stage or Stage.JOINING) < Stage.FINISH
        ]
        own = self._trains and not (self._ending and self.worker.idle)
        return [*ranks, self._ground.rank] if own else ranks

    def _workers(self) -> list[int]:
        return self._settings.workers(len(self._ground.members.others) + 1)

    def look(self, now: float) -> list[Effect]:
        training = self._training()
        looked = [effect for shard in self.shards.values() for effect in shard.look(training)]
        return self._watched([*looked, *self._made_sure(now), *self.leading.look(now)], now)

    def lost(self, rank: int, now: float) -> list[Effect]:
        gone = any(rank in holders and self._are_gone(holders) for holders in self._holders)
        effects = [*(self._bereft(now) if gone else []), *self._copies.lost(rank)]
        return [*effects, *self.worker.lost(rank, now), *self.look(now), *self._unagreed()]

    def left(self, rank: int, now: float) -> list[Effect]:
        return self.lost(rank, now)

    def timer(self, name: str, now: float) -> list[Effect]:
        what, _, shard = name.partition(" ")
        if what == AGAIN:
            return self.worker.again(int(shard), now)
        if what in (RECORDS, FOLLOW):
            return self._watched(self._copies.due(what, int(shard), now), now)
        self._watching = False
        asked = self._ground.requests.asked(ArriveRequest)
        here = ArriveRequest(Stage.TRAIN if not self._ending else Stage.FINISH, self._ground.incarnation)
        signs: list[Effect] = [
            self._ground.requests.send(rank, here, now, now + self._ground.timeout)
            for rank in self._held_up_by()
            if rank not in asked
        ]
        self._deadlocks.again()
        put_off = [effect for shard in self.shards.values() for effect in shard.put_off(now)]
        again = self.moving.seek(now) if self.holding.unsure else []
        return self._watched([*put_off, *signs, *again, *self.moving.watch(now), *self.leading.watch(now)], now)

    def _held_up_by(self) -> set[int]:
        """Others that pulls wait for."""
        return {rank for shard in self.shards.values() for rank in shard.holding_up if rank != self._ground.rank}

    def _watched(self, effects: list[Effect], now: float) -> list[Effect]:
        """Where pulls wait for somebody, see now and then that it is still there; and what the clock is due for."""
        effects = effects + self.holding.keep(now)  # after all else
        effects += self._deadlocks.look(len(self._servers), now)
        effects += self._copies.send(now)
        changes = self.moving.busy or self.leading.busy or self.holding.unsure
        waits = changes or any(shard.waiting for shard in self.shards.values())
        if self._watching or not waits:
            return effects
        self._watching = True
        return [*effects, SetTimer(WATCH, now + LOOK * self._ground.timeout)]

    # --- other sync models --------------------------------------------------------------------------

    def switch(self, event: SwitchSync, now: float) -> list[Effect]:
        return self._watched(self._switching.switch(event, len(self._servers), now), now)

    def _hindered(self) -> str:
        return UNDER_WAY if self.moving.busy else ""

    # --- other servers ------------------------------------------------------------------------------

    def change(self, event: ChangeServers, now: float) -> list[Effect]:
        return self._watched(self.leading.wish(event, now), now)

    def hand_over_all(self, now: float) -> list[Effect]:
        self.worker.stop()
        self.moving.release()
        training = [rank for rank in self._training() if rank != self._ground.rank]
        kept = self.holding.keep(now, leaves=True)
        if not (self.shards and training and self.holding.ready) or self._agreeing or self._settings.fixed:
            return kept
        return self._watched([*kept, *self.moving.look(now), *self.leading.leave(training, now)], now)

    @property
    def stays(self) -> bool:
        return self.leading.leaving

    def prepared(self, event: Prepared, now: float) -> list[Effect]:
        return self.moving.prepared(event)

    @property
    def agreeing(self) -> bool:
        return self._agreeing

    def go_over(self, layout: Layout, epoch: int, state: str, reply: Reply, now: float) -> list[Effect]:
        self._sought = False
        held = self.holding.go_over(layout, epoch, state, reply, now)
        went = self._gone_on(self.worker.go_over(layout.servers, layout.buckets, epoch, now), now)
        return [*held, *went, *self.look(now)]

    def beginning(self) -> list[Shard]:
        """Shards that are this peer's to begin with: they may be brought back before it joins."""
        return [*self.shards.values(), *(one.shard for one in self.replicas.values() if one.begins)]

    # --- the end ----------------------------------------------------------------------------------

    def end(self, now: float) -> list[Effect]:
        self._ending = True
        self.worker.stop()
        return [*self.look(now), *self.moving.look(now)]

    def drop(self, now: float) -> list[Effect]:
        return []

    def unsound(self, now: float) -> list[Effect]:
        return self.boundary(now)  # the others count on its pushes, and its next tables may be sound again

    def agree(self, now: float) -> list[Effect] | None:
        """The end is what the servers hold: each takes it as its own model."""
        self._agreeing = True
        return [*self.holding.keep(now, last=True), *self._answered_all(self.worker.begin(now), now)]
