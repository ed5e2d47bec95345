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
from gossipx.assembly.graph import build_schedule
from gossipx.assembly.hub import elastic_settings
from gossipx.assembly.server import Parts, Served, serve, warm_up
from gossipx.assembly.server_settings import server_ranks
from gossipx.assembly.settings import check_exchange
from gossipx.checkpoint import CheckpointInterval
from gossipx.comm import CommManager
from gossipx.compression import Coded, ElasticCodec, ModelCodec
from gossipx.config.security import Access, grant
from gossipx.config.settings import ExchangeSettings, RunConfig
from gossipx.hub import Elastic, ElasticSettings
from gossipx.metrics import TensorBoardRecorder
from gossipx.metrics.recorder import NullRecorder, Recorder
from gossipx.model.arena import ParameterArena
from gossipx.model.layout import norms
from gossipx.peer import PeerRole, PeerSettings
from gossipx.peer.exchange import Exchange, PeerContext
from gossipx.peer.pulls import Pulls
from gossipx.policies import Policy
from gossipx.protocol.events import GradientsReady
from gossipx.runtime import models
from gossipx.runtime.backward import Backward
from gossipx.runtime.checkpoints import Checkpoints, store_of
from gossipx.runtime.driver import Driver
from gossipx.runtime.options import PeerOptions
from gossipx.runtime.peer import Peer
from gossipx.runtime.progress import Progress
from gossipx.runtime.reporting import Reporter
from gossipx.runtime.shards import ShardKeeper, store_of_shard
from gossipx.runtime.state import TrainingState
from gossipx.server.mode import ServerMode
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
    check_exchange(config)
    hub = elastic_settings(config, place.names)
    arena = _arena(config, place, module)
    served = serve(config, place.names, place.rank, module, optimizer, parts or Parts())
    turns = build_schedule(config, len(place.names), [address.host for address in place.addresses])
    plan = _Plan(module, optimizer, config, place, policy, hub, served, turns)
    driver = _driver(plan, arena)
    comm = driver.comm = _comm(plan, driver, granted)
    options = _options(plan)
    if served is not None and place.directory is not None:
        _keep_shards(driver, served, place, config.run.keep_checkpoints)
    checkpoints = _checkpoints(plan, driver, options)
    recorder = _recorder(plan, None if checkpoints.found is None else checkpoints.found.iteration)
    backward = None if served is None else _backward(module, driver, served, config.server.wait_free)
    reporter = Reporter(module, driver, comm, recorder, place.progress, options, evaluate)
    return Peer(module, optimizer, driver, comm, reporter, checkpoints, options, backward)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The inputs of the steps below, each of which makes one part of a peer.

    Attributes:
        policy: a user's own, in place of the configured one.
        hub: None: the run has no hub.
        served: None: the run has no parameter server.
        turns: who exchanges with whom, and when.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    config: RunConfig
    place: Place
    policy: Policy | None
    hub: ElasticSettings | None
    served: Served | None
    turns: Schedule

    @property
    def max_rate(self) -> float | None:
        """Bytes a second that models may take of a network; None: no limit."""
        given = self.config.exchange.max_rate
        return None if given is None else parse_rate(given)


def _arena(config: RunConfig, place: Place, module: nn.Module) -> ParameterArena:
    # Servers keep what others are given, so that no copy of a boundary is needed.
    sampled = config.sync.delta == "sampled" or server_ranks(config, place.names) is not None
    drawn = random.Random(f"delta {config.run.seed} {place.rank}").getrandbits(64) if sampled else None
    return ParameterArena(module, mix_buffers=config.sync.buffers == "mix", sampled=drawn)


def _driver(plan: _Plan, arena: ParameterArena) -> Driver:
    """Put the role into its driver, with the codec of models and the tables of a server."""
    config, place = plan.config, plan.place
    driver = Driver(_role(plan, arena.nbytes()), arena, config.exchange.max_served)
    driver.tables.transfers.table_store = None if plan.served is None else plan.served.table_store
    driver.transfers.codec = _model_codec(config, arena, plan.module, place.rank, plan.hub)
    if config.sync.init == "first" and not place.resumes:
        driver.begin_codec()
    return driver


