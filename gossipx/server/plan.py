"""The plan of a run with a parameter server: which peers hold which shard, and by which sync model it serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gossipx.errors import UsageError
from gossipx.server.conditions import SyncModel
from gossipx.server.placement import Layout, Layouts
from gossipx.server.shard_clock import ShardClock
from gossipx.server.sync_models import (
    application,
    check_shards,
    check_workers,
    sync_model_from,
)
from gossipx.settings.modes import Server
from gossipx.settings.sections import RunConfig
from gossipx.specs import rank_of


@dataclass(frozen=True)
class ServerPlan:
    """The consequences of the settings of a run with servers, for its roles; the same on all peers.

    Attributes:
        settings: the settings.
        layouts: makes the layout of any list of servers.
        layout: the first layout.
        clock_of: makes a shard's initial clock.
        syncs: each shard's first sync model.
        rate: the learning rate, for sync models that depend on it; None: unknown.
        every: the interval between two checkpoints of a shard, in ticks; 0: none are taken at intervals.
        fixed: why the servers cannot be changed, in one line; empty: they can.
    """

    settings: Server
    layouts: Layouts
    layout: Layout
    clock_of: Callable[[int], ShardClock]
    syncs: tuple[SyncModel, ...]
    rate: float | None
    every: int
    fixed: str

    @property
    def journals(self) -> bool:
        """Whether changes of a shard are written to a journal before they are acknowledged."""
        return bool(self.every) and self.settings.journal

    def shards_of(self, rank: int) -> list[int]:
        """Return the shards that a peer holds when the run begins."""
        return [index for index, server in enumerate(self.layout.servers) if server == rank]


def workers(given: Server, servers: Sequence[int], size: int) -> list[int]:
    """Return the ranks that train; they do not change when the servers change.

    Args:
        servers: the rank of each shard's first server.
        size: the number of peers.
    """
    return [rank for rank in range(size) if not given.servers_only or rank not in servers]


def server_ranks(config: RunConfig, names: Sequence[str]) -> tuple[int, ...] | None:
    """Return the rank of each shard's server, by shard; None if the run has no parameter server.

    ``--mode server`` without ``--servers`` has one server, rank 0.

    Raises:
        UsageError: a server is not a peer or is named twice, no peer is left to train, or a sync model does not suit
            the servers.
    """
    given = config.mode
    if not isinstance(given, Server):
        return None
    ranks = tuple(rank_of(name.strip(), "--servers", names) for name in (given.servers or "0").split(","))
    if len(set(ranks)) < len(ranks):
        raise UsageError(f"--servers {given.servers} names a peer twice")
    trained = workers(given, ranks, len(names))
    if not trained:
        raise UsageError("--servers-only leaves no peer that trains: give more peers, or leave it out")
    for model in sync_models_by_shard(given, len(ranks)):  # raises if --sync or --apply does not suit the servers
        check_workers(model, len(trained))
    return ranks


def sync_models_by_shard(
    given: Server, shards: int, custom: SyncModel | Sequence[SyncModel] | None = None
) -> list[SyncModel]:
    """Return the sync model of each shard.

    Args:
        shards: the number of shards.
        custom: sync models instead of the configured ones; None: the configured ones.

    Raises:
        UsageError: the number of sync models is neither 1 nor the number of shards, or ``--apply`` or that number
            does not suit one of them.
    """
    if custom is not None:
        syncs = [custom] if isinstance(custom, SyncModel) else list(custom)
    else:
        syncs = [sync_model_from(spec) for spec in given.sync.split("|")]
    if len(syncs) not in (1, shards):
        where = "--sync has " if custom is None else ""
        raise UsageError(f"{where}{len(syncs)} sync models for {shards} shards: give one for all, or one per shard")
    for model in syncs:
        application(model, given.apply)  # raises if --apply does not suit the model
        check_shards(model, shards)
    return syncs * shards if len(syncs) == 1 else syncs
