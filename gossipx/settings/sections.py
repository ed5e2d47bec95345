"""The settings of a run, each declared once; the command-line option and the TOML key are generated from that.

Each class here is a table of the TOML file; on the command line all settings are options of one command.
:mod:`gossipx.settings.files` turns given values into these classes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

from gossipx.settings.keys import Key, keys_of, setting

MOST_ITERATIONS = 10**12
"""Upper limit of settings that count iterations: a thousand per second for 30 years."""
LARGEST_FACTOR = 1e6
"""Upper limit of settings that multiply weights: far above useful values, and far below the range of float32."""


@dataclass(frozen=True)
class RunSettings:
    """The run as a whole; the TOML table ``[run]``."""

    peers: str | None = setting(
        None,
        "Hosts file: one line per host, 'localhost slots=4' for four peers here. Required here or in the --config file,"
        " except under torchrun or srun.",
        common="Peers",
        metavar="FILE",
        others="f H hosts hosts-file hostfile machinefile n np nproc nproc-per-node num-processes nnodes world-size"
        " workers num-workers gpus",
        marks="machine later real",
    )
    name: str | None = setting(
        None,
        "Name of the run and of its directory in --logdir. Default: its policy or sync model, and a number if taken.",
        common="Run",
        metavar="NAME",
        others="run-name experiment",
        marks="process",
    )
    logdir: str = setting(
        "runs",
        "Directory of runs; point TensorBoard at it.",
        common="Run",
        metavar="DIR",
        others="o log-dir out output output-dir",
        marks="machine later",
    )
    overwrite: bool = setting(False, "Replace an existing run of the same name.", marks="machine")
    seed: int = setting(
        0, "Seed of all random numbers: data split, batches, initial weights, draws.", 0, 2**32 - 1, common="Run"
    )
    iterations: int = setting(
        3000,
        "Iterations per peer. Default with --solver: its max_iter; with --seconds: no limit.",
        1,
        MOST_ITERATIONS,
        common="Training",
        others="e epochs num-epochs num-train-epochs steps num-steps max-steps iters max-iter",
        marks="later",
    )
    seconds: float | None = setting(
        None,
        "Seconds of training per peer, evaluations included; --iterations may end it before.",
        1e-3,
        1e9,
        marks="later training",
    )
    threads: int = setting(
        1,
        "Compute threads per peer; all peers of a machine together should not exceed its cores.",
        1,
        1024,
        marks="machine later training",
    )
    device: str = setting(
        "cpu",
        "Device to train on, unless the line of the hosts file has device=.",
        common="Training",
        metavar="DEVICE",
        marks="machine later real",
    )
    restart: int = setting(
        0,
        "How often a peer that dies is started again, with growing pauses: from its last checkpoint, or else with the"
        " model of another peer. 0: never.",
        0,
        1000,
        marks="later real",
    )
    log_interval: int = setting(
        10, "Iterations between two records of loss and delta.", 1, MOST_ITERATIONS, marks="later"
    )
    recorder: str = setting(
        "tensorboard",
        "Where curves are recorded: tensorboard, csv, wandb, mlflow, several joined by +, or none.",
        check="recorders:parse",
    )
    metrics_port: str | None = setting(
        None,
        "Serve each peer's figures to Prometheus, on this port plus the peer's rank; on loopback unless an address is"
        " given, as in 0.0.0.0:9400.",
        check="metrics.prometheus:parse",
        metavar="[HOST:]PORT",
        marks="process later real",
    )
    eval_interval: int | None = setting(
        None,
        "Iterations between two evaluations during training; 0: none. Default: a tenth of the run, at most 250.",
        0,
        MOST_ITERATIONS,
        common="Training",
        marks="later training",
    )
    save_model: bool = setting(True, "Save each peer's final model in the directory of the run.", marks="later real")
    checkpoint_every: str | int = setting(
        "0",
        "Write a checkpoint every N iterations (500) or seconds (60s), for --resume; 0: no checkpoints.",
        check="settings.interval:CheckpointInterval.parse",
        marks="later training",
    )
    keep_checkpoints: int = setting(
        2,
        "Number of checkpoints to keep per peer; with 2, one remains if the newest is damaged.",
        1,
        1000,
        marks="later real",
    )


@dataclass(frozen=True)
class TaskSettings:
    """The training task; the TOML table ``[task]``. None: the defaults of the model (Table I for the paper's)."""

    task: str = setting(
        "fashion-mnist",
        "Data set: fashion-mnist, mnist, cifar10, cifar100 or text.",
        check="tasks.presets:TASKS",
        common="Training",
        metavar="NAME",
        others="dataset data-set",
    )
    data_dir: str | None = setting(
        None,
        "Directory with the files of the full data set; of any text files for text. Not needed for fashion-mnist and"
        " text.",
        metavar="DIR",
        others="data data-path data-root",
        marks="machine later",
    )
    model: str = setting(
        "lenet",
        "Model: lenet, convnet, resnet20, resnet56, resnet110, alexnet or googlenet; of text, transformer.",
        check="tasks.presets:PRESETS",
        common="Training",
        metavar="NAME",
    )
    solver: str | None = setting(
        None,
        "Train with a Caffe solver file (solver.prototxt), or with a built-in one: alexnet, convnet, googlenet.",
        check="tasks.solvers:find",
        absolute="tasks.solvers:resolve",
        marks="real",
    )
    batch_size: int | None = setting(
        None, "Batch size per peer, in images or windows of text. Default: the model's.", 1, 60_000, others="b bs batch"
    )
    optimizer: Literal["sgd", "adamw", "lars"] | None = setting(
        None, "Optimizer; another than the model's needs --base-lr. Default: the model's."
    )
    base_lr: float | None = setting(
        None, "Initial learning rate. Default: the model's.", 0, LARGEST_FACTOR, others="lr learning-rate"
    )
    gamma: float | None = setting(
        None, "Factor applied to the learning rate at each of --lr-steps. Default: the model's.", 0, LARGEST_FACTOR
    )
    momentum: float | None = setting(None, "Momentum of SGD or LARS. Default: the model's, or 0.9.", 0, LARGEST_FACTOR)
    nesterov: bool = setting(False, "Use Nesterov momentum; with --hub this is EAMSGD.")
    weight_decay: float | None = setting(
        None, "Weight decay of the optimizer. Default: the model's.", 0, LARGEST_FACTOR
    )
    lr_steps: tuple[float, ...] | None = setting(
        None, "Where the learning rate changes, as fractions of the run: 0.5,0.75. Default: the model's.", 0, 1
    )
    partition: str = setting(
        "iid",
        "How the data are split among the peers: iid, dirichlet:alpha=0.3 or contiguous.",
        check="tasks.partition:parse",
    )


@dataclass(frozen=True)
class SyncSettings:
    """When and with which peers models are exchanged; the TOML table ``[sync]``."""

    preset: Literal["paper"] | None = setting(
        None,
        "paper: settings that are not given are those of Adaptive Communication: its rule, --blocking, --finish none,"
        " --outer none.",
    )
    policy: str = setting(
        "tau:10",
        "When to exchange: never, tau:N, auto:budget, random:p, adaptive:threshold, travel:distance, drift:distance.",
        check="policies:check",
        common="Exchange",
        metavar="SPEC",
        others="tau period threshold sync-every sync-interval local-steps",
    )
    mode: Literal["pull", "push", "pushpull", "server"] = setting(
        "pull",
        "How two peers exchange: pull a model, push a model, or average both models; or use a parameter server"
        " (--servers).",
    )
    exchange: Literal["pulls", "waves"] = setting(
        "pulls", "What a policy starts when it fires: an exchange with one peer (--mode), or a wave through all."
    )
    topology: str = setting(
        "full",
        "Which peers may exchange with each other: a name from 'gossipx topology list', or a file.",
        absolute="topology.files:absolute",
    )
    schedule: str | None = setting(
        None,
        "How partners are chosen: random, static, one-peer, inner-outer, bandwidth-aware. Default: random, or that"
        " of the topology file.",
        check="topology.schedules:check",
    )
    weights: Literal["uniform", "metropolis", "push-sum"] = setting(
        "uniform",
        "Factor on the share of a received model: 1, Metropolis weights by how often two peers pull, or push-sum.",
    )
    mixing: str = setting(
        "average",
        "How a model is mixed in: average:beta=0.5, aged:beta=0.5,half_life=100; with --codec choco:gamma=0.2.",
        check="mixing:parse",
        marks="training",
    )
    outer: str = setting(
        "none",
        "Momentum across exchanges: momentum:0.6, nesterov:lr=0.7,momentum=0.9 (with --exchange waves), or none.",
        check="outer:parse",
    )
    fragments: int = setting(
        1, "Number of parts of the model, of which each exchange moves one in turn; 1: it moves the model.", 1, 1000
    )
    codec: str = setting(
        "none",
        "Codec of the models that peers exchange: none, 3lc:sparsity=1,residual=0.3, ...; see Codecs.",
        check="codecs:parse",
    )
    references: int = setting(
        8, "Reference models kept per direction, so that --codec encodes differences; 0: whole models.", 0, 65_536
    )
    blocking: bool = setting(
        False, "Wait for each exchange (Algorithms 1 and 2 as printed) or wave, instead of training during it."
    )
    finish: Literal["consensus", "none"] = setting(
        "consensus", "Average all models at the end, or (as in the paper) do not.", marks="later"
    )
    finish_timeout: float = setting(
        0.0,
        "Seconds that a peer waits in the finish for peers that still train; 0: as long as they make progress.",
        0,
        30 * 86_400,
    )
    init: Literal["first", "own"] = setting(
        "first", "Start all peers from the weights of one peer, or each peer from its own."
    )
    buffers: Literal["mix", "local"] = setting(
        "mix", "Exchange the statistics of BatchNorm, or keep them local.", marks="training"
    )
    delta: Literal["exact", "sampled"] = setting(
        "exact",
        "Measure each step over all weights, or estimate it from one sixteenth of them, for large models.",
        marks="training",
    )
    min_peers: int = setting(
        1,
        "Stop with exit code 4 when fewer peers than this are left; 1: continue even alone.",
        1,
        65_536,
        marks="later",
    )
    distance_interval: int = setting(
        50,
        "Iterations between two estimates of the consensus distance (Eq. 8).",
        1,
        MOST_ITERATIONS,
        marks="later training",
    )


@dataclass(frozen=True)
class HubSettings:
    """Elastic averaging with a hub; the TOML table ``[hub]``."""

    hub: str | None = setting(
        None,
        "Peer that holds the centre of elastic averaging, by name or number; the other peers exchange with it.",
        peers=1,
    )
    hub_only: bool = setting(False, "The hub only serves the other peers and does not train.")
    alpha: float | None = setting(
        None, "Fraction of its difference to the centre by which a worker moves. Default: 0.9 / workers.", 1e-9, 1
    )
    beta: float | None = setting(
        None, "Workers times the fraction by which the centre moves. Default: workers times --alpha.", 1e-9, 65_536
    )
    hub_lost: Literal["gossip", "wait", "stop"] = setting(
        "gossip", "While the hub does not respond: pull from other workers, train alone, or stop with exit code 4."
    )


@dataclass(frozen=True)
class ServerSettings:
    """The parameter server; the TOML table ``[server]``."""

    servers: str | None = setting(
        None,
        "Train with a parameter server whose shards are on these peers, by name or number: 0,1.",
        peers=2,
        common="Exchange",
        metavar="PEERS",
    )
    servers_only: bool = setting(False, "Servers only serve the workers and do not train.")
    sync: str = setting(
        "bsp",
        "Sync model: bsp, asp, ssp:staleness, dsps, drop:n, pssp:staleness,p or staleness,alpha, hybrid:step; one"
        " for all shards, or one per shard separated by '|'.",
        check="server.sync_models.models:check",
    )
    sync_plan: str | None = setting(
        None,
        "Later sync models, each with the clock at which it starts: 500=ssp:staleness=3;2000=asp.",
        check="server.sync_models.schedule:parse",
    )
    pulls: Literal["lazy", "soft"] = setting(
        "lazy", "When delayed pulls are answered: when the clock has passed them, or (soft barrier) when it ticks."
    )
    apply: Literal["push", "each", "tick", "threshold"] | None = setting(
        None, "Apply each push at once, by 1/N or whole, or their mean at each tick. Default: the sync model's."
    )
    placement: str = setting(
        "heuristic",
        "How tensors are placed on servers: see gossipx placement MODEL.",
        check="server.placement:parse",
    )
    bucket: int | None = setting(
        None, "Send small tensors together, up to this many bytes; 0: each alone. Default: 1 to 4 MiB.", 0, 2**30
    )
    push_codec: str = setting(
        "none",
        "Codec of the gradients that workers push: none, 3lc:1.75, ...; see Codecs.",
        check="codecs:parse",
    )
    pull_codec: str = setting(
        "none",
        "Codec of the table changes that workers pull: none, 3lc:1.75, ...; see Codecs.",
        check="codecs:parse",
    )
    rescale_error: bool = setting(
        False, "Scale the error feedback of --push-codec by old over new learning rate when the rate changes."
    )
    wait_free: bool = setting(
        True, "Send gradients as the backward pass produces them; else all at the optimizer's step."
    )
    overlap: bool = setting(True, "Pull from each shard separately; else from all shards once all of them can answer.")
    server_replicas: int = setting(
        0, "Number of replicas per shard, on other peers; a replica takes over when the server is lost: 0 or 1.", 0, 1
    )
    journal: bool = setting(
        True,
        "Write each gradient to a journal before acknowledging it, so that a killed server can be restarted.",
        marks="real",
    )
    server_lost: Literal["wait", "stop"] = setting(
        "wait", "What to do while a server does not respond: wait until it is back, or stop with exit code 4."
    )


@dataclass(frozen=True)
class ExchangeSettings:
    """Addresses, authentication and transport of the peers; the TOML table ``[exchange]``."""

    bind: str = setting(
        "127.0.0.1",
        "Address to listen on; any address but loopback requires a secret or TLS.",
        common="Peers",
        metavar="ADDRESS",
        others="host address listen interface",
        marks="machine later real",
    )
    advertise: str | None = setting(
        None,
        "Host of this machine in the hosts file, if it cannot be detected; under torchrun or srun, the address at"
        " which others reach it.",
        marks="machine later real",
    )
    secret_file: str | None = setting(
        None,
        "File with the secret that all peers share: 16 bytes or more, readable by its owner only. Or set"
        " GOSSIPX_SECRET.",
        common="Peers",
        metavar="FILE",
        marks="machine later real",
    )
    tls_cert: str | None = setting(
        None,
        "Mutual TLS instead of a secret: PEM file with the certificate of this machine.",
        metavar="FILE",
        marks="machine later real",
    )
    tls_key: str | None = setting(
        None, "With --tls-cert: PEM file with its private key.", metavar="FILE", marks="machine later real"
    )
    tls_ca: str | None = setting(
        None,
        "With --tls-cert: PEM file with the CA that signed the certificates of all peers.",
        metavar="FILE",
        marks="machine later real",
    )
    transport: Literal["auto", "tcp", "shm", "gloo", "nccl"] = setting(
        "auto",
        "How models are sent: auto (shared memory between peers on one machine, else TCP), only TCP, only shared"
        " memory, or gloo or NCCL of torch.distributed.",
        marks="later real",
    )
    max_rate: str | None = setting(
        None,
        "Upper limit of the rate at which models are sent over a network, in total: 100mbit.",
        check="transports.pace:parse_rate",
        marks="later real",
    )
    max_served: int = setting(
        4, "Pulls answered at a time; other requesters are sent to another peer.", 1, 1000, marks="later"
    )
    max_pushes: int = setting(
        1,
        "Pushes received at a time, each with memory for a model; others are sent to another peer.",
        1,
        64,
        marks="later",
    )
    serve_share: float = setting(
        0.03,
        "Upper limit of the fraction of training time spent on answering pulls; 1: no limit.",
        0.001,
        1,
        marks="later",
    )
    peer_timeout: float = setting(
        30.0, "Seconds after which to stop waiting for another peer.", 0.1, 86_400, marks="later"
    )
    rendezvous_timeout: float = setting(
        300.0,
        "Seconds that the processes started by torchrun, srun or mpirun have to find each other.",
        0.1,
        86_400,
        marks="process later real",
    )


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run.

    Attributes:
        given: names of the settings that a user has given, on the command line, in a file or in Python. A given setting
            that has no effect is refused, even if its value is the default.
    """

    run: RunSettings = RunSettings()
    task: TaskSettings = TaskSettings()
    sync: SyncSettings = SyncSettings()
    hub: HubSettings = HubSettings()
    server: ServerSettings = ServerSettings()
    exchange: ExchangeSettings = ExchangeSettings()
    given: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        """The values of all settings, by table and name."""
        return {table: dataclasses.asdict(getattr(self, table)) for table in TABLES}

    @property
    def has_servers(self) -> bool:
        """Whether the run has a parameter server."""
        return self.server.servers is not None or self.sync.mode == "server"

    def is_given(self, name: str) -> bool:
        """Return whether a user has given a setting; a value that is not the default counts in any case."""
        return name in self.given or self.value(name) != KEYS[name].default

    def value(self, name: str) -> Any:
        """Return the value of a setting."""
        return getattr(getattr(self, KEYS[name].table), name)


TABLES: dict[str, Any] = {
    table: kind for table, kind in get_type_hints(RunConfig).items() if dataclasses.is_dataclass(kind)
}
"""The classes of the tables by name, in order."""


KEYS: dict[str, Key] = keys_of(TABLES)
"""All settings by name; names are unique across tables."""


def marked(*marks: str) -> frozenset[str]:
    """Return the names of the settings with one of these marks; see :class:`~gossipx.settings.keys.Key`."""
    return frozenset(name for name, key in KEYS.items() if not key.marks.isdisjoint(marks))
