"""``gossipx run --dry-run``: the peers of a run and its expected traffic. It starts and writes nothing."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from torch import nn

from gossipx import codecs, policies
from gossipx.assembly.graph import build_schedule
from gossipx.assembly.server import Parts
from gossipx.errors import UsageError
from gossipx.hub import rank_of_hub
from gossipx.launch.directory import check_name
from gossipx.launch.hosts import read_hosts
from gossipx.launch.simulation.peers import TrafficPeers
from gossipx.launch.simulation.plan import Plan
from gossipx.launch.start import Checked, check
from gossipx.launch.world.launchers import LaunchWorld, check_world_size
from gossipx.model import layout
from gossipx.runtime.figures.reporting import codec_of
from gossipx.server.plan import server_ranks
from gossipx.settings.modes import Elastic, Server
from gossipx.settings.scenario import MOST_PEERS, Churn, Compute, NetworkSettings, Scenario, Simulation
from gossipx.settings.sections import MOST_ITERATIONS, RunConfig
from gossipx.sim import World, traces
from gossipx.sim.compute import StepTimes
from gossipx.sim.network import Agenda, Network, Transfer
from gossipx.sim.traffic import TrafficPeer
from gossipx.tasks.costs import published_sizes
from gossipx.tasks.data import TASKS, load
from gossipx.tasks.models import build_model
from gossipx.topology import part_in_round, wave_rounds
from gossipx.topology.analysis import LARGEST
from gossipx.topology.weights import Matrix
from gossipx.transports.pace import parse_rate

REFERENCE = "tau:10"
"""The policy that others are compared with: the paper's reference."""
LINK = "1gbit"
"""The default link rate, that of most machines' network."""
ASSUMED = 1_000_000
"""Assumed size of a model of unknown size, in bytes: its figures are then per MB."""
SAMPLED = 2**26
"""Maximum number of elements of a model that is encoded to measure its codec: this takes a second and 256 MB."""
FLOAT32 = 4
"""Bytes per element."""
PEER_ITERATIONS, SHORTEST = 20_000, 200
"""Iterations that are simulated, of all peers together, which takes about a second, and at least of each; the traffic
of longer runs is extrapolated."""
SERVER_ITERATIONS = 20
"""Iterations that are simulated with servers, where each has the same traffic."""
EVENTS = 10_000
"""Events that are simulated at a time."""
_UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9}


@dataclass(frozen=True)
class PeerPlan:
    """One peer; ``here``: whether this command would start it; ``part``: its role in the run."""

    rank: int
    name: str
    address: str
    device: str
    here: bool
    part: str


@dataclass(frozen=True)
class ModelPlan:
    """The model that peers exchange.

    Attributes:
        name: name of the built-in model or of the script.
        is_known: whether the size is known; else all figures are per MB of model.
        exchanged_bytes: size without a codec.
        codec: the codec's spec.
        encoded_bytes: encoded size of normally distributed values.
        whole_bytes: size of the full model that a joining peer receives.
    """

    name: str
    is_known: bool
    exchanged_bytes: int
    codec: str
    encoded_bytes: int
    whole_bytes: int


