"""What measuring the delta of a step costs, on one thread: beside a memcpy of the model, and as a share of a step.

bin/bench delta            models of 0.1, 1.7 and 61 million parameters (about 2 minutes)
bin/bench delta --full     three times as many rounds and steps
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _report import figure, report
from torch import nn

from gossipx import kernels
from gossipx.arena import ParameterArena
from gossipx.layout import lay_out, slots_of
from gossipx.tasks.models import MODELS, build_model

Pass = Callable[[], float]
MEMCPY, EXACT, SAMPLED = "memcpy", "kernels.advance", "kernels.Sampled"
IN_TRAINING = {EXACT: False, SAMPLED: True}
"""What is timed after a step: whether the delta is sampled."""


@dataclass(frozen=True)
class Case:
    """A model as it is trained here: at its published input, one thread.

    Attributes:
        model: a name of MODELS.
        batch: images a step.
        rounds: of the passes, outside of training.
        steps: of training, for each way to measure.
        goals: shares of a step that the exact and the sampled delta are to stay under.
    """

    model: str
    batch: int
    rounds: int
    steps: int
    goals: tuple[float, float] | None


# The batches of the built-in presets, but for alexnet, an eighth of its: its share is larger than in a run of its own.
CASES = (
    Case("lenet", 32, 200, 200, None),
    Case("resnet110", 128, 60, 4, (0.001, 0.001)),
    Case("alexnet", 32, 9, 5, (0.04, 0.01)),
)


class Trained:
    """A model in training, laid out by an arena that nobody asks for a model."""

    def __init__(self, case: Case, sampled: bool):
        facts = MODELS[case.model].facts
        torch.manual_seed(0)
        self.module = build_model(case.model, classes=facts.classes, channels=facts.channels, pixels=facts.pixels)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-4, momentum=0.9)
        self.images = torch.randn(case.batch, facts.channels, facts.pixels, facts.pixels)
        self.labels = torch.randint(0, facts.classes, (case.batch,))
        self.arena = ParameterArena(self.module, sampled=0 if sampled else None)

    def step(self) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.module(self.images), self.labels).backward()
        self.optimizer.step()

    def measured(self) -> None:
        self.arena.step_done()
        self.arena.go_on()


class Laid:
    """A model whose trained parameters are one vector, and the vector as it was before a step."""

    def __init__(self, case: Case):
        facts = MODELS[case.model].facts
        torch.manual_seed(0)
        self.module = build_model(case.model, classes=facts.classes, channels=facts.channels, pixels=facts.pixels)
        self.parameters = list(self.module.parameters())
        section = lay_out([slot for slot in slots_of(self.module, mix_buffers=False) if slot.kind == 0])
        self.x = section.storage[: section.trainable]
        self.before = self.x.clone()
        self.other = self.x.clone()
        self.each_before = [parameter.detach().clone() for parameter in self.parameters]
        starts = [(one.data_ptr() - self.x.data_ptr()) // one.itemsize for one in self.parameters]
        small = [
            (start, one) for start, one in zip(starts, self.parameters, strict=True) if one.numel() < kernels.SMALL
        ]
        self.sampled = kernels.Sampled(self.x, 0, [(start, start + one.numel()) for start, one in small])

    def foreach(self) -> float:
        changes = torch._foreach_sub(self.parameters, self.each_before)
        norm = torch.stack(torch._foreach_norm(changes)).norm()
        torch._foreach_copy_(self.each_before, self.parameters)
        return float(norm)

    def flat(self) -> float:
        norm = torch.linalg.vector_norm(self.x - self.before)
        self.before.copy_(self.x)
        return float(norm)

    def passes(self) -> dict[str, Pass]:
        x, before, other = self.x, self.before, self.other
        passes: dict[str, Pass] = {
            MEMCPY: lambda: float(other.copy_(x)[0]),
            "one read of both vectors": lambda: float(torch.dot(x, other)),
            "torch._foreach": self.foreach,
            "torch, flat": self.flat,
            "numba, one fused pass": lambda: fused(x.numpy(), before.numpy()),
            EXACT: lambda: kernels.advance(x, before, before),
            SAMPLED: lambda: self.sampled.advance(x),
        }
        fused = _fused()
        if fused is None:
            del passes["numba, one fused pass"]
        return passes


def _fused() -> Callable[[Any, Any], float] | None:
    """The same pass as a compiler makes it, where numba is installed: what is left to gain."""
    try:
        import numba
        import numpy as np
    except ImportError:
        return None

    @numba.njit(nogil=True, fastmath={"reassoc", "contract"})
    def fused(x: Any, before: Any) -> float:
        total = 0.0
        for start in range(0, len(x), kernels.BLOCK):
            now, old = x[start : start + kernels.BLOCK], before[start : start + kernels.BLOCK]
            block = np.float32(0)
            for index in range(len(now)):
                change = now[index] - old[index]
                block += change * change
                old[index] = now[index]
            total += block
        return total

    return fused


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


@torch.no_grad()
def _side_by_side(laid: Laid, rounds: int) -> dict[str, list[float]]:
    """Seconds of each pass in each round; what a pass needs is as warm as its last call, just before, left it."""
    passes = laid.passes()
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(rounds):
        for name, run in passes.items():
            run()
            seconds[name].append(_timed(run))
    return seconds


def _in_training(case: Case, steps: int) -> tuple[float, dict[str, float]]:
    """Medians: seconds of a step, and of what the arena does right after one, with the caches as it left them."""
    ours: dict[str, float] = {}
    whole = []
    for name, sampled in IN_TRAINING.items():
        trained = Trained(case, sampled)
        trained.step()
        trained.measured()
        seconds = []
        for _ in range(steps):
            whole.append(_timed(trained.step))
            seconds.append(_timed(trained.measured))
        ours[name] = statistics.median(seconds)
    return statistics.median(whole), ours


def main() -> None:
    parser = argparse.ArgumentParser(prog="bin/bench delta", description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as a peer's is
    times = 3 if arguments.full else 1
    figures: list[Any] = []
    for case in CASES:
        laid = Laid(case)
        seconds = _side_by_side(laid, times * case.rounds)
        length = len(laid.x)
        del laid
        step, ours = _in_training(case, times * case.steps)
        figures += _report(case, length, seconds, step, ours, quiet=arguments.json)
    if arguments.json:
        print(json.dumps({"figures": figures}, indent=2))


def _report(
    case: Case, length: int, seconds: dict[str, list[float]], step: float, ours: dict[str, float], quiet: bool
) -> list[Any]:
    rows, figures = [], []
    for name, values in seconds.items():
        milliseconds = statistics.median(values) * 1e3
        # Of rounds, not of medians: other work on the machine slows both sides of a round alike.
        ratio = statistics.median(mine / copy for mine, copy in zip(values, seconds[MEMCPY], strict=True))
        share = ours[name] / step if name in ours else None
        told = f"{share:.3%}" if share is not None else ""
        rows.append((name, f"{milliseconds:.3f}", f"{ratio:.2f}", f"{ours[name] * 1e3:.3f}" if told else "", told))
        figures.append(figure(f"{case.model} {name}", milliseconds, "ms", reference=milliseconds / ratio))
        if share is not None:
            goal = case.goals[(EXACT, SAMPLED).index(name)] if case.goals else None
            met = share < goal if goal else None
            figures.append(figure(f"{case.model} {name}: share", share, "of a step", goal=goal, met=met))
    figures.append(figure(f"{case.model} training step", step * 1e3, "ms"))
    if not quiet:
        title = f"{case.model}, {length:,} values, batches of {case.batch}, a step takes {step * 1e3:.1f} ms; medians"
        report(title, ("pass", "ms", "to memcpy", "ms after a step", "of the step"), rows, figures)
    return figures


if __name__ == "__main__":
    main()
