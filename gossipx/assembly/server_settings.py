"""Which peers hold shards of a parameter server, and by which sync models."""

from __future__ import annotations

from collections.abc import Sequence

from gossipx.config.settings import RunConfig, ServerSettings
from gossipx.errors import UsageError
from gossipx.server.sync_models import models
from gossipx.specs import rank_of


def server_ranks(config: RunConfig, names: Sequence[str]) -> tuple[int, ...] | None:
    """The ranks that hold shards, by shard; None: the run has no parameter server.

    Raises:
        UsageError: one that is no peer, or settings that do not go with servers.
    """
    given, usual = config.server, ServerSettings()
    if given.servers is None and config.sync.mode != "server":
        for name in ServerSettings.__dataclass_fields__:
            if getattr(given, name) != getattr(usual, name):
                raise UsageError(
                    f"--{name.replace('_', '-')} is of a parameter server: name its peers by --servers, or leave it out"
                )
        return None
    ranks = tuple(rank_of(name.strip(), "--servers", names) for name in (given.servers or "0").split(","))
    if len(set(ranks)) < len(ranks):
        raise UsageError(f"--servers {given.servers} names a peer twice")
    if given.servers_only and len(ranks) == len(names):
        raise UsageError("--servers-only leaves no peer that trains: give more peers, or leave it out")
    if config.hub.hub is not None:
        raise UsageError("--hub and --servers are two ways to train around a server: leave one out")
    sync_models(config, len(ranks))
    return ranks


def sync_models(
    config: RunConfig, shards: int, own: models.SyncModel | Sequence[models.SyncModel] | None = None
) -> list[models.SyncModel]:
    """The sync model of each shard.

    Args:
        own: models in place of the configured ones.

    Raises:
        UsageError: not one for all or one each, or one that its gradients cannot be applied by.
    """
    if own is not None:
        made = [own] if isinstance(own, models.SyncModel) else list(own)
    else:
        made = [models.parse(spec) for spec in config.server.sync.split("|")]
    if len(made) not in (1, shards):
        raise UsageError(f"--sync gives {len(made)} sync models for {shards} shards: one for all, or one each")
    for model in made:
        models.application(model, config.server.apply)
    return made * shards if len(made) == 1 else made
