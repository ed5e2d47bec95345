"""Cost of a checkpoint for the training thread, and the time that the background thread writes.

bin/bench checkpoint [--json]       resnet110 (7 MB) and a model of 44 MB, with SGD's momenta and with Adam's
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _report import figure, report
from torch import nn

from gossipx import policies, topology
from gossipx.checkpoint import Store
from gossipx.model.arena import ParameterArena
from gossipx.peer import PeerRole
from gossipx.runtime.checkpoints import Checkpoints, TrainingState
from gossipx.runtime.driver import Driver
from gossipx.settings.interval import CheckpointInterval
from gossipx.sync import SyncManager
from gossipx.tasks.models import build_model

WIDTH, LAYERS = 1172, 8
"""Square layers with 11 M parameters in total: 44 MB."""
ROUNDS = 9
MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet110": lambda: build_model("resnet110", classes=10, channels=3, pixels=32),
    "44 MB": lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD, momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
}


class Training:
    """One peer's training with random gradients, and a checkpoint every second step."""

    def __init__(self, module: nn.Module, make: Callable[[Any], torch.optim.Optimizer], directory: Path):
        self.module, self.optimizer = module, make(module.parameters())
        self.arena = ParameterArena(module)
        sync = SyncManager(policies.parse("never"))
        role = PeerRole(0, 2, sync, topology.topology_from("full", 2), random.Random(0), incarnation=0)
        self.driver = Driver(role, self.arena)
        self.store = Store(directory)
        state = TrainingState(module, self.optimizer, self.driver, {})
        self.checkpoints = Checkpoints(self.store, CheckpointInterval(iterations=2), state, resumes=False)

    def step(self) -> tuple[float, float]:
        """Return the training thread's seconds for the step's boundary, and for a checkpoint if one is due."""
        for parameter in self.module.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        begin = time.perf_counter()
        self.arena.step_done()
        middle = time.perf_counter()
        self.checkpoints.step_done(dict)
        self.arena.leave_boundary()
        return middle - begin, time.perf_counter() - middle

    def close(self) -> None:
        self.checkpoints.close()
        self.driver.close()


def measure(module: nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> dict[str, float]:
    """Return medians over the rounds, in seconds and bytes."""
    with tempfile.TemporaryDirectory() as directory:
        training = Training(module, make, Path(directory))
        rows: dict[str, list[float]] = {name: [] for name in ("capture", "boundary", "held", "write", "copy")}
        for number in range(ROUNDS + 2):
            training.checkpoints.flush()
            boundary, _ = training.step()
            _, capture = training.step()
            begin = time.perf_counter()
            held, _ = training.step()  # the snapshot is in use, so that the boundary needs another buffer
            training.checkpoints.flush()
            write = time.perf_counter() - begin
            training.step()
            training.checkpoints.flush()
            copied = [t for s in training.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
            begin = time.perf_counter()
            kept = [tensor.clone() for tensor in copied]
            copy = time.perf_counter() - begin
            if number >= 2:  # the first rounds have no memory to reuse
                for name, value in zip(rows, (capture, boundary, held, write, copy), strict=True):
                    rows[name].append(value)
            size = sum(tensor.nbytes for tensor in kept)
            del kept
        found = training.store.load()
        assert found is not None
        on_disk = sum(file.stat().st_size for file in found.path.iterdir())
        training.close()
    return {**{name: statistics.median(row) for name, row in rows.items()}, "size": size, "disk": on_disk}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print only the figures")
    parser.add_argument("--full", action="store_true", help="no effect")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows, figures = [], []
    for name, build in MODELS.items():
        for optimizer, make in OPTIMIZERS.items():
            one = measure(build(), make)
            further = max(one["held"] - one["boundary"], 0.0)
            rows.append(
                [
                    f"{name}, {optimizer}",
                    f"{one['size'] / 1e6:.1f}",
                    f"{one['capture'] * 1e3:.1f}",
                    f"{one['copy'] * 1e3:.1f}",
                    f"{further * 1e3:.1f}",
                    f"{one['disk'] / 1e6:.1f}",
                    f"{one['write']:.2f}",
                ]
            )
            called = f"checkpoint {name} {optimizer}"
            figures += [
                figure(f"{called}: training thread", one["capture"] * 1e3, "ms", reference=one["copy"] * 1e3),
                figure(f"{called}: next boundary", further * 1e3, "ms"),
                figure(f"{called}: copied", one["size"] / 1e6, "MB"),
                figure(f"{called}: written", one["write"], "s"),
            ]
    if given.json:
        print(json.dumps({"figures": figures}, indent=2))
        return
    headings = (
        "model, optimizer",
        "MB copied",
        "training thread, ms",
        "clones of as much, ms",
        "next boundary, ms more",
        "MB on disk",
        "until it is there, s",
    )
    report("A checkpoint", headings, rows, figures)


if __name__ == "__main__":
    main()
