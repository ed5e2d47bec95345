"""A worker of a parameter server, decided purely (FluentPS, Algorithm 1, lines 1 to 6 of the worker).

Each bucket's gradient leaves as soon as it is made (wait-free backpropagation). With the end of the iteration each
shard is asked for its buckets, in the order in which the model uses them, a few at a time; what is computed with a
bucket's tables waits for that bucket alone. Shards do not wait for each other (Figure 5b); without ``overlap`` all
pulls wait until every shard has said that it would answer (Figure 5a).
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gossipx.peer.exchange import PeerContext
from gossipx.peer.membership import REST_FIRST
from gossipx.protocol.effects import Cancel, Effect, Forget, Send, SetTimer
from gossipx.protocol.messages import AcceptReply, BusyReply, Reply
from gossipx.protocol.server_messages import MEASURED, GradientRequest, TablesReply, TablesRequest
from gossipx.protocol.table_effects import Fetch, Fetched, Unchanged
from gossipx.server.replies import Handler, Replies
from gossipx.server.sync_models.conditions import SyncModel
from gossipx.server.sync_models.models import parse

AGAIN = "again"
"""The timers after which a shard is asked again: this, a space and its index."""
NONE_YET = 2**63
"""A clock that none reaches: of tables that are being fetched."""
AT_A_TIME = 2
"""Requests of a kind that are open with one shard: while one is answered the next is on its way."""


class _Pull(enum.Enum):
    """How far the pull of an iteration has come at one shard; each iteration starts anew from any of these."""

    IDLE = "nothing is pulled"
    SKIPPED = "the shard is not pulled from after this iteration, whose pushes are on their way"
    ASKED = "the shard is asked whether it would answer (without overlap)"
    READY = "it would; the other shards have not all said so"
    FETCHING = "its buckets are asked for, until all are here"


NEXT = {_Pull.SKIPPED: _Pull.IDLE, _Pull.ASKED: _Pull.READY, _Pull.READY: _Pull.FETCHING}
"""What follows: once all pushes have come; once the shard has said so; once all have."""


@dataclass
class _Link:
    """A worker's link to one shard.

    Attributes:
        holders: ranks that may hold the shard; ``at``: which of them is asked.
        ready: buckets whose gradients wait to leave.
        pushing: those on their way, by ticket, each with the iteration that its gradients are of.
        asks: buckets to be asked for.
        pulling: those asked for, by ticket, each with the progress that it was asked with.
        pulled: the progress that they are asked with.
        pull: how far the pull of this iteration has come.
        rests: it did not answer, and is not asked before its timer; that may be in any state of the pull.
        fetched: the clock that it gave its tables by, the least of its buckets.
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
    pull: _Pull = _Pull.IDLE
    rests: bool = False
    fetched: int = NONE_YET
    sync: SyncModel | None = None
    told: str = ""

    @property
    def server(self) -> int:
        return self.holders[self.at]

    @property
    def idle(self) -> bool:
        return not (self.ready or self.pushing or self.asks or self.pulling)

    def start(self, asks_first: bool) -> None:
        """Pull all buckets; ``asks_first``: after the shard has said that it would answer."""
        self.pull = _Pull.ASKED if asks_first and self.buckets else _Pull.FETCHING
        self.asks = deque([-1] if self.pull is _Pull.ASKED else range(self.buckets))
        self.fetched = NONE_YET

    def advance(self) -> None:
        """Go to the next state."""
        self.pull = NEXT[self.pull]

    def clear(self) -> None:
        """Forget what is on its way, and what was to be sent."""
        self.ready.clear()
        self.pushing.clear()
        self.asks.clear()
        self.pulling.clear()


