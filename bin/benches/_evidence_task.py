"""The training that all systems of bin/bench evidence share: the same data, batches, model, optimizer and schedule.

A system's program makes an :class:`Assignment`, wraps model or optimizer as the system wants it, and calls
:meth:`Assignment.train`. So systems differ in nothing but how they communicate.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from gossipx.assembly.presets import effective_config
from gossipx.launch.loops.train import optimizer_of, rate_of, scores
from gossipx.settings import files
from gossipx.settings.sections import RunConfig
from gossipx.tasks.data import TASKS, Batches, load
from gossipx.tasks.models import build_model
from gossipx.tasks.partition import partition_from

POINTS = 12
"""Evaluations of a run, at equal distances; the last is at its end."""
LONGEST_WAIT = 300.0
"""Maximum seconds that a peer waits for the others before the first step."""


@dataclass(frozen=True)
class Workload:
    """A task as all systems train it: settings of ``gossipx run``; iterations of each peer; the test figure that the
    table shows, ``loss`` or ``accuracy``; and a difference of it that two seeds of one setting easily have."""

    task: str
    model: str
    partition: str
    steps: int
    figure: str
    noise: float

    def error(self, point: Mapping[str, float]) -> float:
        """Return the loss of a point, or one minus its accuracy: lower is better."""
        return point["loss"] if self.figure == "loss" else 1 - point["accuracy"]


WORKLOADS = {
    "text": Workload("text", "transformer", "iid", 800, "loss", 0.01),
    "text-contiguous": Workload("text", "transformer", "contiguous", 800, "loss", 0.01),
    "fashion-mnist": Workload("fashion-mnist", "lenet", "dirichlet:alpha=0.3", 3000, "accuracy", 0.005),
    "fashion-mnist-resnet20": Workload("fashion-mnist", "resnet20", "dirichlet:alpha=0.1", 800, "accuracy", 0.01),
}


INTERFACE, SENT_COLUMN = "eth0", 8
"""The emulated interface, and the column of its sent bytes in /proc/net/dev."""


def model_of(workload: Workload, classes: int, seed: int) -> nn.Module:
    """Return the model with the initial weights that all peers share."""
    torch.manual_seed(seed)
    spec = TASKS[workload.task]
    return build_model(workload.model, classes=classes, channels=spec.channels, pixels=spec.pixels)


@dataclass(frozen=True)
class Assignment:
    """The run of which a program is one peer: its folder, which the peers share beside the emulated network, its key in
    :data:`WORKLOADS`, what the program needs to know of its system, and the peers' addresses by rank."""

    folder: Path
    workload: str
    seed: int
    steps: int
    peers: int
    options: dict[str, Any]
    addresses: list[str]

    def write(self) -> None:
        """Write the run's file, which :meth:`read` reads in a peer's program."""
        (self.folder / "assignment.json").write_text(json.dumps(asdict(self), default=str))

    @classmethod
    def read(cls, folder: str) -> Assignment:
        """Return the run of a folder."""
        values = json.loads((Path(folder) / "assignment.json").read_text())
        return cls(**{**values, "folder": Path(folder)})

    def tell(self, kind: str, rank: int, text: str = "") -> None:
        """Tell all peers a text of some kind, through a file, so that this sends nothing over the emulated network."""
        unfinished = self.folder / f".{kind}-{rank}"
        unfinished.write_text(text)
        unfinished.rename(self.folder / f"{kind}-{rank}")  # others see it with its content

    def told(self, kind: str) -> list[str]:
        """Return the texts of a kind that peers have told so far."""
        return [file.read_text() for file in self.folder.glob(f"{kind}-*")]

    def wait(self, kind: str, count: int) -> list[str]:
        """Return the texts of a kind once this many peers have told theirs."""
        until = time.monotonic() + LONGEST_WAIT
        while len(texts := self.told(kind)) < count:
            if time.monotonic() > until:
                raise SystemExit(f"{len(texts)} instead of {count} peers were {kind} within {LONGEST_WAIT:g} s")
            time.sleep(0.002)
        return texts

    def prepare(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return model and optimizer of a peer, at the start of the run."""
        torch.set_num_threads(1)
        workload = WORKLOADS[self.workload]
        train, _ = load(workload.task)
        model = model_of(workload, train.classes, self.seed)
        return model, optimizer_of(model, self._settings().task)

    def train(
        self,
        rank: int,
        model: nn.Module,
        optimizer: Any,
        after_step: Callable[[int], None] = lambda done: None,
        before_reading: Callable[[], None] = lambda: None,
    ) -> None:
        """Train one peer, whose model and optimizer may be wrapped, and write its snapshots.

        ``after_step`` is called with the number of steps done, and ``before_reading`` before parameters are read.
        """
        run = self._settings()
        train, _ = load(run.task.task)
        parts = partition_from(run.task.partition).split(train.labels.numpy(), self.peers, self.seed)
        assert run.task.batch_size is not None
        batches = Batches(train.take(parts[rank]), run.task.batch_size, self.seed * 1000 + rank)
        recorder = Recorder(self, rank, averaged(model))
        recorder.start()
        for step in range(self.steps):
            for group in optimizer.param_groups:
                group["lr"] = rate_of(run.task, step, self.steps)
            inputs, labels = next(batches)
            optimizer.zero_grad(set_to_none=True)
            functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            after_step(step + 1)
            if step + 1 in recorder.due:
                before_reading()
                recorder.record(step + 1)
        recorder.end()

    def _settings(self) -> RunConfig:
        workload = WORKLOADS[self.workload]
        named = {"task": workload.task, "model": workload.model, "partition": workload.partition, "seed": self.seed}
        return effective_config(files.resolve(named), self.peers, has_script=False)


class Recorder:
    """Snapshots of one peer during training: its model, the seconds, and the bytes that its interface has sent.

    They stay in memory until the end; a copy of a small model takes less than a millisecond.
    """

    def __init__(self, run: Assignment, rank: int, tensors: list[Tensor]):
        self._run, self._rank, self._tensors = run, rank, tensors
        self.due = {round(run.steps * place / POINTS) for place in range(1, POINTS + 1)} - {0}
        self._made: list[dict[str, Any]] = []
        self._began, self._before = 0.0, 0

    def start(self) -> None:
        """Wait until all peers are ready, and start clock and counter."""
        self._run.tell("ready", self._rank)
        self._run.wait("ready", self._run.peers)
        self._began, self._before = time.monotonic(), sent_bytes()

    def record(self, step: int) -> None:
        """Record the state after a step."""
        point = {"step": step, "seconds": time.monotonic() - self._began, "sent": sent_bytes() - self._before}
        self._made.append({**point, "model": parameters_to_vector(self._tensors).detach().clone()})

    def end(self) -> None:
        """Write the snapshots.

        The last peer to end also writes what all interfaces have sent by then, because the peers that ended before it
        have continued to serve it.
        """
        own = {"pid": os.getpid(), "before": self._before, "sent": sent_bytes()}
        self._run.tell("trained", self._rank, json.dumps(own))
        marks = [json.loads(text) for text in self._run.told("trained")]
        if len(marks) == self._run.peers:
            total = sum((sent_bytes(one["pid"]) or one["sent"]) - one["before"] for one in marks)
            self._run.tell("total", self._rank, str(total))
        torch.save(self._made, self._run.folder / f"peer-{self._rank}.pt")


def averaged(model: nn.Module) -> list[Tensor]:
    """Return the tensors of a model of which an average is made: trained parameters, and statistics of BatchNorm."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [*trained, *(buffer for buffer in model.buffers() if buffer.is_floating_point())]


def sent_bytes(pid: int | str = "self") -> int | None:
    """Return the bytes that the emulated interface in the namespace of a process has sent, as the kernel counts them;
    None: the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()
    except OSError:
        return None
    counts = {name.strip(): counts.split() for name, _, counts in (line.partition(":") for line in lines)}
    if INTERFACE not in counts:
        raise SystemExit(f"no interface {INTERFACE}: programs of bin/bench evidence run in an emulated network")
    return int(counts[INTERFACE][SENT_COLUMN])


def curve(run: Assignment) -> list[dict[str, float]]:
    """Return the points of a run by step: ``step``, ``seconds`` of the slowest peer, ``bytes`` sent per peer, and the
    test figures of the average of all models. The last one also has ``own``, the mean of the figure of the peers' own
    models."""
    workload = WORKLOADS[run.workload]
    torch.set_num_threads(1)
    _, test = load(workload.task)
    model = model_of(workload, test.classes, run.seed)
    peers = [torch.load(run.folder / f"peer-{rank}.pt", weights_only=True) for rank in range(run.peers)]

    def measured(values: Tensor) -> dict[str, float]:
        vector_to_parameters(values, averaged(model))
        return scores(model, test, torch.device("cpu"))

    points = [
        {
            "step": made[0]["step"],
            "seconds": max(one["seconds"] for one in made),
            "bytes": sum(one["sent"] for one in made) / run.peers,
            **measured(torch.stack([one["model"].double() for one in made]).mean(0).float()),
        }
        for made in zip(*peers, strict=True)
    ]
    total = min(map(int, run.told("total")))  # of two peers that end at once, both may be the last
    own = sum(measured(made[-1]["model"])[workload.figure] for made in peers) / run.peers
    return [*points[:-1], {**points[-1], "bytes": total / run.peers, "own": own}]
