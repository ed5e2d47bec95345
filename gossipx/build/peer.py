"""A peer, put together from its settings."""

from __future__ import annotations

import dataclasses
import functools
import random
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from gossipx import codecs, mixing, policies
from gossipx.access import grant
from gossipx.actor import GradientsReady
from gossipx.arena import ParameterArena
from gossipx.build.graph import build_schedule
from gossipx.build.hub import elastic_settings
from gossipx.build.server import Parts, Served, serve, warm_up
from gossipx.build.server_settings import server_ranks
from gossipx.build.settings import check_exchange
from gossipx.checkpoint import Every
from gossipx.coded import Coded, ElasticCodec, ModelCodec
from gossipx.comm import CommManager
from gossipx.drive import models
from gossipx.drive.backward import Backward
from gossipx.drive.checkpoints import Checkpoints, store_of
from gossipx.drive.driver import Driver
from gossipx.drive.options import PeerOptions
from gossipx.drive.peer import Peer
from gossipx.drive.progress import Progress
from gossipx.drive.reporting import Reporter
from gossipx.drive.shards import ShardKeeper, store_of_shard
from gossipx.drive.state import TrainingState
from gossipx.hub import Elastic, ElasticSettings
from gossipx.layout import norms
from gossipx.metrics import TensorBoardRecorder
from gossipx.peer import PeerRole, PeerSettings
from gossipx.peer.exchange import Exchange, Ground
from gossipx.peer.pulls import Pulls
from gossipx.policies import Policy
from gossipx.record import NullRecorder, Recorder
from gossipx.server.mode import ServerMode
from gossipx.settings import ExchangeSettings, RunConfig
from gossipx.sync import SyncManager
from gossipx.tasks import partition
from gossipx.topology import schedules, weights
from gossipx.topology.schedules import Schedule
from gossipx.transports import Address, Carriers
from gossipx.transports.pace import parse_rate

SLOWEST = 1.25e6
"""Bytes a second, 10 Mbit/s: the slowest network on which the first model that a peer asks for is expected in time."""
MODEL_SLACK = 2.0
"""Times as long as that takes: a link may be shared."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a peer stands among the others.

    Attributes:
        rank: from 0.
        names: of all peers, by rank.
        addresses: of all peers, by rank.
        bind: where this peer listens.
        digest: of the list of peers; those with another one are refused.
        directory: the run's; None: nothing is written.
        progress: to the parent process.
        under_run: whether ``gossipx run`` started this process.
        resumes: whether the run goes on from checkpoints; ``resumes_at``: of which iteration, None: the newest.
    """

    rank: int
    names: tuple[str, ...]
    addresses: tuple[Address, ...]
    bind: Address
    digest: str
    directory: Path | None
    progress: Progress
    under_run: bool
    resumes: bool = False
    resumes_at: int | None = None


