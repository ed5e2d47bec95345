"""The shards hosted by one peer: how they are made, start, are restored from disk, and switch to a new layout."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gossipx.peer.exchange import PeerContext
from gossipx.peer.server_role import Metrics, Total
from gossipx.protocol.effects import Effect
from gossipx.protocol.events import TablesRestored
from gossipx.protocol.messages import Reply
from gossipx.protocol.table_effects import RestoreTables
from gossipx.server.placement import Layout
from gossipx.server.plan import ServerPlan
from gossipx.server.shard import Records, Shard
from gossipx.server.shard_clock import ShardClock
from gossipx.server.sync_models import Hybrid


def figures(clock: ShardClock) -> Metrics:
    """Return a shard's figures by name: its clock, the number of delayed pulls (DPRs) and of gradients, the staleness
    of the gradients that were applied, and the gradient buffer's fill and threshold K, if it has them.
    """
    counts = clock.counts
    made: dict[str, float | Total] = {
        "clock": clock.clock,
        "delayed_pulls": counts.delayed,
        "gradients": counts.gradients,
        "staleness": Total(counts.staleness, counts.applied),
    }
    if clock.apply.buffers:
        made["buffered"] = clock.buffered
    if isinstance(clock.model, Hybrid):
        made["threshold"] = clock.model.threshold(clock.view())
    furthest = max([clock.clock, *(progress + 1 for progress in clock.progress.values())])
    return {name: (furthest, value) for name, value in made.items()}


class HostedShards:
    """One peer's shards. Methods return the effects to carry out.

    Attributes:
        shards: by index; the dictionary object never changes.
        epoch: the epoch of their layout.
        unconfirmed: the peer joined while others were training, so its shards may have moved elsewhere, and have not
            started.
    """

    def __init__(self, context: PeerContext, plan: ServerPlan):
        self.shards: dict[int, Shard] = {}
        self.epoch = 0
        self.unconfirmed = False
        self._context = context
        self._plan = plan
        self._counted_before = (0, 0)  # gradients and DPRs counted before the last change of servers
        self._leaves = False

    def make(self, index: int, layout: Layout) -> Shard:
        """Make a shard of ``layout`` in its initial state, to be hosted here."""
        clock = self._plan.clock_of(index)
        shard = Shard(index, layout.buckets[index], clock, self._context.requests, self._plan.every)
        shard.records = Records(index, self.epoch, enabled=self._plan.journals)
        return shard

    def fresh(self, index: int, servers: Sequence[int]) -> Shard:
        """Make a shard of another layout in its initial state, without hosting it."""
        return self.make(index, self._plan.layouts.make(servers))

    # --- state --------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether all hosted shards are being served, so that they can be handed over."""
        return all(shard.is_serving for shard in self.shards.values())

    @property
    def is_being_restored(self) -> bool:
        """Whether this peer's shards may be in the journal on its disk: the peer was killed, and others were training
        when it joined again.

        If none were training, a journal on disk is from an earlier run.
        """
        return self._plan.journals and self._context.members.has_joined_late

    @property
    def sync_settings(self) -> set[str]:
        """The sync models of the hosted shards, each with its apply and pull modes."""
        return {" ".join(shard.clock.settings.values()) for shard in self.shards.values()}

    @property
    def contributions(self) -> int:
        """The number of gradients, including those of shards hosted before the last change of servers."""
        return self._counted_before[0] + sum(shard.clock.counts.gradients for shard in self.shards.values())

    @property
    def delayed_pulls(self) -> int:
        """The number of DPRs, including those of shards hosted before the last change of servers."""
        return self._counted_before[1] + sum(shard.clock.counts.delayed for shard in self.shards.values())

    @property
    def metrics(self) -> Metrics:
        """The figures of the hosted shards; see :func:`figures`."""
        return {
            f"server/{name}/shard-{index:02d}": figure
            for index, shard in self.shards.items()
            for name, figure in figures(shard.clock).items()
        }

    # --- start ------------------------------------------------------------------------------------

    def start_serving(self, now: float) -> list[Effect]:
        """Start the shards once all peers have reached START. If they may have moved elsewhere, ask the other peers
        first.
        """
        alone = self._context.members.has_joined_late and not any(shard.run_resumes for shard in self.shards.values())
        self.unconfirmed = bool(self.shards) and alone and not self._plan.fixed
        return [] if self.unconfirmed else self.start_shards(now)

    def start_shards(self, now: float) -> list[Effect]:
        """Start the shards, or restore them from disk first."""
        self.unconfirmed = False
        return [
            effect
            for shard in self.shards.values()
            for effect in (
                [self._restore_tables(shard)]
                if self.is_being_restored and not shard.run_resumes
                else self.begin(shard, now)
            )
        ]

    def begin(self, shard: Shard, now: float) -> list[Effect]:
        """Start a shard. If workers were training before this peer joined, continue where they stand, less the
        iteration that they may have begun; or from a checkpoint, if there is one.
        """
        if not self._context.members.has_joined_late or shard.run_resumes:
            return shard.begin(now)
        if shard.restored:
            return shard.begin_late(now)
        return shard.begin_again(self._context.step - 1, now) if self._context.step else shard.begin(now)

    def _restore_tables(self, shard: Shard) -> RestoreTables:
        return RestoreTables(shard.index, self.epoch)

    def tables_restored(self, event: TablesRestored, training: Sequence[int], now: float) -> list[Effect]:
        """Start a shard with what was read from disk.

        Args:
            training: the ranks that train.
        """
        shard = self.shards.get(event.shard)
        if shard is None or shard.is_serving or event.epoch != self.epoch:
            return []  # the servers were changed meanwhile, so this shard is another one, or lies elsewhere
        if event.state is None:
            return [*self.begin(shard, now), *shard.update_members(training)]
        shard.records = Records(shard.index, event.epoch, enabled=True)
        shard.load_state_dict(event.state)
        shard.restarted_at = shard.clock.clock
        return [*shard.serve(now), *shard.update_members(training)]

    # --- checkpoints and handover ------------------------------------------------------------------

    def checkpoint(self, last: bool = False, leaves: bool = False) -> list[Effect]:
        """Take the checkpoints that are due.

        Args:
            last: training is over.
            leaves: this peer is about to leave: checkpoint all shards now, and any that it still receives.
        """
        self._leaves = self._leaves or leaves
        return [effect for shard in self.shards.values() for effect in shard.checkpoint(last, leaves=leaves)]

    def hand_over(self) -> tuple[str, str]:
        """Return what shards of another layout continue with: the state of shard 0, and its sync model."""
        first = self.shards[0]
        return json.dumps(first.hand_over()), " ".join(first.clock.settings.values())

    def switch_layout(self, layout: Layout, epoch: int, state: str, reply: Reply, now: float) -> list[Effect]:
        """Replace the shards with those that lie here in ``layout``. Waiting pulls are answered with ``reply``.

        Args:
            state: from :meth:`hand_over`; empty: restore the shards from disk.
        """
        closed = [effect for shard in self.shards.values() for effect in shard.close(reply, now)]
        done = self.contributions, self.delayed_pulls
        self.epoch, self.unconfirmed = epoch, False
        here = [index for index, rank in enumerate(layout.servers) if rank == self._context.rank]
        self.shards.clear()
        self.shards.update({index: self.make(index, layout) for index in here})
        started = [
            effect
            for shard in self.shards.values()
            for effect in (shard.take_over(json.loads(state)) if state else [self._restore_tables(shard)])
        ]
        self._counted_before = (0, 0)
        self._counted_before = done[0] - self.contributions, done[1] - self.delayed_pulls
        # A leaving peer also checkpoints shards that another leaving peer hands to it.
        return [*started, *closed, *(self.checkpoint(leaves=True) if self._leaves else [])]
