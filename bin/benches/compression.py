"""What codecs make of training and of its traffic (3LC, Tables 1 and 2): accuracy, and bits a value.

Four workers and a server under bsp, in one process: gradients and changes of the model go through the codecs' frames
as between processes (:mod:`gossipx.storage.coding`), and nothing else about them differs. Learning rates fall as a
cosine (section 4.3); what is judged is the server's model, on all test images.

bin/bench compression                      LeNet, some codecs, two seeds, short runs (about 5 minutes)
bin/bench compression --full               all codecs, five seeds, and ResNet-20 for Table 2 (about 90 minutes)
bin/bench compression --only accuracy|ratios
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from _report import figure, report
from _sums import interval
from torch import Tensor, nn
from torch.nn import functional

from gossipx import codecs
from gossipx.codecs import Tensors, encoded_bytes
from gossipx.codecs.changes import Changes, checksum
from gossipx.launch.train import accuracy
from gossipx.layout import norms
from gossipx.server.placement import Partition
from gossipx.storage.coding import Coding, Pushing
from gossipx.tasks.data import Batches, Dataset, load
from gossipx.tasks.models import build_model
from gossipx.tasks.partition import parse as split_by

WORKERS = 4
RATES = {"lenet": (0.04, 0.0004), "resnet20": (0.4, 0.004)}
"""First and last learning rate: that of a batch of 128, and a hundredth (section 4.3: from 0.1 to 0.001, times 4)."""
MOMENTUM, DECAY, BATCH = 0.9, 1e-4, 32
TASK = "fashion-mnist"

PAPER = {
    "32-bit float": "none",
    "8-bit int": "int8",
    "Stoch 3-value b-3-5": "stochastic3",
    "MQE 1-bit int": "onebit",
    "5% sparsification": "topk:ratio=0.05,sample=0.01",
    "2 local steps": "localsteps:k=2",
    "3LC (s=1.00)": "3lc:sparsity=1",
    "3LC (s=1.50)": "3lc:sparsity=1.5",
    "3LC (s=1.75)": "3lc:sparsity=1.75",
    "3LC (s=1.90)": "3lc:sparsity=1.9",
}
"""Designs of Table 1 by the names that they have there."""
OTHERS = (
    "fp16",
    "bf16",
    "int8:block=256",
    "uint8-minmax",
    "3lc:sparsity=1,residual=0.3",
    "3lc:sparsity=1.75+zstd",
    "randomk:ratio=0.05",
    "threshold:value=0.001",
    "qsgd:levels=7",
    "natural",
    "signsgd",
    "efsignsgd",
    "powersgd:rank=2",
)
ASKED = ("3LC (s=1.00)", "3LC (s=1.50)", "3LC (s=1.75)")
"""Those that are to come within 0.3 points of float, or of which the interval is to have it in it."""
WIDE = 1.0
"""Points: an interval of more on either side says nothing."""
TERNARY = {"1.00": 39.4, "1.50": 70.9, "1.75": 107.0, "1.90": 160.0}
"""Table 2: compression ratios by sparsity multiplier."""


@dataclass
class Traffic:
    """Of one direction.

    Attributes:
        bits: a step's payload of encoded tensors, a value, step by step.
        wire: bytes of all frames, with headers and tensors that are not encoded.
        whole: that they would have had as float32.
    """

    bits: list[float] = field(default_factory=list)
    wire: int = 0
    whole: int = 0

    def add(self, frames: Sequence[memoryview], values: int) -> None:
        """One step's frames, each of so many values."""
        sizes = [encoded_bytes(frame) for frame in frames]
        count = sum(many for many, _ in sizes)
        self.bits.append(8 * sum(size for _, size in sizes) / count if count else 32.0)
        self.wire += sum(len(frame) for frame in frames)
        self.whole += 4 * values * len(frames)


@dataclass
class Trained:
    """One run.

    Attributes:
        accuracy: of the server's model at the end.
        losses: of the workers' batches, step by step.
        push, pull: traffic.
    """

    accuracy: float
    losses: list[float]
    push: Traffic
    pull: Traffic


