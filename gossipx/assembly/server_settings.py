"""The servers of a run and their sync models: which peers hold a shard, and when it answers pushes and pulls."""

from __future__ import annotations

from collections.abc import Sequence

from gossipx.errors import UsageError
from gossipx.server.sync_models import models, schedule
from gossipx.settings.modes import Server
from gossipx.settings.sections import RunConfig
from gossipx.specs import rank_of


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
    if given.servers_only and len(ranks) == len(names):
        raise UsageError("--servers-only leaves no peer that trains: give more peers, or leave it out")
    planned = (model for _, model in schedule.parse(given.sync_plan or ""))
    for model in (*sync_models(given, len(ranks)), *planned):  # raises if --sync or --apply does not suit the servers
        models.check_workers(model, len(names) - (len(ranks) if given.servers_only else 0))
    return ranks


def sync_models(
    given: Server, shards: int, custom: models.SyncModel | Sequence[models.SyncModel] | None = None
) -> list[models.SyncModel]:
    """Return the sync model of each shard.

    Args:
        shards: the number of shards.
        custom: sync models instead of the configured ones; None: the configured ones.

    Raises:
        UsageError: the number of sync models is neither 1 nor the number of shards, or ``--apply`` does not suit one
            of them.
    """
    if custom is not None:
        syncs = [custom] if isinstance(custom, models.SyncModel) else list(custom)
    else:
        syncs = [models.parse(spec) for spec in given.sync.split("|")]
    if len(syncs) not in (1, shards):
        where = "--sync has " if custom is None else ""
        raise UsageError(f"{where}{len(syncs)} sync models for {shards} shards: give one for all, or one per shard")
    for model in syncs:
        models.application(model, given.apply)  # raises if --apply does not suit the model
    return syncs * shards if len(syncs) == 1 else syncs
