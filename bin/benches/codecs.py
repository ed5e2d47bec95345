"""Speed of codecs on one thread, compared with a memcpy of the input, encoding by int8 also with torch.

Gradients are those of ResNet-20 and the small convnet, recorded when the benchmark starts. The names of synthetic ones
include the fraction of values that 3LC does not encode as zero. GB/s count the float32 values, not the frames. A memcpy
of the same values is timed immediately before each operation.

bin/bench codecs                  (about 3 minutes)
bin/bench codecs --full           three times as many rounds, and 60 million values for codecs without a goal, too
bin/bench codecs --record FILE    only write the sample of gradients for the tests, tests/gradients.npz
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _bench.cli import Given, bench
from _bench.tables import Table, medians
from _bench.training import seconds
from torch import Tensor, nn

from gossipx.codecs import Tensors, decode_into, parse
from gossipx.model.layout import norms
from gossipx.tasks.data import TASKS, Batches, load
from gossipx.tasks.models import build_model
from gossipx.tasks.presets import PRESETS

# --- gradients of consecutive training steps, and a sample of them for tests ------------------------------

TASK = "fashion-mnist"
BEFORE, KEPT = 20, 40
"""Steps to skip, because the first gradients are not typical, and steps to record."""
SAMPLED = {
    "resnet20": (
        "maps.0.weight",
        "maps.3.first.weight",
        "maps.7.first_norm.weight",
        "maps.7.first.weight",
        "head.weight",
    ),
    "convnet": ("maps.0.weight", "maps.4.bias", "head.weight"),
}
"""Tensors of the sample: a small one of each kind."""
SAMPLED_STEPS = 7


@dataclass(frozen=True)
class Recorded:
    """A model's gradients.

    Attributes:
        names: names of the parameters.
        tensors: positions of the parameters in a step; those of normalisation layers are not encoded.
        steps: (step, value), float32.
    """

    names: tuple[str, ...]
    tensors: Tensors
    steps: Tensor


def record(model: str, kept: int = KEPT) -> Recorded:
    """Train a built-in model by its preset on the embedded data, and record its gradients of ``kept`` steps."""
    task, preset = TASKS[TASK], PRESETS[model]
    torch.manual_seed(0)
    module = build_model(model, classes=task.classes, channels=task.channels, pixels=task.pixels)
    optimizer = torch.optim.SGD(
        module.parameters(), lr=preset.lr, momentum=preset.momentum, weight_decay=preset.weight_decay
    )
    batches = Batches(load(TASK)[0], preset.batch_size, 0)
    steps = []
    for step in range(BEFORE + kept):
        images, labels = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(images), labels).backward()
        if step >= BEFORE:
            steps.append(torch.cat([one.grad.view(-1) for one in module.parameters() if one.grad is not None]))
        optimizer.step()
    named = dict(module.named_parameters())
    kept_plain = norms(module)
    tensors = Tensors.of(*named.values(), plain=[name in kept_plain for name in named])
    return Recorded(tuple(named), tensors, torch.stack(steps))


def save_sample(file: Path) -> None:
    """Write the sampled gradients of both models as float16, scaled by a power of two to values below 1.

    Each array has one row per step, and the name ``model/parameter``.
    """
    arrays = {}
    for model, names in SAMPLED.items():
        recorded = record(model)
        for name in names:
            number = recorded.names.index(name)
            start, count = recorded.tensors.starts[number], recorded.tensors.counts[number]
            steps = recorded.steps[-SAMPLED_STEPS:, start : start + count].numpy()
            _, exponent = np.frexp(np.abs(steps).max())
            arrays[f"{model}/{name}"] = np.ldexp(steps, -exponent).astype(np.float16)
    np.savez_compressed(file, **arrays)


def drawn(values: int, part: float) -> Recorded:
    """Return random tensors of ``values`` values. 3LC at sparsity 1 encodes a fraction ``part`` as ±1, others as 0."""
    draws = torch.Generator().manual_seed(0)
    shape = (4, values)
    large = torch.rand(shape, generator=draws) < part
    signs = torch.rand(shape, generator=draws).sub_(0.5).sign_()
    steps = torch.where(large, signs, torch.rand(shape, generator=draws).sub_(0.5).mul_(0.1))
    return Recorded(("drawn",), Tensors(((values,),), torch.float32, (0,)), steps)


# --- speed -------------------------------------------------------------------------------------------------

FED, ENCODE, DECODE, ADD = "encode, error feedback", "encode", "decode", "decode, adding"
WORKS = (FED, ENCODE, DECODE, ADD)
LATE = 4
"""Steps that are timed in turn; the earlier steps fill the error feedback as in a run."""


@dataclass(frozen=True)
class Case:
    """The values to encode: the tensors of a model, repeated in tiles so that they exceed all caches.

    Vectors of all tiles are the input, the decoded output, and the target of the memcpy.
    """

    recorded: Recorded
    tensors: Tensors
    times: int
    x: Tensor
    out: Tensor
    copy: Tensor

    @classmethod
    def of(cls, recorded: Recorded, values: int) -> Case:
        """Return a case of about ``values`` values."""
        one = recorded.tensors
        times = max(1, values // one.length)
        starts = tuple(tile * one.length + start for tile in range(times) for start in one.starts)
        tensors = Tensors(one.shapes * times, one.dtype, starts)
        return cls(recorded, tensors, times, *(torch.zeros(tensors.length) for _ in range(3)))

    def turn(self, number: int) -> None:
        """Load one of the last steps, in turn."""
        self.x.view(self.times, -1)[:] = self.recorded.steps[number % LATE - LATE]

    def memcpy(self) -> float:
        """Return the seconds of a memcpy of the input."""
        return seconds(lambda: np.copyto(self.copy.numpy(), self.x.numpy()))


class Ours:
    """The operations of one of gossipx's codecs."""

    def __init__(self, spec: str, case: Case):
        self._case, self._codec = case, parse(spec)
        one = self._codec.init(case.recorded.tensors)
        left = torch.zeros(case.recorded.tensors.length)
        for step in case.recorded.steps[:-LATE]:
            _, one = self._codec.encode(step, one, left=left)
        self.left = left.repeat(case.times)
        self._fed, self._alone = self._codec.init(case.tensors), self._codec.init(case.tensors)
        self._frames = [np.zeros(self._codec.most(self._fed), np.uint8) for _ in range(2)]
        self.frame: Any = b""

    def works(self) -> dict[str, Callable[[], None]]:
        """Return the operations to time, in order; decoding uses the frame of the first."""
        fed = {FED: self._encode_fed} if self._codec.feedback else {}
        return {ENCODE: self.encode, **fed, DECODE: self._decode, ADD: self._add}

    def encode(self) -> None:
        self.frame, _ = self._codec.encode(self._case.x, self._alone, self._frames[0])

    def _encode_fed(self) -> None:
        self.frame, _ = self._codec.encode(self._case.x, self._fed, self._frames[1], left=self.left)

    def _decode(self) -> None:
        decode_into(self.frame, self._case.out, tensors=self._case.tensors)

    def _add(self) -> None:
        decode_into(self.frame, self._case.out, add=True, tensors=self._case.tensors)


