"""Retrievals and accuracy, or loss of text, of the policies, for the tables of docs/figures.md.

bin/bench policies                  one seed of each policy, lenet on iid images (about 5 minutes on 2 cores)
bin/bench policies --full           five seeds, iid and Dirichlet 0.3 (about an hour)
bin/bench policies --task text      the transformer (about 25 minutes; --full: iid and contiguous, half a day)

    --only ROW         rows in addition to tau:10; it may be repeated
    --partition, --seeds, --iterations    other than the above
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _report import figure, report
from _runs import train
from _sums import interval

from gossipx.metrics.summary import Summary
from gossipx.tasks.presets import PRESETS


@dataclass(frozen=True)
class Task:
    """A task that the policies train.

    Attributes:
        model: its model.
        iterations: of each peer.
        partitions: of its data; the first one without --full.
        measured: what the summaries are judged by, ``accuracy`` or ``loss``.
    """

    model: str
    iterations: int
    partitions: tuple[str, str]
    measured: str


TASKS = {
    "fashion-mnist": Task("lenet", 3000, ("iid", "dirichlet:alpha=0.3"), "accuracy"),
    "text": Task("transformer", 800, ("iid", "contiguous"), "loss"),
}
PAPERS = "adaptive:threshold={threshold:g}"
"""The paper's rule with the threshold of the model's preset."""
MOMENTUM = ("--outer", "momentum:0.6")
ALONE = ("tau:10", "tau:50", "tau:100", PAPERS, "adaptive", "travel", "drift", "never")
KINDS = {
    **{policy: ("--policy", policy) for policy in ALONE},
    "tau:50, momentum:0.6": ("--policy", "tau:50", *MOMENTUM),
    "auto:budget=2%, momentum:0.6": ("--policy", "auto:budget=2%", *MOMENTUM),
    **{f"waves, {policy}": ("--exchange", "waves", "--policy", policy) for policy in ("tau:100", "tau:400")},
}
"""Options by the name of a row."""
GOALS = {PAPERS: (0.90, 0.010), "travel": (0.85, 0.005)}
"""The least share of retrievals saved, and the most accuracy lost, of LeNet on iid images."""
PEERS = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bin/bench policies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--task", choices=list(TASKS), default="fashion-mnist")
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--seeds", type=int, choices=range(1, 6), help="default: 1, with --full 5")
    parser.add_argument("--partition", help="only this one")
    parser.add_argument("--only", action="append", choices=list(KINDS), help="rows in addition to tau:10; default: all")
    given = parser.parse_args()
    task = TASKS[given.task]
    iterations = given.iterations or task.iterations
    seeds = range(given.seeds or (5 if given.full else 1))
    partitions = (given.partition,) if given.partition else task.partitions if given.full else task.partitions[:1]
    kinds = [kind for kind in KINDS if not given.only or kind in ("tau:10", *given.only)]
    figures: list[Any] = []
    for partition in partitions:
        common = ("--task", given.task, "--partition", partition, "--iterations", str(iterations))
        with tempfile.TemporaryDirectory() as scratch:
            runs = {kind: _train(Path(scratch), task, KINDS[kind], common, seeds) for kind in kinds}
        rows, found = _compared(task, partition, runs)
        figures += found
        if not given.json:
            title = f"{partition}: {task.model}, {PEERS} peers, {iterations} iterations, {len(seeds)} seeds"
            own = f"own {task.measured}"
            headings = ("policy", "models", "saved", "MB", f"{own}, before finish", f"{own}, after", "of the average")
            report(f"{title}; models and MB per peer", headings, rows, found)
    if given.json:
        print(json.dumps({"figures": figures}, indent=2))


def _train(scratch: Path, task: Task, kind: tuple[str, ...], common: tuple[str, ...], seeds: range) -> list[Summary]:
    options = [option.format(threshold=PRESETS[task.model].threshold) for option in (*kind, *common)]
    return [train(scratch, "run", PEERS, *options, "--eval-interval", "0", "--seed", str(seed)) for seed in seeds]


def _compared(task: Task, partition: str, runs: dict[str, list[Summary]]) -> tuple[list[Any], list[Any]]:
    """Return the rows of the table and the figures."""
    rows, figures = [], []
    key, tau = f"test_{task.measured}", runs["tau:10"]
    retrievals = _mean(tau, "retrievals")
    sign = 1 if task.measured == "accuracy" else -1
    for kind, summaries in runs.items():
        pulls, own = _mean(summaries, "retrievals"), _mean(summaries, key)
        saved, lost = 1 - pulls / retrievals, sign * (_mean(tau, key) - own)
        ends = [statistics.fmean(getattr(one, key)) for one in summaries]
        half = f" ± {interval(ends):.4f}" if len(ends) > 1 else ""
        averaged = statistics.fmean(getattr(one, f"consensus_{task.measured}") or 0.0 for one in summaries)
        rows.append(
            (
                kind if "," in kind else summaries[0].policy,
                f"{pulls:.1f}",
                f"{saved:.1%}",
                f"{_mean(summaries, 'bytes_received') / 1e6:.1f}",
                f"{_mean(summaries, f'{key}_before_finish'):.4f}",
                f"{own:.4f}{half}",
                f"{averaged:.4f}",
            )
        )
        goals = GOALS.get(kind) if task.model == "lenet" and partition == "iid" else None
        name = f"{partition} {kind.format(threshold=PRESETS[task.model].threshold)}"
        figures.append(figure(f"{name} retrievals per peer", pulls, "", reference=retrievals))
        figures.append(_goal(f"{name} retrievals saved", saved, "of tau:10's", goals and goals[0], float.__ge__))
        figures.append(_goal(f"{name} {task.measured} worse", lost, "than tau:10", goals and goals[1], float.__le__))
    return rows, figures


def _goal(name: str, value: float, unit: str, goal: float | None, meets: Callable[[float, float], bool]) -> Any:
    return figure(name, value, unit, goal=goal, met=None if goal is None else meets(value, goal))


def _mean(summaries: list[Summary], key: str) -> float:
    """Return the mean of a per-peer figure over peers and seeds."""
    return statistics.fmean(statistics.fmean(getattr(one, key)) for one in summaries)


if __name__ == "__main__":
    main()