def _role(plan: _Plan, model_bytes: int) -> PeerRole:
    config, place, turns = plan.config, plan.place, plan.turns
    sync = config.sync
    policy = policies.parse("never") if plan.served else plan.policy or policies.parse(sync.policy)
    # Each peer draws from generators of its own; the split of the data is the same for all.
    rng = random.Random(f"peer {config.run.seed} {place.rank}")
    return PeerRole(
        rank=place.rank,
        size=len(place.names),
        sync=SyncManager(policy, rng.getrandbits(64)),
        topology=turns.topology,
        rng=rng,
        incarnation=secrets.randbits(48),
        mixing=mixing.parse(sync.mixing),
        settings=_role_settings(config, model_bytes, plan.max_rate),
        schedule=turns,
        shares=weights.shares(sync.weights, turns, place.rank, pushed=sync.mode == "push"),
        exchange_of=_exchange_of(plan.hub, plan.served),
    )


def _role_settings(config: RunConfig, model_bytes: int, max_rate: float | None) -> PeerSettings:
    sync, exchange = config.sync, config.exchange
    return PeerSettings(
        peer_timeout=exchange.peer_timeout,
        model_timeout=MODEL_SLACK * model_bytes / min(SLOWEST, max_rate or SLOWEST),
        max_served=exchange.max_served,
        max_pushes=exchange.max_pushes,
        serve_share=exchange.serve_share,
        exchange=sync.exchange,
        mode="pull" if sync.mode == "server" else sync.mode,
        push_sum=sync.weights == "push-sum",
        blocking=sync.blocking,
        finish=sync.finish,
        init=sync.init,
        min_peers=sync.min_peers,
    )


def _comm(plan: _Plan, driver: Driver, granted: Access) -> CommManager:
    """Connect the driver to the other peers."""
    exchange, place = plan.config.exchange, plan.place
    return CommManager(
        rank=place.rank,
        names=place.names,
        addresses=place.addresses,
        bind=place.bind,
        peers_digest=place.digest,
        settings=_alike(plan.config, plan.turns, plan.hub, plan.served),
        manifest=driver.arena.manifest,
        on_request=driver.received,
        room_for=driver.uploads.room_for,
        peer_timeout=exchange.peer_timeout,
        max_rate=plan.max_rate,
        transport=granted.transport,
        secret=granted.secret,
        share_memory=granted.share_memory,
        only_memory=exchange.transport == "shm",
        carriers=_carriers(exchange, plan.module),
    )


def _options(plan: _Plan) -> PeerOptions:
    run, place = plan.config.run, plan.place
    split = partition.parse(plan.config.task.partition)
    if plan.served is not None:
        policy = plan.served.sync
    else:
        policy = plan.config.sync.policy if plan.policy is None else policies.describe(plan.policy)
    return PeerOptions(
        name=place.names[place.rank],
        directory=place.directory,
        log_interval=run.log_interval,
        distance_interval=plan.config.sync.distance_interval,
        split=lambda labels: split.split(labels, len(place.names), run.seed),
        by_label=split.by_label,
        policy=policy,
        save_model=run.save_model,
        under_run=place.under_run,
        codec=codec_of(plan.config),
    )


def _checkpoints(plan: _Plan, driver: Driver, options: PeerOptions) -> Checkpoints:
    run, place = plan.config.run, plan.place
    about = {"--policy": options.policy.partition(":")[0], "peers": len(place.names), "--seed": run.seed}
    return Checkpoints(
        None if place.directory is None else store_of(place.directory, place.rank, run.keep_checkpoints),
        CheckpointInterval.parse(str(run.checkpoint_every)),
        TrainingState(plan.module, plan.optimizer, driver, about),
        place.resumes,
        place.resumes_at,
        _told_to_keep(driver),
    )


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
    keeper = ShardKeeper(stores, served.table_store, exchange.hosted.fresh, settings.servers, settings.journals)
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

    return lambda poll: Backward(
        module, served.tables, served.table_store.client, ready, driver.wait_for_resume, poll, wait_free
    )


def _exchange_of(hub: ElasticSettings | None, served: Served | None) -> Callable[[PeerContext, Pulls], Exchange] | None:
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


def _recorder(plan: _Plan, goes_on_from: int | None) -> Recorder:
    config, place = plan.config, plan.place
    if place.directory is None:
        return NullRecorder()
    settings = {
        f"{section}.{key}": value
        for section, values in dataclasses.asdict(config).items()
        for key, value in values.items()
        if isinstance(value, str | int | float | bool)
    }
    hparams = {**settings, "rank": place.rank}
    around = {"gossipx: hub": config.hub.hub is not None, "gossipx: servers": plan.served is not None}
    parts = ["gossipx", *(part for part, there in around.items() if there)]
    return TensorBoardRecorder(models.directory_of(place.directory, place.rank), hparams, parts, goes_on_from)
