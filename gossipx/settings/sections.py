"""The settings of a run, each declared once; the command-line option and the TOML key are generated from that.

Each class here is a table of the TOML file; on the command line all settings are options of one command.
:mod:`gossipx.settings.files` turns given values into these classes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gossipx.settings import modes
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
        common="Peers",
        metavar="FILE",
        marks="machine later real",
    )
    """Hosts file: one line per host, 'localhost slots=4' for four peers here. Required here or in the --config file,
    except under torchrun or srun."""
    name: str | None = setting(None, common="Run", metavar="NAME", marks="process")
    """Name of the run and of its directory in --logdir. Default: its policy or sync model, and a number if taken."""
    logdir: str = setting("runs", common="Run", metavar="DIR", marks="machine later")
    """Directory of runs; point TensorBoard at it."""
    overwrite: bool = setting(False, marks="machine")
    """Replace an existing run of the same name."""
    seed: int = setting(0, 0, 2**32 - 1, common="Run")
    """Seed of all random numbers: data split, batches, initial weights, draws."""
    iterations: int = setting(
        3000,
        1,
        MOST_ITERATIONS,
        common="Training",
        marks="later",
    )
    """Iterations per peer. Default with --seconds: no limit."""
    seconds: float | None = setting(None, 1e-3, 1e9, marks="later training")
    """Seconds of training per peer, evaluations included; --iterations may end it before."""
    threads: int = setting(1, 1, 1024, marks="machine later training")
    """Compute threads per peer; all peers of a machine together should not exceed its cores."""
    device: str = setting("cpu", common="Training", metavar="DEVICE", marks="machine later real")
    """Device to train on, unless the line of the hosts file has device=."""
    restart: int = setting(0, 0, 1000, marks="later real")
    """How often a peer that dies is started again, with growing pauses: from its last checkpoint, or else with the
    model of another peer. 0: never."""
    log_interval: int = setting(10, 1, MOST_ITERATIONS, marks="later")
    """Iterations between two records of loss and delta."""
    recorder: str = setting("tensorboard", check="recorders:recorders_from")
    """Where curves are recorded: tensorboard, csv, wandb, mlflow, several joined by +, or none."""
    metrics_port: str | None = setting(
        None, check="metrics.prometheus:address_from", metavar="[HOST:]PORT", marks="process later real"
    )
    """Serve each peer's figures to Prometheus, on this port plus the peer's rank; on loopback unless an address is
    given, as in 0.0.0.0:9400."""
    eval_interval: int | None = setting(None, 0, MOST_ITERATIONS, common="Training", marks="later training")
    """Iterations between two evaluations during training; 0: none. Default: a tenth of the run, at most 250."""
    save_model: bool = setting(True, marks="later real")
    """Save each peer's final model in the directory of the run."""
    checkpoint_every: str | int = setting(
        "0", check="settings.interval:CheckpointInterval.parse", marks="later training"
    )
    """Write a checkpoint every N iterations (500) or seconds (60s), for --resume; 0: no checkpoints."""
    keep_checkpoints: int = setting(2, 1, 1000, marks="later real")
    """Number of checkpoints to keep per peer; with 2, one remains if the newest is damaged."""