def build_peer(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: RunConfig,
    place: Place,
    policy: Policy | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    parts: Parts | None = None,
) -> Peer:
    """Put a peer together; it takes part once it is started.

    Args:
        module: as for :func:`gossipx.join`.
        policy: in place of the one that the configuration names.
        parts: of a parameter server, a user's own.

    Raises:
        UsageError: settings that do not fit, or a parameter that cannot be joined.
    """
    granted = grant(config.exchange, place.bind.host)
    size = len(place.names)
    run, sync = config.run, config.sync
    max_rate = None if config.exchange.max_rate is None else parse_rate(config.exchange.max_rate)
    check_exchange(config)
    hub = elastic_settings(config, place.names)
    by_servers = server_ranks(config, place.names) is not None
    # Servers keep what others are given, so that no copy of a boundary is needed.
    sampled = sync.delta == "sampled" or by_servers
    drawn = random.Random(f"delta {run.seed} {place.rank}").getrandbits(64) if sampled else None
    arena = ParameterArena(module, mix_buffers=sync.buffers == "mix", sampled=drawn)
    served = serve(config, place.names, place.rank, module, optimizer, parts or Parts())
    # Each peer draws from generators of its own; the split of the data is the same for all.
    rng = random.Random(f"peer {run.seed} {place.rank}")
    turns = build_schedule(config, size, [address.host for address in place.addresses])
    role = PeerRole(
        rank=place.rank,
        size=size,
        sync=SyncManager(
            policies.parse("never") if served else policy or policies.parse(sync.policy), rng.getrandbits(64)
        ),
        topology=turns.topology,
        rng=rng,
        incarnation=secrets.randbits(48),
        mixing=mixing.parse(sync.mixing),
        settings=PeerSettings(
            peer_timeout=config.exchange.peer_timeout,
            model_timeout=MODEL_SLACK * arena.nbytes() / min(SLOWEST, max_rate or SLOWEST),
            max_served=config.exchange.max_served,
            max_pushes=config.exchange.max_pushes,
            serve_share=config.exchange.serve_share,
            exchange=sync.exchange,
            mode="pull" if sync.mode == "server" else sync.mode,
            push_sum=sync.weights == "push-sum",
            blocking=sync.blocking,
            finish=sync.finish,
            init=sync.init,
            min_peers=sync.min_peers,
        ),
        schedule=turns,
        shares=weights.shares(sync.weights, turns, place.rank, pushed=sync.mode == "push"),
        exchange_of=_exchange_of(hub, served),
    )
    driver = Driver(role, arena, config.exchange.max_served)
    driver.tables.transfers.desk = None if served is None else served.desk
    driver.transfers.codec = _model_codec(config, arena, module, place.rank, hub)
    if sync.init == "first" and not place.resumes:
        driver.begin_codec()
    comm = driver.comm = CommManager(
        rank=place.rank,
        names=place.names,
        addresses=place.addresses,
        bind=place.bind,
        peers_digest=place.digest,
        settings=_alike(config, turns, hub, served),
        manifest=arena.manifest,
        on_request=driver.received,
        room_for=driver.brought.room_for,
        peer_timeout=config.exchange.peer_timeout,
        max_rate=max_rate,
        transport=granted.transport,
        secret=granted.secret,
        share_memory=granted.share_memory,
        only_memory=config.exchange.transport == "shm",
        carriers=_carriers(config.exchange, module),
    )
    split = partition.parse(config.task.partition)
    options = PeerOptions(
        name=place.names[place.rank],
        directory=place.directory,
        log_interval=run.log_interval,
        distance_interval=sync.distance_interval,
        split=lambda labels: split.split(labels, size, run.seed),
        by_label=split.by_label,
        policy=served.sync if served else sync.policy if policy is None else policies.describe(policy),
        save_model=run.save_model,
        under_run=place.under_run,
        codec=codec_of(config),
    )
    if served is not None and place.directory is not None:
        _keep_shards(driver, served, place, run.keep_checkpoints)
    about = {"--policy": options.policy.partition(":")[0], "peers": size, "--seed": run.seed}
    checkpoints = Checkpoints(
        None if place.directory is None else store_of(place.directory, place.rank, run.keep_checkpoints),
        Every.parse(str(run.checkpoint_every)),
        TrainingState(module, optimizer, driver, about),
        place.resumes,
        place.resumes_at,
        _told_to_keep(driver),
    )
    goes_on_from = None if checkpoints.found is None else checkpoints.found.iteration
    recorder = _recorder(config, place, served is not None, goes_on_from)
    backward = None if served is None else _backward(module, driver, served, config.server.wait_free)
    reporter = Reporter(module, driver, comm, recorder, place.progress, options, evaluate)
    return Peer(module, optimizer, driver, comm, reporter, checkpoints, options, backward)


def codec_of(config: RunConfig) -> str:
    """Return what the codecs of a run are called in its summary."""
    if config.sync.codec != "none":
        return codecs.describe(codecs.parse(config.sync.codec))
    push, pull = (codecs.describe(codecs.parse(one)) for one in (config.server.push_codec, config.server.pull_codec))
    return push if push == pull else f"push {push}, pull {pull}"


