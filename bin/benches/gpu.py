"""Cost of a peer for a training loop on a device, and the rates at which models move; run by bin/gpu-check.

bin/bench gpu [--json]              models of 2 and 60 million parameters, on the first CUDA device
bin/bench gpu --device cpu          the same passes on the CPU, to check the program
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Iterator

import torch
from _bench.cli import Given, bench
from _bench.tables import Table, median_ratio
from _bench.training import seconds
from torch import nn

from gossipx.model.arena import ParameterArena
from gossipx.model.pool import HostBuffer
from gossipx.model.receive import Incoming

WIDTHS = {"2 M": 512, "60 M": 2752}
"""Widths of eight square layers."""
LAYERS, BATCH, ROUNDS, STEPS = 8, 512, 9, 30


class Loop:
    """A model in training on a device."""

    def __init__(self, width: int, device: torch.device, sampled: bool, joined: bool = True):
        torch.manual_seed(0)
        layers = [part for _ in range(LAYERS) for part in (nn.Linear(width, width), nn.ReLU())]
        self.module = nn.Sequential(*layers).to(device)
        self.device = device
        self.arena = ParameterArena(self.module, sampled=0 if sampled else None) if joined else None
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-4, momentum=0.9)
        self.images = torch.randn(BATCH, width, device=device)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.module(self.images).square().mean().backward()
        self.optimizer.step()
        if self.arena is not None:
            self.arena.step_done()
            self.arena.leave_boundary()

    def seconds(self, steps: int = STEPS) -> float:
        """Return the seconds of a step, including all work that it starts on the device."""
        self.finish()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.finish()
        return (time.perf_counter() - begin) / steps

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _steps(width: int, device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a step in each round, without and with a peer."""
    kinds = {"alone": (False, False), "exact delta": (False, True), "sampled delta": (True, True)}
    loops = {name: Loop(width, device, *kind) for name, kind in kinds.items()}
    found: dict[str, list[float]] = {name: [] for name in loops}
    for loop in loops.values():
        loop.seconds(3)
    for _ in range(rounds):
        for name, loop in loops.items():
            found[name].append(loop.seconds())
    return found


def _moves(width: int, device: torch.device, rounds: int) -> tuple[int, dict[str, float]]:
    """Return the bytes of a model, and the median seconds of each operation on it."""
    loop = Loop(width, device, sampled=False)
    assert loop.arena is not None
    arena, model = loop.arena, _model(loop.arena)
    found: dict[str, list[float]] = {"snapshot": [], "received, to the device": [], "mixed": []}
    for _ in range(rounds):
        loop.step()
        snapshot = arena.snapshot()
        found["snapshot"].append(seconds(lambda one=snapshot: one.buffer))
        snapshot.release()
        incoming = Incoming(arena, arena.snapshot())
        loop.finish()
        found["received, to the device"].append(seconds(lambda one=incoming: _receive(one, model)))
        there: HostBuffer = incoming.buffer
        found["mixed"].append(seconds(lambda one=there: (arena.exchanged.commit(one, 0.5), loop.finish())))
        arena.leave_boundary()
        incoming.release()
    return len(model), {name: statistics.median(values) for name, values in found.items()}


def _model(arena: ParameterArena) -> bytearray:
    """Return the current model as a peer would receive it."""
    snapshot = arena.snapshot()
    model = bytearray(snapshot.buffer.view)
    snapshot.release()
    return model


def _receive(incoming: Incoming, model: bytearray) -> None:
    """Take in a model in host memory, which is compared and copied to the device in pieces, and wait for the copies."""
    incoming.take(0, memoryview(model))
    incoming.norm()


def _overlap(width: int, device: torch.device, rounds: int) -> tuple[float, float, float]:
    """Return the seconds of a step alone, and while models are read and mixed continuously, and models per second."""
    loop = Loop(width, device, sampled=False)
    assert loop.arena is not None
    arena, stop, moved = loop.arena, threading.Event(), [0]
    model = _model(arena)

    def move() -> None:
        while not stop.is_set():
            incoming = Incoming(arena, arena.snapshot())
            _receive(incoming, model)
            incoming.release()
            moved[0] += 1

    loop.seconds(3)
    alone = statistics.median(loop.seconds() for _ in range(rounds))
    mover = threading.Thread(target=move)
    begin = time.perf_counter()
    mover.start()
    try:
        busy = statistics.median(loop.seconds() for _ in range(rounds))
    finally:
        stop.set()
        mover.join(60)
    return alone, busy, moved[0] / (time.perf_counter() - begin)


def gpu(given: Given) -> Iterator[Table]:
    """Yield a table per model."""
    device: torch.device = given.device
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bin/bench gpu: skipped, torch sees no CUDA device here", file=sys.stderr)
        sys.exit(0)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    for name, width in given.of({"small": 64}, WIDTHS, WIDTHS).items():
        table = Table(f"{name} parameters on {where}; medians", ("what", "value", "unit", "to undisturbed"))
        _measure(table, name, width, device, given.of(1, ROUNDS, ROUNDS))
        yield table


def _measure(table: Table, name: str, width: int, device: torch.device, rounds: int) -> None:
    def tell(what: str, value: float, unit: str, reference: float | None = None) -> None:
        table.row(what, f"{value:.4g}", unit, "" if reference is None else f"{value / reference:.3f}")
        table.figure(f"{name} {what}", value, unit, reference=reference)

    steps = _steps(width, device, rounds)
    for kind, values in steps.items():
        milliseconds = statistics.median(values) * 1e3
        tell(f"step, {kind}", milliseconds, "ms", milliseconds / median_ratio(values, steps["alone"]))
    nbytes, moves = _moves(width, device, rounds)
    for what, taken in moves.items():
        tell(what, taken * 1e3, "ms")
        tell(f"{what}, rate", nbytes / taken / 1e9, "GB/s")
    alone, busy, models = _overlap(width, device, rounds)
    tell("step, models read and received all the time", busy * 1e3, "ms", alone * 1e3)
    tell("models read and received", models, "a second")


if __name__ == "__main__":
    options = {"--device": {"default": "cuda", "type": torch.device}}
    bench(__file__, __doc__, gpu, options)
