"""Training of some workers and a server under bsp in one process, with codecs.

Gradients and model changes pass through the codecs' frames as between processes (:mod:`gossipx.tables.coding`), so that
training is the same. Learning rates follow a cosine (3LC, section 4.3). The server's model is evaluated on all test
images.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossipx import codecs
from gossipx.codecs import Tensors, encoded_bytes
from gossipx.codecs.changes import Changes, checksum
from gossipx.codecs.sparse import DGC
from gossipx.launch.loops.train import scores
from gossipx.model.layout import norms
from gossipx.server.placement import Partition
from gossipx.tables.coding import Coding, PushEncoder
from gossipx.tasks.data import Batches, Dataset, load
from gossipx.tasks.models import build_model
from gossipx.tasks.partition import partition_from

WORKERS = 4
RATES = {"lenet": 0.02, "resnet20": 0.1}
"""Initial learning rate: the usual one for batches of 128 (LeNet: 0.01 for 64; ResNet: 0.1, section 4.3), the size of
all workers' batches together."""
LAST = 0.01
"""Final learning rate, as a fraction of the initial one (section 4.3)."""
MOMENTUM, DECAY, BATCH = 0.9, 1e-4, 32
TASK = "fashion-mnist"
POINTS = 100
"""Number of points of a curve, each a mean."""


@dataclass
class Traffic:
    """The traffic in one direction: the payload of encoded tensors in bits per value, by step; bytes of all frames with
    headers and tensors that are not encoded; and bytes of the same values as float32."""

    bits: list[float] = field(default_factory=list)
    wire: int = 0
    whole: int = 0

    def add(self, frames: Sequence[memoryview], values: int) -> None:
        """Add one step's frames of ``values`` values each."""
        sizes = [encoded_bytes(frame) for frame in frames]
        count = sum(many for many, _ in sizes)
        self.bits.append(8 * sum(size for _, size in sizes) / count if count else 32.0)
        self.wire += sum(len(frame) for frame in frames)
        self.whole += 4 * values * len(frames)


class Cluster:
    """A server and its workers, which push and pull a built-in model by codecs.

    With ``dgc``, which has its own momentum, the server's optimizer has none.
    """

    def __init__(
        self, model: str, push: str, pull: str, seed: int, data: tuple[Dataset, Dataset], workers: int = WORKERS
    ):
        images = data[0].images
        torch.manual_seed(seed)
        self.module = build_model(model, classes=data[0].classes, channels=images.shape[1], pixels=images.shape[-1])
        named = list(self.module.named_parameters())
        self.parameters = [parameter for _, parameter in named]
        sizes = [parameter.numel() for parameter in self.parameters]
        self.partitions = [Partition(number, 0, size) for number, size in enumerate(sizes)]
        kept = norms(self.module)
        pushed = codecs.parse(push)
        coding = Coding(
            push=pushed,
            shapes=[tuple(parameter.shape) for parameter in self.parameters],
            norms=frozenset(number for number, (name, _) in enumerate(named) if name in kept),
        )
        self.values = sum(sizes)
        self.tensors: Tensors = coding.tensors(self.partitions, torch.float32)
        self.gradients = [torch.zeros(self.values) for _ in range(workers)]
        self.pushing = [
            PushEncoder(coding, self.partitions, gradient, 1000 * seed + rank)
            for rank, gradient in enumerate(self.gradients)
        ]
        self.pulling = Changes(codecs.parse(pull), self.tensors, seed)
        self.table = nn.Parameter(torch.cat([parameter.detach().view(-1) for parameter in self.parameters]))
        self.shown = self.table.detach().clone()  # what all workers have
        momentum = 0.0 if isinstance(pushed, DGC) else MOMENTUM
        self.optimizer = torch.optim.SGD([self.table], lr=1.0, momentum=momentum, weight_decay=DECAY)
        parts = partition_from("iid").split(data[0].labels.numpy(), workers, seed)
        own = [data[0].take(part) for part in parts]
        self.batches = [Batches(one, BATCH, 1000 * seed + rank) for rank, one in enumerate(own)]
        self.test = data[1]
        self.pulling.frame(0, 0, 0, self.table.detach())

    def step(self, version: int, rate: float, push: Traffic, pull: Traffic) -> float:
        """Run one iteration of all workers, and return the mean loss of the batches."""
        losses, mean = [], torch.zeros(self.values)
        self._place(self.shown)
        frames = []
        for rank in range(len(self.pushing)):
            images, labels = next(self.batches[rank])
            self.module.zero_grad()
            loss = functional.cross_entropy(self.module(images), labels)
            loss.backward()
            losses.append(loss.item())
            flat = [torch.zeros(one.numel()) if one.grad is None else one.grad.reshape(-1) for one in self.parameters]
            torch.cat(flat, out=self.gradients[rank])
            frames.append(self.pushing[rank].encode())
            codecs.decode_into(frames[-1], mean, add=True, tensors=self.tensors)
        push.add(frames, self.values)
        self.table.grad = mean / len(self.pushing)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        change = self.pulling.frame(0, checksum(self.shown), version, self.table.detach())
        assert change is not None
        codecs.decode_into(change.source.view, self.shown, add=True, tensors=self.tensors)
        pull.add([change.source.view], self.values)
        return statistics.fmean(losses)

    def judge(self) -> float:
        """Return the accuracy of the server's model on all test images."""
        self._place(self.table.detach())
        return scores(self.module, self.test, torch.device("cpu"))["accuracy"]

    @torch.no_grad()
    def _place(self, values: Tensor) -> None:
        start = 0
        for parameter in self.parameters:
            parameter.copy_(values[start : start + parameter.numel()].view(parameter.shape))
            start += parameter.numel()