class TorchInt8:
    """``int8`` as torch operations, each a pass through memory, with the same first error (as GRACE, Xu et al. 2021).

    Encoding each tensor separately is the same work. Encoding each tile as one tensor (``whole``) is less work, because
    its tensors share one scale and one call.
    """

    def __init__(self, case: Case, left: Tensor, whole: bool):
        counts = [case.recorded.tensors.length] * case.times if whole else list(case.tensors.counts)
        self._x, self._left = case.x.split(counts), left.split(counts)
        self.codes: list[tuple[Tensor, Tensor]] = []

    def works(self) -> dict[str, Callable[[], None]]:
        """Return the operations to time."""
        return {ENCODE: self._encode, FED: self._encode_fed}

    def _encode(self) -> None:
        self.codes = []
        for x in self._x:
            scale = x.abs().max() / 127
            self.codes.append((scale, torch.div(x, scale).round_().to(torch.int8)))

    def _encode_fed(self) -> None:
        self.codes = []
        for x, left in zip(self._x, self._left, strict=True):
            values = x + left
            scale = values.abs().max() / 127
            levels = torch.div(values, scale).round_()
            torch.sub(values, levels * scale, out=left)
            self.codes.append((scale, levels.to(torch.int8)))


Rates = dict[str, list[float]]
"""Speeds by operation, one per round, as a fraction of the preceding memcpy's speed."""


def measured(case: Case, sides: dict[str, Ours | TorchInt8], rounds: int) -> tuple[dict[str, Rates], float]:
    """Return the rates of each side, and the median GB/s of the memcpy, after one round of warm-up."""
    rates: dict[str, Rates] = {name: {work: [] for work in side.works()} for name, side in sides.items()}
    copies = []
    for number in range(rounds + 1):
        case.turn(number)
        for name, side in sides.items():
            for work, run in side.works().items():
                copy = case.memcpy()
                took = seconds(run)
                if number:
                    rates[name][work].append(copy / took)
                    copies.append(copy)
    return rates, 4 * case.tensors.length / 1e9 / statistics.median(copies)


# --- tables ------------------------------------------------------------------------------------------------

