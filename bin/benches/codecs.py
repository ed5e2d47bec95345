"""Speed of codecs on one thread, compared with a memcpy of the input and with torch operations; and encoded sizes.

Gradients are those of ResNet-20 and the small convnet, recorded when the benchmark starts. The names of synthetic ones
include the fraction of values that 3LC does not encode as zero. GB/s count the float32 values, not the frames.

bin/bench codecs                  (about 3 minutes)
bin/bench codecs --full           three times as many rounds, and 60 million values for codecs without a goal, too
bin/bench codecs --record FILE    only write the sample of gradients for the tests, tests/gradients.npz
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _codec_speed import ADD, ENCODE, FED, WORKS, Case, Ours, Rates, Theirs, allocated, bits, measured
from _gradients import Recorded, drawn, record, save_sample
from _report import figure, report
from _torch_codecs import RATIO, SAMPLE, Int8, Reference, ThreeLC, TopK

from gossipx.codecs import parse
from gossipx.codecs.packing import trit_bytes

MILLION = 1_000_000
VALUES, FEWER = 60 * MILLION, 6 * MILLION
"""Number of values to encode: for codecs with a goal, and for the others in a short run."""
ROUNDS, FEW_ROUNDS = 9, 3
MODELS = ("resnet20", "convnet")
LC, LC_DENSE, INT8, TOPK = "3lc:sparsity=1.75", "3lc:sparsity=1", "int8", f"topk:ratio={RATIO:g},sample={SAMPLE:g}"
REFERENCES: dict[str, Callable[[], Reference]] = {
    LC: lambda: ThreeLC(1.75),
    LC_DENSE: lambda: ThreeLC(1.0),
    INT8: Int8,
    TOPK: TopK,
}
DRAWN = (0.003, 0.11)
GOALS: dict[tuple[str, str], dict[str, float]] = {
    **{(model, LC): {FED: 0.5, ADD: 1.0} for model in MODELS},
    **{(model, INT8): {ENCODE: 0.6} for model in MODELS},
    **{(model, TOPK): {ENCODE: 0.6} for model in MODELS},
    ("11 %", LC_DENSE): {FED: 0.33, ADD: 0.33},
}
"""Goals as fractions of a memcpy's speed."""
TIMES_TORCH = 3.0
ALLOCATED = 0.01
"""Limit of allocations as a fraction of the input's bytes, for tables and numbers of constant size."""
OTHERS = (
    *("none", "fp16", "bf16", "int8:block=256", "3lc:sparsity=1,residual=0.3", "stochastic3"),
    *("onebit", "topk:ratio=0.01", "randomk:ratio=0.01", "qsgd:levels=7", "signsgd"),
    *("efsignsgd", "powersgd:rank=2", "dgc:ratio=0.001", "localsteps:k=2", "3lc:sparsity=1.75+zlib"),
)
SPARSITIES = (1.0, 1.5, 1.75, 1.9)
HEADINGS = ("codec", *WORKS)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bin/bench codecs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.record:
        save_sample(arguments.record)
        return
    models = {model: record(model) for model in MODELS}
    times, fewer = (3, VALUES) if arguments.full else (1, FEWER)
    figures: list[Any] = []

    def tell(title: str, headings: Sequence[str], rows: list[tuple[str, ...]], found: list[Any]) -> None:
        figures.extend(found)
        if not arguments.json:
            report(title, headings, rows, found)

    for model, recorded in models.items():
        tell(*_with_goals(model, recorded, (LC, LC_DENSE, INT8, TOPK), times * ROUNDS))
    for part in DRAWN:
        tell(*_with_goals(f"{100 * part:g} %", drawn(MILLION, part), (LC_DENSE,), times * ROUNDS))
    tell(*_others(models["resnet20"], fewer, FEW_ROUNDS))
    for model, recorded in models.items():
        tell(*_sizes(model, recorded))
    if arguments.json:
        print(json.dumps({"figures": figures}, indent=2))


Table = tuple[str, Sequence[str], list[tuple[str, ...]], list[Any]]