@dataclass(frozen=True)
class TaskSettings:
    """The training task; the TOML table ``[task]``. None: the defaults of the model (Table I for the paper's)."""

    task: str = setting("fashion-mnist", check="tasks.presets:TASKS", common="Training", metavar="NAME")
    """Data set: fashion-mnist, mnist, cifar10, cifar100 or text."""
    data_dir: str | None = setting(None, metavar="DIR", marks="machine later")
    """Directory with the files of the full data set; of any text files for text. Not needed for fashion-mnist and
    text."""
    model: str = setting("lenet", check="tasks.presets:PRESETS", common="Training", metavar="NAME")
    """Model: lenet, convnet, resnet20, resnet56, resnet110, alexnet or googlenet; of text, transformer."""
    batch_size: int | None = setting(None, 1, 60_000)
    """Batch size per peer, in images or windows of text. Default: the model's."""
    optimizer: Literal["sgd", "adamw", "muon", "lars"] | None = setting(None)
    """Optimizer: sgd, adamw, muon (with adamw for all but hidden matrices) or lars. Default: the model's."""
    lr: float | None = setting(None, 0, LARGEST_FACTOR)
    """Initial learning rate; needed with another optimizer than the model's, but not with muon on lenet, convnet or
    transformer. Default: the model's."""
    gamma: float | None = setting(None, 0, LARGEST_FACTOR)
    """Factor applied to the learning rate at each of --lr-steps. Default: the model's."""
    momentum: float | None = setting(None, 0, LARGEST_FACTOR)
    """Momentum of SGD, LARS or Muon. Default: the model's, or 0.9; of Muon, 0.95."""
    nesterov: bool = setting(False)
    """Use Nesterov momentum; with --hub this is EAMSGD."""
    weight_decay: float | None = setting(None, 0, LARGEST_FACTOR)
    """Weight decay of the optimizer. Default: the model's."""
    lr_steps: tuple[float, ...] | None = setting(None, 0, 1)
    """Where the learning rate changes, as fractions of the run: 0.5,0.75. Default: the model's."""
    partition: str = setting("iid", check="tasks.partition:partition_from")
    """How the data are split among the peers: iid, dirichlet:alpha=0.3 or contiguous."""


@dataclass(frozen=True)
class SyncSettings:
    """The beginning and the end of a run, and its figures, whatever is exchanged; in the TOML table ``[sync]``."""

    finish: Literal["consensus", "none"] = setting("consensus", marks="later")
    """Average all models at the end, or (as in the paper) do not."""
    finish_timeout: float = setting(0.0, 0, 30 * 86_400)
    """Seconds that a peer waits in the finish for peers that still train; 0: as long as they make progress."""
    init: Literal["first", "own"] = setting("first")
    """Start all peers from the weights of one peer, or each peer from its own."""
    buffers: Literal["mix", "local"] = setting("mix", marks="training")
    """Exchange the statistics of BatchNorm, or keep them local."""
    min_peers: int = setting(1, 1, 65_536, marks="later")
    """Stop with exit code 4 when fewer peers than this are left; 1: continue even alone."""
    distance_interval: int = setting(50, 1, MOST_ITERATIONS, marks="later training")
    """Iterations between two estimates of the consensus distance (Eq. 8)."""


