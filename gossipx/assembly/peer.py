"""The builder of a peer: it connects role, driver, network, checkpoints and reports according to the settings."""

from __future__ import annotations

import dataclasses
import random
import secrets
from collections.abc import Callable, Sequence

from torch import nn

from gossipx import codecs, mixing, outer, policies, recorders
from gossipx.assembly import rules
from gossipx.assembly.graph import build_schedule
from gossipx.assembly.managers import Managers
from gossipx.assembly.presets import with_policy
from gossipx.assembly.role import build_role, max_rate
from gossipx.assembly.server import Parts, Served, serve, warm_up
from gossipx.comm import CommManager
from gossipx.compression import Coded, ModelCodec, WaveCodec
from gossipx.errors import UsageError
from gossipx.hub import rank_of_hub
from gossipx.metrics.board import HUB, PEERS, SERVERS, TEXT, WHOLE
from gossipx.metrics.recorder import Recorder
from gossipx.model.arena import ParameterArena
from gossipx.model.layout import norms
from gossipx.peer.joining.admission import settings_of_run, why_closed
from gossipx.policies import Policy
from gossipx.protocol.events import GradientsReady
from gossipx.recorders import Recorded
from gossipx.runtime import model_files
from gossipx.runtime.checkpoints import Checkpoints, TrainingState, store_of
from gossipx.runtime.driver import Driver
from gossipx.runtime.driver.joins import JoinHandler
from gossipx.runtime.driver.shards import ShardKeeper, store_of_shard
from gossipx.runtime.figures.reporting import Reporter
from gossipx.runtime.figures.scores import Evaluate
from gossipx.runtime.optimizers import Optimizers
from gossipx.runtime.place import Place
from gossipx.runtime.training.backward import Backward
from gossipx.runtime.training.peer import Peer
from gossipx.runtime.training.schedule_free import ScheduleFree
from gossipx.server.mode import ServerMode
from gossipx.settings import files
from gossipx.settings.interval import CheckpointInterval
from gossipx.settings.modes import Elastic, HasCodec, HasPolicy, Pairs, Server, Waves
from gossipx.settings.sections import ExchangeSettings, RunConfig
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
    hub = rank_of_hub(config.mode, place.names)
    served = serve(config, place.names, place.rank, module, optimizers.all, parts or Parts())
    schedule = build_schedule(config, place.begun, [address.host for address in place.addresses[: place.begun]])
    arena = build_arena(config, place.rank, module)
    made = _Builder(config, place, module, managers, schedule, hub, served)
    driver = made.driver(arena, policy)
    names, addresses = list(place.names), list(place.addresses)
    driver.join_handler = joins = JoinHandler(
        driver.commands, driver.handle, settings_of_run(config), names, addresses, place.begun
    )
    comm = driver.comm = made.comm(driver, joins, granted)
    if isinstance(comm, CommManager):  # a script's own manager admits nobody
        comm.join_handler = joins
    if served is not None and place.directory is not None:
        _keep_shards(driver, served, place, config.run.keep_checkpoints)
    told = made.told_policy(policy)
    checkpoints = made.checkpoints(driver, optimizers, told)
    recorder = made.recorder(told, None if checkpoints.found is None else checkpoints.found.iteration)
    reporter = Reporter(module, driver, comm, recorder, config, place, told, evaluate)
    backward = None if served is None else made.backward(driver, served)
    return Peer(module, optimizers, driver, comm, reporter, checkpoints, config, place, backward, schedule_free)


