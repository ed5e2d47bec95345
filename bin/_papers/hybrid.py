"""Tables 1 to 5 of Hybrid Approach beside ours, in virtual time: 25 workers, of which 12 are delayed, and a server.

bin/papers hybrid           random data, one setting, two rounds of 12 s
bin/papers hybrid --full    all settings, with LeNet, too, and three rounds of 100 s (about two hours)

--data-dir has CIFAR-10, for Table 2.

A value is the mean over a round of hybrid less that of another sync model that starts from the same weights.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from _served import Samples, Work, train
from _table import Part, show
from published import Figure, Paper
from torch import nn
from torch.nn import functional

from gossipx.tasks.data import load
from gossipx.tasks.models import build_model

sys.path.append(str(Path(__file__).parents[1] / "benches"))
from _hybrid import JUDGED, MOMENTS, RATE, random_task
from _sums import interval

WORKERS = 25
COMPUTE = 0.2
"""Seconds of a gradient, which the paper does not give."""
READINGS = {
    "no wait, mean": "hybrid:step={},reduce=mean",
    "no wait, sum": "hybrid:step={},reduce=sum",
    "wait, mean": "hybrid:step={},reduce=mean,wait=true",
}
"""Readings of Algorithm 1: whether a worker waits until its gradient is applied, and what is done with K gradients."""
ASP, BSP = "asp", "bsp"
METRICS = ("test-accuracy", "test-loss", "train-loss")
UNITS = {"test-accuracy": "points", "test-loss": "loss", "train-loss": "loss"}
DATA = {"table-1": "fashion-mnist", "table-2": "cifar10"}


@dataclass(frozen=True)
class Cell:
    """A setting of a table of the paper.

    Attributes:
        table: of the paper.
        column: there.
        step: number of gradients after which K grows, as in the spec of the sync model.
        deviation: of the delays, in seconds.
    """

    table: str
    column: str
    batch: int = 32
    step: str = "500"
    deviation: float = 0.25
    compute: float = COMPUTE


ONE = Cell("table-3", "32")
FULL = (
    *(Cell("table-3", str(batch), batch) for batch in (8, 16, 32, 64, 128)),
    *(Cell("table-4", f"{step}/lr", step=f"{step}/lr") for step in (1, 3, 5, 7, 10)),
    *(Cell("table-5", f"0,{deviation:g}", deviation=deviation) for deviation in (0.25, 0.5, 0.75, 1, 1.25)),
    *(Cell("table-3", "32", compute=compute) for compute in (0.05, 0.5)),
)
IMAGES = tuple(
    Cell(table, f"{step},{batch}", batch, str(step), compute=0.5)
    for table in DATA
    for step in (300, 500)
    for batch in (32, 64)
)
Rounds = list[dict[str, float]]
"""For each round, the means of the metrics."""


def parts(paper: Paper, full: bool, arguments: argparse.Namespace) -> Sequence[Part]:
    """Return the tables."""
    rounds, seconds = (3, 100.0) if full else (2, 12.0)
    images = [cell for cell in IMAGES if cell.table == "table-1" or arguments.data_dir]
    cells = (*FULL, *images) if full else (ONE,)
    made, steps = [], Part("Figure 9: step sizes", "with wait=true, which has an effect on the workers")
    for cell in cells:
        means = {name: _rounds(cell, spec, rounds, seconds, arguments.data_dir) for name, spec in _models(cell).items()}
        made.append(_cell(paper, cell, means, rounds, seconds))
    for step in ("1/lr", "10/lr"):
        steps.lines += _step(paper, Cell("table-4", step, step=step), rounds, seconds)
    one, ten = (line.ours for line in steps.lines)
    claim = paper.claims["figure-9/small-steps"]
    steps.add("10/lr less 1/lr, as far ahead of bsp", claim, ten - one, "points", one < ten, holds=True)
    return [*made, steps]


def _models(cell: Cell) -> dict[str, str]:
    return {**{name: spec.format(cell.step) for name, spec in READINGS.items()}, ASP: ASP, BSP: BSP}


def _step(paper: Paper, cell: Cell, rounds: int, seconds: float) -> Sequence[Any]:
    part = Part("", "")
    own, other = (_rounds(cell, spec, rounds, seconds, None) for spec in (_models(cell)["wait, mean"], BSP))
    ahead, _ = _less(own, other, "test-accuracy")
    part.add(f"{cell.step}, wait: accuracy less bsp's", paper.claims["figure-9/large-steps"], ahead, "points")
    return part.lines


def _cell(paper: Paper, cell: Cell, means: dict[str, Rounds], rounds: int, seconds: float) -> Part:
    data = DATA.get(cell.table, "random data, MLP of 20, 64 and 10 units")
    setting = (
        f"{data}, {rounds} rounds of {seconds:g} virtual seconds in place of 5 of 100, {cell.compute:g} s per gradient;"
    )
    setting += " ± is the 95 % interval over rounds; means over the round"
    place = paper.figures[f"{cell.table}/test-accuracy/{cell.column}"].place
    made = Part(f"{place.split(',')[0]}: batch {cell.batch}, step {cell.step}, delays {cell.deviation:g} s", setting)
    name = f"{cell.table} {cell.column} {cell.compute:g} s"
    for reading in READINGS:
        for metric in METRICS:
            figure = paper.figures[f"{cell.table}/{metric}/{cell.column}"]
            ours, half = _less(means[reading], means[ASP], metric)
            unit = f"± {half:.3f} {UNITS[metric]}"
            made.add(f"{name}, {reading}: {metric} less asp's", figure, ours, unit, _same_sign(ours, half, figure))
    for reading in READINGS:
        ours, half = _less(means[reading], means[BSP], "test-accuracy")
        claim = paper.claims["figures-4-to-7/synchronous"]
        told = f"± {half:.3f} points"
        made.add(f"{name}, {reading}: accuracy less bsp's", claim, ours, told, ours > 0, holds="no wait" in reading)
    gradients = fmean(one["gradients"] for one in means[ASP]) / fmean(one["gradients"] for one in means[BSP])
    made.add(f"{name}, gradients of asp / bsp", paper.claims["figures-4-to-7/synchronous"], gradients, "", None)
    return made


def _same_sign(ours: float, half: float, figure: Figure) -> bool | None:
    """Whether ours has the direction of the paper's; None: it is not beyond its interval."""
    return ours * figure.value > 0 if abs(ours) > half else None