def _with_goals(name: str, recorded: Recorded, specs: Sequence[str], rounds: int) -> Table:
    """Return the table of codecs with goals, each compared with torch operations."""
    case = Case.of(recorded, VALUES)
    rows, figures, copies = [], [], []
    for spec in specs:
        ours = Ours(spec, case)
        sides: dict[str, Ours | Theirs] = {spec: ours}
        for whole, told in ((False, "tensor by tensor"), (True, "a model as one tensor")):
            if not whole or len(recorded.tensors.shapes) > 1:
                sides[f"  torch, {told}"] = Theirs(REFERENCES[spec](), case, ours.left.clone(), whole)
        rates, memcpy = measured(case, sides, rounds)
        copies.append(memcpy)
        rows += [_row(side, of_side, memcpy) for side, of_side in rates.items()]
        figures += _figures(f"{name} {spec}", rates, memcpy, GOALS.get((name, spec), {}))
        part = allocated(case, ours) / (4 * case.tensors.length)
        told = f"{name} {spec}: allocated by one more encoding"
        figures.append(figure(told, part, "of the input", goal=ALLOCATED, met=part <= ALLOCATED))
    title = f"{name}: {_told(case)}; GB/s, and in brackets to a memcpy of {statistics.median(copies):.1f} GB/s; medians"
    return title, HEADINGS, rows, figures


def _figures(name: str, rates: dict[str, Rates], memcpy: float, goals: dict[str, float]) -> list[Any]:
    """Return the figures of a codec, the first side, and of the sides it is compared with."""
    figures = []
    (_, ours), *theirs = (
        (side.strip(), {work: statistics.median(of_work) for work, of_work in of_side.items()})
        for side, of_side in rates.items()
    )
    for work, rate in ours.items():
        goal = goals.get(work)
        figures.append(figure(f"{name}: {work}", rate * memcpy, "GB/s", reference=memcpy))
        if goal:
            figures.append(figure(f"{name}: {work}", rate, "of a memcpy", goal=goal, met=rate >= goal))
        for side, of_side in theirs:
            faster = rate / of_side[work]
            times, met = (TIMES_TORCH, faster >= TIMES_TORCH) if goal else (None, None)
            figures.append(figure(f"{name}: {work}", faster, f"times {side}", goal=times, met=met))
    return figures


def _others(recorded: Recorded, values: int, rounds: int) -> Table:
    case = Case.of(recorded, values)
    rows, figures, copies = [], [], []
    for spec in OTHERS:
        rates, memcpy = measured(case, {spec: Ours(spec, case)}, rounds)
        copies.append(memcpy)
        rows.append(_row(spec, rates[spec], memcpy))
        figures += _figures(f"resnet20 {spec}", rates, memcpy, {})
    title = f"The others on resnet20: {_told(case)}; GB/s, and in brackets to a memcpy of "
    return f"{title}{statistics.median(copies):.1f} GB/s; medians", HEADINGS, rows, figures


def _sizes(model: str, recorded: Recorded) -> Table:
    """Return the table of sizes of 3LC with error feedback; normalisation tensors are not encoded."""
    kept = recorded.tensors.are_plain(1)
    counts = [count for count, plain in zip(recorded.tensors.counts, kept, strict=True) if not plain]
    dense = 8 * sum(map(trit_bytes, counts)) / sum(counts)
    rows = [("without zero-run encoding", f"{dense:.3f}", f"{32 / dense:.1f}", "")]
    figures = [figure(f"{model} 3lc without zero-run encoding: payload", dense, "bits per value")]
    for sparsity in SPARSITIES:
        spec = f"3lc:sparsity={sparsity:g},small=1"
        payload, whole = bits(recorded, parse(spec))
        rows.append((spec, f"{payload:.3f}", f"{32 / payload:.1f}", f"{whole:.1f}"))
        figures.append(figure(f"{model} {spec}: payload", payload, "bits per value"))
        figures.append(figure(f"{model} {spec}: frame", whole, "times smaller"))
    title = f"{model}: size of frames over {len(recorded.steps)} steps, with error feedback"
    return title, ("codec", "bits per value, payload", "times smaller", "whole frames, times smaller"), rows, figures


def _row(name: str, rates: Rates, memcpy: float) -> tuple[str, ...]:
    shown = []
    for work in WORKS:
        rate = statistics.median(rates[work]) if work in rates else None
        shown.append("" if rate is None else f"{rate * memcpy:.3g} ({rate:.2f})")
    return name, *shown


def _told(case: Case) -> str:
    return f"{case.tensors.length / MILLION:.0f} million values in {len(case.tensors.shapes):,} tensors"


if __name__ == "__main__":
    main()
