"""Scripts for ``gossipx run`` in benchmarks: ``_scripts.py NAME ARGUMENTS``."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import gossipx
from gossipx.assembly.presets import effective_config
from gossipx.launch.loops.train import optimizer_of, rate_of, scores
from gossipx.settings.files import resolve
from gossipx.tasks.data import TASKS, Batches, load
from gossipx.tasks.models import build_model
from gossipx.tasks.partition import partition_from

SKIPPED = 4
"""Steps to skip of timed ones: the first pull transfers the whole model, and much is initialised."""
TENSORS = 16
CHANGED = 1000
"""Number of weights that a step of a large model changes: few, so that it costs its sleep plus gossipx's work."""


def timed(model: str, steps: str, folder: str) -> None:
    """Train on real images, and write the mean seconds of a step to the folder."""
    torch.manual_seed(0)
    data, count = load("fashion-mnist")[0], int(steps)
    module = build_model(model, classes=data.classes, channels=data.images.shape[1], pixels=data.images.shape[-1])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    with gossipx.join(module, optimizer) as peer:
        batches = Batches(data, 32, peer.rank)
        for step in range(count + SKIPPED):
            if step == SKIPPED:
                began = time.monotonic()
            images, labels = next(batches)
            optimizer.zero_grad(set_to_none=True)
            functional.cross_entropy(module(images), labels).backward()
            optimizer.step()
        took = time.monotonic() - began
    (Path(folder) / f"{peer.rank}.json").write_text(json.dumps(took / count))


def large(parameters: str, steps: str, seconds: str) -> None:
    """Train a large model, whose steps sleep, like steps on a device that uses no CPU, and change few weights."""
    module = nn.Module()
    module.layers = nn.ParameterList(torch.randn(int(parameters) // TENSORS) for _ in range(TENSORS))

    class StandIn(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            time.sleep(float(seconds))
            self.param_groups[0]["params"][0][:CHANGED].mul_(0.999)

    optimizer = StandIn(module.parameters(), {})
    with gossipx.join(module, optimizer) as peer:
        while peer.iteration < int(steps):
            optimizer.step()


def paced(*given: Any) -> None:
    """Train the built-in task at a fixed pace, to be compared with a simulated run.

    An iteration takes ``pace`` seconds. For most of it the process sleeps, so that the load of the machine hardly
    matters. Batches and initial weights are those of the built-in task, and so of a simulated run with the same seed.
    """
    (seed, iterations, size), pace, has_servers = map(int, (given[0], given[1], given[3])), float(given[2]), given[4:]
    torch.set_num_threads(1)
    rank = int(os.environ["GOSSIPX_RANK"])
    task = effective_config(resolve({"seed": seed, "iterations": iterations}), size, has_script=False).task
    everything, test = load(task.task)
    spec = TASKS[task.task]
    torch.manual_seed(seed * 1000 + rank)
    model = build_model(task.model, classes=everything.classes, channels=spec.channels, pixels=spec.pixels)
    optimizer = optimizer_of(model, task)
    own = everything.take(partition_from(task.partition).split(everything.labels.numpy(), size, seed)[rank])
    assert task.batch_size is not None
    batches = Batches(own, task.batch_size, seed * 1000 + rank)

    def evaluate(module: nn.Module) -> dict[str, float]:
        return scores(module, test, torch.device("cpu"))

    functional.cross_entropy(model(test.images[:32]), test.labels[:32]).backward()  # the first one takes far longer
    backward = 0.0
    with gossipx.join(model, optimizer, evaluate=evaluate) as peer:
        while peer.iteration < iterations:
            peer.sync()  # in server mode: the simulator computes once all tables are there, too
            due = time.perf_counter() + pace
            for group in optimizer.param_groups:
                group["lr"] = rate_of(task, peer.iteration, iterations)
            inputs, labels = next(batches)
            optimizer.zero_grad(set_to_none=True)
            loss = functional.cross_entropy(model(inputs), labels)
            if not has_servers:
                loss.backward()
            time.sleep(max(0.0, due - backward - time.perf_counter()))
            if has_servers:  # the simulator pushes gradients when the time of the iteration is over, too
                began = time.perf_counter()
                loss.backward()
                backward = time.perf_counter() - began
            optimizer.step()


if __name__ == "__main__":
    {"timed": timed, "large": large, "paced": paced}[sys.argv[1]](*sys.argv[2:])
