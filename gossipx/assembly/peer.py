"""The builder of a peer: it connects role, driver, network, checkpoints and reports according to the settings."""

from __future__ import annotations

import dataclasses
import random
import secrets
from collections.abc import Callable, Sequence

from torch import nn

from gossipx import codecs, mixing, outer, policies, recorders
from gossipx.assembly import rules
from gossipx.assembly.admission import Door, why_closed
from gossipx.assembly.graph import build_schedule
from gossipx.assembly.hub import elastic_settings
from gossipx.assembly.managers import Managers
from gossipx.assembly.place import Place
from gossipx.assembly.presets import with_policy
from gossipx.assembly.role import build_role, max_rate
from gossipx.assembly.server import Parts, Served, serve, warm_up
from gossipx.comm import CommManager
from gossipx.compression import Coded, ElasticCodec, ModelCodec, WaveCodec
from gossipx.errors import UsageError
from gossipx.hub import ElasticSettings
from gossipx.metrics import prometheus
from gossipx.metrics.board import HUB, PEERS, SERVERS, TEXT, WHOLE
from gossipx.metrics.recorder import NullRecorder, Recorder
from gossipx.model.arena import ParameterArena
from gossipx.model.layout import norms
from gossipx.peer.admission import settings_of_run
from gossipx.policies import Policy
from gossipx.protocol.events import GradientsReady
from gossipx.recorders import Recorded
from gossipx.runtime import models
from gossipx.runtime.backward import Backward
from gossipx.runtime.checkpoints import Checkpoints, store_of
from gossipx.runtime.driver import Driver
from gossipx.runtime.optimizers import Optimizers
from gossipx.runtime.options import PeerOptions
from gossipx.runtime.peer import Peer
from gossipx.runtime.reporting import Reporter
from gossipx.runtime.roster import Roster
from gossipx.runtime.schedule_free import ScheduleFree
from gossipx.runtime.scores import Evaluate
from gossipx.runtime.shards import ShardKeeper, store_of_shard
from gossipx.runtime.state import TrainingState
from gossipx.server.mode import ServerMode
from gossipx.settings import files
from gossipx.settings.hyperparameters import hyperparameters
from gossipx.settings.interval import CheckpointInterval
from gossipx.settings.modes import HasPolicy, Pairs, Server, Waves
from gossipx.settings.sections import ExchangeSettings, RunConfig
from gossipx.tasks import partition
from gossipx.tasks.presets import TEXT_TASK
from gossipx.topology import schedules
from gossipx.topology.schedules import Schedule
from gossipx.transports import Carriers
from gossipx.transports.access import Access, grant


def build_peer(
    module: nn.Module,
    optimizers: Optimizers,
    config: RunConfig,
    place: Place,
    policy: Policy | None = None,
    evaluate: Evaluate | None = None,
    parts: Parts | None = None,
    managers: Managers | None = None,
    schedule_free: ScheduleFree | None = None,
) -> Peer:
    """Build a peer. It joins the run when it is started.

    Args:
        module, evaluate: as for :func:`gossipx.join`.
        optimizers: those of the module.
        policy: a custom policy; None: the configured one.
        parts: custom parts of the parameter server; None: none.
        managers: custom managers; None: the built-in ones.
        schedule_free: what the optimizers exchange beside the weights; None: nothing.

    Raises:
        UsageError: settings exclude each other, or a parameter cannot be joined.
    """
    granted = grant(config.exchange, place.bind.host)
    managers = managers or Managers()
    if isinstance(config.mode, HasPolicy):
        config = with_policy(files.changed(config, policy=managers.configured(config.mode.policy)), has_script=True)
    rules.check(config)
    hub = elastic_settings(config, place.names)
    served = serve(config, place.names, place.rank, module, optimizers.all, parts or Parts())
    arena = build_arena(config, place.rank, served is not None, module)
    turns = build_schedule(config, place.begun, [address.host for address in place.addresses[: place.begun]])
    plan = _Plan(module, optimizers, config, place, policy, managers, hub, served, turns)
    driver = _driver(plan, arena)
    driver.roster = Roster(list(place.names), list(place.addresses))
    comm = driver.comm = _comm(plan, driver, driver.roster, granted)
    if (gate := getattr(comm, "gate", None)) is not None:  # a script's own manager may have none
        gate.admission = Door(driver, settings_of_run(config), driver.roster, place.begun)
    options = _options(plan)
    if served is not None and place.directory is not None:
        _keep_shards(driver, served, place, config.run.keep_checkpoints)
    checkpoints = _checkpoints(plan, driver, options)
    recorder = _recorder(plan, options.policy, None if checkpoints.found is None else checkpoints.found.iteration)
    backward = None if served is None else _backward(module, driver, served, config.values["wait_free"])
    reporter = Reporter(module, driver, comm, recorder, place.progress, options, evaluate)
    return Peer(module, optimizers, driver, comm, reporter, checkpoints, options, backward, schedule_free)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The inputs of the functions below, each of which makes one part of a peer.

    Attributes:
        policy: a custom policy; None: the configured one.
        managers: custom managers.
        hub: settings of elastic SGD; None: the run has no hub.
        served: the server-mode parts; None: the run has no parameter server.
        turns: the exchange schedule.
    """

    module: nn.Module
    optimizers: Optimizers
    config: RunConfig
    place: Place
    policy: Policy | None
    managers: Managers
    hub: ElasticSettings | None
    served: Served | None
    turns: Schedule


def build_arena(config: RunConfig, rank: int, has_servers: bool, module: nn.Module) -> ParameterArena:
    """Return the arena of a peer's module.

    Args:
        has_servers: whether the run has a parameter server.
    """
    # In server mode only servers send tables, so the arena needs no copy of the model at each step boundary.
    sampled = config.values["delta"] == "sampled" or has_servers
    drawn = random.Random(f"delta {config.run.seed} {rank}").getrandbits(64) if sampled else None
    buffers, fragments = config.sync.buffers == "mix", config.values["fragments"]
    arena = ParameterArena(module, mix_buffers=buffers, sampled=drawn, fragments=fragments)
    if (rule := outer.parse(config.values["outer"])) is not None:
        arena.use_outer(rule)
    return arena


def _driver(plan: _Plan, arena: ParameterArena) -> Driver:
    """Return a driver for the peer's role, with the codec of models and the tables of a server."""
    config, place = plan.config, plan.place
    role = build_role(
        config,
        place.rank,
        place.begun,
        plan.turns,
        model_bytes=arena.nbytes(),
        policy=plan.policy,
        hub=plan.hub,
        served=None if plan.served is None else (plan.served.settings, plan.served.clocks),
        incarnation=secrets.randbits(48),
        closed=why_closed(config, plan.turns, place.addresses),
        joined=place.joined,
        sync_manager=plan.managers.sync_manager,
    )
    role.members.nobody_waits_for(() if place.admission is None else place.admission.lost)
    driver = Driver(role, arena, config.values["max_served"])
    driver.tables.transfers.table_store = None if plan.served is None else plan.served.table_store
    driver.transfers.codec = model_codec(config, arena, plan.module, place.rank, len(place.names), plan.hub)
    if config.sync.init == "first" and not place.resumes:
        driver.begin_codec()
    return driver


