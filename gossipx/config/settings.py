"""The settings of a run: one declaration each, from which the command line's option and the TOML key both come.

A run's settings are the tables of its TOML file; on the command line they stand side by side. How values that are given
become these is :mod:`gossipx.config.files`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gossipx.specs import known_word

Group = Literal["Peers", "Exchange", "Training", "Run"]
"""Headings of the common options in ``gossipx run --help``, in order."""


def setting(
    default: Any,
    help: str,
    least: float | None = None,
    most: float | None = None,
    check: Callable[[str], object] | None = None,
    peers: Literal[0, 1, 2] = 0,
    common: Group | None = None,
    metavar: str | None = None,
) -> Any:
    """Declare a setting: its default, help and limits, and the other attributes of a :class:`Key`."""
    meta = {"help": help, "least": least, "most": most, "check": check, "peers": peers}
    return field(default=default, metadata={**meta, "common": common, "metavar": metavar})


MOST_ITERATIONS = 10**12
"""What counts iterations is no larger: a thousand a second for 30 years."""
LARGEST_FACTOR = 1e6
"""What weights are multiplied by is no larger: far beyond all that trains, and far below what float32 cannot hold."""

# What a spec may be is looked up when one is given: the help is there before torch is imported.


def _policy(spec: str) -> None:
    from gossipx import policies

    if ":" in spec:  # a bare name may get its values from the model's preset
        policies.parse(spec)
    elif spec.strip() not in policies.BUILT_IN:
        known_word("policy", spec.strip(), policies.names())


def _interval(spec: str) -> None:
    from gossipx.checkpoint import CheckpointInterval

    CheckpointInterval.parse(spec)


def _mixing(spec: str) -> None:
    from gossipx import mixing

    mixing.parse(spec)


def _schedule(spec: str) -> None:
    from gossipx.topology import schedules

    schedules.check(spec)


def _sync_model(specs: str) -> None:
    from gossipx.server.sync_models import models

    for spec in specs.split("|"):
        models.parse(spec)


def _plan(text: str) -> None:
    from gossipx.server.sync_models import schedule as sync_models_schedule

    sync_models_schedule.parse(text)


def _placement(spec: str) -> None:
    from gossipx.server import placement

    placement.parse(spec)


def _codec(spec: str) -> None:
    if spec == "none":  # the default, for which no torch is imported
        return
    from gossipx import codecs

    codecs.parse(spec)


def _rate(text: str) -> None:
    from gossipx.transports import pace

    pace.parse_rate(text)


def _partition(spec: str) -> None:
    from gossipx.tasks import partition

    partition.parse(spec)


def _task(name: str) -> None:
    from gossipx.tasks.data import TASKS

    known_word("task", name, TASKS)


def _model(name: str) -> None:
    from gossipx.tasks.presets import PRESETS

    known_word("model", name, PRESETS)


def _solver(given: str) -> None:
    from gossipx.tasks import solvers

    solvers.find(given)


@dataclass(frozen=True)
class RunSettings:
    """The run as a whole; the TOML table ``[run]``."""

    peers: str | None = setting(
        None,
        "The hosts file, one line per host. Needed here or in the --config file, except under torchrun or srun.",
        common="Peers",
        metavar="FILE",
    )
    name: str | None = setting(
        None,
        "Name of the run and of its directory in --logdir. Default: the policy's, with a number.",
        common="Run",
        metavar="NAME",
    )
    logdir: str = setting("runs", "Directory of runs; point TensorBoard at it.", common="Run", metavar="DIR")
    overwrite: bool = setting(False, "Replace a run of the same name.")
    seed: int = setting(
        0, "Seed of everything random: data split, batches, weights, draws.", 0, 2**32 - 1, common="Run"
    )
    iterations: int = setting(
        3000, "Iterations per peer. Default with --solver: its max_iter.", 1, MOST_ITERATIONS, common="Training"
    )
    threads: int = setting(1, "Computing threads a peer; with one a core, peers on one machine do not fight.", 1, 1024)
    device: str = setting(
        "cpu", "Device to train on, unless the hosts file has a device=.", common="Training", metavar="DEVICE"
    )
    log_interval: int = setting(10, "Iterations between two records of loss and delta.", 1, MOST_ITERATIONS)
    eval_interval: int = setting(
        250, "Iterations between two test accuracies while training; 0: none.", 0, MOST_ITERATIONS
    )
    save_model: bool = setting(True, "Keep each peer's final model in the run's directory.")
    checkpoint_every: str | int = setting(
        "0",
        "Write a checkpoint every so many iterations, 500, or seconds, 60s, to go on from; 0: none.",
        check=_interval,
    )
    keep_checkpoints: int = setting(2, "Checkpoints kept a peer; 2: one is left where the newest is damaged.", 1, 1000)


@dataclass(frozen=True)
class TaskSettings:
    """What is trained; the TOML table ``[task]``. What is not given is the model's preset (Table I for its models)."""

    task: str = setting(
        "fashion-mnist", "Data set: fashion-mnist, mnist or cifar10.", check=_task, common="Training", metavar="NAME"
    )
    data_dir: str | None = setting(
        None, "Directory with the full data set's files; fashion-mnist needs none.", metavar="DIR"
    )
    model: str = setting(
        "lenet",
        "Model: lenet, convnet, resnet20, resnet56, resnet110, alexnet or googlenet.",
        check=_model,
        common="Training",
        metavar="NAME",
    )
    solver: str | None = setting(
        None,
        "Train by a Caffe solver file, solver.prototxt, or by one that is here: alexnet, convnet, googlenet.",
        check=_solver,
    )
    batch_size: int | None = setting(None, "Images a batch and peer.", 1, 60_000)
    base_lr: float | None = setting(None, "Learning rate at the start.", 0, LARGEST_FACTOR)
    gamma: float | None = setting(None, "Factor of the learning rate at each step of lr_steps.", 0, LARGEST_FACTOR)
    momentum: float | None = setting(None, "Momentum of SGD.", 0, LARGEST_FACTOR)
    nesterov: bool = setting(False, "Nesterov's form of the momentum; around a hub that is EAMSGD.")
    weight_decay: float | None = setting(None, "Weight decay of SGD.", 0, LARGEST_FACTOR)
    lr_steps: tuple[float, ...] | None = setting(None, "Where the rate steps, as fractions of the run: 0.5,0.75.", 0, 1)
    partition: str = setting("iid", "How the data are dealt out: iid or dirichlet:alpha=0.3.", check=_partition)


