"""The one place that names concrete classes and puts a peer together."""

from __future__ import annotations

import dataclasses
import functools
import random
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from gossipx import mixing, policies, topology
from gossipx.access import grant
from gossipx.actor import GradientsReady
from gossipx.arena import ParameterArena
from gossipx.build.roles import rank_of
from gossipx.build.server import Parts as Parts
from gossipx.build.server import Served, serve
from gossipx.build.server import servers as servers
from gossipx.checkpoint import Every
from gossipx.comm import CommManager
from gossipx.config import ExchangeSettings, HubSettings, RunConfig, SyncSettings
from gossipx.drive import models
from gossipx.drive.backward import Backward
from gossipx.drive.checkpoints import Checkpoints, store_of
from gossipx.drive.driver import Driver
from gossipx.drive.peer import Peer, PeerOptions
from gossipx.drive.progress import Progress
from gossipx.drive.shards import ShardKeeper, store_of_shard
from gossipx.drive.state import TrainingState
from gossipx.errors import UsageError
from gossipx.hub import Elastic, ElasticSettings
from gossipx.metrics import TensorBoardRecorder
from gossipx.peer import PeerRole, PeerSettings
from gossipx.peer.exchange import Exchange, Ground
from gossipx.peer.pulls import Pulls
from gossipx.policies import Policy
from gossipx.record import NullRecorder, Recorder
from gossipx.server.mode import ServerMode
from gossipx.sync import SyncManager
from gossipx.tasks import partition
from gossipx.tasks.presets import PRESETS
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