def _comm(plan: _Plan, driver: Driver, roster: Roster, granted: Access) -> CommManager:
    """Return the CommManager that connects the driver to the other peers."""
    exchange, place = plan.config.exchange, plan.place
    joins = {} if place.admission is None else {"joined": place.admission.own, "begun": place.begun}
    return plan.managers.comm_manager(
        **joins,
        rank=place.rank,
        names=roster.names,
        addresses=roster.addresses,
        bind=place.bind,
        peers_digest=place.digest,
        settings=_alike(plan.config, plan.turns, plan.hub, plan.served),
        manifest=driver.arena.manifest,
        on_request=driver.received,
        sink_for=driver.uploads.sink_for,
        peer_timeout=exchange.peer_timeout,
        max_rate=max_rate(plan.config),
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
        policy = plan.config.decides if plan.policy is None else policies.describe(plan.policy)
        policy = plan.managers.describe(policy)
    return PeerOptions(
        name=place.names[place.rank],
        directory=place.directory,
        log_interval=run.log_interval,
        distance_interval=plan.config.sync.distance_interval,
        peer_timeout=plan.config.exchange.peer_timeout,
        split=lambda labels: split.split(labels, len(place.names), run.seed),
        by_label=split.by_label,
        policy=policy,
        save_model=run.save_model,
        under_run=place.under_run,
        codec=codec_of(plan.config),
        metrics=None if run.metrics_port is None else _metrics_of(run.metrics_port, place.rank),
    )


def _metrics_of(given: str, rank: int) -> tuple[str, int]:
    """Return where the peer serves its figures: several peers of a machine cannot share a port."""
    host, port = prometheus.parse(given)
    if port + rank > 65535:
        raise UsageError(f"--metrics-port {given}: the port of rank {rank} would be above 65535; give a lower one")
    return host, port + rank


def _checkpoints(plan: _Plan, driver: Driver, options: PeerOptions) -> Checkpoints:
    run, place = plan.config.run, plan.place
    about = {
        "--policy": options.policy.partition(":")[0],
        "--outer": plan.config.values["outer"],
        "--fragments": plan.config.values["fragments"],
        "--seed": run.seed,
    }
    if plan.hub is not None or plan.served is not None:  # in gossip the number of peers may change
        about["peers"] = len(place.names)
    return Checkpoints(
        None if place.directory is None else store_of(place.directory, place.rank, run.keep_checkpoints),
        CheckpointInterval.parse(str(run.checkpoint_every)),
        TrainingState(plan.optimizers, driver, about, place.job),
        place.resumes,
        place.resumes_at,
        place.is_added,
        _servers_due(driver),
    )


def codec_of(config: RunConfig) -> str:
    """Return the description of a run's codecs for its summary."""
    if not isinstance(config.mode, Server):
        return codecs.describe(codecs.parse(config.mode.codec))
    push, pull = (codecs.describe(codecs.parse(spec)) for spec in (config.mode.push_codec, config.mode.pull_codec))
    return push if push == pull else f"push {push}, pull {pull}"


def model_codec(
    config: RunConfig, arena: ParameterArena, module: nn.Module, rank: int, peers: int, hub: ElasticSettings | None
) -> Coded | None:
    """Return the encoder of a peer's models; None: models are sent as raw values.

    Args:
        peers: number of peers.
        hub: settings of elastic SGD; None: the run has no hub.
    """
    mode = config.mode
    if isinstance(mode, Server) or (codec := codecs.parse(mode.codec)) == codecs.NoCodec():
        return None
    warm_up(codec)
    seed = random.Random(f"codec {config.run.seed} {rank}").getrandbits(63)
    plain = norms(module)
    references = mode.references if hub is None else 0  # with a hub, workers do not exchange with each other
    public, in_pairs = mixing.parse(config.values["mixing"]).public, isinstance(mode, Pairs)
    numbers = [fragment.number for fragment in arena.fragments]
    if isinstance(mode, Waves):
        return Coded([], waves=[WaveCodec(codec, arena, rank, peers, plain, seed + 1000 * one, one) for one in numbers])
    models = [
        ModelCodec(codec, arena, references, plain, seed + 1000 * number, public and not in_pairs, number)
        for number in numbers
    ]
    if hub is None:
        return Coded(models, in_pairs=public and in_pairs)
    return Coded(models, ElasticCodec(codec, arena, hub.rank == rank, bool(mode.references), plain, seed))


def _keep_shards(driver: Driver, served: Served, place: Place, keep: int) -> None:
    """Enable checkpoints of this peer's shards; in a resumed run, restore the shards."""
    assert place.directory is not None
    stores = {index: store_of_shard(place.directory, index, keep) for index in range(len(place.names))}
    settings = served.settings
    exchange = driver.role.exchange
    assert isinstance(exchange, ServerMode)
    keeper = ShardKeeper(stores, served.table_store, exchange.hosted.fresh, settings.servers, settings.journals)
    driver.tables.keeper = keeper
    for shard in exchange.beginning() if place.resumes else ():
        keeper.resume(shard, place.resumes_at)


def _servers_due(driver: Driver) -> Callable[[], int] | None:
    """Return a function that returns the iteration at which the servers request a checkpoint; None without servers."""
    exchange = driver.role.exchange
    return (lambda: exchange.checkpoint_at) if isinstance(exchange, ServerMode) and exchange.trains else None


def _backward(
    module: nn.Module, driver: Driver, served: Served, wait_free: bool
) -> Callable[[Callable[[], None]], Backward]:
    def on_gradients_ready(buckets: Sequence[tuple[int, int]]) -> None:
        driver.handle(GradientsReady(tuple(buckets)))

    return lambda poll: Backward(
        module, served.tables, served.table_store.client, on_gradients_ready, driver.wait_for_resume, poll, wait_free
    )


def _alike(config: RunConfig, turns: Schedule, hub: ElasticSettings | None, served: Served | None) -> dict[str, str]:
    """Return the settings of the exchange that must be equal on all peers, by option."""
    values = config.values
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
        "--mode": values["mode"],
        "--codec": codecs.describe(codecs.parse(values["codec"])),
        "--references": str(values["references"]),
        "--exchange": values["exchange"],
        "--outer": values["outer"],
        "--fragments": str(values["fragments"]),
        "--weights": values["weights"],
        "--schedule": schedules.describe(values["schedule"], turns),
        "--topology": turns.topology.fingerprint(),
    }


def _carriers(exchange: ExchangeSettings, module: nn.Module) -> Carriers | None:
    transport = exchange.transport
    if transport != "gloo" and transport != "nccl":
        return None
    from gossipx.transports import process_group  # torch.distributed is slow to import

    return process_group.ProcessGroups(transport, next(module.parameters()).device)


def _recorder(plan: _Plan, policy: str, resumed_at: int | None) -> Recorder:
    config, place = plan.config, plan.place
    if place.directory is None:
        return NullRecorder()
    used = {
        WHOLE: True,
        TEXT: config.task.task == TEXT_TASK,
        PEERS: True,
        HUB: plan.hub is not None,
        SERVERS: plan.served is not None,
    }
    parts = [part for part, is_used in used.items() if is_used]
    own = models.directory_of(place.directory, place.rank)
    name = config.run.name or place.directory.name
    settings = {**hyperparameters(config, len(place.names)), "policy": policy}
    of = Recorded(name, place.names[place.rank], place.rank, own, settings, parts, resumed_at)
    try:
        return recorders.open_all(config.run.recorder, plan.managers.recorder, of)
    except OSError as error:
        raise UsageError(f"cannot write there: {error.strerror}; give another --logdir", own) from error
