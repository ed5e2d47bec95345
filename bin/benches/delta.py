"""Cost of measuring the delta of a step on one thread, compared with a memcpy of the model and with a training step.

bin/bench overhead measures all that a peer does after a step.

bin/bench delta            models of 0.1, 1.7 and 61 million parameters (about 4 minutes)
bin/bench delta --full     three times as many rounds and steps
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from _bench.cli import Given, bench
from _bench.tables import Table, median_ratio
from _bench.training import Training, built, seconds

from gossipx.model import kernels
from gossipx.model.arena import ParameterArena
from gossipx.model.layout import lay_out, slots_of
from gossipx.model.section import TensorKind

Pass = Callable[[], float]
MEMCPY, READ, EXACT, SAMPLED = "memcpy", "one read of both vectors", "kernels.advance", "kernels.Sampled"
IN_TRAINING = {EXACT: False, SAMPLED: True}
"""Passes timed after a step; the value is whether the delta is sampled."""


@dataclass(frozen=True)
class Case:
    """A model that trains on one thread with its published input size: images per step, rounds of the passes outside of
    training, and steps of each kind."""

    model: str
    batch: int
    rounds: int
    steps: int


# The batches are those of the presets, except that alexnet has an eighth of its batch, which makes its share larger.
CASES = (
    Case("lenet", 32, 200, 200),
    Case("resnet110", 128, 60, 6),
    Case("alexnet", 32, 9, 6),
)
SMOKE = Case("lenet", 4, 3, 4)


def passes_of(case: Case) -> tuple[int, dict[str, Pass]]:
    """Return the number of a model's values, and passes over its trained parameters, which are one vector."""
    module = built(case.model)
    slots = [slot for slot in slots_of(module, mix_buffers=False) if slot.kind is TensorKind.TRAINABLE]
    section = lay_out(slots)
    x = section.storage[: section.trainable]
    before, other = x.clone(), x.clone()
    starts = {(one.data_ptr() - x.data_ptr()) // one.itemsize: one.numel() for one in module.parameters()}
    small = [(start, start + count) for start, count in starts.items() if count < kernels.SMALL]
    sampled = kernels.Sampled(x, 0, small)
    return len(x), {
        MEMCPY: lambda: float(other.copy_(x)[0]),
        READ: lambda: float(torch.dot(x, other)),
        EXACT: lambda: kernels.advance(x, before, before),
        SAMPLED: lambda: sampled.advance(x),
    }


@torch.no_grad()
def _side_by_side(passes: dict[str, Pass], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each pass in each round, with caches as left by an untimed call just before."""
    taken: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(rounds):
        for name, run in passes.items():
            run()
            taken[name].append(seconds(run))
    return taken


def _in_training(case: Case, steps: int) -> tuple[float, dict[str, float]]:
    """Return the median seconds of a step, and of each pass of the arena right after it, with the caches as it left
    them."""
    whole: list[float] = []
    ours: dict[str, float] = {}
    for name, sampled in IN_TRAINING.items():
        training = Training.of(case.model, case.batch)
        arena = ParameterArena(training.module, sampled=0 if sampled else None)
        taken = []
        for number in range(1 + steps):
            step = seconds(training.step)
            after = seconds(lambda arena=arena: (arena.step_done(), arena.leave_boundary()))
            if number:  # the first step initialises much
                whole.append(step)
                taken.append(after)
        ours[name] = statistics.median(taken)
    return statistics.median(whole), ours


def delta(given: Given) -> Iterator[Table]:
    """Yield a table per model."""
    times = given.of(1, 1, 3)
    for case in given.of((SMOKE,), CASES, CASES):
        length, passes = passes_of(case)
        taken = _side_by_side(passes, times * case.rounds)
        del passes  # with the model
        step, ours = _in_training(case, times * case.steps)
        yield _table(case, length, taken, step, ours)


def _table(case: Case, length: int, taken: dict[str, list[float]], step: float, ours: dict[str, float]) -> Table:
    title = f"{case.model}, {length:,} values, batches of {case.batch}, a step takes {step * 1e3:.1f} ms; medians"
    table = Table(title, ("pass", "ms", "to memcpy", "ms after a step", "of the step"))
    after = {name: (f"{each * 1e3:.3f}", f"{each / step:.3%}") for name, each in ours.items()}
    for name, values in taken.items():
        milliseconds = statistics.median(values) * 1e3
        ratio = median_ratio(values, taken[MEMCPY])
        table.row(name, f"{milliseconds:.3f}", f"{ratio:.2f}", *after.get(name, ("", "")))
        table.figure(f"{case.model} {name}", milliseconds, "ms", reference=milliseconds / ratio)
    reads = median_ratio(taken[EXACT], taken[READ])
    table.figure(f"{case.model} {EXACT} to {READ}", reads, "times", most=1.0)
    for name, after_step in ours.items():
        table.figure(f"{case.model} {name}: share", after_step / step, "of a step")
    table.figure(f"{case.model} training step", step * 1e3, "ms")
    return table


if __name__ == "__main__":
    bench(__file__, __doc__, delta)
