"""A worker of the parameter server, as a pure state machine (FluentPS, Algorithm 1, lines 1 to 6 of the worker).

The worker pushes each bucket's gradient as soon as it is computed (wait-free backpropagation). At the end of an
iteration it pulls each shard's buckets in the order in which the model uses them, a few at a time; computation waits
only for the buckets that it needs next. Shards do not wait for each other (FluentPS, Figure 5b). Without ``overlap``,
all pulls wait until every shard has replied that it would answer (Figure 5a).
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gossipx.peer.exchange import PeerContext
from gossipx.peer.membership import FIRST_BACKOFF
from gossipx.protocol.effects import Effect, Forget, Note, Resume, Send, SetTimer, Stop
from gossipx.protocol.messages import AcceptReply, BusyReply, NotReadyReply, Reply
from gossipx.protocol.server_messages import MEASURED, GradientRequest, PushAgainReply, TablesReply, TablesRequest
from gossipx.protocol.table_effects import Fetch, Fetched, Gather, Unchanged
from gossipx.server.conditions import SyncModel
from gossipx.server.requests import Handler, Replies
from gossipx.server.sync_models import sync_model_from

NONE_YET = 2**63
"""A clock above all others: no table of this pull has arrived yet."""


class PullState(enum.Enum):
    """The state of an iteration's pull at one shard; the next iteration starts again from any state."""

    IDLE = "no pull"
    SKIPPED = "no pull after this iteration, whose pushes are in flight"
    ASKED = "the shard was asked whether it would answer (without overlap)"
    READY = "it would answer; other shards have not replied yet"
    FETCHING = "its buckets are being pulled"


NEXT = {PullState.SKIPPED: PullState.IDLE, PullState.ASKED: PullState.READY, PullState.READY: PullState.FETCHING}
"""The next states: once all pushes are acknowledged, once the shard has replied, once all shards have replied."""


@dataclass
class ShardLink:
    """A worker's link to one shard.

    Attributes:
        server: the rank that holds the shard.
        buckets: the number of its buckets.
        first_sync: the shard's first sync model.
        sync_spec: the sync model that the shard's last reply named; empty: the first one.
        ready: buckets whose gradients wait to be pushed.
        pushed_to: the rank and the incarnation of the server that this iteration's gradients were first pushed to;
            None: none yet.
        pushing: open pushes by ticket, each with its bucket and iteration.
        to_pull: buckets to pull; -1 asks whether the shard would answer.
        pulling: open pulls by ticket, each with its bucket and progress.
        pulled: the progress to pull with.
        pull: the state of this iteration's pull.
        backing_off: requests wait for the retry timer, since the shard did not answer; possible in any state.
        fetched: the lowest clock of the tables received in this pull.
        seen: the highest clock of all replies.
        restart_of: the incarnation of the server whose restart was reported last.
        sync: that model, which decides after which iterations to push and to pull.
    """

    server: int
    buckets: int
    first_sync: SyncModel
    sync_spec: str = ""
    ready: deque[int] = field(default_factory=deque)
    pushed_to: tuple[int, int | None] | None = None
    pushing: dict[int, tuple[int, int]] = field(default_factory=dict)
    to_pull: deque[int] = field(default_factory=deque)
    pulling: dict[int, tuple[int, int]] = field(default_factory=dict)
    pulled: int = -1
    pull: PullState = PullState.IDLE
    backing_off: bool = False
    fetched: int = NONE_YET
    seen: int = 0
    restart_of: int | None = None

    def __post_init__(self) -> None:
        self.follow_sync(self.sync_spec)

    def follow_sync(self, spec: str) -> None:
        """Follow the sync model of this spec; empty: the first one."""
        self.sync_spec = spec
        self.sync = sync_model_from(spec) if spec else self.first_sync

    @property
    def idle(self) -> bool:
        return not (self.ready or self.pushing or self.waits)

    @property
    def waits(self) -> bool:
        """Whether any of its tables have not arrived."""
        return bool(self.to_pull or self.pulling)

    def start(self, asks_first: bool) -> None:
        """Start pulling all buckets; ``asks_first``: only after the shard has replied that it would answer."""
        self.pull = PullState.ASKED if asks_first and self.buckets else PullState.FETCHING
        self.to_pull = deque([-1] if self.pull is PullState.ASKED else range(self.buckets))
        self.fetched = NONE_YET

    def advance(self) -> None:
        """Enter the next state."""
        self.pull = NEXT[self.pull]

    def clear(self) -> None:
        """Forget everything that is open or waits to be sent."""
        self.ready.clear()
        self.pushing.clear()
        self.to_pull.clear()
        self.pulling.clear()