@dataclass(frozen=True)
class ExchangeSettings:
    """Addresses, authentication and transport of the peers; the TOML table ``[exchange]``."""

    bind: str = setting(
        "127.0.0.1",
        common="Peers",
        metavar="ADDRESS",
        marks="machine later real",
    )
    """Address to listen on; any address but loopback requires a secret or TLS."""
    advertise: str | None = setting(None, marks="machine later real")
    """Host of this machine in the hosts file, if it cannot be detected; under torchrun or srun, the address at which
    others reach it."""
    secret_file: str | None = setting(None, common="Peers", metavar="FILE", marks="machine later real")
    """File with the secret that all peers share: 16 bytes or more, readable by its owner only. Or set
    GOSSIPX_SECRET."""
    tls_cert: str | None = setting(None, metavar="FILE", marks="machine later real")
    """Mutual TLS instead of a secret: PEM file with the certificate of this machine."""
    tls_key: str | None = setting(None, metavar="FILE", marks="machine later real")
    """With --tls-cert: PEM file with its private key."""
    tls_ca: str | None = setting(None, metavar="FILE", marks="machine later real")
    """With --tls-cert: PEM file with the CA that signed the certificates of all peers."""
    transport: Literal["auto", "tcp", "shm", "gloo", "nccl"] = setting("auto", marks="later real")
    """How models are sent: auto (shared memory between peers on one machine, else TCP), only TCP, only shared memory,
    or gloo or NCCL of torch.distributed."""
    max_rate: str | None = setting(None, check="transports.pace:parse_rate", marks="later real")
    """Upper limit of the rate at which models are sent over a network, in total: 100mbit."""
    peer_timeout: float = setting(30.0, 0.1, 86_400, marks="later")
    """Seconds after which to stop waiting for another peer (but not for a model on its way), for a host that --ssh has
    started, or for the answer to a command."""
    rendezvous_timeout: float = setting(300.0, 0.1, 86_400, marks="process later real")
    """Seconds that the processes started by torchrun, srun or mpirun have to find each other."""


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run.

    Attributes:
        mode: what is exchanged, and the settings that only some modes have.
        given: names of the settings that a user has given, on the command line, in a file or in Python. A given setting
            that has no effect is refused, even if its value is the default.
    """

    run: RunSettings = RunSettings()
    task: TaskSettings = TaskSettings()
    sync: SyncSettings = SyncSettings()
    mode: modes.Mode = field(default_factory=modes.Pulls)
    exchange: ExchangeSettings = ExchangeSettings()
    given: frozenset[str] = field(default=frozenset(), compare=False)

    @functools.cached_property
    def values(self) -> Mapping[str, Any]:
        """The value of each setting by name; of one that the mode does not have, the default."""
        sections = self.run, self.task, self.sync, self.mode, self.exchange
        held = dict([self.mode.chosen_by]) | {n: v for section in sections for n, v in vars(section).items()}
        return {name: held.get(name, key.default) for name, key in KEYS.items()}

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        """The values of all settings, by TOML table and name."""
        return {
            table: {name: self.values[name] for name, key in KEYS.items() if key.table == table} for table in TABLES
        }

    @property
    def decides(self) -> str:
        """The spec of what decides when peers exchange: the policy, or the sync model of a parameter server."""
        return self.mode.sync if isinstance(self.mode, modes.Server) else self.mode.policy

    def hyperparameters(self, peers: int) -> dict[str, str | float]:
        """Return the hyperparameters by which runs of this number of peers are compared, in TensorBoard and others."""
        mode, is_central = self.mode, isinstance(self.mode, modes.Elastic | modes.Server)
        codec = self.values["codec"]
        if isinstance(mode, modes.Server):
            codec = f"push {mode.push_codec}, pull {mode.pull_codec}"
        found: dict[str, str | float | None] = {
            "policy": self.decides,
            "exchange": "hub" if isinstance(mode, modes.Elastic) else mode.chosen_by[1],
            "codec": codec,
            "outer": None if is_central else self.values["outer"],
            "topology": None if is_central else self.values["topology"],
            "optimizer": self.task.optimizer,
            "seed": self.run.seed,
            "peers": peers,
            "learning rate": self.task.lr,
        }
        return {name: value for name, value in found.items() if value is not None}

    def is_given(self, name: str) -> bool:
        """Return whether a user has given a setting; a value that is not the default counts in any case."""
        return name in self.given or self.values[name] != KEYS[name].default


TABLES = {
    "run": (RunSettings,),
    "task": (TaskSettings,),
    "sync": (
        modes.HasPolicy,
        modes.Choice,
        modes.HasPartners,
        modes.HasMixing,
        modes.HasOuter,
        modes.HasFragments,
        modes.HasCodec,
        SyncSettings,
    ),
    "hub": (modes.Elastic,),
    "server": (modes.Server,),
    "exchange": (ExchangeSettings, modes.HasServing, modes.Pushes),
}
"""The classes that declare the settings of each TOML table."""
KEYS: dict[str, Key] = keys_of(TABLES)
"""All settings by name; names are unique across tables."""


def marked(*marks: str) -> frozenset[str]:
    """Return the names of the settings with one of these marks; see :class:`~gossipx.settings.keys.Key`."""
    return frozenset(name for name, key in KEYS.items() if not key.marks.isdisjoint(marks))