@dataclass(frozen=True)
class Traffic:
    """Traffic of one policy during training.

    Attributes:
        policy: the policy or sync model.
        source: what was simulated, in words.
        exchanges: exchanges per peer, mean.
        received_bytes: bytes received per peer, mean.
        busiest_bytes: bytes received or sent by the busiest peer.
        link_seconds: seconds for which the busiest machine's link is occupied.
    """

    policy: str
    source: str
    exchanges: float
    received_bytes: float
    busiest_bytes: float
    link_seconds: float


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run.

    Attributes:
        name: the run's name.
        peers: the peers by rank.
        policy: the run's policy, or the sync model of its servers.
        iterations: number of iterations that the figures are for.
        is_length_known: False: a script determines its own length.
        model: the exchanged model.
        link: rate of the link, as given.
        between_machines: True: peers of one machine share a link to the others. False: all peers are on one machine,
            and the figures assume one link per peer.
        fragments: number of fragments of the model, of which an exchange moves one.
        exchange_seconds: seconds that the model or the fragment of one exchange takes alone, at ``exchange_rate``.
        exchange_rate: the link's rate, or a lower ``--max-rate``.
        traffic: traffic by policy; a policy on the drift of models has none.
        start_bytes: bytes that each peer but the first receives before training.
        finish_bytes: bytes received per peer in the finish, mean; None: unknown with servers, where it depends on
            the exchanges in progress.
        notice: a notice of ``gossipx run`` about the settings; None: no notice.
    """

    name: str
    peers: list[PeerPlan]
    policy: str
    iterations: int
    is_length_known: bool
    model: ModelPlan
    link: str
    between_machines: bool
    fragments: int
    exchange_seconds: float
    exchange_rate: str
    traffic: list[Traffic]
    start_bytes: int
    finish_bytes: float | None
    notice: str | None


def dry_run(
    given: RunConfig,
    hosts: Path,
    script: list[str],
    link: str | None = None,
    model_size: str | None = None,
    world: LaunchWorld | None = None,
) -> DryRun:
    """Return the plan of a run.

    Args:
        given, hosts, script: as for :func:`gossipx.launch.run.processes.launch`, with the same checks.
        link: rate of the machines' links, such as ``100mbit``; None: :data:`LINK`.
        model_size: size of a script's model, such as ``45MB``; None: unknown.
        world: the group of processes that an external launcher started; None: no such launcher.

    Raises:
        UsageError: the run would end with this error before it started.
    """
    if model_size is not None and not script:
        raise UsageError(f"--model-size {model_size} applies only to a script: the built-in task's model is known")
    if (size := len(read_hosts(hosts))) > LARGEST:
        wanted = f"a dry run has at most {LARGEST}: gossipx simulate has up to {MOST_PEERS}"
        raise UsageError(f"{size} peers, and {wanted}", hosts)
    checked = check(given, hosts, script)
    if world is not None:
        check_world_size(world, len(checked.peers), hosts)
    settings, link = checked.settings, link or LINK
    rate = parse_rate(link, "--link")
    check_name(settings)
    module = None if script else _module(settings)
    model = _model(settings, script, module, model_size)
    if settings.run.iterations == MOST_ITERATIONS and not script:
        raise UsageError("--dry-run cannot tell how many iterations --seconds allows: give --iterations too")
    most = settings.exchange.max_rate
    max_rate = None if most is None else parse_rate(most)
    names = [peer.name for peer in checked.peers]
    machines = _machines(checked)
    apart = len(set(machines)) > 1
    link_of = machines if apart else list(range(len(names)))  # number of the link that each peer uses, by rank
    return DryRun(
        name=settings.run.name or "",
        peers=_peers(checked),
        policy=settings.decides,
        iterations=settings.run.iterations,
        is_length_known=not script,
        model=model,
        link=link,
        between_machines=apart,
        fragments=settings.values["fragments"],
        exchange_seconds=model.encoded_bytes / settings.values["fragments"] / min(rate, max_rate or rate),
        exchange_rate=link if most is None or parse_rate(most) >= rate else most,
        traffic=[
            _traffic_of(one, checked, module, model, link_of, rate, max_rate) for one in _shown_policies(settings)
        ],
        start_bytes=model.whole_bytes if settings.sync.init == "first" and len(names) > 1 else 0,
        finish_bytes=_finish(settings, names, model.exchanged_bytes),
        notice=checked.notice,
    )


# --- traffic --------------------------------------------------------------------------------------


@dataclass
class _CountingNetwork(Network):
    """A network so fast that no exchange delays another, which counts the bytes: [receiver, sender]."""

    sent: Matrix = field(default_factory=lambda: np.zeros((0, 0)))

    def carry(
        self,
        sender: int,
        receiver: int,
        nbytes: float,
        agenda: Agenda,
        rng: random.Random,
        arrived: Callable[[], None],
    ) -> Transfer:
        self.sent[receiver, sender] += nbytes
        return super().carry(sender, receiver, nbytes, agenda, rng, arrived)


def _shown_policies(settings: RunConfig) -> list[str]:
    """Return the policies whose traffic is shown: the reference and the run's own, or the sync model of servers."""
    own = settings.decides
    if isinstance(settings.mode, Server):
        return [own]
    policy = policies.parse(own)
    reference = [REFERENCE] if policy != policies.parse(REFERENCE) else []  # the same policy has several spellings
    return reference if policy.uses_drift else [*reference, own]  # drift needs the values of models


