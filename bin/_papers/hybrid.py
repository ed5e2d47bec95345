"""Tables 1 to 5 of Hybrid Approach beside ours, in virtual time: 25 workers, of which half are delayed, and a server.

bin/papers hybrid           random data, one setting, three rounds of 8 s, with shorter steps of K
bin/papers hybrid --full    all settings, with LeNet, too, and three rounds of 50 s (about 80 minutes)

--data-dir has CIFAR-10, for Table 2 with --full.

A value is the mean over a round of hybrid less that of another sync model that starts from the same weights.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from _bench.cli import Given
from _bench.tables import interval
from _bench.tasks import Samples, Task, clouds, images
from _table import Part, show
from _workers import Problem, run_peers
from published import read
from torch import nn

from gossipx.errors import UsageError

paper = read("hybrid")
RATE = 0.01
MOMENTS = 12
"""Number of moments in a round at which the servers' model is evaluated."""
JUDGED = 2000
"""Maximum number of test samples, and of training samples, for an evaluation."""
WORKERS = 25
COMPUTE = 0.2
"""Seconds of a gradient, which the paper does not give."""
READINGS = {
    "no wait, mean": "hybrid:step={},reduce=mean",
    "no wait, sum": "hybrid:step={},reduce=sum",
    "wait, mean": "hybrid:step={},reduce=mean,wait=true",
    "at once, mean": "hybrid:step={},reduce=mean,at_once=true",
}
"""Readings of Algorithm 1: whether a worker waits until its gradient is applied, or a gradient below K is also applied
at once, and what is done with K gradients."""
WAITS, AT_ONCE = "wait, mean", "at once, mean"
ASP, BSP, SUMMED = "asp", "bsp", "bsp, sum"
METRICS = {"test-accuracy": "accuracy", "test-loss": "loss", "train-loss": "train"}
UNITS = {"test-accuracy": "points", "test-loss": "loss", "train-loss": "loss"}
DATA = {"table-1": "fashion-mnist", "table-2": "cifar10"}


@dataclass(frozen=True)
class Cell:
    """A setting of a table of the paper.

    Attributes:
        table: of the paper.
        column: there.
        step: number of gradients after which K grows, in rounds of 100 s.
        deviation: of the delays, in seconds.
    """

    table: str
    column: str
    batch: int = 32
    step: int = 500
    deviation: float = 0.25
    compute: float = COMPUTE


ONE = Cell("table-3", "32")
ROUND = 100.0
"""Seconds of a round of the paper."""
LEARNING_STEP = round(1 / RATE)
"""The step 1/lr of Table 4."""
FULL = (
    *(Cell("table-3", str(batch), batch) for batch in (8, 16, 32, 64, 128)),
    *(Cell("table-4", f"{step}/lr", step=step * LEARNING_STEP) for step in (1, 3, 5, 7, 10)),
    *(Cell("table-5", f"0,{deviation:g}", deviation=deviation) for deviation in (0.25, 0.5, 0.75, 1, 1.25)),
    *(Cell("table-3", "32", compute=compute) for compute in (0.05, 0.5)),
)
IMAGES = tuple(
    Cell(table, f"{step},{batch}", batch, step, compute=0.5)
    for table in DATA
    for step in (300, 500)
    for batch in (32, 64)
)
Rounds = list[dict[str, float]]
"""For each round, the means of the metrics."""


def parts(given: Given) -> Iterator[Part]:
    """Yield the tables."""
    if given.data_dir and not given.full:
        raise UsageError("--data-dir is for Table 2, which needs --full: add that, or leave it out")
    rounds, seconds = given.of((1, 0.5), (3, 8.0), (3, 50.0))
    images = [cell for cell in IMAGES if cell.table == "table-1" or given.data_dir]
    for cell in (*FULL, *images) if given.full else (ONE,):
        specs = _models(cell, seconds)
        means = {name: _rounds(cell, spec, rounds, seconds, given.data_dir) for name, spec in specs.items()}
        yield _cell(cell, means, rounds, seconds)
    if not given.smoke:
        yield _summed(rounds, seconds)
        yield _steps(rounds, seconds)
    if given.full:
        yield _over_settings(rounds, seconds)