@dataclass(frozen=True)
class SyncSettings:
    """When and with whom models are exchanged; the TOML table ``[sync]``."""

    policy: str = setting(
        "adaptive",
        "When to exchange: never, tau:N, random:p, adaptive:threshold, travel:distance, drift:distance.",
        check=_policy,
        common="Exchange",
        metavar="SPEC",
    )
    mode: Literal["pull", "push", "pushpull", "server"] = setting(
        "pull",
        "Fetch another's model, have another fetch one's own, average a pair of peers; or train by a parameter server"
        " (--servers).",
    )
    exchange: Literal["pulls", "waves"] = setting(
        "pulls", "What a policy that fires begins: an exchange with one peer (--mode), or a wave that averages all."
    )
    topology: str = setting("full", "Who may exchange with whom: a name or file of 'gossipx topology list'.")
    schedule: str | None = setting(
        None,
        "Whose turn it is: random, static, one-peer, inner-outer, bandwidth-aware. Default: the file's, or random.",
        check=_schedule,
    )
    weights: Literal["uniform", "metropolis", "push-sum"] = setting(
        "uniform",
        "Factor on the mixing's share: 1, or Metropolis' by how often two peers pull from each other; or push-sum's"
        " weights, half of which a push gives away.",
    )
    mixing: str = setting(
        "average",
        "How a model enters: average:beta=0.5, aged:beta=0.5,half_life=100, or of --codec choco:gamma=0.2.",
        check=_mixing,
    )
    codec: str = setting(
        "none",
        "How models are encoded that peers exchange: none, 3lc:sparsity=1,residual=0.3, ...; see Codecs.",
        check=_codec,
    )
    references: int = setting(
        8,
        "Models a peer keeps of those it exchanges with, each way, so that --codec encodes differences; 0: models.",
        0,
        65_536,
    )
    blocking: bool = setting(
        False, "Wait for each exchange (Algorithm 2 as printed) or wave instead of training on meanwhile."
    )
    finish: Literal["consensus", "none"] = setting("consensus", "Average all models at the end, or (the paper) do not.")
    init: Literal["first", "own"] = setting("first", "Begin with one peer's weights, or each with its own.")
    buffers: Literal["mix", "local"] = setting("mix", "Exchange BatchNorm's statistics, or keep them local.")
    delta: Literal["exact", "sampled"] = setting(
        "exact", "Measure each step over all weights; or estimate it from a sixteenth of them, for large models."
    )
    min_peers: int = setting(1, "Stop with exit code 4 when fewer peers are left; 1: go on alone.", 1, 65_536)
    distance_interval: int = setting(
        50, "Iterations between two estimates of the consensus distance (Eq. 8).", 1, MOST_ITERATIONS
    )