def _less(own: Rounds, other: Rounds, metric: str) -> tuple[float, float]:
    scale = 100 if metric == "test-accuracy" else 1
    pairs = [scale * (one[metric] - its[metric]) for one, its in zip(own, other, strict=True)]
    return fmean(pairs), interval(pairs)


# --- a round --------------------------------------------------------------------------------------


_DONE: dict[Any, Rounds] = {}


def _rounds(cell: Cell, spec: str, rounds: int, seconds: float, data_dir: str | None) -> Rounds:
    """Train some rounds, unless the same were trained before: tables share settings."""
    key = cell.table in DATA and cell.table, cell.batch, cell.deviation, cell.compute, spec
    if key not in _DONE:
        _DONE[key] = [_round(cell, spec, seed, seconds, data_dir) for seed in range(rounds)]
    return _DONE[key]


def _round(cell: Cell, spec: str, seed: int, seconds: float, data_dir: str | None) -> dict[str, float]:
    make, data, test = _task(cell.table, seed, data_dir)
    draws = [random.Random(f"{seed} {rank}") for rank in range(WORKERS + 1)]
    found: list[dict[str, float]] = []

    def batch(rank: int) -> Samples:
        chosen = torch.tensor(draws[rank].choices(range(rank - 1, len(data[1]), WORKERS), k=cell.batch))
        return data[0][chosen], data[1][chosen]

    def judge(model: nn.Module) -> None:
        with torch.no_grad():
            scores, labels = model(test[0][:JUDGED]), test[1][:JUDGED]
            trained = functional.cross_entropy(model(data[0][:JUDGED]), data[1][:JUDGED])
        accuracy = float((scores.argmax(1) == labels).float().mean())
        loss = float(functional.cross_entropy(scores, labels))
        found.append({"test-accuracy": accuracy, "test-loss": loss, "train-loss": float(trained)})

    server: dict[str, Any] = {"servers": "0", "servers_only": True, "sync": spec}
    if spec == ASP:
        server["apply"] = "each"  # the paper's asynchronous algorithm
    tables = {
        "simulation": {"peers": WORKERS + 1},
        "run": {"seconds": seconds, "iterations": 10**6, "seed": seed},
        "server": server,
        "sync": {"finish": "none"},
        "compute": {"seconds": cell.compute, "delay_share": 0.5, "delay_deviation": cell.deviation},
        "network": {"preset": "10gbit"},
    }
    moments = [(number + 1) * seconds / MOMENTS - 1e-3 for number in range(MOMENTS)]
    gradients = train(tables, Work(make, batch, RATE), moments, judge)
    return {**{metric: fmean(one[metric] for one in found) for metric in METRICS}, "gradients": gradients}


def _task(table: str, seed: int, data_dir: str | None) -> tuple[Any, Samples, Samples]:
    """Return what makes the model, the training set and the test set."""
    if table in DATA:
        training, test = load(DATA[table], Path(data_dir) if table == "table-2" and data_dir else None)
        pixels, channels = training.images.shape[-1], training.images.shape[1]
        own = (training.images, training.labels), (test.images, test.labels)
        return lambda: build_model("lenet", classes=10, channels=channels, pixels=pixels), *own
    samples, labels = random_task(seed)
    cut = len(labels) * 4 // 5
    mlp = lambda: nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))  # noqa: E731
    return mlp, (samples[:cut], labels[:cut]), (samples[cut:], labels[cut:])


if __name__ == "__main__":
    torch.set_num_threads(1)
    show("hybrid", parts, __doc__ or "", ["--data-dir"])
