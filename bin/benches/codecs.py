"""Speed of codecs on one thread, compared with a memcpy of the input, int8 also with torch.

Gradients are those of ResNet-20 and the small convnet, recorded when the benchmark starts. The names of synthetic ones
include the fraction of values that 3LC does not encode as zero. GB/s count the float32 values, not the frames.

bin/bench codecs                  (about 3 minutes)
bin/bench codecs --full           three times as many rounds, and 60 million values for codecs without a goal, too
bin/bench codecs --record FILE    only write the sample of gradients for the tests, tests/gradients.npz
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from _bench.cli import Given, bench
from _bench.tables import Table, medians
from _codec_speed import (
    ADD,
    ENCODE,
    FED,
    WORKS,
    Case,
    Ours,
    Recorded,
    TorchInt8,
    drawn,
    measured,
    record,
    save_sample,
)

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