AGAIN = "again"
"""The prefix of the timers that end a shard's retry delay, followed by a space and the shard's index."""
LONGEST_WAIT = 3600.0
"""Seconds after which a worker stops waiting for a shard: enough time to restart its server by hand."""
MAX_OPEN = 2
"""Maximum number of open pushes, and of open pulls, per shard: while one is answered, the next is on its way."""


@dataclass
class Worker:
    """One worker's pushes and pulls. Methods return the effects to carry out.

    Attributes:
        context: the role's.
        replies: the table of reply handlers.
        handler: of the replies to this worker's requests.
        links: to the shards.
        overlap: whether each shard is pulled from as soon as it has this worker's push.
        is_mid_iteration: an iteration has computed some of its gradients, but not all.
    """

    context: PeerContext
    replies: Replies
    handler: Handler
    links: list[ShardLink]
    overlap: bool
    is_mid_iteration: bool = False
    # One number for all shards, though their clocks may differ. With a number per shard, two workers could each be
    # ahead on one shard and behind on another, and deadlock.
    _progress: int = 0  # the iteration whose gradients are being pushed, or were last
    _next: int = 0  # the next iteration; it jumps ahead to a clock that has passed us
    _gathers: bool = False  # the gradients of this iteration, or of the last one, stay in the transmit buffers
    # The shard of each open request; None: it is of an earlier layout.
    _by_ticket: dict[int, int | None] = field(default_factory=dict)
    _since: float = 0.0  # when the current pulls began
    _epoch: int = 0  # the layout's
    _is_dropped: bool = False  # this iteration's gradients are of an earlier layout, so they are not sent

    @property
    def quiet(self) -> bool:
        """Whether no iteration has begun and no push is waiting or open."""
        return not self.is_mid_iteration and not any(link.ready or link.pushing for link in self.links)

    @property
    def idle(self) -> bool:
        """Whether nothing is open or waits to be sent."""
        return all(link.idle for link in self.links)

    def holder(self, shard: int) -> int:
        """Return the rank that requests for a shard are sent to."""
        return self.links[shard].server

    def begin(self, now: float, at: int = 0) -> list[Effect]:
        """Pull all current values, and continue at the shards' clocks, or at iteration ``at`` if that is later."""
        self._next = max(self._next, at)
        self._since = now
        for link in self.links:
            link.ready.clear()
            link.pulled = -1
            link.start(asks_first=False)
        return [Fetch(self._all()), *self.send_ready(now)]

    def _all(self) -> tuple[tuple[int, int], ...]:
        return tuple((shard, bucket) for shard, link in enumerate(self.links) for bucket in range(link.buckets))

    # --- another layout ---------------------------------------------------------------------------

    def switch_layout(self, servers: Sequence[int], buckets: Sequence[int], epoch: int, now: float) -> list[Effect]:
        """Switch to another layout while :attr:`quiet`, and repeat open pulls there."""
        self._forget_requests()
        pulled, fetched = self.links[0].pulled, min(link.fetched for link in self.links)
        pulls = any(link.waits for link in self.links)
        self._epoch = epoch
        # A layout only changes if all shards have the same sync model, so the first one's applies to all.
        first_sync, sync_spec = self.links[0].first_sync, self.links[0].sync_spec
        self.links = [
            ShardLink(*one, first_sync, sync_spec, pulled=pulled, fetched=fetched)
            for one in zip(servers, buckets, strict=True)
        ]
        for link in self.links:
            link.pushed_to = self._process(link)  # it has taken over all pushes
            if pulls:
                link.start(asks_first=not self.overlap and link.pulled >= 0)
        return self.send_ready(now)

    def drop_iteration(self) -> None:
        """Drop this iteration's gradients, since their layout is no longer in force."""
        self._forget_requests()
        self._is_dropped = self.is_mid_iteration
        for link in self.links:
            link.clear()

    def _forget_requests(self) -> None:
        self._by_ticket = dict.fromkeys(self._by_ticket)

    # --- an iteration -----------------------------------------------------------------------------

    def gradients_ready(self, buckets: Sequence[tuple[int, int]], now: float) -> list[Effect]:
        """Push the gradients of these buckets; an empty list announces that an iteration begins."""
        if self._is_dropped:
            return []
        if not self.is_mid_iteration:
            self.is_mid_iteration, self._progress = True, self._next
            self._gathers = not any(
                link.sync.pushes(self._progress, link.fetched) for link in self.links if link.buckets
            )
            for link in self.links:
                link.pushed_to = self._process(link)
        for shard, bucket in buckets if not self._gathers else ():
            self.links[shard].ready.append(bucket)
        return self.send_ready(now)

    def iteration_done(self, now: float) -> list[Effect]:
        """End the iteration, whose gradients are all computed, and pull all tables."""
        self.is_mid_iteration = self._is_dropped = False
        if self._gathers:
            self._next = max(self._next, self._progress + 1)
            return [Gather()]
        self._since = now
        for link in self.links:
            link.pulled = self._progress
            if link.sync.fetches(self._progress, link.fetched):
                link.start(asks_first=not self.overlap)
            else:
                link.pull = PullState.SKIPPED
        kept = [effect for shard in range(len(self.links)) for effect in self._advance_skipped(shard)]
        return [Fetch(self._all()), *kept, *self.send_ready(now)]

    def push_gathered(self, now: float) -> list[Effect]:
        """Between two iterations, push the gradients that have gathered."""
        if not self._gathers or self.is_mid_iteration:
            return []
        self._gathers = False
        for link in self.links:
            link.ready.extend(range(link.buckets))
        return self.send_ready(now)

    def _advance_skipped(self, shard: int) -> list[Effect]:
        """If the shard is not pulled from, start the next iteration once its pushes are acknowledged."""
        link = self.links[shard]
        if link.pull is not PullState.SKIPPED or link.ready or link.pushing:
            return []
        link.advance()
        self._next = max(self._next, link.pulled + 1)
        return [Unchanged(tuple((shard, bucket) for bucket in range(link.buckets)))]

    def send_ready(self, now: float) -> list[Effect]:
        """Send what may be sent, as after any event."""
        if not any(link.pull is PullState.ASKED for link in self.links):
            for link in self.links:
                if link.pull is PullState.READY and not link.pulling:
                    link.advance()
                    link.to_pull = deque(range(link.buckets))
        effects: list[Effect] = []
        for shard, link in enumerate(self.links):
            if link.buckets:
                effects += self._ask(shard, link, now)
        return effects

    def _ask(self, shard: int, link: ShardLink, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if link.backing_off:
            return effects
        effects += self._push_to_restarted(shard, link)
        patience = self.context.members.model_timeout
        incarnation = self.context.incarnation
        while link.ready and len(link.pushing) < MAX_OPEN:
            bucket = link.ready.popleft()
            push = GradientRequest(shard, bucket, incarnation, self._progress, (), (), patience, self._epoch)
            send = self._send(shard, push, now)
            link.pushing[send.ticket] = bucket, self._progress
            effects.append(send)
        # Without overlap, every push must be acknowledged before the first pull.
        pushed = not link.ready and (self.overlap or not link.pushing)
        while link.to_pull and pushed and len(link.pulling) < MAX_OPEN:
            bucket = link.to_pull.popleft()
            measures = link.sync.asks_significance and link.pulled >= 0
            significance = MEASURED if measures else 0.0
            pull = TablesRequest(
                *(shard, bucket, incarnation, link.pulled, significance, patience, self._epoch),
                pushed=link.pulled >= 0 and not link.ready and not link.pushing,
            )
            send = self._send(shard, pull, now)
            link.pulling[send.ticket] = bucket, link.pulled
            effects.append(send)
        return effects

    def _send(self, shard: int, request: GradientRequest | TablesRequest, now: float) -> Send:
        send = self.replies.send(self.links[shard].server, request, now, now + request.patience, self.handler)
        self._by_ticket[send.ticket] = shard
        return send

    def stop(self) -> None:
        """Expect no further gradients of this iteration."""
        self.is_mid_iteration = self._is_dropped = False

    def give_up(self) -> list[Effect]:
        """Drop all requests, and stop waiting for tables."""
        for link in self.links:
            link.clear()
        return [Unchanged(self._all())]

    # --- replies ----------------------------------------------------------------------------------

    def answered(self, ticket: int, reply: Reply | None, now: float) -> list[Effect]:
        """Handle a shard's reply; None: the request failed."""
        shard = self._by_ticket.pop(ticket)
        if shard is None:
            return [Forget(ticket)]
        if reply is None:
            waits = self._note_wait(shard, "it does not answer; restart it, or use --server-lost stop", now)
            return [Forget(ticket), *waits, self._failed(ticket, shard, now)]
        link = self.links[shard]
        if ticket not in link.pushing and ticket not in link.pulling:  # it was dropped
            return [Forget(ticket)]
        if ticket in link.pushing:
            push = link.pushing.pop(ticket)
            if isinstance(reply, AcceptReply):
                return [Forget(ticket), *self._advance_skipped(shard), *self.send_ready(now)]
            self._requeue_push(link, *push)
            return [Forget(ticket), self._not_ready(shard, now)]
        return self._pulled(ticket, shard, reply, now)

    def _pulled(self, ticket: int, shard: int, reply: Reply, now: float) -> list[Effect]:
        """Handle a shard's reply to a pull."""
        link = self.links[shard]
        bucket, pulled = link.pulling.pop(ticket)
        if pulled != link.pulled:  # of an earlier iteration: the bucket is pulled again
            return [Forget(ticket), *self.send_ready(now)]
        if not isinstance(reply, TablesReply):
            link.to_pull.appendleft(bucket)
            if isinstance(reply, PushAgainReply):
                return [Forget(ticket), *self._push_again(shard, pulled), *self.send_ready(now)]
            if isinstance(reply, BusyReply):
                waits = self._note_wait(shard, "other workers' pushes are missing there", now)
                return [Forget(ticket), *waits, *self.send_ready(now)]
            waits = self._note_wait(shard, reply.reason if isinstance(reply, NotReadyReply) else "", now)
            return [Forget(ticket), *waits, self._not_ready(shard, now)]
        restart = self._note_restart(shard, reply)
        self._next = max(self._next, link.pulled + 1, reply.clock)
        if reply.sync != link.sync_spec:  # the sync model was switched
            link.follow_sync(reply.sync)
        if bucket < 0:
            if link.pull is PullState.ASKED:
                link.advance()
            return [Forget(ticket), *restart, *self.send_ready(now)]
        link.fetched = min(link.fetched, reply.clock)
        effects = [Fetched(ticket), *restart, *self.send_ready(now)]
        if link.pulled >= 0 and not any(one.waits for one in self.links):
            self.context.sync.retrieved()
        return effects

    def _push_again(self, shard: int, progress: int) -> list[Effect]:
        """Push all buckets of an iteration again, since the shard has lost some. It ignores those that it has."""
        link = self.links[shard]
        if progress != self._progress:  # the next iteration has overwritten these gradients: pull the current values
            link.to_pull.extend(bucket for bucket, _ in link.pulling.values())
            link.pulled = -1
            return []
        if link.ready or link.pushing:
            return []  # they are on their way
        link.pushed_to = self._process(link)
        link.ready.extend(range(link.buckets))
        text = f"peer {link.server} has lost pushes of iteration {progress} to shard {shard}: they are sent again"
        return [Note("", text)]

    def _push_to_restarted(self, shard: int, link: ShardLink) -> list[Effect]:
        """While tables of any shard are missing, push the last gradients again to a shard that another process serves.

        The tables of that shard may all be here, so no pull would find that it lacks the push. But other workers may
        wait for it there, and this worker for theirs at another shard.
        """
        if self.is_mid_iteration or link.pulled != self._progress or link.ready or link.pushing:
            return []
        process = self._process(link)
        if process == link.pushed_to or not any(one.waits for one in self.links):
            return []
        link.pushed_to = process
        link.ready.extend(range(link.buckets))
        at = f"another process, of peer {link.server}, serves shard {shard} now"
        return [Note("", f"{at}: iteration {link.pulled} is pushed again")]

    def _process(self, link: ShardLink) -> tuple[int, int | None]:
        """Return the rank and the incarnation of the process that requests for a shard are sent to."""
        other = self.context.members.others.get(link.server)
        return link.server, self.context.incarnation if other is None else other.incarnation

    def _note_wait(self, shard: int, reason: str, now: float) -> list[Effect]:
        """Report a pull that has waited for longer than peer_timeout, and stop training after :data:`LONGEST_WAIT`."""
        waited, server = now - self._since, self.links[shard].server
        text = f"has waited for {waited:.0f} s for shard {shard} at peer {server}: {reason}"
        if waited >= LONGEST_WAIT:
            return [Stop(text), Resume()]
        return [] if waited < self.context.timeout else [Note("waits", text)]

    def _note_restart(self, shard: int, reply: TablesReply) -> list[Effect]:
        """Report once what a shard has lost with the restart of its server."""
        link = self.links[shard]
        other = self.context.members.others.get(link.server)
        seen, link.seen = link.seen, max(link.seen, reply.clock)
        if other is None or not 0 <= reply.restarted_at < seen or other.incarnation == link.restart_of:
            return []
        link.restart_of = other.incarnation
        self.context.counts.add("shard_rollbacks")
        back = f"shard {shard} continues from clock {reply.restarted_at}, and what it had applied since is lost"
        lost = back if reply.restarted_at else f"the state of shard {shard} is lost, its optimizer's too"
        sync = reply.sync or "the initial one"
        switched = "" if reply.sync == link.sync_spec else f"; its sync model is now {sync}"
        return [Note("", f"peer {link.server}, a server, was restarted: {lost}{switched}")]

    def _failed(self, ticket: int, shard: int, now: float) -> Effect:
        """Handle a request without a reply: send it again after a delay."""
        link = self.links[shard]
        if ticket in link.pushing:
            self._requeue_push(link, *link.pushing.pop(ticket))
        elif ticket in link.pulling:
            bucket, pulled = link.pulling.pop(ticket)
            if pulled == link.pulled:
                link.to_pull.appendleft(bucket)
        other = self.context.members.others.get(link.server)
        return self._back_off(shard, now if other is None else other.backoff_until)

    def _requeue_push(self, link: ShardLink, bucket: int, progress: int) -> None:
        """Push a bucket again, unless the next iteration has begun. Then the shard has the push, since it answered the
        pull that waited for it.
        """
        if progress == self._progress:
            link.ready.appendleft(bucket)

    def _not_ready(self, shard: int, now: float) -> Effect:
        """Handle a shard's reply that it cannot answer yet or is not held there."""
        server, members = self.links[shard].server, self.context.members
        own_backoff = now + FIRST_BACKOFF * self.context.timeout
        return self._back_off(shard, members.back_off(server, now) if server in members.others else own_backoff)

    def _back_off(self, shard: int, until: float) -> Effect:
        self.links[shard].backing_off = True
        return SetTimer(f"{AGAIN} {shard}", until)

    def retry(self, shard: int, now: float) -> list[Effect]:
        """Resume requests to a shard after its retry delay."""
        if shard < len(self.links):
            self.links[shard].backing_off = False
        return self.send_ready(now)
