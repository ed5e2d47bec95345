"""The built-in task as one peer: the program that ``gossipx run`` starts if no script is given.

It is a training loop like a user's, and uses only the public interface.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from gossipx.config import files
from gossipx.config.settings import RunConfig, RunSettings
from gossipx.launch.environment import ENV_CONFIG, ENV_DEVICE, ENV_RANK, progress
from gossipx.launch.loops import solve
from gossipx.launch.loops.join import join
from gossipx.runtime.peer import Peer
from gossipx.tasks.data import TASKS, Batches, Dataset, load
from gossipx.tasks.models import build_model
from gossipx.tasks.partition import parse
from gossipx.tasks.presets import learning_rate

TEST_BATCH = 500
"""Images evaluated at once: large enough for full speed, small enough for the cache."""
LIVE_IMAGES = 2000
"""Test images used for an accuracy during training; the final accuracies use all."""


@dataclass(frozen=True)
class Steps:
    """Learning rate schedule; see :func:`gossipx.tasks.presets.learning_rate`."""

    base_lr: float
    gamma: float
    lr_steps: tuple[float, ...]


def main() -> None:
    """Train one peer, as defined by environment variables (see :mod:`gossipx.launch.loops.join`)."""
    progress()
    run = files.resolve(files.load(Path(os.environ[ENV_CONFIG])))
    try:
        train(run, int(os.environ[ENV_RANK]))
    except KeyboardInterrupt:
        sys.exit(130)


def train(run: RunConfig, rank: int) -> None:
    """Train the configured task as peer ``rank``, to the end."""
    torch.set_num_threads(run.run.threads)
    device = torch.device(os.environ.get(ENV_DEVICE, run.run.device))
    task = run.task
    everything, test = load(task.task, None if task.data_dir is None else Path(task.data_dir))
    spec = TASKS[task.task]
    # All peers start from one peer's weights; the seed per rank matters only with --init own.
    torch.manual_seed(run.run.seed * 1000 + rank)
    model = build_model(task.model, classes=spec.classes, channels=spec.channels, pixels=spec.pixels).to(device)

    def evaluate(module: nn.Module) -> float:
        return accuracy(module, test, device)

    if task.solver is not None:
        solve.train(run, Path(os.environ[ENV_CONFIG]).parent, rank, model, everything, test, evaluate)
        return
    assert task.base_lr is not None and task.momentum is not None and task.weight_decay is not None
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=task.base_lr,
        momentum=task.momentum,
        weight_decay=task.weight_decay,
        nesterov=task.nesterov,
    )
    with join(model, optimizer, evaluate=evaluate) as peer:
        parts = parse(task.partition).split(everything.labels.numpy(), peer.size, run.run.seed)
        loop(peer, model, optimizer, everything.take(parts[peer.rank]), test, run)


def loop(
    peer: Peer, model: nn.Module, optimizer: torch.optim.Optimizer, own: Dataset, test: Dataset, run: RunConfig
) -> None:
    """Train: batches of this peer's own images, SGD, and an evaluation from time to time."""
    settings = run.run
    device = next(model.parameters()).device
    task = run.task
    assert task.batch_size is not None and task.base_lr is not None
    assert task.gamma is not None and task.lr_steps is not None
    schedule = Steps(task.base_lr, task.gamma, task.lr_steps)
    batches = Batches(own, task.batch_size, settings.seed * 1000 + peer.rank)
    batches.seek(peer.iteration)
    live = Dataset(test.images[:LIVE_IMAGES], test.labels[:LIVE_IMAGES], test.classes)
    while (used := used_of(peer, settings))[0] < used[1]:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(schedule, *used)
        images, labels = next(batches)
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if peer.iteration % settings.log_interval == 0:
            peer.log("train/loss", float(loss.detach()))
        if settings.eval_interval and peer.iteration % settings.eval_interval == 0:
            peer.log("test/accuracy", accuracy(model, live, device))


def used_of(peer: Peer, settings: RunSettings) -> tuple[float, float]:
    """Return how much of the run's budget is used, and the budget: in iterations or seconds, whichever ends first."""
    used: list[tuple[float, float]] = [(peer.iteration, settings.iterations)]
    if settings.seconds is not None:
        used.append((peer.seconds, settings.seconds))
    return max(used, key=lambda one: one[0] / one[1])


@torch.no_grad()
def accuracy(model: nn.Module, data: Dataset, device: torch.device) -> float:
    """Return the fraction of images that are classified correctly, from 0 to 1."""
    training = model.training
    model.eval()
    right = 0
    for start in range(0, len(data), TEST_BATCH):
        images, labels = data.images[start : start + TEST_BATCH], data.labels[start : start + TEST_BATCH]
        right += int((model(images.to(device)).argmax(1) == labels.to(device)).sum())
    model.train(training)
    return right / len(data)


if __name__ == "__main__":
    main()