def _model_codec(
    config: RunConfig, arena: ParameterArena, module: nn.Module, rank: int, hub: ElasticSettings | None
) -> Coded | None:
    """What models are encoded by; None: they travel as they are."""
    sync = config.sync
    codec = codecs.parse(sync.codec)
    if codec == codecs.NoCodec():
        return None
    warm_up(codec)
    seed = random.Random(f"codec {config.run.seed} {rank}").getrandbits(63)
    plain = norms(module)
    references = sync.references if hub is None else 0  # around a hub no two peers exchange theirs
    models = ModelCodec(codec, arena, references, plain, seed, mixing.parse(sync.mixing).public)
    if hub is None:
        return Coded(models)
    return Coded(models, ElasticCodec(codec, arena, hub.rank == rank, bool(sync.references), plain, seed))


def _keep_shards(driver: Driver, served: Served, place: Place, keep: int) -> None:
    """Have the shards that lie here kept, and go on from what was kept of them."""
    assert place.directory is not None
    stores = {index: store_of_shard(place.directory, index, keep) for index in range(len(place.names))}
    settings = served.settings
    exchange = driver.role.exchange
    assert isinstance(exchange, ServerMode)
    keeper = ShardKeeper(stores, served.desk, exchange.holding.fresh, settings.servers, settings.journals)
    driver.tables.keeper = keeper
    for shard in exchange.beginning() if place.resumes else ():
        keeper.resume(shard, place.resumes_at)


def _told_to_keep(driver: Driver) -> Callable[[], int] | None:
    """Of a worker that trains by servers: gives the iteration after which these have all take a checkpoint."""
    exchange = driver.role.exchange
    return (lambda: exchange.keep_at) if isinstance(exchange, ServerMode) and exchange.gives else None


def _backward(
    module: nn.Module, driver: Driver, served: Served, wait_free: bool
) -> Callable[[Callable[[], None]], Backward]:
    def ready(buckets: Sequence[tuple[int, int]]) -> None:
        driver.tell(GradientsReady(tuple(buckets)))

    return lambda look: Backward(module, served.tables, served.desk.client, ready, driver.may_go_on, look, wait_free)


def _exchange_of(hub: ElasticSettings | None, served: Served | None) -> Callable[[Ground, Pulls], Exchange] | None:
    """What makes the exchange of a run with a hub or servers; None: it has neither."""
    if served is not None:
        return functools.partial(ServerMode, settings=served.settings, clocks=served.clocks)
    return None if hub is None else functools.partial(Elastic, settings=hub)


def _alike(config: RunConfig, turns: Schedule, hub: ElasticSettings | None, served: Served | None) -> dict[str, str]:
    """By option, what all peers must have alike: who exchanges with whom, and how."""
    sync = config.sync
    around = {} if hub is None else {
        "--hub": str(hub.rank),
        "--hub-only": str(not hub.trains).lower(),
        "--alpha": f"{hub.alpha:g}",
        "--beta": f"{hub.share:g} of a worker's difference",
    }  # fmt: skip
    if served is not None:
        around = served.alike
    return {
        **around,
        "--mode": sync.mode,
        "--codec": codecs.describe(codecs.parse(sync.codec)),
        "--references": str(sync.references),
        "--exchange": sync.exchange,
        "--weights": sync.weights,
        "--schedule": schedules.told(sync.schedule, turns),
        "--topology": turns.topology.fingerprint(),
    }


def _carriers(exchange: ExchangeSettings, module: nn.Module) -> Carriers | None:
    transport = exchange.transport
    if transport != "gloo" and transport != "nccl":
        return None
    from gossipx.transports import process_group  # loads torch.distributed, which takes a while

    return process_group.ProcessGroups(transport, next(module.parameters()).device)


def _recorder(config: RunConfig, place: Place, is_served: bool, goes_on_from: int | None) -> Recorder:
    if place.directory is None:
        return NullRecorder()
    settings = {
        f"{section}.{key}": value
        for section, values in dataclasses.asdict(config).items()
        for key, value in values.items()
        if isinstance(value, str | int | float | bool)
    }
    hparams = {**settings, "rank": place.rank}
    around = {"gossipx: hub": config.hub.hub is not None, "gossipx: servers": is_served}
    parts = ["gossipx", *(part for part, there in around.items() if there)]
    return TensorBoardRecorder(models.directory_of(place.directory, place.rank), hparams, parts, goes_on_from)
