"""The server-mode parts of a peer: its tables, its sync models and the plan of its role."""

from __future__ import annotations

import inspect
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from gossipx import codecs
from gossipx.errors import UsageError
from gossipx.model.layout import norms, plain_name
from gossipx.server import placement
from gossipx.server.conditions import SyncModel
from gossipx.server.placement import Layouts, Placement, Table
from gossipx.server.plan import ServerPlan, server_ranks, sync_models_by_shard, workers
from gossipx.server.shard_clock import ShardClock
from gossipx.server.sync_models import spec_of
from gossipx.settings.interval import CheckpointInterval
from gossipx.settings.modes import Server
from gossipx.settings.sections import RunConfig
from gossipx.tables.coding import Coding, TableSource
from gossipx.tables.parts import Storages
from gossipx.tables.store import TableStore

log = logging.getLogger("gossipx")

SLOW_COMPILE = 1.0
"""Seconds above which the compilation of a codec is logged."""


@dataclass(frozen=True)
class Parts:
    """Custom parts of the parameter server: Python objects that no command line option can name.

    All peers of a run need the same parts. :mod:`gossipx.parts` has the base classes.

    Attributes:
        placement: the placement of tables on servers; None: the configured one.
        sync: a sync model, or one per shard; None: the configured ones.
        storages: the classes of the tables and their storages.
    """

    placement: Placement | None = None
    sync: SyncModel | Sequence[SyncModel] | None = None
    storages: Storages = field(default_factory=Storages)


@dataclass(frozen=True)
class Served:
    """The parts of a peer in server mode.

    Attributes:
        plan: of its role.
        tables: the model's trained parameters with their names, by table.
        table_store: the tables of this peer, as a worker and as a server.
        alike: settings that must be equal on all peers, by option.
        sync: description of the sync models, for the summary.
    """

    plan: ServerPlan
    tables: list[tuple[str, nn.Parameter]]
    table_store: TableStore
    alike: dict[str, str]
    sync: str


_OPTIONAL = inspect.Parameter("closure", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)


def serve(
    config: RunConfig,
    names: Sequence[str],
    rank: int,
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    own: Parts,
    places: int | None = None,
) -> Served | None:
    """Build the server-mode parts of this peer; return None if the run has no parameter server.

    Args:
        places: number of gradients that a server receives at a time; None: the default.

    Raises:
        UsageError: settings exclude each other, or there is not one optimizer of which servers can run a copy.
    """
    ranks, given = server_ranks(config, names), config.mode
    if ranks is None or not isinstance(given, Server):
        return None
    if not optimizers:
        raise UsageError("in server mode the servers run the optimizer: pass it to gossipx.join")
    if len(optimizers) > 1:
        raise UsageError(
            f"servers run one optimizer, and {len(optimizers)} are given: give one with several parameter groups, or"
            " leave out the servers"
        )
    optimizer = optimizers[0]
    if inspect.signature(optimizer.step).parameters.get("closure", _OPTIONAL).default is inspect.Parameter.empty:
        raise UsageError(
            f"{type(optimizer).__name__} computes gradients in its step, by a closure, and servers have none: give"
            " another optimizer, or leave out the servers"
        )
    tables = [(plain_name(name), value) for name, value in module.named_parameters() if value.requires_grad]
    rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    layouts = Layouts(
        [Table(name, parameter.numel()) for name, parameter in tables],
        own.placement or placement.placement_from(given.placement),
        lambda table: (tables[table][1].dtype, tables[table][1].element_size()),
        given.bucket,
    )
    plan = server_plan(config, given, layouts, ranks, len(names), rates[0] if rates else None, own)
    groups = {id(value): number for number, group in enumerate(optimizer.param_groups) for value in group["params"]}
    numbers = [groups.get(id(value), -1) for _, value in tables]
    coding = _coding(given, config.run.seed, own.storages, module, tables, numbers, rank)
    source = TableSource([value for _, value in tables], optimizer, own.storages, coding)
    shards = plan.shards_of(rank)
    table_store = TableStore(source, rank, layouts, plan.layout, shards, places or max(8, 2 * len(names)))
    return Served(plan, tables, table_store, _alike(given, ranks, own), _describe_sync(given, own))


