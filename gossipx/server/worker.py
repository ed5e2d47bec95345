"""A worker of a parameter server, decided purely (FluentPS, Algorithm 1, lines 1 to 6 of the worker).

Each bucket's gradient leaves as soon as it is made (wait-free backpropagation). With the end of the iteration each
shard is asked for its buckets, in the order in which the model uses them, a few at a time; what is computed with a
bucket's tables waits for that bucket alone. Shards do not wait for each other (Figure 5b); without ``overlap`` all
pulls wait until every shard has said that it would answer (Figure 5a).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gossipx.effects import Cancel, Effect, Forget, Send, SetTimer
from gossipx.messages import AcceptReply, BusyReply, Reply
from gossipx.peer.exchange import Ground
from gossipx.peer.membership import REST_FIRST
from gossipx.server.conditions import SyncModel
from gossipx.server.models import parse
from gossipx.server_messages import MEASURED, GradientRequest, TablesReply, TablesRequest
from gossipx.table_effects import Fetch, Fetched, Unchanged

AGAIN = "again"
"""The timers after which a shard is asked again: this, a space and its index."""
NONE_YET = 2**63
"""A clock that none reaches: of tables that are being fetched."""
AT_A_TIME = 2
"""Requests of a kind that are open with one shard: while one is answered the next is on its way."""


@dataclass
class _Way:
    """A worker's dealings with one shard.

    Attributes:
        holders: ranks that may hold the shard; ``at``: which of them is asked.
        ready: buckets whose gradients wait to leave.
        pushing: those on their way, by ticket, each with the iteration that its gradients are of.
        asks: buckets to be asked for.
        pulling: those asked for, by ticket, each with the progress that it was asked with.
        pulled: the progress that they are asked with.
        ended: the iteration's gradients are all made.
        rests: it did not answer, and is not asked before its timer.
        agreed: it has said that it would answer (without overlap).
        fetched: the clock that it gave its tables by, the least of its buckets.
        skips: it is not asked after this iteration, whose pushes are on their way.
        sync: its sync model, by its last answer: says after which iterations it is pulled from; None: after each.
        told: what that answer said of it.
    """

    holders: tuple[int, ...]
    buckets: int
    at: int = 0
    ready: deque[int] = field(default_factory=deque)
    pushing: dict[int, tuple[int, int]] = field(default_factory=dict)
    asks: deque[int] = field(default_factory=deque)
    pulling: dict[int, tuple[int, int]] = field(default_factory=dict)
    pulled: int = -1
    ended: bool = False
    rests: bool = False
    agreed: bool = True
    fetched: int = NONE_YET
    skips: bool = False
    sync: SyncModel | None = None
    told: str = ""

    @property
    def server(self) -> int:
        return self.holders[self.at]

    @property
    def idle(self) -> bool:
        return not (self.ready or self.pushing or self.asks or self.pulling)


class Worker:
    """One worker's pushes and pulls. Each method says what is to be done.

    Args:
        ground: of its role.
        holders: by shard, the ranks that may hold it, the first of them as the run begins.
        buckets: by shard, how many it has.
        overlap: whether each shard is pulled from as soon as it has what was pushed.
        syncs: by shard, the sync model that the run begins with; none: it is pulled from after each iteration.

    Attributes:
        keep_at: the iteration after which a checkpoint is to be taken, where servers say so; 0: none yet.
    """

    def __init__(
        self,
        ground: Ground,
        holders: Sequence[tuple[int, ...]],
        buckets: Sequence[int],
        overlap: bool = True,
        syncs: Sequence[SyncModel] = (),
    ):
        self.keep_at = 0
        self._ground = ground
        self._overlap = overlap
        self._ways = [_Way(*one) for one in zip(holders, buckets, strict=True)]
        self._begins_by: list[SyncModel | None] = [*syncs] if syncs else [None] * len(self._ways)
        for way, sync in zip(self._ways, self._begins_by, strict=True):
            way.sync = sync
        # One number for all shards, though their clocks may differ: were it another on each, two workers could each be
        # ahead on one shard and behind on another, and wait for each other for good.
        self._progress = 0  # the iteration whose gradients are pushed now, or were last
        self._next = 0  # the one after it: further on where a clock has passed us
        self._begun = False  # some gradients of an iteration have come
        # Of open requests the shard, and who was asked; None: they are of an earlier layout.
        self._by_ticket: dict[int, tuple[int, int] | None] = {}
        self._epoch = 0  # of the layout
        self._left_out = False  # the gradients of this iteration are of an earlier layout, and are not sent

    @property
    def quiet(self) -> bool:
        """Whether no iteration is being pushed, nor anything of one on its way."""
        return not self._begun and not any(way.ready or way.pushing for way in self._ways)

    @property
    def begun(self) -> bool:
        """Whether gradients of an iteration have been taken that are not all made."""
        return self._begun

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way, nor to be sent."""
        return all(way.idle for way in self._ways)

    def holder(self, shard: int) -> int:
        """The rank that a shard is asked of."""
        return self._ways[shard].server

    def awaits(self, ticket: int) -> bool:
        """Whether ``ticket`` is that of an open request."""
        return ticket in self._by_ticket

    def begin(self, now: float) -> list[Effect]:
        """Take what there is now, and begin at the clocks of the shards."""
        for way in self._ways:
            way.ready.clear()
            way.pulled, way.ended = -1, False
            way.asks = deque(range(way.buckets))
            way.agreed, way.skips = True, False
            way.fetched = NONE_YET
        return [Fetch(self._all()), *self._go_on(now)]

    def _all(self) -> tuple[tuple[int, int], ...]:
        return tuple((shard, bucket) for shard, way in enumerate(self._ways) for bucket in range(way.buckets))

    # --- another layout ---------------------------------------------------------------------------

    def go_over(self, servers: Sequence[int], buckets: Sequence[int], epoch: int, now: float) -> list[Effect]:
        """Go over to another layout, being :attr:`quiet`: what was being pulled is asked for anew."""
        self._forget_ways()
        holders = [(rank,) for rank in servers]
        pulled, fetched = self._ways[0].pulled, min(way.fetched for way in self._ways)
        pulls = any(way.asks or way.pulling for way in self._ways)
        self._epoch = epoch
        # Shards that differ in their sync models have no other layout: one serves for all.
        told, sync = self._ways[0].told, self._ways[0].sync
        self._begins_by = self._begins_by[:1] * len(servers)
        self._ways = [
            _Way(*one, pulled=pulled, fetched=fetched, told=told, sync=sync)
            for one in zip(holders, buckets, strict=True)
        ]
        for way in self._ways if pulls else ():
            way.fetched = NONE_YET
            way.ended = way.pulled >= 0
            way.agreed = self._overlap or not way.ended
            way.asks = deque(range(way.buckets)) if way.agreed else deque([-1])
        return self._go_on(now)

    def leave_out(self) -> None:
        """The gradients of this iteration are of a layout that is over: they are not sent."""
        self._forget_ways()
        self._left_out = self._begun
        for way in self._ways:
            way.ready.clear()
            way.pushing.clear()
            way.asks.clear()
            way.pulling.clear()

    def _forget_ways(self) -> None:
        self._by_ticket = dict.fromkeys(self._by_ticket)

    # --- an iteration -----------------------------------------------------------------------------

    def gradients_ready(self, buckets: Sequence[tuple[int, int]], now: float) -> list[Effect]:
        """These buckets' gradients are made; with none of any, the first is about to be taken."""
        if self._left_out:
            return []
        if not self._begun:
            self._begun, self._progress = True, self._next
        for shard, bucket in buckets:
            self._ways[shard].ready.append(bucket)
        return self._go_on(now)

    def iteration_done(self, now: float) -> list[Effect]:
        """All gradients of the iteration are made, and all tables are wanted again."""
        self._begun = self._left_out = False
        for way in self._ways:
            way.pulled = self._progress
            way.skips = way.sync is not None and not way.sync.fetches(self._progress, way.fetched)
            way.ended = not way.skips
            way.agreed = self._overlap or way.skips
            if way.ended:
                way.asks = deque(range(way.buckets)) if self._overlap else deque([-1])
                way.fetched = NONE_YET
        kept = [effect for shard in range(len(self._ways)) for effect in self._passed(shard)]
        return [Fetch(self._all()), *kept, *self._go_on(now)]

    def _passed(self, shard: int) -> list[Effect]:
        """A shard that is not asked after this iteration: the next begins once it has all of this one's gradients."""
        way = self._ways[shard]
        if not way.skips or way.ready or way.pushing:
            return []
        way.skips = False
        self._next = max(self._next, way.pulled + 1)
        return [Unchanged(tuple((shard, bucket) for bucket in range(way.buckets)))]

    def _go_on(self, now: float) -> list[Effect]:
        """Send what may be sent."""
        if all(way.agreed or not way.buckets for way in self._ways) and not self._overlap:
            for way in self._ways:
                if not way.asks and not way.pulling and way.ended and way.agreed and way.pulled >= 0:
                    way.ended = False
                    way.asks = deque(range(way.buckets))
        effects: list[Effect] = []
        for shard, way in enumerate(self._ways):
            if way.buckets:
                effects += self._ask(shard, way, now)
        return effects

    def _ask(self, shard: int, way: _Way, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if way.rests:
            return effects
        patience = self._ground.members.longest
        incarnation = self._ground.incarnation
        while way.ready and len(way.pushing) < AT_A_TIME:
            bucket = way.ready.popleft()
            push = GradientRequest(
                shard, bucket, incarnation, self._progress, (), (), patience, self._epoch, self.keep_at
            )
            send = self._send(shard, push, now)
            way.pushing[send.ticket] = bucket, self._progress
            effects.append(send)
        # Without overlap every push has to be there before anything is asked for.
        pushed = not way.ready and (self._overlap or not way.pushing)
        while way.asks and pushed and len(way.pulling) < AT_A_TIME:
            bucket = way.asks.popleft()
            asks = way.sync is not None and way.sync.asks_significance and way.pulled >= 0
            significance = MEASURED if asks else 0.0
            pull = TablesRequest(shard, bucket, incarnation, way.pulled, significance, patience, self._epoch)
            send = self._send(shard, pull, now)
            way.pulling[send.ticket] = bucket, way.pulled
            effects.append(send)
        return effects

    def _send(self, shard: int, request: GradientRequest | TablesRequest, now: float) -> Send:
        send = self._ground.requests.send(self._ways[shard].server, request, now, now + request.patience)
        self._by_ticket[send.ticket] = shard, send.to
        return send

    def stop(self) -> None:
        """No further gradient of the iteration comes."""
        self._begun = self._left_out = False

    def give_up(self) -> list[Effect]:
        """Nothing is asked for any more, nor waited for."""
        for way in self._ways:
            way.ready.clear()
            way.asks.clear()
            way.pushing.clear()
            way.pulling.clear()
        return [Unchanged(self._all())]

    # --- what comes of it -------------------------------------------------------------------------

    def replied(self, ticket: int, reply: Reply, now: float) -> list[Effect]:
        """A shard has answered."""
        place = self._by_ticket.pop(ticket)
        if place is None:
            return [Forget(ticket)]
        shard, asked = place
        way = self._ways[shard]
        if ticket not in way.pushing and ticket not in way.pulling:  # it was given up
            return [Forget(ticket)]
        if ticket in way.pushing:
            push = way.pushing.pop(ticket)
            if isinstance(reply, AcceptReply):
                return [Forget(ticket), *self._passed(shard), *self._go_on(now)]
            self._push_again(way, *push)
            return [Forget(ticket), self._not_ready(shard, asked, now)]
        bucket, pulled = way.pulling.pop(ticket)
        if pulled != way.pulled:  # of an iteration before, whose tables nobody has used: it is asked for anew
            return [Forget(ticket), *self._go_on(now)]
        if not isinstance(reply, TablesReply):
            way.asks.appendleft(bucket)
            if isinstance(reply, BusyReply):
                return [Forget(ticket), *self._go_on(now)]
            return [Forget(ticket), self._not_ready(shard, asked, now)]
        self._next = max(self._next, way.pulled + 1, reply.clock)
        self.keep_at = max(self.keep_at, reply.keep)
        if reply.sync != way.told:  # it was switched: what the new model says holds from here on
            way.told, way.sync = reply.sync, parse(reply.sync) if reply.sync else self._begins_by[shard]
        if bucket < 0:
            way.agreed = True
            return [Forget(ticket), *self._go_on(now)]
        way.fetched = min(way.fetched, reply.clock)
        effects = [Fetched(ticket), *self._go_on(now)]
        if way.pulled >= 0 and not any(one.asks or one.pulling for one in self._ways):
            self._ground.sync.retrieved()
        return effects

    def failed(self, ticket: int, now: float) -> list[Effect]:
        """A shard has not answered: what was asked is asked again after a while."""
        place = self._by_ticket.pop(ticket)
        if place is None:
            return [Forget(ticket)]
        shard, asked = place
        way = self._ways[shard]
        if ticket in way.pushing:
            self._push_again(way, *way.pushing.pop(ticket))
        elif ticket in way.pulling:
            bucket, pulled = way.pulling.pop(ticket)
            if pulled == way.pulled:
                way.asks.appendleft(bucket)
        if self._ground.members.is_gone(asked):
            self._turn(way, asked)
        other = self._ground.members.others.get(way.server)
        return [Forget(ticket), self._rest(shard, now if other is None else other.rests_until)]

    def lost(self, rank: int, now: float) -> list[Effect]:
        """A peer is gone: what is still asked of it is asked of who may hold its shards now."""
        turned = {(shard, rank) for shard, way in enumerate(self._ways) if self._turn(way, rank)}
        return [Cancel(ticket) for ticket, place in self._by_ticket.items() if place in turned]

    def _turn(self, way: _Way, asked: int) -> bool:
        """Ask another that may hold the shard, if ``asked`` is who is asked now; whether there is one."""
        if way.server != asked:
            return False
        for step in range(1, len(way.holders)):
            at = (way.at + step) % len(way.holders)
            if not self._ground.members.is_gone(way.holders[at]):
                way.at = at
                return True
        return False

    def _push_again(self, way: _Way, bucket: int, progress: int) -> None:
        """A push may not have come; it has, where the next iteration has begun, since what was pulled waited for it."""
        if progress == self._progress:
            way.ready.appendleft(bucket)

    def _not_ready(self, shard: int, asked: int, now: float) -> Effect:
        """It has answered that it cannot answer yet, or does not hold the shard."""
        self._turn(self._ways[shard], asked)
        server, members = self._ways[shard].server, self._ground.members
        oneself = now + REST_FIRST * self._ground.timeout
        return self._rest(shard, members.rest(server, now) if server in members.others else oneself)

    def _rest(self, shard: int, until: float) -> Effect:
        self._ways[shard].rests = True
        return SetTimer(f"{AGAIN} {shard}", until)

    def again(self, shard: int, now: float) -> list[Effect]:
        """The rest of a shard is over."""
        if shard < len(self._ways):
            self._ways[shard].rests = False
        return self._go_on(now)
