"""Comparison of the hybrid sync model with asp and bsp in rounds of equal time (Hybrid Approach, section 6).

A worker without delays keeps copies of the servers' model as it pulls it. They are evaluated after the round, so that
evaluation takes no time from training.
"""

from __future__ import annotations

import bisect
import random
import statistics
import time
from collections.abc import Sequence

import torch
from _bench.tables import Table, interval
from _bench.tasks import Task, clouds, images
from _process_pool import SERVERS, WORKERS, Done, Job, ProcessPool, join
from torch import Tensor, nn
from torch.nn import functional

from gossipx.runtime.training.peer import Peer

RATE, BATCH = 0.01, 32
SPREAD = 0.25
"""Standard deviation, in seconds, of the normal distribution whose absolute values are the delays."""
MOMENTS = 12
"""Number of moments in a round at which the servers' model is evaluated."""
JUDGED = 2000
"""Maximum number of test samples, and of training samples, for an evaluation."""
HYBRIDS = (
    "hybrid:step=5/lr",
    "hybrid:step=5/lr,reduce=sum",
    "hybrid:step=5/lr,wait=true",
    "hybrid:step=1/lr,wait=true",
)
OTHERS = ("asp", "bsp")
TASKS = ("fashion-mnist, lenet", "random, 20 dimensions, MLP")
METRICS = {"accuracy": "test accuracy", "loss": "test loss", "train": "train loss"}
Curves = dict[str, list[float]]


def measure(pool: ProcessPool, rounds: int, seconds: float, tasks: tuple[str, ...] = TASKS) -> Table:
    """Return the table; all sync models start from the same weights in a round of ``seconds``."""
    title = (
        f"{WORKERS} workers, {SERVERS} servers, {rounds} rounds of {seconds:g} s, learning rate {RATE}, batches of"
        f" {BATCH}, delays |N(0, {SPREAD})| s on half of the workers; means over a round, hybrid's less the other's,"
        " with the 95 % interval over rounds"
    )
    table = Table(title, ("task", "sync", "gradients", "less", *METRICS.values()))
    for task in tasks:
        curves: dict[str, list[Curves]] = {}
        gradients: dict[str, list[int]] = {}
        models = [*HYBRIDS, *OTHERS]
        for number in range(rounds):
            for model in models[number % len(models) :] + models[: number % len(models)]:  # rotate the order
                settings = {"servers": "0,1", "servers_only": True, "sync": model, "seed": number, "finish": "none"}
                if model == "asp":
                    settings["apply"] = "each"  # the paper's asynchronous baseline
                done = pool.run(train, task=task, seed=number, seconds=seconds, settings=settings)
                curves.setdefault(model, []).append(next(one["curves"] for one in done if one.get("curves")))
                gradients.setdefault(model, []).append(sum(one.get("iterations", 0) for one in done))
        _tell(table, task, curves, gradients)
    return table


def _tell(table: Table, task: str, curves: dict[str, list[Curves]], gradients: dict[str, list[int]]) -> None:
    for name, rounds in curves.items():
        count = f"{statistics.fmean(gradients[name]):.0f}"
        table.row(task, name, count, "", *(f"{statistics.fmean(_means(rounds, metric)):.3f}" for metric in METRICS))
    for hybrid in HYBRIDS:
        for other in OTHERS:
            shown = []
            for metric, called in METRICS.items():
                pairs = zip(_means(curves[hybrid], metric), _means(curves[other], metric), strict=True)
                differences = [own - its for own, its in pairs]
                mean, half = statistics.fmean(differences), interval(differences)
                shown.append(f"{mean:+.3f} ± {half:.3f}")
                better = mean > 0 if metric == "accuracy" else mean < 0
                table.figure(f"{task}: {hybrid} less {other}, {called}", mean, "", least=0.0, met=better)
            table.row(task, hybrid, "", other, *shown)


def _means(rounds: list[Curves], metric: str) -> list[float]:
    """Return the mean over moments for each round."""
    return [statistics.fmean(one[metric]) for one in rounds]


# --- in each process ------------------------------------------------------------------------------------


def train(job: Job) -> Done:
    """Train one worker for a round; the first worker without delays evaluates the servers' model."""
    torch.manual_seed(job["seed"])  # all sync models of a round have the same initial weights
    task = images() if job["task"] == TASKS[0] else clouds(job["seed"])
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    peer = join(job, model, optimizer)
    if peer is None:
        return {}
    worker = peer.rank - SERVERS
    draws = random.Random(f"{job['seed']} {worker}")
    kept: list[tuple[float, list[Tensor]]] = []
    own = task.train[0][worker::WORKERS], task.train[1][worker::WORKERS]
    began = time.perf_counter()
    while time.perf_counter() - began < job["seconds"]:
        if worker == 0:
            _keep(peer, model, kept, began, job["seconds"])
        chosen = torch.tensor(draws.choices(range(len(own[1])), k=BATCH))
        optimizer.zero_grad()
        functional.cross_entropy(model(own[0][chosen]), own[1][chosen]).backward()
        if worker >= WORKERS // 2:
            time.sleep(abs(draws.gauss(0.0, SPREAD)))
        optimizer.step()
    done: Done = {"iterations": peer.iteration}
    peer.finish()
    if worker == 0:
        done["curves"] = _judged(task, model, kept, job["seconds"])
    return done


def _keep(peer: Peer, model: nn.Module, kept: list[tuple[float, list[Tensor]]], began: float, seconds: float) -> None:
    """Keep a copy of the pulled model, a few per moment."""
    now = time.perf_counter() - began
    if not kept or now - kept[-1][0] >= seconds / MOMENTS / 4:
        peer.sync()
        now = time.perf_counter() - began
        kept.append((now, [parameter.detach().clone() for parameter in model.parameters()]))


def _judged(task: Task, model: nn.Module, kept: list[tuple[float, list[Tensor]]], seconds: float) -> Curves:
    """Evaluate the model of each moment."""
    moments = [(number + 1) * seconds / MOMENTS for number in range(MOMENTS)]
    curves: Curves = {metric: [] for metric in METRICS}
    for place in held_at([at for at, _ in kept], moments):
        for parameter, value in zip(model.parameters(), kept[place][1], strict=True):
            parameter.detach().copy_(value)
        for metric, value in task.scores(model, JUDGED).items():
            curves[metric].append(value)
    return curves


def held_at(times: Sequence[float], moments: Sequence[float]) -> list[int]:
    """Return, for each moment, the index of the last of the ascending times not after it, or 0 before all times."""
    return [max(0, bisect.bisect_right(times, moment) - 1) for moment in moments]
