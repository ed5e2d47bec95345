"""The built-in task as one peer: the program that ``gossipx run`` starts if no script is given.

It is a training loop like a user's, and uses only the public interface.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from gossipx.launch.environment import ENV_CONFIG, ENV_DEVICE, ENV_RANK, start_reporting
from gossipx.launch.loops.join import join
from gossipx.launch.run.display import LOADING_DATA
from gossipx.optimizers import LARS, muon
from gossipx.runtime.training.peer import Peer
from gossipx.settings import files
from gossipx.settings.sections import RunConfig, RunSettings, TaskSettings
from gossipx.tasks.data import TASKS, Batches, Samples, Windows, load
from gossipx.tasks.models import build_model
from gossipx.tasks.partition import partition_from
from gossipx.tasks.presets import PRESETS, cosine_rate, step_rate

TEST_BATCH, LIVE = 500, 2000
"""Images evaluated at once: large enough for full speed, small enough for the cache; and in all, during training. The
final figures use all test images."""
TEST_BATCH_TEXT, LIVE_TEXT = 50, 100
"""The same numbers for windows of text."""

PER_SECOND = 1000
"""Units of a budget of seconds: a schedule counts whole units, and the warm-up of a short run takes about a second."""


def main() -> None:
    """Train one peer, as defined by environment variables (see :mod:`gossipx.launch.loops.join`)."""
    start_reporting().tell(state=LOADING_DATA)
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
    model = build_model(task.model, classes=everything.classes, channels=spec.channels, pixels=spec.pixels).to(device)

    def evaluate(module: nn.Module) -> dict[str, float]:
        return scores(module, test, device)

    optimizer = optimizer_of(model, task)
    with join(model, optimizer, evaluate=evaluate) as peer:
        parts = partition_from(task.partition).split(everything.labels.numpy(), peer.size, run.run.seed)
        loop(peer, model, optimizer, everything.take(parts[peer.rank]), test, run)


def optimizer_of(model: nn.Module, task: TaskSettings) -> torch.optim.Optimizer:
    """Return the optimizer that the run's settings describe, after their values were filled in."""
    assert task.lr is not None and task.weight_decay is not None
    weights, rate, decay = model.parameters(), task.lr, task.weight_decay
    if task.optimizer == "adamw":
        return torch.optim.AdamW(weights, lr=rate, weight_decay=decay)
    assert task.momentum is not None
    if task.optimizer == "muon":
        return muon(model, rate, momentum=task.momentum, weight_decay=decay)
    if task.optimizer == "lars":
        return LARS(weights, lr=rate, momentum=task.momentum, weight_decay=decay)
    return torch.optim.SGD(weights, lr=rate, momentum=task.momentum, weight_decay=decay, nesterov=task.nesterov)


def rate_of(task: TaskSettings, step: float, iterations: float) -> float:
    """Return the learning rate of one iteration, by the schedule of the model's preset."""
    assert task.lr is not None
    if PRESETS[task.model].schedule == "cosine":
        return cosine_rate(task.lr, step, iterations)
    assert task.gamma is not None and task.lr_steps is not None
    return step_rate(task.lr, task.gamma, task.lr_steps, step, iterations)


def loop(
    peer: Peer, model: nn.Module, optimizer: torch.optim.Optimizer, own: Samples, test: Samples, run: RunConfig
) -> None:
    """Train: batches of this peer's own data, and an evaluation from time to time."""
    settings, task = run.run, run.task
    device = next(model.parameters()).device
    assert task.batch_size is not None
    batches = Batches(own, task.batch_size, settings.seed * 1000 + peer.rank)
    batches.seek(peer.iteration)
    live = live_of(test)
    while (used := used_of(peer, settings))[0] < used[1]:
        for group in optimizer.param_groups:
            group["lr"] = rate_of(task, *used)
        inputs, labels = next(batches)
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(model(inputs.to(device)), labels.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if peer.iteration % settings.log_interval == 0:
            peer.log("train/loss", float(loss.detach()))
        if settings.eval_interval and peer.iteration % settings.eval_interval == 0:
            for name, value in scores(model, live, device).items():
                peer.log(f"test/{name}", value)


def live_of(test: Samples) -> Samples:
    """Return the part of the test data that is used during training."""
    return test.take(torch.arange(min(LIVE_TEXT if isinstance(test, Windows) else LIVE, len(test))))


def used_of(peer: Peer, settings: RunSettings) -> tuple[float, float]:
    """Return how much of the run's budget is used, and the budget: iterations or milliseconds, whichever end first."""
    used: list[tuple[float, float]] = [(peer.iteration, settings.iterations)]
    if settings.seconds is not None:
        used.append((peer.seconds * PER_SECOND, settings.seconds * PER_SECOND))
    return max(used, key=lambda one: one[0] / one[1])


@torch.no_grad()
def scores(model: nn.Module, data: Samples, device: torch.device) -> dict[str, float]:
    """Return the figures of a model.

    Returns:
        ``loss``: mean cross-entropy, in nats per image or per character. Of images also ``accuracy``: the fraction that
        is classified correctly, from 0 to 1. Of text also ``bits_per_character``: the loss divided by ln 2.
    """
    of_text = isinstance(data, Windows)
    training = model.training
    model.eval()
    loss, right, count = 0.0, 0, 0
    for index in torch.split(torch.arange(len(data)), TEST_BATCH_TEXT if of_text else TEST_BATCH):
        inputs, labels = (each.to(device) for each in data.batch(index))
        logits = model(inputs)
        loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
        right += int((logits.argmax(1) == labels).sum())
        count += labels.numel()
    model.train(training)
    loss /= count
    return (
        {"loss": loss, "bits_per_character": loss / math.log(2)}
        if of_text
        else {"accuracy": right / count, "loss": loss}
    )


if __name__ == "__main__":
    main()