@dataclass(frozen=True)
class HubSettings:
    """Elastic averaging around a hub; the TOML table ``[hub]``."""

    hub: str | None = setting(
        None,
        "The peer that holds the centre of elastic averaging, by name or number: others bring their models to it.",
        peers=1,
    )
    hub_only: bool = setting(False, "The hub serves the others, and does not train.")
    alpha: float | None = setting(
        None, "Share of its difference to the centre that a worker moves by. Default: 0.9 / workers.", 1e-9, 1
    )
    beta: float | None = setting(
        None, "Workers' number times the centre's share of the same. Default: that many times alpha.", 1e-9, 65_536
    )
    hub_lost: Literal["gossip", "wait", "stop"] = setting(
        "gossip", "While the hub does not answer: pull from other workers, go on alone, or stop with exit code 4."
    )


@dataclass(frozen=True)
class ServerSettings:
    """A parameter server; the TOML table ``[server]``."""

    servers: str | None = setting(
        None,
        "Train by a parameter server whose shards these peers hold, by name or number: 0,1.",
        peers=2,
        common="Exchange",
        metavar="PEERS",
    )
    servers_only: bool = setting(False, "Servers serve the others, and do not train.")
    sync: str = setting(
        "bsp",
        "bsp, asp, ssp:staleness, dsps, drop:n, pssp:staleness,p or staleness,alpha, hybrid:step; one, or one a shard"
        " with a | between them.",
        check=_sync_model,
    )
    sync_plan: str | None = setting(
        None, "Other sync models, each with the clock from which on: 500=ssp:staleness=3;2000=asp.", check=_plan
    )
    pulls: Literal["lazy", "soft"] = setting(
        "lazy", "When a pull that was delayed is answered: when the clock has passed it, or at the soft barrier."
    )
    apply: Literal["push", "each", "tick", "threshold"] | None = setting(
        None, "Apply each push at once, by 1/N or whole, or their mean at each tick. Default: the sync model's."
    )
    placement: str = setting(
        "heuristic", "Which server holds which tensor: see gossipx placement MODEL.", check=_placement
    )
    bucket: int | None = setting(
        None,
        "Bytes that small tensors are put together to, to travel as one; 0: each alone. Default: 1 to 4 MiB.",
        0,
        2**30,
    )
    push_codec: str = setting("none", "How gradients are encoded: none, 3lc:1.75, ...; see Codecs.", check=_codec)
    pull_codec: str = setting("none", "How changes of tables are encoded on their way to workers.", check=_codec)
    rescale_error: bool = setting(
        False, "Scale what --push-codec has left out by old over new learning rate, when that changes."
    )
    wait_free: bool = setting(True, "Gradients leave as backward makes them; else all at the optimizer's step.")
    overlap: bool = setting(True, "Pull from each shard by itself; else from all once all would answer.")
    server_replicas: int = setting(
        0, "Peers beside its server that follow each shard, one of which takes its place when it is gone: 0 or 1.", 0, 1
    )
    journal: bool = setting(
        True, "Beside checkpoints, write down each gradient before it is answered: a killed server can come back."
    )
    server_lost: Literal["wait", "stop"] = setting(
        "wait", "While a server does not answer: wait for it to come back, or stop with exit code 4."
    )


