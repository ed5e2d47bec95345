"""The shards that lie at one peer: how they are made, begin, come back from its disk, and go over to a new layout."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gossipx.peer.exchange import PeerContext
from gossipx.protocol.effects import Effect, Resume, Stop
from gossipx.protocol.events import TablesRestored
from gossipx.protocol.messages import Reply
from gossipx.protocol.table_effects import RestoreTables
from gossipx.server.failover.records import Journal
from gossipx.server.placement.layout import Layout
from gossipx.server.settings import ServerSettings
from gossipx.server.shard import Shard
from gossipx.server.sync_models.clock import Clock


class HostedShards:
    """One peer's shards. Each method says what is to be done.

    Attributes:
        shards: that it holds; the same dictionary all the time.
        epoch: of the layout that they are of.
        unsure: others were training as it came, and may know that its shards lie elsewhere by now: they have not begun.
    """

    def __init__(self, context: PeerContext, settings: ServerSettings):
        self.shards: dict[int, Shard] = {}
        self.epoch = 0
        self.unsure = False
        self._context = context
        self._settings = settings
        self._before = (0, 0)  # figures of shards that lay here before the servers were changed
        self._leaves = False

    def make(self, index: int, clock: Clock, layout: Layout) -> Shard:
        """A shard of ``layout``, which may be held here, or followed."""
        plan = self._settings.plans[index % len(self._settings.plans)] if self._settings.plans else ()
        leads = not any(layout.buckets[:index])
        shard = Shard(index, layout.buckets[index], clock, self._context.requests, plan, self._settings.every, leads)
        shard.records = Journal(index, self.epoch) if self._settings.journals else shard.records
        return shard

    def fresh(self, index: int, servers: Sequence[int]) -> Shard:
        """A shard of a layout as it was at the beginning, beside the one that is held."""
        return self.make(index, self._settings.clock_of(index), self._settings.layouts.make(servers))

    # --- what is to be told of them ---------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether all of them are served: they could be handed over."""
        return all(shard.begun for shard in self.shards.values())

    @property
    def is_being_restored(self) -> bool:
        """Whether what this peer is to hold may be on its disk: it was killed, and others were training as it came.

        If none were, journals that lie there are of a run before.
        """
        return self._settings.journals and self._context.members.had_begun

    @property
    def made(self) -> set[str]:
        """By what they go."""
        return {" ".join(shard.clock.made.values()) for shard in self.shards.values()}

    @property
    def taken_in(self) -> int:
        """Gradients, those of shards that lay here before, too."""
        return self._before[0] + sum(shard.clock.counts.gradients for shard in self.shards.values())

    @property
    def delayed_pulls(self) -> int:
        """DPRs, those of shards that lay here before, too."""
        return self._before[1] + sum(shard.clock.counts.delayed for shard in self.shards.values())

    # --- how they begin ---------------------------------------------------------------------------

    def begun(self, now: float) -> list[Effect]:
        """All have come to START: they begin, unless it is to be seen first whether they are still this peer's."""
        again = self._context.members.had_begun and not any(shard.restored for shard in self.shards.values())
        self.unsure = bool(self.shards) and again and not self._settings.fixed
        return [] if self.unsure else self.begin(now)

    def begin(self, now: float) -> list[Effect]:
        """They are this peer's: they are served, or come back from its disk first."""
        self.unsure = False
        return [
            effect
            for shard in self.shards.values()
            for effect in (
                [self._restore_tables(shard)] if self.is_being_restored and not shard.restored else shard.begin(now)
            )
        ]

    def _restore_tables(self, shard: Shard) -> RestoreTables:
        return RestoreTables(shard.index, self.epoch)

    def tables_restored(self, event: TablesRestored, training: Sequence[int], now: float) -> list[Effect]:
        """What was on the disk of one of them has been read.

        Args:
            training: ranks that train.
        """
        shard = self.shards.get(event.shard)
        if shard is None or shard.begun or event.epoch != self.epoch:
            return []  # the servers were changed meanwhile: it is another one, or lies elsewhere
        if event.state is None and event.epoch:
            reason = "the servers were changed, and no checkpoint here has the tables that this peer is to hold"
            return [Stop(reason), Resume()]
        if event.state is not None:
            shard.records = Journal(shard.index, event.epoch)
            shard.load_state_dict(event.state)
        return [*shard.begin(now), *shard.look(training)]

    # --- how they go on, here and elsewhere -------------------------------------------------------

    def keep(self, now: float, last: bool = False, leaves: bool = False) -> list[Effect]:
        """Take the checkpoints that are due.

        Args:
            last: training is over.
            leaves: this peer is about to leave: all are due, and those of what it is still handed will be.
        """
        self._leaves = self._leaves or leaves
        return [effect for shard in self.shards.values() for effect in shard.keep(now, last, leaves=leaves)]

    def hand_over(self) -> tuple[str, str]:
        """What shards of another layout go on with: the state of shard 0's clock, and by what it goes."""
        first = self.shards[0]
        return json.dumps(first.hand_over()), " ".join(first.clock.made.values())

    def go_over(self, layout: Layout, epoch: int, state: str, reply: Reply, now: float) -> list[Effect]:
        """Take on the shards that lie here by ``layout``; whoever waits gets ``reply``.

        Args:
            state: of the clock; empty: they are to come back from a disk.
        """
        closed = [effect for shard in self.shards.values() for effect in shard.close(reply, now)]
        done = self.taken_in, self.delayed_pulls
        self.epoch, self.unsure = epoch, False
        here = [index for index, rank in enumerate(layout.servers) if rank == self._context.rank]
        self.shards.clear()
        self.shards.update({index: self.make(index, self._settings.clock_of(index), layout) for index in here})
        begun = [
            effect
            for shard in self.shards.values()
            for effect in (shard.take_over(json.loads(state), now) if state else [self._restore_tables(shard)])
        ]
        self._before = (0, 0)
        self._before = done[0] - self.taken_in, done[1] - self.delayed_pulls
        # Another that leaves, too, may have handed over what it had kept by another layout.
        return [*begun, *closed, *(self.keep(now, leaves=True) if self._leaves else [])]
