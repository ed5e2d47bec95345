"""What codecs make of peers that pull each other's models: own and averaged accuracy, and bytes a model.

bin/bench models            one seed of tau:10, some codecs (about 4 minutes on 2 cores)
bin/bench models --full     adaptive, travel and tau:10, all codecs, three seeds (about an hour)
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _report import figure, report
from _runs import train
from _sums import interval

from gossipx.metrics.summary import Summary

NONE = "none"
CODECS: dict[str, tuple[str, ...]] = {
    NONE: (),
    "3lc:sparsity=1,residual=0.3": (),
    "3lc:sparsity=1,residual=0.1": (),
    "3lc:sparsity=1": (),
    "3lc:sparsity=1, choco 0.2": ("--codec", "3lc:sparsity=1", "--mixing", "choco:gamma=0.2"),
    "3lc:sparsity=1, choco 0.5": ("--codec", "3lc:sparsity=1", "--mixing", "choco:gamma=0.5"),
    "3lc:sparsity=1.75, choco 0.1": ("--codec", "3lc:sparsity=1.75", "--mixing", "choco:gamma=0.1"),
    "3lc:sparsity=1,residual=0.3, choco 0.5": (
        "--codec",
        "3lc:sparsity=1,residual=0.3",
        "--mixing",
        "choco:gamma=0.5",
    ),
    "topk:ratio=0.05, choco 0.2": ("--codec", "topk:ratio=0.05", "--mixing", "choco:gamma=0.2"),
    "powersgd:rank=2, choco 0.2": ("--codec", "powersgd:rank=2", "--mixing", "choco:gamma=0.2"),
    "efsignsgd, choco 0.2": ("--codec", "efsignsgd", "--mixing", "choco:gamma=0.2"),
    "int8": (),
    "int8, no references": ("--codec", "int8", "--references", "0"),
    "bf16, no references": ("--codec", "bf16", "--references", "0"),
    "qsgd:levels=7, no references": ("--codec", "qsgd:levels=7", "--references", "0"),
    "natural, no references": ("--codec", "natural", "--references", "0"),
    "moniqua:bits=8,theta=0.1": ("--codec", "moniqua:bits=8,theta=0.1", "--references", "0"),
    "moniqua:bits=4,theta=0.1": ("--codec", "moniqua:bits=4,theta=0.1", "--references", "0"),
}
"""Options by the name of a row; where there are none, the name is the codec's."""
SOME = (NONE, "3lc:sparsity=1,residual=0.3", "3lc:sparsity=1", "3lc:sparsity=1, choco 0.2", "int8, no references")
POLICIES = ("tau:10", "travel", "adaptive")
PEERS = 4
GOALS = {"3lc:sparsity=1,residual=0.3": 0.005}
"""How much accuracy may be lost, of those that are to lose nothing: less than two seeds of one codec differ."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="bin/bench models", description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--seeds", type=int, choices=range(1, 6), help="default: 1, with --full 3")
    parser.add_argument("--policy", action="append", help="default: tau:10, with --full travel and adaptive, too")
    parser.add_argument("--only", action="append", choices=list(CODECS), help="rows beside none; default: all")
    given = parser.parse_args()
    names = [name for name in CODECS if name in (NONE, *(given.only or (CODECS if given.full else SOME)))]
    seeds = range(given.seeds or (3 if given.full else 1))
    figures: list[Any] = []
    for policy in given.policy or (POLICIES if given.full else POLICIES[:1]):
        runs = {name: [_train(policy, name, given.iterations, seed) for seed in seeds] for name in names}
        title = f"{policy}: LeNet, {PEERS} peers, iid, {given.iterations} iterations, {len(seeds)} seeds, 10,000 images"
        rows, found = table(policy, runs)
        figures += found
        if not given.json:
            report(title, HEADINGS, rows, found)
    if given.json:
        print(json.dumps({"figures": figures}, indent=2))


def _train(policy: str, name: str, iterations: int, seed: int) -> Summary:
    codec = CODECS[name] or ("--codec", name)
    options = ("--policy", policy, *codec, "--iterations", str(iterations), "--eval-interval", "0")
    with tempfile.TemporaryDirectory() as scratch:
        return train(Path(scratch), "run", PEERS, *options, "--seed", str(seed))


HEADINGS = ("codec", "models a peer", "kB a model", "times fewer", "own, before finish", "less none", "averaged")


def table(policy: str, runs: dict[str, Sequence[Summary]]) -> tuple[list[tuple[str, ...]], list[Any]]:
    """Rows and figures of one policy.

    Args:
        runs: by the codec's row, a run a seed; :data:`NONE` is there.
    """
    rows, figures = [], []
    whole = bytes_a_model(runs[NONE])
    plain = [own(one) for one in runs[NONE]]
    for name, summaries in runs.items():
        size = bytes_a_model(summaries)
        accuracy = [own(one) for one in summaries]
        less = [one - other for one, other in zip(accuracy, plain, strict=True)]
        half = interval(less)
        averaged = statistics.fmean(one.consensus_accuracy or 0.0 for one in summaries)
        lost = -statistics.fmean(less)
        rows.append(
            (
                name,
                f"{statistics.fmean(statistics.fmean(_known(one.retrievals)) for one in summaries):.0f}",
                f"{size / 1e3:.1f}",
                f"{whole / size:.1f}",
                f"{statistics.fmean(accuracy):.4f}",
                "" if name == NONE else f"{-lost:+.4f}" + (f" ± {half:.4f}" if half == half else ""),
                f"{averaged:.4f}",
            )
        )
        figures.append(figure(f"{policy}, {name}: bytes a model", size, "bytes", reference=whole))
        goal = GOALS.get(name)
        met = None if goal is None else lost <= goal
        figures.append(figure(f"{policy}, {name}: accuracy lost", lost, "of 1", goal=goal, met=met))
    return rows, figures


def own(one: Summary) -> float:
    """Mean accuracy of the peers' own models, before the finish."""
    return statistics.fmean(_known(one.test_accuracy_before_finish))


def bytes_a_model(summaries: Sequence[Summary]) -> float:
    """On the wire, of each model that was mixed."""
    models = sum(sum(_known(one.retrievals)) for one in summaries)
    return sum(sum(_known(one.bytes_received)) for one in summaries) / models


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


if __name__ == "__main__":
    main()
