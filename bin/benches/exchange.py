"""Cost of exchanging models: the rate of pulls, secured or not, the slowdown of training steps, and memory.

bin/bench exchange            pulls of 8, 44 and 240 MB compared with other ways to move them; the same with checksums,
                              MACs and encryption; training steps while another process pulls; training with tau:10,
                              overlapped and blocking, and never, one peer per core; and on Linux the memory of a peer
                              (about 8 minutes)
bin/bench exchange --full     more rounds, and three runs of each
bin/bench exchange --only pulls|secured|served|training|memory
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from _memory import held
from _pulls import SIZES, apart
from _report import figure, report
from _runs import train
from _served import served

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]], list[dict[str, Any]]]
GOAL = 0.02
KINDS = (
    ("never", ("--policy", "never")),
    ("tau:10, overlapped", ("--policy", "tau:10")),
    ("tau:10, blocking", ("--policy", "tau:10", "--blocking")),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bin/bench exchange", description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=tuple(PARTS))
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--peers", type=int, default=max(2, os.cpu_count() or 2), help="default: one per core")
    arguments = parser.parse_args()
    tables = []
    for name, measure in PARTS.items():
        if arguments.only in (None, name):
            tables.append(measure(arguments))
    if arguments.json:
        print(json.dumps({"figures": [one for *_, figures in tables for one in figures]}, indent=2))
        return
    for table in tables:
        report(*table)


def _pulls(arguments: argparse.Namespace) -> Table:
    rows, figures = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for size in SIZES:
            more = apart("pulls", size, 25 if arguments.full else 9, Path(scratch))
            rows += [tuple(row) for row in more[0]]
            figures += more[1]
    row, one = apart("questions")
    headings = ("model", "way", "GB/s", "of its reference", "goal")
    title = (
        f"One pull from another process of this machine, {os.cpu_count()} cores, medians of rounds in turn;"
        " of one version again and again, where it does not say new"
    )
    return title, headings, [*rows, tuple(row)], [*figures, one]


def _secured(arguments: argparse.Namespace) -> Table:
    rows, figures = [], []
    for size in SIZES[1:]:
        with tempfile.TemporaryDirectory() as scratch:
            more = apart("secured", size, 25 if arguments.full else 9, Path(scratch))
        rows += [tuple(row) for row in more[0]]
        figures += more[1]
    headings = ("model", "way", "GB/s", "of its reference", "goal")
    return "Cost of checksums, MACs and encryption of a model, medians of rounds in turn", headings, rows, figures


def _served(arguments: argparse.Namespace) -> Table:
    return served(arguments.full)


def _training(arguments: argparse.Namespace) -> Table:
    rows, figures = [], []
    with tempfile.TemporaryDirectory() as scratch:
        measured = {name: _measure(Path(scratch), options, arguments) for name, options in KINDS}
    undisturbed = measured["never"][1]
    for name, (blocked, seconds, measuring, pulls) in measured.items():
        per_step = seconds / arguments.iterations * 1e3
        rows.append((name, f"{pulls:.0f}", f"{blocked:.2%}", f"{measuring:.2%}", f"{per_step:.2f}"))
        goal = GOAL if name == "tau:10, overlapped" else None
        met = blocked < GOAL if goal else None
        figures.append(figure(f"{name}: blocked", blocked, "of wall time", goal=goal, met=met))
        figures.append(figure(f"{name}: training", seconds, "s", reference=undisturbed))
    headings = ("policy", "pulls per peer", "blocked", "measuring, recording", "ms per iteration")
    title = f"lenet, {arguments.peers} peers on {os.cpu_count()} cores, {arguments.iterations} iterations, medians"
    return title, headings, rows, figures


def _memory(arguments: argparse.Namespace) -> Table:
    return held()


def _measure(
    scratch: Path, options: tuple[str, ...], arguments: argparse.Namespace
) -> tuple[float, float, float, float]:
    """Return medians over runs and peers: blocked share, seconds of training, share of measuring, pulls."""
    blocked, seconds, measuring, pulls = [], [], [], []
    for run in range(3 if arguments.full else 1):
        common = ("--iterations", str(arguments.iterations), "--eval-interval", "0", "--seed", str(run))
        one = train(scratch, "run", arguments.peers, *options, *common)
        for rank in range(arguments.peers):
            wall = float(one.train_seconds[rank] or 0.0)
            seconds.append(wall)
            blocked.append(float(one.blocked_seconds[rank] or 0.0) / wall)
            measuring.append(float(one.overhead_seconds[rank] or 0.0) / wall)
            pulls.append(float(one.retrievals[rank] or 0.0))
    return tuple(statistics.median(values) for values in (blocked, seconds, measuring, pulls))  # type: ignore[return-value]


PARTS = {"pulls": _pulls, "secured": _secured, "served": _served, "training": _training}
if sys.platform == "linux":  # only Linux reports a process's share of shared memory
    PARTS["memory"] = _memory


if __name__ == "__main__":
    main()
