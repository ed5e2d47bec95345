"""The built-in task at a fixed pace: a script for real runs that are compared with simulated ones.

An iteration takes PACE seconds. For most of it the process sleeps, so that the load of the machine hardly matters.
Batches and initial weights are those of the built-in task, and so of a simulated run with the same seed.
"""

from __future__ import annotations

import os
import sys
import time

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


def main() -> None:
    has_servers = sys.argv[5] == "server"
    seed, iterations, pace = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    rank, size = int(os.environ["GOSSIPX_RANK"]), int(sys.argv[4])
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
    main()