def _models(cell: Cell, seconds: float) -> dict[str, str]:
    """Return the specs of a cell by name; K grows as far in a shorter round."""
    step = round(cell.step * seconds / ROUND)
    return {**{name: spec.format(step) for name, spec in READINGS.items()}, ASP: ASP, BSP: BSP}


def _over_settings(rounds: int, seconds: float) -> Part:
    """Return what the paper concludes from Figures 4, 5, 8 and 10, with the values of the tables above."""
    made = Part("Figures 4, 5, 8 and 10: over settings", "as above")

    def leads(reading: str, table: str, over: str) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for cell in (one for one in (*FULL, *IMAGES) if one.table == table):
            specs = _models(cell, seconds)
            own, other = (_rounds(cell, specs[name], rounds, seconds, None) for name in (reading, over))
            found.setdefault(cell.column, _pairs(own, other, "test-accuracy"))  # others: another time per gradient
        return found

    for reading in READINGS:
        batches, delays = (leads(reading, table, ASP) for table in ("table-3", "table-5"))
        falls = [one - other for one, other in zip(batches["8"], batches["128"], strict=True)]
        fall, half = fmean(falls), interval(falls)
        agrees = fall > 0 if abs(fall) > half else None
        claim = paper["figure-8/batch-size"]
        made.add(f"{reading}: lead over asp, batch 8 less batch 128", claim, fall, "points", agrees, half=half)
        ahead = sum(fmean(pairs) > interval(pairs) for pairs in delays.values())
        claim = paper["figure-10/delays"]
        made.add(f"{reading}: ahead of asp", claim, ahead, f"of {len(delays)} delays", ahead == len(delays))
        both = [leads(reading, "table-1", over) for over in (ASP, BSP)]
        ahead = sum(all(fmean(one[column]) > interval(one[column]) for one in both) for column in both[0])
        claim = paper["figures-4-and-5/mnist"]
        made.add(
            f"{reading}, images: ahead of both", claim, ahead, f"of {len(both[0])} settings", ahead == len(both[0])
        )
    return made


def _summed(rounds: int, seconds: float) -> Part:
    """Return how far hybrid is ahead of a bsp that makes as many steps of a gradient as asp does."""
    made = Part("bsp with the sum of the gradients", "as the table of Table 3, batch 32, in place of their mean")
    specs = _models(ONE, seconds)
    summed = _rounds(ONE, SUMMED, rounds, seconds, None)
    for reading in READINGS:
        ours, half = _less(_rounds(ONE, specs[reading], rounds, seconds, None), summed, "test-accuracy")
        claim = paper["figures-4-to-7/synchronous"]
        made.add(f"{reading}: accuracy less bsp's", claim, ours, "points", ours > half, half=half)
    return made


def _steps(rounds: int, seconds: float) -> Part:
    """Return how far hybrid is ahead with the shortest and the longest step."""
    setting = "workers wait, unless stated, and K gradients are one step of their mean"
    made = Part("Table 4 and Figure 9: step sizes", setting)
    ahead = {}
    for factor in (1, 10):
        cell = Cell("table-4", f"{factor}/lr", step=factor * LEARNING_STEP)
        specs = _models(cell, seconds)
        own, at_once, asp, bsp = (
            _rounds(cell, specs[name], rounds, seconds, None) for name in (WAITS, AT_ONCE, ASP, BSP)
        )
        figure = paper[f"table-4/test-accuracy/{factor}/lr"]
        for reading, one in (("", own), (f", {AT_ONCE}", at_once)):
            ours, half = _less(one, asp, "test-accuracy")
            made.add(f"step {factor}/lr{reading}: accuracy less asp's", figure, ours, "points", half=half)
        ahead[factor], half = _less(own, bsp, "test-accuracy")
        claim = paper[f"figure-9/{'small' if factor == 1 else 'large'}-steps"]
        near = abs(ahead[factor]) < half if factor == 1 else None
        made.add(f"step {factor}/lr: accuracy less bsp's", claim, ahead[factor], "points", near, half=half)
    nearer = ahead[1] < ahead[10]
    claim = paper["figure-9/small-steps"]
    made.add("1/lr is nearer to bsp than 10/lr", claim, ahead[10] - ahead[1], "points", nearer, holds=True)
    return made


