"""Puts a peer of a run with a parameter server together."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from gossipx import codecs
from gossipx.assembly.server_settings import server_ranks, sync_models
from gossipx.checkpoint import CheckpointInterval
from gossipx.config.settings import RunConfig, ServerSettings
from gossipx.errors import UsageError
from gossipx.model.layout import norms, plain_name
from gossipx.server import placement
from gossipx.server.placement import Partition, Placement, Table
from gossipx.server.placement.buckets import Bucket
from gossipx.server.placement.layout import Layouts
from gossipx.server.settings import ServerSettings as Settings
from gossipx.server.sync_models import models, schedule
from gossipx.server.sync_models.clock import Clock
from gossipx.tables.client import Client
from gossipx.tables.coding import Coding
from gossipx.tables.migration import TableMigrator
from gossipx.tables.parts import Storages
from gossipx.tables.shard import ShardStore
from gossipx.tables.store import TableStore

log = logging.getLogger("gossipx")

NOTICED = 1.0
"""Seconds above which a codec that is compiled is worth a line."""


@dataclass(frozen=True)
class Parts:
    """What of the parameter server is a user's own, which no command line can name.

    Attributes:
        placement: in place of the configured one.
        sync: a sync model, or one a shard.
        storages: the classes that tables are made with.

    All peers of a run need the same; :mod:`gossipx.parts` has what they are made of.
    """

    placement: Placement | None = None
    sync: models.SyncModel | Sequence[models.SyncModel] | None = None
    storages: Storages = field(default_factory=Storages)


@dataclass(frozen=True)
class Served:
    """What a peer in server mode is made of.

    Attributes:
        tables: the model's trained parameters by table, with their names.
        clocks: of the shards that lie here.
        alike: by option, what all peers must have alike.
        sync: the sync models, for people.
    """

    settings: Settings
    tables: list[tuple[str, nn.Parameter]]
    clocks: dict[int, Clock]
    table_store: TableStore
    alike: dict[str, str]
    sync: str


def serve(
    config: RunConfig,
    names: Sequence[str],
    rank: int,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    own: Parts,
) -> Served | None:
    """What this peer needs in a run with a parameter server; None: the run has none.

    Raises:
        UsageError: settings that do not fit, no optimizer, or one that servers cannot have, too.
    """
    ranks = server_ranks(config, names)
    if ranks is None:
        return None
    if optimizer is None:
        raise UsageError("in server mode the servers make the optimizer's steps: give gossipx.join the optimizer")
    tables = [(plain_name(name), one) for name, one in module.named_parameters() if one.requires_grad]
    layouts = _layouts(tables, config.server, own)
    rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    settings = _settings(config, layouts, ranks, len(names), rates[0] if rates else None, own)
    here = [index for index, able in enumerate(settings.holders) if rank in able]
    groups = {id(one): number for number, group in enumerate(optimizer.param_groups) for one in group["params"]}
    numbers = [groups.get(id(one), -1) for _, one in tables]
    coding = _coding(config, own.storages, module, tables, numbers, rank)
    layout, parameters = settings.layout, [one for _, one in tables]

    def store_of(partitions: Sequence[Partition], cut: Sequence[Bucket]) -> ShardStore:
        return ShardStore(partitions, cut, parameters, numbers, optimizer, own.storages, coding)

    stores = {index: store_of(layout.placed[index], layout.cut[index]) for index in here}
    client = Client(parameters, layout.placed, layout.cut, own.storages, coding)
    table_store = TableStore(client, stores, parameters, optimizer, max(8, 2 * len(names)))
    table_store.migrator = TableMigrator(rank, layouts, layout, store_of)
    clocks = {index: settings.clock_of(index) for index in here}
    return Served(settings, tables, clocks, table_store, _alike(config, ranks, own), _told(config, own))


def _layouts(tables: Sequence[tuple[str, nn.Parameter]], given: ServerSettings, own: Parts) -> Layouts:
    """Return the layouts of the tables, one for each set of servers."""
    return Layouts(
        [Table(name, parameter.numel()) for name, parameter in tables],
        own.placement or placement.parse(given.placement),
        lambda table: (tables[table][1].dtype, tables[table][1].element_size()),
        given.bucket,
    )


def _settings(
    config: RunConfig, layouts: Layouts, ranks: Sequence[int], size: int, rate: float | None, own: Parts
) -> Settings:
    """Return the settings of the role in server mode.

    Args:
        ranks: the servers', by shard.
        size: peers in the run.
        rate: the learning rate at the start; None: the optimizer has none.
    """
    given = config.server
    layout = layouts.make(ranks)
    syncs = sync_models(config, len(ranks), own.sync)
    every = CheckpointInterval.parse(str(config.run.checkpoint_every))

    def clock_of(index: int) -> Clock:
        model = syncs[index % len(syncs)]
        model = model.resolved(rate) if model.needs_rate and rate is not None else model
        rng = random.Random(f"shard {config.run.seed} {index}")
        return Clock(model, given.apply, given.pulls, settings.workers(size), rng)

    settings = Settings(
        layouts=layouts,
        layout=layout,
        clock_of=clock_of,
        holders=_holders(ranks, given.server_replicas, size),
        fixed=_fixed(config, own.storages),
        trains=not given.servers_only,
        overlap=given.overlap,
        lost=given.server_lost,
        plans=(schedule.parse(given.sync_plan or "", rate),) * len(ranks),
        rate=rate,
        every=(every.iterations, every.seconds),
        syncs=tuple(syncs),
        journals=bool(every) and given.journal and not given.server_replicas,
    )
    return settings


def _coding(
    config: RunConfig,
    storages: Storages,
    module: nn.Module,
    tables: Sequence[tuple[str, nn.Parameter]],
    groups: Sequence[int],
    rank: int,
) -> Coding:
    """The codecs of gradients and tables.

    Raises:
        UsageError: one that does not go with parts of one's own, or with tables.
    """
    given = config.server
    push, pull = codecs.parse(given.push_codec), codecs.parse(given.pull_codec)
    for option, codec, is_raw in (
        ("--push-codec", push, storages.raw_pushes),
        ("--pull-codec", pull, storages.raw_pulls),
    ):
        if codec != codecs.NoCodec() and not is_raw:
            raise UsageError(f"{option} and parts of one's own that encode, too: leave one out: {storages.describe()}")
    for codec in (push, pull):
        warm_up(codec)
    kept = norms(module)
    return Coding(
        push=None if push == codecs.NoCodec() else push,
        pull=None if pull == codecs.NoCodec() else pull,
        shapes=tuple(tuple(parameter.shape) for _, parameter in tables),
        norms=frozenset(number for number, (name, _) in enumerate(tables) if name in kept),
        groups=groups,
        rescale=given.rescale_error,
        seed=random.Random(f"codec {config.run.seed} {rank}").getrandbits(63),
    )


def warm_up(codec: codecs.Codec) -> None:
    """Have a codec's loops compiled now, and not while training waits."""
    began = time.monotonic()
    for encoder in (codec, codecs.ErrorFeedback(codec)):
        values = torch.zeros(1)
        frame, _ = encoder.encode(values, encoder.init(values))
        codecs.decode_into(frame, values, add=True, near=values)
    took = time.monotonic() - began
    if took > NOTICED:
        log.warning("%s was compiled in %.1f s; later runs on this machine have it", codecs.describe(codec), took)