def server_plan(
    config: RunConfig, given: Server, layouts: Layouts, ranks: Sequence[int], size: int, rate: float | None, own: Parts
) -> ServerPlan:
    """Return the plan of a run with servers.

    Args:
        given: its mode.
        layouts: of the model's tables.
        ranks: the rank of each shard's server, by shard.
        size: number of peers in the run.
        rate: the initial learning rate; None: the optimizer has none.
    """
    syncs = sync_models_by_shard(given, len(ranks), own.sync)
    every = CheckpointInterval.parse(str(config.run.checkpoint_every)).iterations

    def clock_of(index: int) -> ShardClock:
        model = syncs[index % len(syncs)]
        model = model.resolved(rate) if model.needs_rate and rate is not None else model
        rng = random.Random(f"shard {config.run.seed} {index}")
        return ShardClock(model, given.apply, given.pulls, workers(given, ranks, size), rng)

    return ServerPlan(
        settings=given,
        layouts=layouts,
        layout=layouts.make(ranks),
        clock_of=clock_of,
        syncs=tuple(syncs),
        rate=rate,
        every=every,
        fixed=_fixed(given, bool(every), own.storages),
    )


def _coding(
    given: Server,
    run_seed: int,
    storages: Storages,
    module: nn.Module,
    tables: Sequence[tuple[str, nn.Parameter]],
    groups: Sequence[int],
    rank: int,
) -> Coding:
    """Return the codecs of gradients and tables.

    Raises:
        UsageError: a codec is combined with custom parts that encode, too.
    """
    push, pull = codecs.parse(given.push_codec), codecs.parse(given.pull_codec)
    for option, codec, is_raw in (
        ("--push-codec", push, storages.raw_pushes),
        ("--pull-codec", pull, storages.raw_pulls),
    ):
        if codec != codecs.NoCodec() and not is_raw:
            raise UsageError(
                f"{option} and custom parts that encode exclude each other: leave out {storages.describe()}"
            )
    for codec in (push, pull):
        warm_up(codec)
    norm_names = norms(module)
    return Coding(
        push=None if push == codecs.NoCodec() else push,
        pull=None if pull == codecs.NoCodec() else pull,
        shapes=tuple(tuple(parameter.shape) for _, parameter in tables),
        norms=frozenset(number for number, (name, _) in enumerate(tables) if name in norm_names),
        groups=groups,
        seed=random.Random(f"codec {run_seed} {rank}").getrandbits(63),
    )


def warm_up(codec: codecs.Codec) -> None:
    """Compile a codec's loops now, so that training does not wait for it later."""
    began, before = time.monotonic(), codecs.compilations()
    for encoder in (codec, codecs.ErrorFeedback(codec)):
        values = torch.zeros(1)
        frame, _ = encoder.encode(values, encoder.init(values))
        codecs.decode_into(frame, values, add=True)
    took = time.monotonic() - began
    if took > SLOW_COMPILE and codecs.compilations() > before:
        log.warning("compiling %s took %.1f s; later runs on this machine reuse it", codecs.describe(codec), took)


def _alike(given: Server, ranks: Sequence[int], own: Parts) -> dict[str, str]:
    """Return the settings of the servers that must be equal on all peers, by option."""
    return {
        "--servers": ",".join(map(str, ranks)),
        "--servers-only": str(given.servers_only).lower(),
        "--sync": _describe_sync(given, own),
        "--apply": given.apply or "the sync model's",
        "--pulls": given.pulls,
        "--placement": given.placement if own.placement is None else type(own.placement).__qualname__,
        "--bucket": "default" if given.bucket is None else str(given.bucket),
        "--push-codec": codecs.describe(codecs.parse(given.push_codec)),
        "--pull-codec": codecs.describe(codecs.parse(given.pull_codec)),
        "parts": own.storages.describe() or "gossipx's own",
    }


def _fixed(given: Server, takes_checkpoints: bool, storages: Storages) -> str:
    """Return why the servers cannot be changed during the run; empty if they can."""
    if given.servers_only and takes_checkpoints:
        return "with --servers-only and --checkpoint-every the servers cannot be changed: --resume needs the same ones"
    own = storages.describe()
    return f"with custom parts the servers cannot be changed, as their state cannot be moved: {own}" if own else ""


def _describe_sync(given: Server, own: Parts) -> str:
    if own.sync is None:
        return given.sync
    return "|".join(map(spec_of, [own.sync] if isinstance(own.sync, SyncModel) else own.sync))