def _traffic_of(
    spec: str,
    checked: Checked,
    module: nn.Module | None,
    model: ModelPlan,
    machines: Sequence[int],
    link: float,
    max_rate: float | None,
) -> Traffic:
    """Return the traffic of a policy, from a short run of the peers in virtual time.

    Args:
        machines, link, max_rate: as for :func:`link_seconds`.
    """
    settings, size = checked.settings, len(checked.peers)
    source, deltas = ["simulated"], None
    iterations = SERVER_ITERATIONS
    if not isinstance(settings.mode, Server):
        policy = policies.parse(spec)
        period = policy.period if isinstance(policy, policies.Tau) else 1
        iterations = max(SHORTEST, PEER_ITERATIONS // size, 2 * period)
        if not isinstance(policy, policies.Never | policies.Tau | policies.Random):
            deltas = model.name if model.name in traces.names() else "lenet"
            source.append(f"deltas of {deltas}")
    iterations = min(settings.run.iterations, iterations)
    if iterations < settings.run.iterations:
        source.insert(1, f"{iterations:,} iterations")
    exchanges, sent = _simulated(spec, iterations, deltas, checked, module, model)
    if isinstance(settings.mode, Server | Elastic):  # less the traffic of start and finish
        sent -= _simulated(spec, 0, deltas, checked, module, model)[1]
    longer = settings.run.iterations / iterations  # than what was simulated
    sent *= longer
    return Traffic(
        policy=spec,
        source=", ".join(source),
        exchanges=exchanges * longer,
        received_bytes=float(sent.sum()) / size,
        busiest_bytes=max(float(sent.sum(axis).max()) for axis in (0, 1)),
        link_seconds=link_seconds(sent, machines, link, max_rate),
    )


def link_seconds(sent: Matrix, machines: Sequence[int], link: float, max_rate: float | None) -> float:
    """Return the seconds that the traffic between machines takes.

    They are those of the busiest machine's link in its busier direction, or those of the busiest sender at
    ``max_rate``, whichever is longer.

    Args:
        sent: bytes, [receiver, sender].
        machines: machine by rank; traffic within a machine does not use its link.
        link: rate of a machine's link, in bytes per second.
        max_rate: limit on a peer's sending rate, in bytes per second; None: no limit.
    """
    machine_of = np.array(machines)
    crossing = np.where(machine_of[:, None] != machine_of[None, :], sent, 0.0)
    busiest = max(float(np.bincount(machine_of, weights=crossing.sum(axis)).max()) for axis in (0, 1))
    return max(busiest / link, 0.0 if max_rate is None else float(crossing.sum(0).max()) / max_rate)


def _simulated(
    spec: str, iterations: int, deltas: str | None, checked: Checked, module: nn.Module | None, model: ModelPlan
) -> tuple[float, Matrix]:
    """Return the exchanges per peer in some iterations, and the bytes sent: [receiver, sender]."""
    settings, names = checked.settings, [peer.name for peer in checked.peers]
    size, mode, larger, share = len(names), settings.mode, 1.0, model.encoded_bytes / model.exchanged_bytes
    built_in = "lenet" if module is None else model.name
    if isinstance(mode, Server):
        total = model.exchanged_bytes if module is None else FLOAT32 * sum(one.numel() for one in module.parameters())
        larger = total / (FLOAT32 * sum(count for _, count in published_sizes(built_in)))
        # Gradients and values take the same way back and forth, so that the mean share gives the sum of both.
        coded = [codec for codec in (mode.push_codec, mode.pull_codec) if codec != "none"]
        share = mean(_encoded(codecs.parse(codec), module, total) / total for codec in coded) if coded else 1.0
    else:
        mode = replace(mode, policy=spec)
    is_central = isinstance(mode, Server | Elastic)
    finish = settings.sync.finish if is_central else "none"
    config = replace(
        settings,
        run=replace(settings.run, iterations=iterations, seconds=None),
        sync=replace(settings.sync, finish=finish),
        mode=mode,
    )
    simulation = Simulation(
        peers=size,
        work="traffic",
        model=built_in,
        parameters=None if isinstance(mode, Server) else model.exchanged_bytes // FLOAT32,
        deltas=deltas,
        encoded=share,
    )
    # Within the 30 s of the last evaluation, the last exchange arrives and slower peers end.
    compute = Compute(seconds=1.0, evaluation=30.0)
    scenario = Scenario(simulation, compute, NetworkSettings(), Churn(), (), config, path=Path(), text="")
    schedule = build_schedule(config, size, [peer.host for peer in checked.peers])
    # Peers in lockstep would meet at the same moments again and again, where pairs exclude each other.
    times = StepTimes.drawn(size, 1.0, 0.1, (0.0, 1.0), (0.0, 0.0), config.run.seed)
    plan = Plan(
        scenario, config, names, schedule, rank_of_hub(mode, names), times, assembled=not is_central, parts=Parts()
    )
    network = _CountingNetwork(bandwidth=1e15, delay=1e-6, sent=np.zeros((size, size)))
    world: World[TrafficPeer] = World(config.run.seed, network)
    make = TrafficPeers(plan)
    for rank in range(size):
        world.start(rank, partial(make, rank))
    while world.advance(EVENTS):
        pass
    retrievals = [peer.role.sync.retrievals for peer in world.peers.values() if peer.role.trains]
    return sum(retrievals) / max(len(retrievals), 1), network.sent * larger


def _models_in_wave(size: int) -> int:
    """Return the models that all peers receive in the finish."""
    parts = [part_in_round(rank, number, size) for rank in range(size) for number in range(wave_rounds(size))]
    return sum(part is not None and part.receives for part in parts)


def _finish(settings: RunConfig, names: Sequence[str], nbytes: int) -> float | None:
    """Return the mean bytes received per peer in the finish; None with servers, where it is not known before."""
    if isinstance(settings.mode, Server):
        return None
    if settings.sync.finish == "none":
        return 0.0
    hub = rank_of_hub(settings.mode, names)
    size = len(names)
    return nbytes * (_models_in_wave(size) if hub is None else size - 1) / size


# --- the model ------------------------------------------------------------------------------------


def _module(settings: RunConfig) -> nn.Module:
    """Return the built-in task's model with uninitialised values, so that a large one costs no memory and no time.

    Raises:
        UsageError: the task's data are missing or damaged.
    """
    task = settings.task
    spec, data = TASKS[task.task], load(task.task, None if task.data_dir is None else Path(task.data_dir))[0]
    with torch.device("meta"):
        module = build_model(task.model, classes=data.classes, channels=spec.channels, pixels=spec.pixels)
    return module.to_empty(device="cpu")


def _model(settings: RunConfig, script: list[str], module: nn.Module | None, size: str | None) -> ModelPlan:
    if module is not None:
        exchanged, whole = layout.nbytes(module, settings.sync.buffers == "mix")
    else:
        exchanged = whole = ASSUMED if size is None else parse_size(size)
    encoded = exchanged
    if not isinstance(settings.mode, Server):
        encoded = _encoded(codecs.parse(settings.values["codec"]), module, exchanged)
    return ModelPlan(
        name=settings.task.model if module is not None else script[0],
        is_known=module is not None or size is not None,
        exchanged_bytes=exchanged,
        codec=codec_of(settings),
        encoded_bytes=encoded,
        whole_bytes=whole,
    )


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``500kB``, ``45MB`` or ``1.2GB``, or raise UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(kb|mb|gb)", text.strip().lower())
    size = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not FLOAT32 <= size <= 10**13:
        raise UsageError(f"--model-size '{text}': give bytes with a unit, such as 500kB, 45MB or 1.2GB")
    return size


def _encoded(codec: codecs.Codec, module: nn.Module | None, exchanged: int) -> int:
    """Return the encoded size of a model with normally distributed values, in bytes; of a large one, the bound for any.

    Buffers are not encoded. An unknown model is treated as one tensor.
    """
    if codec == codecs.NoCodec():
        return exchanged
    if module is None:
        tensors = codecs.Tensors.of(torch.empty(exchanged // FLOAT32, device="meta"))
    else:
        plain = layout.norms(module)
        trained = [(layout.plain_name(name), one) for name, one in module.named_parameters() if one.requires_grad]
        tensors = codecs.Tensors.of(*(one for _, one in trained), plain=[name in plain for name, _ in trained])
    codec = codec.in_feedback()
    others = max(0, exchanged - tensors.nbytes)
    if tensors.length > SAMPLED:
        return codec.longest(tensors) + others
    values = torch.randn(tensors.length, generator=torch.Generator().manual_seed(0))
    frame, _ = codec.encode(values, codec.init(tensors))
    return len(frame) + others


# --- peers and exchanges --------------------------------------------------------------------------


def _peers(checked: Checked) -> list[PeerPlan]:
    settings = checked.settings
    names = [peer.name for peer in checked.peers]
    hub = rank_of_hub(settings.mode, names)
    servers = server_ranks(settings, names) or ()

    def part(rank: int) -> str:
        if rank == hub:
            return "hub" if settings.values["hub_only"] else "hub and worker"
        if rank in servers:
            return "server" if settings.values["servers_only"] else "server and worker"
        return "worker" if hub is not None or servers else "peer"

    return [
        PeerPlan(
            rank=peer.rank,
            name=peer.name,
            address=peer.shown,
            device=peer.device or settings.run.device,
            here=peer.rank in checked.here,
            part=part(peer.rank),
        )
        for peer in checked.peers
    ]


def _machines(checked: Checked) -> list[int]:
    """Return the machine's number of each peer, by rank."""
    hosts = ["" if peer.rank in checked.here else peer.host for peer in checked.peers]
    return [hosts.index(host) for host in hosts]