def _alike(config: RunConfig, ranks: Sequence[int], own: Parts) -> dict[str, str]:
    given = config.server
    return {
        "--servers": ",".join(map(str, ranks)),
        "--server-replicas": str(given.server_replicas),
        "--servers-only": str(given.servers_only).lower(),
        "--sync": _told(config, own),
        "--sync-plan": given.sync_plan or "none",
        "--apply": given.apply or "the sync model's",
        "--pulls": given.pulls,
        "--placement": given.placement if own.placement is None else type(own.placement).__qualname__,
        "--bucket": "default" if given.bucket is None else str(given.bucket),
        "--push-codec": codecs.describe(codecs.parse(given.push_codec)),
        "--pull-codec": codecs.describe(codecs.parse(given.pull_codec)),
        "parts": own.storages.describe() or "gossipx's own",
    }


def _holders(servers: Sequence[int], replicas: int, size: int) -> tuple[tuple[int, ...], ...]:
    """By shard, who holds it and who its replica: the next server, or the next peer where there is one server only."""
    if replicas and size == 1:
        raise UsageError("--server-replicas 1 needs a second peer, which holds the replica: give more, or leave it out")
    if not replicas:
        return tuple((rank,) for rank in servers)
    if len(servers) == 1:
        return ((servers[0], (servers[0] + 1) % size),)
    return tuple(zip(servers, [*servers[1:], servers[0]], strict=True))


def _fixed(config: RunConfig, storages: Storages) -> str:
    """Why tables cannot go to other servers while the run goes on, or nothing."""
    if config.server.server_replicas:
        return "with --server-replicas the servers stay: a replica is of one shard, as it was at the beginning"
    if config.server.servers_only and CheckpointInterval.parse(str(config.run.checkpoint_every)):
        return "with --servers-only and --checkpoint-every the servers stay: --resume takes from them who trains"
    own = storages.describe()
    return f"parts of one's own may keep what only they know of, and stay where they are: {own}" if own else ""


def _told(config: RunConfig, own: Parts) -> str:
    if own.sync is None:
        return config.server.sync
    return "|".join(map(models.describe, [own.sync] if isinstance(own.sync, models.SyncModel) else own.sync))