def _cell(cell: Cell, means: dict[str, Rounds], rounds: int, seconds: float) -> Part:
    data = DATA.get(cell.table, "random data, new in each round, MLP of 20, 64 and 10 units")
    if cell.table == "table-1":
        data += " in place of MNIST"
    step = round(cell.step * seconds / ROUND)
    shorter = "" if step == cell.step else f", a step of K every {step} gradients in place of {cell.step}"
    setting = (
        f"{data}, {rounds} rounds of {seconds:g} virtual seconds in place of 5 of 100{shorter}, {cell.compute:g} s per "
        "gradient; ± is the 95 % interval over rounds; means over the round"
    )
    place = paper[f"{cell.table}/test-accuracy/{cell.column}"].place
    made = Part(f"{place.split(',')[0]}: batch {cell.batch}, step {cell.step}, delays {cell.deviation:g} s", setting)
    name = f"{cell.table} {cell.column} {cell.compute:g} s"
    for reading in READINGS:
        for metric in METRICS:
            figure = paper[f"{cell.table}/{metric}/{cell.column}"]
            ours, half = _less(means[reading], means[ASP], metric)
            made.add(f"{name}, {reading}: {metric} less asp's", figure, ours, UNITS[metric], half=half)
    for reading in READINGS:
        ours, half = _less(means[reading], means[BSP], "test-accuracy")
        what, holds = f"{name}, {reading}: accuracy less bsp's", reading != WAITS
        made.add(what, paper["figures-4-to-7/synchronous"], ours, "points", ours > half, holds, half)
    gradients = fmean(one["gradients"] for one in means[ASP]) / fmean(one["gradients"] for one in means[BSP])
    made.add(f"{name}, gradients of asp / bsp", paper["figures-4-to-7/synchronous"], gradients, "", None)
    return made


def _less(own: Rounds, other: Rounds, metric: str) -> tuple[float, float]:
    pairs = _pairs(own, other, metric)
    return fmean(pairs), interval(pairs)


def _pairs(own: Rounds, other: Rounds, metric: str) -> list[float]:
    """Return the differences by round, of accuracy in points."""
    scale = 100 if metric == "test-accuracy" else 1
    return [scale * (one[metric] - its[metric]) for one, its in zip(own, other, strict=True)]


# --- a round --------------------------------------------------------------------------------------


_DONE: dict[Any, Rounds] = {}


def _rounds(cell: Cell, spec: str, rounds: int, seconds: float, data_dir: str | None) -> Rounds:
    """Train some rounds, unless the same were trained before: tables share settings."""
    key = DATA.get(cell.table), cell.batch, cell.deviation, cell.compute, spec
    if key not in _DONE:
        _DONE[key] = [_round(cell, spec, seed, seconds, data_dir) for seed in range(rounds)]
    return _DONE[key]


def _round(cell: Cell, spec: str, seed: int, seconds: float, data_dir: str | None) -> dict[str, float]:
    task = _task(cell.table, seed, data_dir)
    draws = [random.Random(f"{seed} {rank}") for rank in range(WORKERS + 1)]
    found: list[dict[str, float]] = []

    def batch(rank: int) -> Samples:
        chosen = torch.tensor(draws[rank].choices(range(rank - 1, len(task.train[1]), WORKERS), k=cell.batch))
        return task.train[0][chosen], task.train[1][chosen]

    def judge(model: nn.Module) -> None:
        found.append(task.scores(model, JUDGED))

    server: dict[str, Any] = {"servers": "0", "servers_only": True, "sync": BSP if spec == SUMMED else spec}
    if spec in (ASP, SUMMED):
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
    made = Problem(cell.table, task, cell.batch, lambda parameters: torch.optim.SGD(parameters, lr=RATE), draw=batch)
    peers = run_peers(tables, made, moments=moments, judge=judge)
    gradients = sum(peer.step for peer in peers[1:])
    return {
        **{metric: fmean(one[name] for one in found) for metric, name in METRICS.items()},
        "gradients": gradients,
    }


def _task(table: str, seed: int, data_dir: str | None) -> Task:
    return images(DATA[table], data_dir if table == "table-2" else None) if table in DATA else clouds(seed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    show(paper, parts, __doc__)