@dataclasses.dataclass(frozen=True)
class _Builder:
    """Makes the parts of one peer from the settings of its run and its place in it.

    Attributes:
        schedule: the exchange schedule.
        hub: the rank of the hub; None: the run has none.
        served: the server-mode parts; None: the run has no parameter server.
    """

    config: RunConfig
    place: Place
    module: nn.Module
    managers: Managers
    schedule: Schedule
    hub: int | None
    served: Served | None

    def driver(self, arena: ParameterArena, policy: Policy | None) -> Driver:
        """Return a driver for the peer's role, with the codec of models and the tables of a server."""
        config, place, served = self.config, self.place, self.served
        role = build_role(
            config,
            place.rank,
            place.begun,
            self.schedule,
            model_bytes=arena.nbytes(),
            policy=policy,
            hub=self.hub,
            server_plan=None if served is None else served.plan,
            incarnation=secrets.randbits(48),
            why_closed=why_closed(config, self.schedule, any(address.behind_nat for address in place.addresses)),
            joined=place.joined,
            sync_manager=self.managers.sync_manager,
        )
        role.members.count_as_lost(() if place.admission is None else place.admission.lost)
        driver = Driver(role, arena, config.values["max_served"])
        driver.tables.store = None if served is None else served.table_store
        add_codecs(driver, config, self.module)
        if config.sync.init == "first" and not place.resumes:
            driver.begin_codec()
        return driver

    def comm(self, driver: Driver, joins: JoinHandler, granted: Access) -> CommManager:
        """Return the CommManager that connects the driver to the other peers."""
        exchange, place = self.config.exchange, self.place
        joined = {} if place.admission is None else {"joined": place.admission.own, "begun": place.begun}
        return self.managers.comm_manager(
            **joined,
            rank=place.rank,
            names=joins.names,
            addresses=joins.addresses,
            bind=place.bind,
            peers_digest=place.digest,
            settings=self._alike(),
            manifest=driver.arena.manifest,
            on_request=driver.received,
            sink_for=driver.sink_for,
            peer_timeout=exchange.peer_timeout,
            max_rate=max_rate(self.config),
            transport=granted.transport,
            secret=granted.secret,
            share_memory=granted.share_memory,
            only_memory=exchange.transport == "shm",
            carriers=_carriers(exchange, self.module),
        )

    def _alike(self) -> dict[str, str]:
        """Return the settings of the exchange that must be equal on all peers, by option."""
        values, mode, schedule = self.config.values, self.config.mode, self.schedule
        around = {} if self.served is None else self.served.alike
        if isinstance(mode, Elastic):
            workers = len(self.place.names) - mode.hub_only
            around = {
                "--hub": str(self.hub),
                "--hub-only": str(mode.hub_only).lower(),
                "--alpha": f"{mode.worker_share(workers):g}",
                "--beta": f"{mode.centre_share(workers):g} of a worker's difference",
            }
        return {
            **around,
            "--mode": values["mode"],
            "--codec": codecs.describe(codecs.parse(values["codec"])),
            "--references": str(values["references"]),
            "--exchange": values["exchange"],
            "--outer": values["outer"],
            "--fragments": str(values["fragments"]),
            "--weights": values["weights"],
            "--schedule": schedules.schedule_spec(values["schedule"], schedule),
            "--topology": schedule.topology.fingerprint(),
        }

    def told_policy(self, policy: Policy | None) -> str:
        """Return the description of what decides when to exchange, given a custom policy or None."""
        if self.served is not None:
            return self.served.sync
        return self.managers.describe(self.config.decides if policy is None else policies.describe(policy))

    def checkpoints(self, driver: Driver, optimizers: Optimizers, policy: str) -> Checkpoints:
        """Return the checkpoints of the peer, given the description of its policy."""
        run, place = self.config.run, self.place
        about = {
            "--policy": policy.partition(":")[0],
            "--outer": self.config.values["outer"],
            "--fragments": self.config.values["fragments"],
            "--seed": run.seed,
        }
        if isinstance(self.config.mode, Elastic | Server):  # in gossip the number of peers may change
            about["peers"] = len(place.names)
        return Checkpoints(
            None if place.directory is None else store_of(place.directory, place.rank, run.keep_checkpoints),
            CheckpointInterval.parse(str(run.checkpoint_every)),
            TrainingState(optimizers, driver, about, place.job),
            place.resumes,
            place.resumes_at,
            place.is_added,
        )

    def recorder(self, policy: str, resumed_at: int | None) -> Recorder:
        """Return what records the peer's curves."""
        config, place = self.config, self.place
        if place.directory is None:
            return recorders.NOWHERE
        used = {
            WHOLE: True,
            TEXT: config.task.task == TEXT_TASK,
            PEERS: True,
            HUB: isinstance(config.mode, Elastic),
            SERVERS: isinstance(config.mode, Server),
        }
        parts = [part for part, is_used in used.items() if is_used]
        own = model_files.directory_of(place.directory, place.rank)
        name = config.run.name or place.directory.name
        settings = {**config.hyperparameters(len(place.names)), "policy": policy}
        of = Recorded(name, place.name, place.rank, own, settings, parts, resumed_at)
        try:
            return recorders.open_all(config.run.recorder, self.managers.recorder, of)
        except OSError as error:
            raise UsageError(f"cannot write there: {error.strerror}; give another --logdir", own) from error

    def backward(self, driver: Driver, served: Served) -> Callable[[Callable[[], None]], Backward]:
        """Return what makes the exchange of gradients, given the function that it calls while it waits."""

        def on_gradients_ready(buckets: Sequence[tuple[int, int]]) -> None:
            driver.handle(GradientsReady(tuple(buckets)))

        return lambda poll: Backward(
            self.module,
            served.tables,
            served.table_store.client,
            on_gradients_ready,
            driver.wait_for_resume,
            poll,
            self.config.values["wait_free"],
        )


