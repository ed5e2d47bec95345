"""Cost of a checkpoint for the training thread, and the time that the background thread writes.

bin/bench checkpoint [--json]       resnet110 (7 MB) and a model of 44 MB, with SGD's momenta and with Adam's
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _bench.cli import Given, bench
from _bench.tables import Table, medians
from _bench.training import built, seconds
from torch import nn

from gossipx import policies, topology
from gossipx.checkpoint import Store
from gossipx.model.arena import ParameterArena
from gossipx.peer import PeerRole
from gossipx.runtime.checkpoints import Checkpoints, TrainingState
from gossipx.runtime.driver import Driver
from gossipx.runtime.optimizers import Optimizers
from gossipx.settings import files
from gossipx.settings.interval import CheckpointInterval
from gossipx.sync import SyncManager

WIDTH, LAYERS = 1172, 8
"""Square layers with 11 M parameters in total: 44 MB."""
ROUNDS = 9
MODELS: dict[str, Callable[[], nn.Module]] = {
    "lenet": lambda: built("lenet"),
    "resnet110": lambda: built("resnet110"),
    "44 MB": lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD, momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
}
HEADINGS = (
    *("model, optimizer", "MB copied", "training thread, ms", "clones of as much, ms", "next boundary, ms more"),
    *("MB on disk", "until it is there, s"),
)


class Training:
    """One peer's training with random gradients, and a checkpoint every second step."""

    def __init__(self, module: nn.Module, make: Callable[[Any], torch.optim.Optimizer], directory: Path):
        self.module, self.optimizer = module, make(module.parameters())
        self.arena = ParameterArena(module)
        sync, settings = SyncManager(policies.parse("never")), files.resolve({})
        role = PeerRole(
            0, 2, sync, topology.topology_from("full", 2), random.Random(0), incarnation=0, settings=settings
        )
        self.driver = Driver(role, self.arena)
        self.store = Store(directory)
        state = TrainingState(Optimizers(module, [self.optimizer]), self.driver, {})
        self.checkpoints = Checkpoints(self.store, CheckpointInterval(iterations=2), state, resumes=False)

    def step(self) -> tuple[float, float]:
        """Return the training thread's seconds for the step's boundary, and for a checkpoint if one is due."""
        for parameter in self.module.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        boundary = seconds(self.arena.step_done)
        return boundary, seconds(lambda: (self.checkpoints.step_done(dict), self.arena.leave_boundary()))

    def copy(self) -> list[torch.Tensor]:
        """Return a copy of the optimizer's state."""
        state = self.optimizer.state.values()
        return [value.clone() for of in state for value in of.values() if isinstance(value, torch.Tensor)]

    def close(self) -> None:
        self.checkpoints.close()
        self.driver.close()


def measure(module: nn.Module, make: Callable[[Any], torch.optim.Optimizer], rounds: int) -> dict[str, float]:
    """Return medians over the rounds, in seconds and bytes."""
    with tempfile.TemporaryDirectory() as directory:
        training = Training(module, make, Path(directory))
        found: dict[str, list[float]] = {name: [] for name in ("capture", "boundary", "held", "write", "copy", "size")}
        for number in range(rounds + 2):
            training.checkpoints.flush()
            boundary, _ = training.step()
            _, capture = training.step()
            began = time.perf_counter()
            held, _ = training.step()  # the snapshot is in use, so that the boundary needs another buffer
            training.checkpoints.flush()
            write = time.perf_counter() - began
            training.step()
            training.checkpoints.flush()
            began = time.perf_counter()
            kept = training.copy()
            copy = time.perf_counter() - began
            size = sum(tensor.nbytes for tensor in kept)
            if number >= 2:  # the first rounds have no memory to reuse
                for name, value in zip(found, (capture, boundary, held, write, copy, size), strict=True):
                    found[name].append(value)
        stored = training.store.load()
        assert stored is not None
        on_disk = sum(file.stat().st_size for file in stored.path.iterdir())
        training.close()
    return {**medians(found), "disk": on_disk}


def checkpoints(given: Given) -> Table:
    """Return the table."""
    torch.manual_seed(0)
    table = Table("A checkpoint", HEADINGS)
    for name in given.of(["lenet"], ["resnet110", "44 MB"], ["resnet110", "44 MB"]):
        for optimizer in given.of(["SGD, momentum"], list(OPTIMIZERS), list(OPTIMIZERS)):
            one = measure(MODELS[name](), OPTIMIZERS[optimizer], given.of(1, ROUNDS, ROUNDS))
            further = max(one["held"] - one["boundary"], 0.0)
            milliseconds = (f"{value * 1e3:.1f}" for value in (one["capture"], one["copy"], further))
            copied, on_disk = (f"{one[what] / 1e6:.1f}" for what in ("size", "disk"))
            table.row(f"{name}, {optimizer}", copied, *milliseconds, on_disk, f"{one['write']:.2f}")
            called = f"checkpoint {name} {optimizer}"
            table.figure(f"{called}: training thread", one["capture"] * 1e3, "ms", reference=one["copy"] * 1e3)
            table.figure(f"{called}: next boundary", further * 1e3, "ms")
            table.figure(f"{called}: copied", one["size"] / 1e6, "MB")
            table.figure(f"{called}: written", one["write"], "s")
    return table


if __name__ == "__main__":
    bench(__file__, __doc__, checkpoints)
