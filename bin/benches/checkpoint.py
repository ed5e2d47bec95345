"""Cost of a checkpoint for the training thread, and the time that the background thread writes.

bin/bench checkpoint [--json]       resnet110 (7 MB) and a model of 44 MB, with SGD's momenta and with Adam's
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _bench.cli import Given, bench
from _bench.peers import hosts_file
from _bench.tables import Table, medians
from _bench.training import Training, built
from torch import nn

WIDTH, LAYERS = 1172, 8
"""Square layers with 11 M parameters in total: 44 MB."""
ROUNDS = 9
MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet110": lambda: built("resnet110"),
    "44 MB": lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))),
}
SMOKE: dict[str, Callable[[], nn.Module]] = {"lenet": lambda: built("lenet")}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD, momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
}
HEADINGS = (
    *("model, optimizer", "MB copied", "training thread, ms", "clones of as much, ms", "next boundary, ms more"),
    *("MB on disk", "until it is there, s"),
)
ALONE = {"policy": "never", "checkpoint_every": 2, "log_interval": 10**6, "save_model": False, "name": "run"}


def measure(module: nn.Module, make: Callable[[Any], torch.optim.Optimizer], rounds: int) -> dict[str, float]:
    """Return medians over the rounds, in seconds and bytes, of a peer alone that trains with random gradients."""
    training = Training(module, torch.empty(0))
    training.optimizer = make(module.parameters())
    found: dict[str, list[float]] = {name: [] for name in ("capture", "further", "write", "copy", "size")}

    def step() -> float:
        """Return the seconds of a step in the peer; every second one makes a checkpoint."""
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        training.optimizer.step()
        return training.in_peer[-1].wall

    with tempfile.TemporaryDirectory() as scratch, hosts_file(Path(scratch), 1) as hosts:
        peer = training.join(hosts, logdir=scratch, **ALONE)
        for number in range(rounds + 2):
            boundary = step()
            began = time.perf_counter()
            capture = step() - boundary
            further = max(step() - boundary, 0.0)  # the snapshot is in use, so that the boundary needs another buffer
            peer._checkpoints.flush()
            write = time.perf_counter() - began
            step()
            peer._checkpoints.flush()
            began = time.perf_counter()
            state = [value for of in training.optimizer.state.values() for value in of.values()]
            kept = [value.clone() for value in state if isinstance(value, torch.Tensor)]
            copy, size = time.perf_counter() - began, sum(tensor.nbytes for tensor in kept)
            if number >= 2:  # the first rounds have no memory to reuse
                for name, value in zip(found, (capture, further, write, copy, size), strict=True):
                    found[name].append(value)
        newest = max(Path(scratch).rglob("manifest.json"), key=lambda file: file.stat().st_mtime).parent
        on_disk = sum(file.stat().st_size for file in newest.iterdir())
        peer.close()
    return {**medians(found), "disk": on_disk}


def checkpoints(given: Given) -> Table:
    """Return the table."""
    torch.manual_seed(0)
    table = Table("A checkpoint", HEADINGS)
    for name, build in given.of(SMOKE, MODELS, MODELS).items():
        for optimizer, make in OPTIMIZERS.items():
            one = measure(build(), make, given.of(1, ROUNDS, ROUNDS))
            capture, copy, further = (one[what] * 1e3 for what in ("capture", "copy", "further"))
            milliseconds = (f"{value:.1f}" for value in (capture, copy, further))
            copied, on_disk = (f"{one[what] / 1e6:.1f}" for what in ("size", "disk"))
            table.row(f"{name}, {optimizer}", copied, *milliseconds, on_disk, f"{one['write']:.2f}")
            called = f"checkpoint {name} {optimizer}"
            table.figure(f"{called}: training thread", capture, "ms", reference=copy)
            table.figure(f"{called}: next boundary", further, "ms")
            table.figure(f"{called}: copied", one["size"] / 1e6, "MB")
            table.figure(f"{called}: written", one["write"], "s")
    return table


if __name__ == "__main__":
    bench(__file__, __doc__, checkpoints)