@functools.cache
def images(data_dir: str | None = None) -> tuple[Dataset, Dataset]:
    """Return the training and test set: those embedded, or those of CIFAR-10."""
    return load(TASK) if data_dir is None else load("cifar10", Path(data_dir))


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job.

    Args:
        job: ``model``, ``spec`` for both directions (only for pushes if the codec is for gradients only), ``seed``,
            ``steps``, initial learning ``rate``, the number of evaluations
            ``judged``, the number of ``workers`` if it is not :data:`WORKERS`, and the ``data_dir`` of CIFAR-10, which
            then replaces the embedded images.

    Returns:
        ``accuracy`` at the end; ``judged``, [step, accuracy] each; curves of at most :data:`POINTS` means: ``losses``
        of the batches, ``push`` and ``pull`` in bits per value; and for both directions together ``bits`` per value,
        ``wire`` bytes, and ``whole``, the bytes as float32.
    """
    torch.set_num_threads(1)
    pull = "none" if codecs.parse(job["spec"]).gradients_only else job["spec"]
    cluster = Cluster(
        job["model"], job["spec"], pull, job["seed"], images(job.get("data_dir")), job.get("workers", WORKERS)
    )
    first, last = job["rate"], LAST * job["rate"]
    pushes, pulls = Traffic(), Traffic()
    losses, judged = [], []
    for step in range(job["steps"]):
        rate = last + (first - last) * (1 + math.cos(math.pi * step / job["steps"])) / 2
        losses.append(cluster.step(step + 1, rate, pushes, pulls))
        if (step + 1) * job["judged"] // job["steps"] > step * job["judged"] // job["steps"]:
            judged.append([step + 1, cluster.judge()])
    return {
        "accuracy": judged[-1][1],
        "judged": judged,
        "losses": thinned(losses),
        "push": thinned(pushes.bits),
        "pull": thinned(pulls.bits),
        "bits": [statistics.fmean(pushes.bits), statistics.fmean(pulls.bits)],
        "wire": pushes.wire + pulls.wire,
        "whole": pushes.whole + pulls.whole,
    }


def thinned(values: Sequence[float]) -> list[float]:
    """Return at most :data:`POINTS` means of consecutive values, rounded to a plot's resolution."""
    size = -(-len(values) // POINTS)
    means = [statistics.fmean(values[start : start + size]) for start in range(0, len(values), size)]
    return [float(f"{mean:.4g}") for mean in means]