class Worker:
    """One worker's pushes and pulls. Each method says what is to be done.

    Args:
        context: of its role.
        replies, answered: the table of handlers, and that of the worker's requests.
        holders: by shard, the ranks that may hold it, the first of them as the run begins.
        buckets: by shard, how many it has.
        overlap: whether each shard is pulled from as soon as it has what was pushed.
        syncs: by shard, the sync model that the run begins with; none: it is pulled from after each iteration.

    Attributes:
        keep_at: the iteration after which a checkpoint is to be taken, where servers say so; 0: none yet.
    """

    def __init__(
        self,
        context: PeerContext,
        replies: Replies,
        answered: Handler,
        holders: Sequence[tuple[int, ...]],
        buckets: Sequence[int],
        overlap: bool = True,
        syncs: Sequence[SyncModel] = (),
    ):
        self.keep_at = 0
        self._context = context
        self._replies, self._answered = replies, answered
        self._overlap = overlap
        self._links = [_Link(*one) for one in zip(holders, buckets, strict=True)]
        self._begins_by: list[SyncModel | None] = [*syncs] if syncs else [None] * len(self._links)
        for link, sync in zip(self._links, self._begins_by, strict=True):
            link.sync = sync
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
        return not self._begun and not any(link.ready or link.pushing for link in self._links)

    @property
    def begun(self) -> bool:
        """Whether gradients of an iteration have been taken that are not all made."""
        return self._begun

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way, nor to be sent."""
        return all(link.idle for link in self._links)

    def holder(self, shard: int) -> int:
        """The rank that a shard is asked of."""
        return self._links[shard].server

    def begin(self, now: float) -> list[Effect]:
        """Take what there is now, and begin at the clocks of the shards."""
        for link in self._links:
            link.ready.clear()
            link.pulled = -1
            link.start(asks_first=False)
        return [Fetch(self._all()), *self._go_on(now)]

    def _all(self) -> tuple[tuple[int, int], ...]:
        return tuple((shard, bucket) for shard, link in enumerate(self._links) for bucket in range(link.buckets))

    # --- another layout ---------------------------------------------------------------------------

    def go_over(self, servers: Sequence[int], buckets: Sequence[int], epoch: int, now: float) -> list[Effect]:
        """Go over to another layout, being :attr:`quiet`: what was being pulled is asked for anew."""
        self._forget_requests()
        holders = [(rank,) for rank in servers]
        pulled, fetched = self._links[0].pulled, min(link.fetched for link in self._links)
        pulls = any(link.asks or link.pulling for link in self._links)
        self._epoch = epoch
        # Shards that differ in their sync models have no other layout: one serves for all.
        told, sync = self._links[0].told, self._links[0].sync
        self._begins_by = self._begins_by[:1] * len(servers)
        self._links = [
            _Link(*one, pulled=pulled, fetched=fetched, told=told, sync=sync)
            for one in zip(holders, buckets, strict=True)
        ]
        for link in self._links if pulls else ():
            link.start(asks_first=not self._overlap and link.pulled >= 0)
        return self._go_on(now)

    def leave_out(self) -> None:
        """The gradients of this iteration are of a layout that is over: they are not sent."""
        self._forget_requests()
        self._left_out = self._begun
        for link in self._links:
            link.clear()

    def _forget_requests(self) -> None:
        self._by_ticket = dict.fromkeys(self._by_ticket)

    # --- an iteration -----------------------------------------------------------------------------

    def gradients_ready(self, buckets: Sequence[tuple[int, int]], now: float) -> list[Effect]:
        """These buckets' gradients are made; with none of any, the first is about to be taken."""
        if self._left_out:
            return []
        if not self._begun:
            self._begun, self._progress = True, self._next
        for shard, bucket in buckets:
            self._links[shard].ready.append(bucket)
        return self._go_on(now)

    def iteration_done(self, now: float) -> list[Effect]:
        """All gradients of the iteration are made, and all tables are wanted again."""
        self._begun = self._left_out = False
        for link in self._links:
            link.pulled = self._progress
            if link.sync is None or link.sync.fetches(self._progress, link.fetched):
                link.start(asks_first=not self._overlap)
            else:
                link.pull = _Pull.SKIPPED
        kept = [effect for shard in range(len(self._links)) for effect in self._passed(shard)]
        return [Fetch(self._all()), *kept, *self._go_on(now)]

    def _passed(self, shard: int) -> list[Effect]:
        """A shard that is not asked after this iteration: the next begins once it has all of this one's gradients."""
        link = self._links[shard]
        if link.pull is not _Pull.SKIPPED or link.ready or link.pushing:
            return []
        link.advance()
        self._next = max(self._next, link.pulled + 1)
        return [Unchanged(tuple((shard, bucket) for bucket in range(link.buckets)))]

    def _go_on(self, now: float) -> list[Effect]:
        """Send what may be sent."""
        if not any(link.pull is _Pull.ASKED for link in self._links):
            for link in self._links:
                if link.pull is _Pull.READY and not link.pulling:
                    link.advance()
                    link.asks = deque(range(link.buckets))
        effects: list[Effect] = []
        for shard, link in enumerate(self._links):
            if link.buckets:
                effects += self._ask(shard, link, now)
        return effects

    def _ask(self, shard: int, link: _Link, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if link.rests:
            return effects
        patience = self._context.members.longest
        incarnation = self._context.incarnation
        while link.ready and len(link.pushing) < AT_A_TIME:
            bucket = link.ready.popleft()
            push = GradientRequest(
                shard, bucket, incarnation, self._progress, (), (), patience, self._epoch, self.keep_at
            )
            send = self._send(shard, push, now)
            link.pushing[send.ticket] = bucket, self._progress
            effects.append(send)
        # Without overlap every push has to be there before anything is asked for.
        pushed = not link.ready and (self._overlap or not link.pushing)
        while link.asks and pushed and len(link.pulling) < AT_A_TIME:
            bucket = link.asks.popleft()
            asks = link.sync is not None and link.sync.asks_significance and link.pulled >= 0
            significance = MEASURED if asks else 0.0
            pull = TablesRequest(shard, bucket, incarnation, link.pulled, significance, patience, self._epoch)
            send = self._send(shard, pull, now)
            link.pulling[send.ticket] = bucket, link.pulled
            effects.append(send)
        return effects

    def _send(self, shard: int, request: GradientRequest | TablesRequest, now: float) -> Send:
        send = self._replies.send(self._links[shard].server, request, now, now + request.patience, self._answered)
        self._by_ticket[send.ticket] = shard, send.to
        return send

    def stop(self) -> None:
        """No further gradient of the iteration comes."""
        self._begun = self._left_out = False

    def give_up(self) -> list[Effect]:
        """Nothing is asked for any more, nor waited for."""
        for link in self._links:
            link.clear()
        return [Unchanged(self._all())]

    # --- what comes of it -------------------------------------------------------------------------

    def answered(self, ticket: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle a shard's answer, or that none has come."""
        place = self._by_ticket.pop(ticket)
        if place is None:
            return [Forget(ticket)]
        shard, asked = place
        if reply is None:
            return [Forget(ticket), self._failed(ticket, shard, asked, now)]
        link = self._links[shard]
        if ticket not in link.pushing and ticket not in link.pulling:  # it was given up
            return [Forget(ticket)]
        if ticket in link.pushing:
            push = link.pushing.pop(ticket)
            if isinstance(reply, AcceptReply):
                return [Forget(ticket), *self._passed(shard), *self._go_on(now)]
            self._push_again(link, *push)
            return [Forget(ticket), self._not_ready(shard, asked, now)]
        return self._pulled(ticket, shard, asked, reply, now)

    def _pulled(self, ticket: int, shard: int, asked: int, reply: Reply, now: float) -> list[Effect]:
        """Handle a shard's answer to a pull."""
        link = self._links[shard]
        bucket, pulled = link.pulling.pop(ticket)
        if pulled != link.pulled:  # of an iteration before, whose tables nobody has used: it is asked for anew
            return [Forget(ticket), *self._go_on(now)]
        if not isinstance(reply, TablesReply):
            link.asks.appendleft(bucket)
            if isinstance(reply, BusyReply):
                return [Forget(ticket), *self._go_on(now)]
            return [Forget(ticket), self._not_ready(shard, asked, now)]
        self._next = max(self._next, link.pulled + 1, reply.clock)
        self.keep_at = max(self.keep_at, reply.keep)
        if reply.sync != link.told:  # it was switched: what the new model says holds from here on
            link.told, link.sync = reply.sync, parse(reply.sync) if reply.sync else self._begins_by[shard]
        if bucket < 0:
            if link.pull is _Pull.ASKED:
                link.advance()
            return [Forget(ticket), *self._go_on(now)]
        link.fetched = min(link.fetched, reply.clock)
        effects = [Fetched(ticket), *self._go_on(now)]
        if link.pulled >= 0 and not any(one.asks or one.pulling for one in self._links):
            self._context.sync.retrieved()
        return effects

    def _failed(self, ticket: int, shard: int, asked: int, now: float) -> Effect:
        """A shard has not answered: what was asked is asked again after a while."""
        link = self._links[shard]
        if ticket in link.pushing:
            self._push_again(link, *link.pushing.pop(ticket))
        elif ticket in link.pulling:
            bucket, pulled = link.pulling.pop(ticket)
            if pulled == link.pulled:
                link.asks.appendleft(bucket)
        if self._context.members.is_gone(asked):
            self._turn(link, asked)
        other = self._context.members.others.get(link.server)
        return self._rest(shard, now if other is None else other.backoff_until)

    def lost(self, rank: int, now: float) -> list[Effect]:
        """A peer is gone: what is still asked of it is asked of who may hold its shards now."""
        turned = {(shard, rank) for shard, link in enumerate(self._links) if self._turn(link, rank)}
        return [Cancel(ticket) for ticket, place in self._by_ticket.items() if place in turned]

    def _turn(self, link: _Link, asked: int) -> bool:
        """Ask another that may hold the shard, if ``asked`` is who is asked now; whether there is one."""
        if link.server != asked:
            return False
        for step in range(1, len(link.holders)):
            at = (link.at + step) % len(link.holders)
            if not self._context.members.is_gone(link.holders[at]):
                link.at = at
                return True
        return False

    def _push_again(self, link: _Link, bucket: int, progress: int) -> None:
        """A push may not have come; it has, where the next iteration has begun, since what was pulled waited for it."""
        if progress == self._progress:
            link.ready.appendleft(bucket)

    def _not_ready(self, shard: int, asked: int, now: float) -> Effect:
        """It has answered that it cannot answer yet, or does not hold the shard."""
        self._turn(self._links[shard], asked)
        server, members = self._links[shard].server, self._context.members
        oneself = now + REST_FIRST * self._context.timeout
        return self._rest(shard, members.rest(server, now) if server in members.others else oneself)

    def _rest(self, shard: int, until: float) -> Effect:
        self._links[shard].rests = True
        return SetTimer(f"{AGAIN} {shard}", until)

    def again(self, shard: int, now: float) -> list[Effect]:
        """The rest of a shard is over."""
        if shard < len(self._links):
            self._links[shard].rests = False
        return self._go_on(now)