def build_arena(config: RunConfig, rank: int, module: nn.Module) -> ParameterArena:
    """Return the arena of a peer's module."""
    # In server mode only servers send tables, so the arena needs no copy of the model at each step boundary.
    sampled = config.values["delta"] == "sampled" or isinstance(config.mode, Server)
    drawn = random.Random(f"delta {config.run.seed} {rank}").getrandbits(64) if sampled else None
    buffers, fragments = config.sync.buffers == "mix", config.values["fragments"]
    arena = ParameterArena(module, mix_buffers=buffers, sampled=drawn, fragments=fragments)
    if isinstance(rule := outer.outer_from(config.values["outer"]), outer.Momentum):
        arena.use_outer(rule)
    return arena


def add_codecs(driver: Driver, config: RunConfig, module: nn.Module) -> None:
    """Add to a driver what encodes the models of its peer, and the references of waves."""
    mode, arena, rank = config.mode, driver.arena, driver.role.rank
    given = codecs.parse(mode.codec) if isinstance(mode, HasCodec) else codecs.NoCodec()
    codec = None if given == codecs.NoCodec() else given
    seed = random.Random(f"codec {config.run.seed} {rank}").getrandbits(63)
    plain, fragments = norms(module), arena.fragments
    if codec is not None:
        warm_up(codec)
    if isinstance(mode, Waves):
        rule = outer.outer_from(mode.outer)
        nesterov = rule if isinstance(rule, outer.Nesterov) else None
        for one in fragments:
            own = seed + 1000 * one.number
            driver.waves.codecs[one.number] = WaveCodec(codec, arena, rank, nesterov, plain, own, one.number)
    elif codec is not None and isinstance(mode, HasCodec):
        public, in_pairs = mixing.mixing_from(config.values["mixing"]).uses_public_copies, isinstance(mode, Pairs)
        models = [
            ModelCodec(
                codec, arena, mode.references, plain, seed + 1000 * one.number, public and not in_pairs, one.number
            )
            for one in fragments
        ]
        driver.models.codec = Coded(models, in_pairs=public and in_pairs)


def _keep_shards(driver: Driver, served: Served, place: Place, keep: int) -> None:
    """Enable checkpoints of this peer's shards; in a resumed run, restore the shards."""
    assert place.directory is not None
    stores = {index: store_of_shard(place.directory, index, keep) for index in range(len(place.names))}
    exchange = driver.role.exchange
    assert isinstance(exchange, ServerMode)
    servers, journals = served.plan.layout.servers, served.plan.journals
    keeper = ShardKeeper(stores, served.table_store, exchange.hosted.fresh, servers, journals)
    driver.tables.keeper = keeper
    for shard in exchange.beginning() if place.resumes else ():
        keeper.resume(shard, place.resumes_at)


def _carriers(exchange: ExchangeSettings, module: nn.Module) -> Carriers | None:
    transport = exchange.transport
    if transport != "gloo" and transport != "nccl":
        return None
    from gossipx.transports import process_group  # torch.distributed is slow to import

    return process_group.ProcessGroups(transport, next(module.parameters()).device)
