"""Effect of codecs on peers that pull each other's models: own and averaged accuracy, and bytes per model.

bin/bench models            one seed of tau:10, some codecs (about 3 minutes on 2 cores)
bin/bench models --full     the paper's rule, travel and tau:10, all codecs, three seeds (about an hour and a half)

    --keep FILE             results, one line per run; a run in the file is not repeated, even if the code has changed
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _cached_runs import CachedRuns, Job
from _report import figure, report
from _runs import train
from _sums import interval

NONE = "none"
CODECS: dict[str, tuple[str, ...]] = {
    NONE: (),
    "3lc:sparsity=1,residual=0.3": (),
    "3lc:sparsity=1,residual=0.1": (),
    "3lc:sparsity=1": (),
    "3lc:sparsity=1, choco 0.2": ("--codec", "3lc:sparsity=1", "--mixing", "choco:gamma=0.2"),
    "3lc:sparsity=1, choco 0.5": ("--codec", "3lc:sparsity=1", "--mixing", "choco:gamma=0.5"),
    "3lc:sparsity=1,residual=0.3, choco 0.5": (
        "--codec",
        "3lc:sparsity=1,residual=0.3",
        "--mixing",
        "choco:gamma=0.5",
    ),
    "topk:ratio=0.05, choco 0.2": ("--codec", "topk:ratio=0.05", "--mixing", "choco:gamma=0.2"),
    "onebit, choco 0.2": ("--codec", "onebit", "--mixing", "choco:gamma=0.2"),
    "efsignsgd, choco 0.5": ("--codec", "efsignsgd", "--mixing", "choco:gamma=0.5"),
    "efsignsgd, choco 0.2": ("--codec", "efsignsgd", "--mixing", "choco:gamma=0.2"),
    "int8": (),
    "int8, no references": ("--codec", "int8", "--references", "0"),
    "bf16, no references": ("--codec", "bf16", "--references", "0"),
    "qsgd:levels=7": (),
    "stochastic3": (),
    "stochastic3, choco 0.2": ("--codec", "stochastic3", "--mixing", "choco:gamma=0.2"),
    "moniqua:bits=8,theta=0.1": ("--codec", "moniqua:bits=8,theta=0.1", "--references", "0"),
    "moniqua:bits=4,theta=0.05": ("--codec", "moniqua:bits=4,theta=0.05", "--references", "0"),
}
"""Options by the name of a row; by default, the name is the codec's spec."""
SOME = (NONE, "3lc:sparsity=1,residual=0.3", "3lc:sparsity=1", "3lc:sparsity=1, choco 0.2", "efsignsgd, choco 0.2")
POLICIES = ("tau:10", "travel", "adaptive:threshold=0.025")
PEERS = 4
GOALS = {"3lc:sparsity=1,residual=0.3": 0.005}
"""Accuracy that a codec without loss may lose: less than the difference between two seeds of one codec."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bin/bench models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--seeds", type=int, choices=range(1, 6), help="default: 1, with --full 3")
    parser.add_argument(
        "--policy", action="append", help="default: tau:10, with --full travel and the paper's rule, too"
    )
    parser.add_argument("--only", action="append", choices=list(CODECS), help="rows in addition to none; default: all")
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    names = [name for name in CODECS if name in (NONE, *(given.only or (CODECS if given.full else SOME)))]
    seeds, kept = given.seeds or (3 if given.full else 1), CachedRuns(given.keep)
    figures: list[Any] = []
    for policy in given.policy or (POLICIES if given.full else POLICIES[:1]):
        wanted = jobs(policy, names, given.iterations, seeds)
        kept.complete(wanted, run, 1)
        title = f"{policy}: LeNet, {PEERS} peers, iid, {given.iterations} iterations, {seeds} seeds, 10,000 images"
        made = {name: [kept[job] for job in wanted if job["row"] == name] for name in names}
        rows, found = table(policy, made)
        figures += found
        if not given.json:
            report(title, HEADINGS, rows, found)
    if given.json:
        print(json.dumps({"figures": figures}, indent=2))


def jobs(policy: str, names: Sequence[str], iterations: int, seeds: int) -> list[Job]:
    """Return the jobs, ordered by seed."""
    return [
        {"policy": policy, "row": name, "iterations": iterations, "seed": seed}
        for seed in range(seeds)
        for name in names
    ]


def run(job: Job) -> dict[str, float]:
    """Run a job. Return the number of ``models`` mixed per peer, the ``bytes`` of each on the wire, and the accuracy of
    the peers' ``own`` models before the finish and of the ``averaged`` model."""
    codec = CODECS[job["row"]] or ("--codec", job["row"])
    options = ("--policy", job["policy"], *codec, "--iterations", str(job["iterations"]), "--eval-interval", "0")
    with tempfile.TemporaryDirectory() as scratch:
        summary = train(Path(scratch), "run", PEERS, *options, "--seed", str(job["seed"]))
    models = sum(_known(summary.retrievals))
    return {
        "models": models / PEERS,
        "bytes": sum(_known(summary.bytes_received)) / max(models, 1),
        "own": statistics.fmean(_known(summary.test_accuracy_before_finish)),
        "averaged": summary.consensus_accuracy or 0.0,
    }


HEADINGS = ("codec", "models per peer", "kB per model", "times fewer", "own, before finish", "less none", "averaged")


def table(policy: str, runs: dict[str, list[dict[str, float]]]) -> tuple[list[tuple[str, ...]], list[Any]]:
    """Return the rows and figures of one policy.

    Args:
        policy: the policy.
        runs: results by the codec's row, one per seed; must include :data:`NONE`.
    """
    rows, figures = [], []
    plain = runs[NONE]
    whole = _mean(plain, "bytes")
    for name, made in runs.items():
        less = [one["own"] - other["own"] for one, other in zip(made, plain, strict=True)]
        lost, half, size = -statistics.fmean(less), interval(less), _mean(made, "bytes")
        shown = f"{-lost:+.4f} ± {half:.4f}" if len(less) > 1 else f"{-lost:+.4f}"
        rows.append(
            (
                name,
                f"{_mean(made, 'models'):.0f}",
                f"{size / 1e3:.1f}",
                f"{whole / size:.1f}",
                f"{_mean(made, 'own'):.4f}",
                "" if name == NONE else shown,
                f"{_mean(made, 'averaged'):.4f}",
            )
        )
        figures.append(figure(f"{policy}, {name}: bytes per model", size, "bytes", reference=whole))
        goal = GOALS.get(name)
        met = None if goal is None else lost <= goal
        figures.append(figure(f"{policy}, {name}: accuracy lost", lost, "of 1", goal=goal, met=met))
    return rows, figures


def _mean(runs: Sequence[dict[str, float]], key: str) -> float:
    return statistics.fmean(one[key] for one in runs)


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


if __name__ == "__main__":
    main()
