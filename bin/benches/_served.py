"""Slowdown of training steps while another peer pulls the model."""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _bench.cli import Given
from _bench.peers import hosts_file
from _bench.processes import Spawned
from _bench.tables import Table
from _bench.training import Training
from torch import nn

RATES = {"none": 0.0, "10 a second": 10.0, "back to back": float("inf")}
GOALS = {"10 a second": 0.01, "back to back": 0.05}
SEGMENT = 1.5
"""Seconds of training at one rate of pulls before the next rate."""
HEADINGS = ("model", "way", "pulled", "pulls per second", "ms per step", "longer", "goal")
WAYS = {"TCP": "tcp", "shared memory": "shm"}
MLP = "MLP 784-96-10, batch 32"
MODELS: dict[str, Callable[[], Training]] = {
    "lenet, batch 32": lambda: Training.of("lenet", 32),
    MLP: lambda: Training(nn.Sequential(nn.Linear(784, 96), nn.ReLU(), nn.Linear(96, 10)), torch.randn(32, 784)),
}


def served(given: Given) -> Table:
    """Return the table of steps; each round runs all rates, and ratios are to no pulls in the same round."""
    table = Table("A training step while another peer pulls the model, medians of rounds in turn", HEADINGS)
    for name in given.of((MLP,), MODELS, MODELS):
        for way in given.of(("TCP",), WAYS, WAYS):
            _measure(table, name, way, given.of(1, 7, 15), given.of(0.05, SEGMENT, SEGMENT))
    return table


def _measure(table: Table, name: str, way: str, rounds: int, lasting: float) -> None:
    seconds: dict[str, list[float]] = {rate: [] for rate in RATES}
    pulls: dict[str, list[float]] = {rate: [] for rate in RATES}
    training = MODELS[name]()
    with tempfile.TemporaryDirectory() as scratch, hosts_file(Path(scratch), 2) as hosts:
        settings = {"logdir": scratch, "name": "served", "transport": WAYS[way], "finish": "none"}
        with Spawned(pull, name, str(hosts), settings) as puller:
            peer = training.join(hosts, rank=0, policy="never", **settings)
            for number in range(rounds + 1):
                for called, rate in RATES.items():
                    puller.ask(rate)
                    took = _mean_step(training, lasting)
                    came = int(puller.ask(0.0))
                    if number:  # the first round is warm-up
                        seconds[called].append(took)
                        pulls[called].append(came / lasting)
        peer.close()
    for called in RATES:
        ratios = [one / none - 1 for one, none in zip(seconds[called], seconds["none"], strict=True)]
        more, goal = statistics.median(ratios), GOALS.get(called)
        count, step = statistics.median(pulls[called]), statistics.median(seconds[called]) * 1e3
        table.row(name, way, called, f"{count:.0f}", f"{step:.3f}", f"{more:+.1%}", f"{goal:.0%}" if goal else "")
        if goal is not None:
            table.figure(f"{name} over {way}, pulled {called}: longer steps", more, "of undisturbed", most=goal)


def _mean_step(training: Training, lasting: float) -> float:
    """Return the mean seconds per step of one segment."""
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < lasting:
        training.step()
        steps += 1
    return (time.perf_counter() - began) / steps


def pull(name: str, hosts: str, settings: dict[str, Any]) -> None:
    """Pull as the second peer, at the rate in the last line of input; for each line, print the pulls since the last."""
    training = MODELS[name]()
    peer = training.join(Path(hosts), rank=1, policy="tau:1", blocking=True, **settings)
    rate: list[float] = [0.0]
    count, changed = [0], threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            print(count[0], flush=True)
            rate[0], count[0] = float(line), 0
            changed.set()
        rate[0] = -1.0
        changed.set()

    threading.Thread(target=listen, daemon=True).start()
    while rate[0] >= 0:
        changed.clear()
        if rate[0] > 0:
            training.optimizer.step()  # it computes nothing: all gradients are missing
            count[0] += 1
        changed.wait(1 / rate[0] if rate[0] > 0 else None)
    peer.close()