class Cluster:
    """A server and its workers.

    Args:
        model: a name of gossipx's models.
        push, pull: codecs' specs.
        seed: of weights, batches and draws.
        data: images to learn from, and to be judged by.
    """

    def __init__(self, model: str, push: str, pull: str, seed: int, data: tuple[Dataset, Dataset]):
        images = data[0].images
        torch.manual_seed(seed)
        self.module = build_model(model, classes=data[0].classes, channels=images.shape[1], pixels=images.shape[-1])
        named = list(self.module.named_parameters())
        self.parameters = [parameter for _, parameter in named]
        sizes = [parameter.numel() for parameter in self.parameters]
        self.partitions = [Partition(number, 0, size) for number, size in enumerate(sizes)]
        kept = norms(self.module)
        coding = Coding(
            push=codecs.parse(push),
            shapes=[tuple(parameter.shape) for parameter in self.parameters],
            norms=frozenset(number for number, (name, _) in enumerate(named) if name in kept),
        )
        self.values = sum(sizes)
        self.tensors: Tensors = coding.tensors(self.partitions, torch.float32)
        self.gradients = [torch.zeros(self.values) for _ in range(WORKERS)]
        self.pushing = [
            Pushing(coding, self.partitions, gradient, 1000 * seed + rank)
            for rank, gradient in enumerate(self.gradients)
        ]
        self.pulling = Changes(codecs.parse(pull), self.tensors, seed)
        self.table = nn.Parameter(torch.cat([parameter.detach().view(-1) for parameter in self.parameters]))
        self.shown = self.table.detach().clone()  # what all workers have
        self.optimizer = torch.optim.SGD([self.table], lr=1.0, momentum=MOMENTUM, weight_decay=DECAY)
        parts = split_by("iid").split(data[0].labels.numpy(), WORKERS, seed)
        own = [data[0].take(part) for part in parts]
        self.batches = [Batches(one, BATCH, 1000 * seed + rank) for rank, one in enumerate(own)]
        self.test = data[1]
        self.pulling.frame(0, 0, 0, self.table.detach())

    def step(self, version: int, rate: float, push: Traffic, pull: Traffic) -> float:
        """One iteration of all; the mean loss of the batches."""
        losses, mean = [], torch.zeros(self.values)
        self._place(self.shown)
        frames = []
        for rank in range(WORKERS):
            images, labels = next(self.batches[rank])
            self.module.zero_grad()
            loss = functional.cross_entropy(self.module(images), labels)
            loss.backward()
            losses.append(loss.item())
            flat = [torch.zeros(one.numel()) if one.grad is None else one.grad.reshape(-1) for one in self.parameters]
            torch.cat(flat, out=self.gradients[rank])
            frames.append(self.pushing[rank].encode(()))
            codecs.decode_into(frames[-1], mean, add=True, tensors=self.tensors)
        push.add(frames, self.values)
        self.table.grad = mean / WORKERS
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        change = self.pulling.frame(0, checksum(self.shown), version, self.table.detach())
        assert change is not None
        codecs.decode_into(change.source.view, self.shown, add=True, tensors=self.tensors)
        pull.add([change.source.view], self.values)
        return statistics.fmean(losses)

    def judge(self) -> float:
        """Accuracy of the server's model on all test images."""
        self._place(self.table.detach())
        return accuracy(self.module, self.test, torch.device("cpu"))

    @torch.no_grad()
    def _place(self, values: Tensor) -> None:
        start = 0
        for parameter in self.parameters:
            parameter.copy_(values[start : start + parameter.numel()].view(parameter.shape))
            start += parameter.numel()


def train(model: str, push: str, pull: str, seed: int, steps: int, data: tuple[Dataset, Dataset]) -> Trained:
    """Train by codecs, for so many steps."""
    cluster = Cluster(model, push, pull, seed, data)
    first, last = RATES[model]
    made = Trained(0.0, [], Traffic(), Traffic())
    for step in range(steps):
        rate = last + (first - last) * (1 + math.cos(math.pi * step / steps)) / 2
        made.losses.append(cluster.step(step + 1, rate, made.push, made.pull))
    made.accuracy = cluster.judge()
    return made


