"""Server mode of one peer: the shards that it holds, and its own dealings with all shards as a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gossipx.actor import Effect, Mix, Received, Resume, SetTimer, Stop
from gossipx.messages import (
    ArriveRequest,
    GradientRequest,
    NotReadyReply,
    Reply,
    ServerRequest,
    Stage,
    TablesRequest,
)
from gossipx.peer.exchange import Exchange, Ground
from gossipx.peer.pulls import Pulls
from gossipx.server.clock import Clock
from gossipx.server.shard import Shard
from gossipx.server.worker import AGAIN, Worker

WATCH = "watch"
"""The timer of the next look at those that pulls wait for."""
LOOK = 1 / 4
"""Share of peer_timeout between two looks: one that is silent is lost soon after peer_timeout has passed."""


@dataclass(frozen=True)
class ServerSettings:
    """How workers and servers go together; the same for all peers of a run.

    Attributes:
        servers: by shard, the rank that holds it.
        buckets: by shard, how many it has.
        trains: whether servers train, too.
        overlap: whether a worker pulls from each shard as soon as that has what it pushed (FluentPS, Figure 5b).
        lost: what a worker does while a server does not answer: wait for it, or stop.
    """

    servers: tuple[int, ...]
    buckets: tuple[int, ...]
    trains: bool = True
    overlap: bool = True
    lost: Literal["wait", "stop"] = "wait"

    def workers(self, size: int) -> list[int]:
        """Ranks that train."""
        return [rank for rank in range(size) if self.trains or rank not in self.servers]


class ServerMode(Exchange):
    """One peer of a run with a parameter server.

    Args:
        clocks: of the shards that this peer holds, by shard.
    """

    takes = (GradientRequest, TablesRequest)
    timers = (AGAIN, WATCH)

    def __init__(self, ground: Ground, pulls: Pulls, settings: ServerSettings, clocks: dict[int, Clock]):
        super().__init__(ground)
        self._settings = settings
        self._trains = settings.trains or ground.rank not in settings.servers
        self.shards = {
            index: Shard(index, settings.buckets[index], clock, ground.requests) for index, clock in clocks.items()
        }
        self.worker = Worker(ground, settings.servers, settings.buckets, settings.overlap)
        self._agreeing = False
        self._watching = False

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
        return bool(self.shards)

    @property
    def taken_in(self) -> int:
        return sum(shard.clock.counts.gradients for shard in self.shards.values())

    @property
    def delayed_pulls(self) -> int:
        return sum(shard.clock.counts.delayed for shard in self.shards.values())

    # --- the worker -------------------------------------------------------------------------------

    def begun(self, now: float) -> list[Effect]:
        filled = [effect for shard in self.shards.values() for effect in shard.begin(now)]
        return self._watched([*filled, *(self.worker.begin(now) if self._trains else [])], now)

    def begin(self, now: float) -> list[Effect]:
        return []

    def boundary(self, now: float) -> list[Effect]:
        return self.worker.iteration_done(now)

    def gradients_ready(self, buckets: Sequence[tuple[int, int]], now: float) -> list[Effect]:
        return self.worker.gradients_ready(buckets, now)

    def replied(self, ticket: int, to: int, reply: Reply, now: float) -> list[Effect]:
        return self._answered_all(self.worker.replied(ticket, reply, now), now)

    def failed(self, ticket: int, now: float) -> list[Effect]:
        return self.worker.failed(ticket, now)

    def _answered_all(self, effects: list[Effect], now: float) -> list[Effect]:
        if not self.worker.idle:
            return effects
        if self._agreeing:
            self._agreeing = False
            return [*effects, Resume()]
        return [*effects, *self.look(now)] if self._ending else effects

    def mix(self, step: int, at_boundary: bool) -> Mix | None:
        return None

    def mixed(self, ticket: int) -> bool:
        return False

    # --- the server -------------------------------------------------------------------------------

    def requested(self, event: Received, now: float) -> list[Effect]:
        request = event.request
        assert isinstance(request, ServerRequest)
        shard = self.shards.get(request.shard)
        if shard is None:
            return [self._answer(event.key, NotReadyReply("it holds no such shard: give all peers the same"), now)]
        if event.sender not in self._training() and isinstance(request, TablesRequest):
            return shard.give(event, now)
        return self._watched(shard.requested(event, now), now)

    def offered(self, event: Received, now: float) -> list[Effect]:
        return self.requested(event, now)

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
        return [effect for shard in self.shards.values() for effect in shard.look(now, training)]

    def lost(self, rank: int, now: float) -> list[Effect]:
        stops = rank in self._settings.servers and self._settings.lost == "stop"
        stopped: list[Effect] = (
            [Stop(f"the server, peer {rank}, is gone, and --server-lost is stop"), Resume()] if stops else []
        )
        return [*stopped, *self.look(now)]

    def left(self, rank: int, now: float) -> list[Effect]:
        return self.lost(rank, now)

    def timer(self, name: str, now: float) -> list[Effect]:
        what, _, shard = name.partition(" ")
        if what == AGAIN:
            return self.worker.again(int(shard), now)
        self._watching = False
        asked = self._ground.requests.asked(ArriveRequest)
        here = ArriveRequest(Stage.TRAIN if not self._ending else Stage.FINISH, self._ground.incarnation)
        signs: list[Effect] = [
            self._ground.requests.send(rank, here, now, now + self._ground.timeout)
            for rank in self._held_up_by()
            if rank not in asked
        ]
        put_off = [effect for shard in self.shards.values() for effect in shard.put_off(now)]
        return self._watched([*put_off, *signs], now)

    def _held_up_by(self) -> set[int]:
        """Others that pulls wait for."""
        return {rank for shard in self.shards.values() for rank in shard.holding_up if rank != self._ground.rank}

    def _watched(self, effects: list[Effect], now: float) -> list[Effect]:
        """Where pulls wait for somebody, see now and then that it is still there."""
        if self._watching or not any(shard.waiting for shard in self.shards.values()):
            return effects
        self._watching = True
        return [*effects, SetTimer(WATCH, now + LOOK * self._ground.timeout)]

    def give_up(self, now: float) -> list[Effect]:
        return []

    def ask_again(self, now: float) -> list[Effect]:
        return []

    # --- the end ----------------------------------------------------------------------------------

    def end(self, now: float) -> list[Effect]:
        self._ending = True
        return self.look(now)

    def drop(self, now: float) -> list[Effect]:
        return []

    def agree(self, now: float) -> list[Effect] | None:
        """The end is what the servers hold: each takes it as its own model."""
        self._agreeing = True
        return self._answered_all(self.worker.begin(now), now)