MILLION = 1_000_000
VALUES, FEWER = 60 * MILLION, 6 * MILLION
"""Number of values to encode: for codecs with a goal, and for the others in a short run."""
ROUNDS, FEW_ROUNDS = 9, 3
MODELS = ("resnet20", "convnet")
LC, LC_DENSE, INT8, TOPK = "3lc:sparsity=1.75", "3lc:sparsity=1", "int8", "topk:ratio=0.01,sample=0.01"
DRAWN = (0.003, 0.11)
GOALS: dict[tuple[str, str], dict[str, float]] = {
    **{(model, LC): {FED: 0.5, ADD: 1.0} for model in MODELS},
    **{(model, INT8): {ENCODE: 0.6} for model in MODELS},
    **{(model, TOPK): {ENCODE: 0.6} for model in MODELS},
    ("11 %", LC_DENSE): {FED: 0.33, ADD: 0.33},
}
"""Goals as fractions of a memcpy's speed."""
TIMES_TORCH = 3.0
OTHERS = (
    *("none", "fp16", "bf16", "int8:block=256", "3lc:sparsity=1,residual=0.3", "stochastic3"),
    *("onebit", "topk:ratio=0.01", "qsgd:levels=7", "signsgd"),
    *("efsignsgd", "powersgd:rank=2", "dgc:ratio=0.001", "localsteps:k=2", "3lc:sparsity=1.75+zlib"),
)
HEADINGS = ("codec", *WORKS)


def codecs(given: Given) -> Iterator[Table]:
    """Yield the tables, or only record gradients."""
    if given.record:
        save_sample(given.record)
        return
    if given.smoke:
        recorded = record("lenet", 4)
        yield _with_goals("lenet", recorded, (INT8, LC), 1, MILLION // 10)
        return
    models = {model: record(model) for model in MODELS}
    times, fewer = given.of(1, 1, 3), given.of(FEWER, FEWER, VALUES)
    for model, recorded in models.items():
        yield _with_goals(model, recorded, (LC, LC_DENSE, INT8, TOPK), times * ROUNDS)
    for part in DRAWN:
        yield _with_goals(f"{100 * part:g} %", drawn(MILLION, part), (LC_DENSE,), times * ROUNDS)
    yield _others(models["resnet20"], fewer, FEW_ROUNDS)


def _with_goals(name: str, recorded: Recorded, specs: Sequence[str], rounds: int, values: int = VALUES) -> Table:
    """Return the table of codecs with goals."""
    case, table, copies = Case.of(recorded, values), Table("", HEADINGS), []
    for spec in specs:
        ours = Ours(spec, case)
        sides: dict[str, Ours | TorchInt8] = {spec: ours}
        if spec == INT8:
            for whole, told in ((False, "tensor by tensor"), (True, "a model as one tensor")):
                sides[f"  torch, {told}"] = TorchInt8(case, ours.left.clone(), whole)
        copies.append(_compare(table, name, case, sides, rounds, GOALS.get((name, spec), {})))
    table.title = f"{name}: {_told(case, copies)}"
    return table


def _compare(
    table: Table, name: str, case: Case, sides: dict[str, Ours | TorchInt8], rounds: int, goals: dict[str, float]
) -> float:
    """Measure a codec, the first side, and what it is compared with; return the GB/s of a memcpy."""
    rates, memcpy = measured(case, sides, rounds)
    for side, of_side in rates.items():
        found = medians(of_side)
        table.row(side, *(f"{found[work] * memcpy:.3g} ({found[work]:.2f})" if work in found else "" for work in WORKS))
    (spec, ours), *theirs = ((side.strip(), medians(of_side)) for side, of_side in rates.items())
    for work, rate in ours.items():
        what, goal = f"{name} {spec}: {work}", goals.get(work)
        table.figure(what, rate * memcpy, "GB/s", reference=memcpy)
        if goal:
            table.figure(what, rate, "of a memcpy", least=goal)
        for side, of_side in theirs:
            if work in of_side:
                table.figure(what, rate / of_side[work], f"times {side}", least=TIMES_TORCH if goal else None)
    return memcpy


def _others(recorded: Recorded, values: int, rounds: int) -> Table:
    case, table = Case.of(recorded, values), Table("", HEADINGS)
    copies = [_compare(table, "resnet20", case, {spec: Ours(spec, case)}, rounds, {}) for spec in OTHERS]
    table.title = f"The others on resnet20: {_told(case, copies)}"
    return table


def _told(case: Case, copies: Sequence[float]) -> str:
    values = f"{case.tensors.length / MILLION:.0f} million values in {len(case.tensors.shapes):,} tensors"
    return f"{values}; GB/s, and in brackets to a memcpy of {statistics.median(copies):.1f} GB/s; medians"


if __name__ == "__main__":
    bench(__file__, __doc__, codecs, {"--record": {"type": Path, "metavar": "FILE"}})