def measure_accuracy(seeds: int, steps: int, specs: dict[str, str]) -> Any:
    """Table 1's last column: what each codec makes of the accuracy, in both directions."""
    data = load(TASK)
    reached: dict[str, list[Trained]] = {}
    for seed in range(seeds):
        for name, spec in specs.items():
            reached.setdefault(name, []).append(train("lenet", spec, spec, seed, steps, data))
    none = [100 * one.accuracy for one in reached["32-bit float"]]
    rows, figures = [], []
    for name, runs in reached.items():
        own = [100 * one.accuracy for one in runs]
        less = [one - other for one, other in zip(own, none, strict=True)]
        mean, half = statistics.fmean(less), interval(less) if seeds > 1 else math.inf
        push, pull = (statistics.fmean(statistics.fmean(way.bits) for way in ways) for ways in _ways(runs))
        ratio = sum(one.push.whole + one.pull.whole for one in runs) / sum(
            one.push.wire + one.pull.wire for one in runs
        )
        shown = f"{mean:+.2f} ± {half:.2f}" if name != "32-bit float" else ""
        bits = f"{push:.3f}", f"{pull:.3f}"
        rows.append((name, specs[name], f"{statistics.fmean(own):.2f}", shown, *bits, f"{ratio:.1f}"))
        asked = -0.3 if name in ASKED else None
        one = figure(f"accuracy of {specs[name]} less none", mean, "points", goal=asked)
        figures.append({**one, "met": mean >= -0.3 or (mean + half >= 0 and half <= WIDE) if asked else None})
    title = (
        f"LeNet, {WORKERS} workers, bsp, {steps} steps, {seeds} seeds, means with the 95 % interval of the difference"
    )
    heads = ("design", "codec", "accuracy %", "less float", "push, bits a value", "pull", "times fewer bytes")
    return title, heads, rows, figures


def measure_ratios(model: str, steps: int) -> Any:
    """Table 2: how many times fewer bytes 3LC sends."""
    data = load(TASK)
    rows: list[Any] = [("no zero-run encoding", "20.0", "1.600", "1.600", "", "20.0")]
    figures = []
    for sparsity, paper in TERNARY.items():
        spec = f"3lc:sparsity={sparsity},small=1"  # normalisation layers stay as they are
        run = train(model, spec, spec, 0, steps, data)
        push, pull = statistics.fmean(run.push.bits), statistics.fmean(run.pull.bits)
        payload = 32 / ((push + pull) / 2)
        wire = (run.push.whole + run.pull.whole) / (run.push.wire + run.pull.wire)
        rows.append((f"s={sparsity}", f"{payload:.1f}", f"{push:.3f}", f"{pull:.3f}", f"{wire:.1f}", f"{paper:g}"))
        goal = {"1.00": 39.0, "1.75": 107.0}.get(sparsity)
        one = figure(f"{model}: ratio of 3LC, s={sparsity}, payload", payload, "x", goal=goal)
        figures.append({**one, "met": None if goal is None else payload >= goal})
        figures.append(figure(f"{model}: ratio of 3LC, s={sparsity}, all frames", wire, "x"))
    title = f"{model}, {WORKERS} workers, bsp, {steps} steps: how many times fewer bytes than float32"
    return title, ("3LC", "payload", "push, bits a value", "pull", "all frames", "the paper's"), rows, figures


def _ways(runs: Sequence[Trained]) -> tuple[list[Traffic], list[Traffic]]:
    return [one.push for one in runs], [one.pull for one in runs]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=("accuracy", "ratios"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    some = dict(PAPER) if given.full else {name: PAPER[name] for name in ("32-bit float", "8-bit int", "3LC (s=1.75)")}
    if given.full:
        some |= {spec: spec for spec in OTHERS}
    tables = []
    if given.only in (None, "accuracy"):
        tables.append(measure_accuracy(5 if given.full else 2, 1500 if given.full else 300, some))
    if given.only in (None, "ratios"):
        tables.append(measure_ratios("resnet20" if given.full else "lenet", 600 if given.full else 200))
    if given.json:
        print(json.dumps({"figures": [one for *_, figures in tables for one in figures]}))
        return
    for title, headings, rows, figures in tables:
        report(title, headings, rows, figures)


if __name__ == "__main__":
    main()