@dataclass(frozen=True)
class ExchangeSettings:
    """How peers reach each other; the TOML table ``[exchange]``."""

    bind: str = setting(
        "127.0.0.1",
        "Address to listen on; anything but loopback needs a secret or TLS.",
        common="Peers",
        metavar="ADDRESS",
    )
    advertise: str | None = setting(
        None, "This machine's host in the hosts file, where it cannot be told by itself; or what others reach it by."
    )
    secret_file: str | None = setting(
        None,
        "Secret that all peers share, 16 bytes or more, in a file that nobody else can read. Or set GOSSIPX_SECRET.",
        common="Peers",
        metavar="FILE",
    )
    tls_cert: str | None = setting(
        None, "Mutual TLS instead of a secret: PEM file of this machine's certificate.", metavar="FILE"
    )
    tls_key: str | None = setting(None, "With --tls-cert: PEM file of its private key.", metavar="FILE")
    tls_ca: str | None = setting(
        None, "With --tls-cert: PEM file of the CA that signed all peers' certificates.", metavar="FILE"
    )
    transport: Literal["auto", "tcp", "shm", "gloo", "nccl"] = setting(
        "auto",
        "How models travel: in shared memory between peers of one machine, else over TCP; or always one of them;"
        " or by torch.distributed's gloo, or its NCCL between CUDA devices.",
    )
    max_rate: str | None = setting(
        None, "Send models no faster than this over a network, all together: 100mbit, 2.5gbit.", check=_rate
    )
    max_served: int = setting(4, "Pulls that are answered at a time; others are told to ask another peer.", 1, 1000)
    max_pushes: int = setting(
        1, "Pushes that are taken in at a time, each into the memory of a model; others go to another peer.", 1, 64
    )
    serve_share: float = setting(
        0.03, "Share of training that answering pulls may take; who asks more often waits. 1: no limit.", 0.001, 1
    )
    peer_timeout: float = setting(30.0, "Seconds after which another peer is no longer waited for.", 0.1, 86_400)
    rendezvous_timeout: float = setting(
        300.0,
        "Seconds in which the processes that torchrun, srun or mpirun start have to meet: hosts start unevenly.",
        0.1,
        86_400,
    )


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run."""

    run: RunSettings = RunSettings()
    task: TaskSettings = TaskSettings()
    sync: SyncSettings = SyncSettings()
    hub: HubSettings = HubSettings()
    server: ServerSettings = ServerSettings()
    exchange: ExchangeSettings = ExchangeSettings()


@dataclass(frozen=True)
class Key:
    """One setting as command line and TOML see it.

    Attributes:
        table: ``run``, ``task``, ``sync``, ``hub``, ``server`` or ``exchange``.
        name: ``peer_timeout``; on the command line ``--peer-timeout``.
        kind: of one value, None aside.
        choices: the values it may take, if these are few.
        many: whether it is a list of values.
        check: refuses a value by a UsageError; None: limits say it all.
        numbers: it is text, and may be given as a number where that has a type, in TOML and in Python.
        peers: it is text that names peers, 1: one, 2: several, which may be given as a list; 0: it names none.
        common: the heading of ``gossipx run --help`` that it stands under; None: only ``--help-all`` shows it.
        metavar: the word for its value in help; None: that of its type.
    """

    table: str
    name: str
    kind: type
    choices: tuple[str, ...]
    many: bool
    default: Any
    help: str
    least: float | None
    most: float | None
    check: Callable[[str], object] | None
    numbers: bool = False
    peers: int = 0
    common: Group | None = None
    metavar: str | None = None

    @property
    def option(self) -> str:
        """How it reads on the command line."""
        return "--" + self.name.replace("_", "-")


def _keys() -> dict[str, Key]:
    keys = {}
    for table, section in get_type_hints(RunConfig).items():
        hints = get_type_hints(section)
        for one in dataclasses.fields(section):
            kind = next((part for part in get_args(hints[one.name]) if part is not type(None)), None)
            kind = hints[one.name] if kind is None or get_origin(hints[one.name]) is Literal else kind
            choices = get_args(kind) if get_origin(kind) is Literal else ()
            many = get_origin(kind) is tuple
            plain = str if choices else float if many else kind
            numbers = one.metadata["peers"] > 0 or (plain is str and int in get_args(hints[one.name]))
            keys[one.name] = Key(table, one.name, plain, choices, many, one.default, numbers=numbers, **one.metadata)
    return keys


KEYS: dict[str, Key] = _keys()
"""All settings by name; no two tables have one of the same name."""