def peer(
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
    _check_exchange(config)
    hub = elastic(config, place.names)
    by_servers = servers(config, place.names) is not None
    # Servers keep what others are given, so that no copy of a boundary is needed.
    sampled = sync.delta == "sampled" or by_servers
    drawn = random.Random(f"delta {run.seed} {place.rank}").getrandbits(64) if sampled else None
    arena = ParameterArena(module, mix_buffers=sync.buffers == "mix", sampled=drawn)
    served = serve(config, place.names, place.rank, module, optimizer, parts or Parts())
    # Each peer draws from generators of its own; the split of the data is the same for all.
    rng = random.Random(f"peer {run.seed} {place.rank}")
    turns = schedule(config, size, [address.host for address in place.addresses])
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
    driver.transfers.desk = None if served is None else served.desk
    comm = driver.comm = CommManager(
        rank=place.rank,
        names=place.names,
        addresses=place.addresses,
        bind=place.bind,
        peers_digest=place.digest,
        settings=_alike(config, turns, hub, served),
        manifest=arena.manifest,
        on_request=driver.received,
        room_for=driver.transfers.room_for,
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
    )
    recorder = _recorder(config, place, None if checkpoints.found is None else checkpoints.found.iteration)
    backward = None if served is None else _backward(module, driver, served, config.server.wait_free)
    return Peer(module, optimizer, driver, comm, recorder, place.progress, checkpoints, options, evaluate, backward)


def _keep_shards(driver: Driver, served: Served, place: Place, keep: int) -> None:
    """Have the shards that lie here kept, and go on from what was kept of them."""
    assert place.directory is not None
    stores = {index: store_of_shard(place.directory, index, keep) for index in range(len(place.names))}
    settings = served.settings
    driver.keeper = ShardKeeper(stores, served.desk, settings.servers, settings.journals)
    exchange = driver.role.exchange
    assert isinstance(exchange, ServerMode)
    for shard in exchange.beginning():
        if place.resumes:
            driver.keeper.resume(shard, place.resumes_at)
        elif served.settings.journals:
            driver.keeper.come_back(shard)


def _backward(
    module: nn.Module, driver: Driver, served: Served, wait_free: bool
) -> Callable[[Callable[[], None]], Backward]:
    def ready(buckets: Sequence[tuple[int, int]]) -> None:
        driver.tell(GradientsReady(tuple(buckets)))

    return lambda look: Backward(module, served.tables, served.desk.client, ready, driver.may_go_on, look, wait_free)


EASGD_BETA = 0.9
"""β of Zhang et al., whose α is β/p."""


def elastic(config: RunConfig, names: Sequence[str]) -> ElasticSettings | None:
    """How workers and the hub go together; None: there is no hub.

    Args:
        names: of all peers, by rank.

    Raises:
        UsageError: a hub that is no peer, or settings that do not go with one.
    """
    hub, usual = config.hub, HubSettings()
    if hub.hub is None:
        for name in ("hub_only", "alpha", "beta", "hub_lost"):
            if getattr(hub, name) != getattr(usual, name):
                raise UsageError(f"--{name.replace('_', '-')} is of a hub: name it by --hub, or leave this out")
        return None
    rank = rank_of(hub.hub, "--hub", names)
    workers = len(names) - hub.hub_only
    if not workers:
        raise UsageError("--hub-only leaves no peer that trains: give more peers, or leave it out")
    alpha = EASGD_BETA / workers if hub.alpha is None else hub.alpha
    beta = workers * alpha if hub.beta is None else hub.beta
    if beta > workers:
        raise UsageError(f"--beta {beta:g} moves the centre past a worker's model: at most {workers}, one a worker")
    return ElasticSettings(rank, alpha, beta / workers, not hub.hub_only, hub.hub_lost)


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


def schedule(config: RunConfig, size: int, hosts: Sequence[str] = ()) -> Schedule:
    """The schedule over the run's graph.

    Args:
        size: peers in the run.
        hosts: by rank; the sites of a topology that has none of its own.

    Raises:
        UsageError: a topology, schedule or weights that are not right, or do not go together.
    """
    graph = topology.load(config.sync.topology, size, config.run.seed)
    weights.check(config.sync.weights, graph)
    if config.sync.mode == "pushpull" and graph.edge_shares:
        raise UsageError(
            f"--mode pushpull takes half of a model, and '{graph.name}' gives edges weights: leave one out"
        )
    sites = graph.sites or tuple(hosts.index(host) for host in hosts)
    return schedules.parse(config.sync.schedule, dataclasses.replace(graph, sites=sites))


def _recorder(config: RunConfig, place: Place, goes_on_from: int | None) -> Recorder:
    if place.directory is None:
        return NullRecorder()
    settings = {
        f"{section}.{key}": value
        for section, values in dataclasses.asdict(config).items()
        for key, value in values.items()
        if isinstance(value, str | int | float | bool)
    }
    hparams = {**settings, "rank": place.rank}
    return TensorBoardRecorder(models.directory_of(place.directory, place.rank), hparams, goes_on_from)


def effective(config: RunConfig, size: int, has_script: bool) -> RunConfig:
    """The configuration with the model's preset filled in where nothing was given.

    Args:
        size: peers in the run.
        has_script: whether a user's script is trained; the built-in models' presets say nothing about its model then.

    Raises:
        UsageError: a value that would be refused when peers start, so that it is refused before any does.
    """
    if not has_script:
        config = _with_preset(config)
    steps = config.task.lr_steps or ()
    if list(steps) != sorted(steps):
        raise UsageError(f"--lr-steps do not ascend: {', '.join(map(str, steps))}")
    policies.parse(config.sync.policy)
    schedule(config, size)
    _check_exchange(config)
    return config


def _check_exchange(config: RunConfig) -> None:
    """Refuse settings of what is exchanged, and how, that do not go together."""
    sync = config.sync
    averages = mixing.parse(sync.mixing) == mixing.Average()
    if config.hub.hub is not None:
        with_each_other = {"--mode": sync.mode != "pull", "--exchange": sync.exchange != "pulls"}
        for option, given_too in with_each_other.items():
            if given_too:
                raise UsageError(f"{option} is of peers that exchange with each other, not with a hub: leave one out")
    if sync.exchange == "waves":
        if sync.mode != "pull":
            raise UsageError(f"--mode {sync.mode} is of exchanges of two peers, and a wave is of all: leave one out")
        if sync.topology != SyncSettings().topology:
            raise UsageError(
                f"--topology {sync.topology} says who may pull from whom, and in a wave any two peers meet:"
                " leave it out, or --exchange pulls"
            )
        if sync.schedule is not None:
            raise UsageError(
                f"--schedule {sync.schedule} says whose turn it is, and a wave has rounds of its own:"
                " leave it out, or --exchange pulls"
            )
        if sync.weights != "uniform":
            raise UsageError(
                f"--weights {sync.weights} weighs the models of two peers, and a wave averages all models alike:"
                " leave it out, or --exchange pulls"
            )
        if not averages:
            raise UsageError(
                f"--mixing {sync.mixing} says how a pulled model enters, and a wave averages all models alike:"
                " leave it out, or --exchange pulls"
            )
    if sync.weights != "uniform":
        goes_with = {"push-sum": "push", "metropolis": "pull"}[sync.weights]
        if sync.mode != goes_with:
            raise UsageError(f"--weights {sync.weights} goes with --mode {goes_with}, not {sync.mode}: leave one out")
    if (sync.mode == "pushpull" or sync.weights == "push-sum") and not averages:
        given = "--mode pushpull" if sync.mode == "pushpull" else "--weights push-sum"
        raise UsageError(f"{given} sets the share of a received model itself: leave --mixing out")
    exchange = config.exchange
    pulls = sync.exchange == "pulls" and sync.mode == "pull"
    usual = ExchangeSettings()
    given = "--exchange waves" if sync.exchange == "waves" else f"--mode {sync.mode}"
    if exchange.max_served != usual.max_served and not pulls:
        raise UsageError(f"--max-served counts pulls, and with {given} nobody pulls: leave one out")
    if exchange.max_pushes != usual.max_pushes and sync.mode != "push":
        raise UsageError(f"--max-pushes goes with --mode push, not {sync.mode}: leave one out")
    if exchange.serve_share != usual.serve_share and not pulls:
        raise UsageError(f"--serve-share is of answering pulls, and with {given} nobody pulls: leave one out")
    if exchange.serve_share != usual.serve_share and sync.blocking:
        raise UsageError(
            "--serve-share keeps answers from taking time of training, and with --blocking training waits for pulls"
            " anyway, so that all are answered: leave one out"
        )
    if exchange.max_rate is not None and exchange.transport == "shm":
        raise UsageError(
            f"--max-rate {exchange.max_rate} is of a network, and with --transport shm no model goes over one:"
            " leave one out"
        )


def check_device(name: str, option: str, file: Path | None = None, line: int | None = None) -> None:
    """Look whether this machine has a device, without opening it.

    Args:
        option: how it was named, for the message; ``file`` and ``line``: where.

    Raises:
        UsageError: it is none, or is not here.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"{option} '{name}' is no device: cpu, cuda:0, mps or the like", file, line) from None
    if device.type == "cpu":
        return
    kind = getattr(torch, device.type, None)
    there = kind.device_count() if kind is not None and hasattr(kind, "device_count") else 0
    if (device.index or 0) >= there:
        raise UsageError(
            f"{option} '{name}': {there} devices of type {device.type} are here; cpu always is", file, line
        )


def check_transport(exchange: ExchangeSettings, device: str | None) -> None:
    """Look whether models can travel so, here.

    Args:
        device: of the model; None: a script will say.

    Raises:
        UsageError: they cannot.
    """
    transport = exchange.transport
    if transport == "gloo" or transport == "nccl":
        from gossipx.transports import process_group

        process_group.check(transport, None if device is None else torch.device(device))


def _with_preset(config: RunConfig) -> RunConfig:
    task = config.task
    preset = PRESETS[task.model]
    keys = ("batch_size", "base_lr", "gamma", "momentum", "weight_decay", "lr_steps")
    filled = {key: getattr(preset, key) for key in keys if getattr(task, key) is None}
    # A policy named without arguments gets the model's; one with arguments stands as it was given.
    policy = preset.policies.get(config.sync.policy, config.sync.policy)
    return dataclasses.replace(
        config,
        task=dataclasses.replace(task, **filled),
        sync=dataclasses.replace(config.sync, policy=policy),
    )
