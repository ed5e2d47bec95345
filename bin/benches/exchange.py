"""Cost of exchanging models: the rate of pulls, secured or not, the slowdown of training steps, and memory.

bin/bench exchange            pulls of 8, 44 and 240 MB compared with other ways to move them; the same with checksums,
                              MACs and encryption; training steps while another process pulls; training with tau:10,
                              overlapped and blocking, and never, one peer per core; and on Linux the memory of a peer
                              (about 8 minutes)
bin/bench exchange --full     more rounds, and three runs of each
bin/bench exchange --only pulls|secured|served|training|memory
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path

import resident_memory
from _bench.cli import Given, bench
from _bench.peers import train
from _bench.tables import Table, known
from _pulls import pulls, secured
from _served import served

GOAL = 0.02
KINDS = {
    "never": ("--policy", "never"),
    "tau:10, overlapped": ("--policy", "tau:10"),
    "tau:10, blocking": ("--policy", "tau:10", "--blocking"),
}
MB = 1e6
CASES = ((2, 40), (4, 40), (2, 240))
"""Number of peers and MB per model; the peers are processes on this machine that pull from each other."""
TRANSPORTS = ("tcp", "shm")
ITERATIONS, SAMPLES = 60, 30
MODELS, FIXED = 3, 64
"""Limit beside the model: two snapshots, one receive buffer, and a number of MB."""


def training(given: Given) -> Table:
    """Return the table of training with and without pulls; medians over runs and peers."""
    headings = ("policy", "pulls per peer", "blocked", "measuring, recording", "ms per iteration")
    title = f"lenet, {given.peers} peers on {os.cpu_count()} cores, {given.iterations} iterations, medians"
    table, undisturbed = Table(title, headings), None
    for name, options in KINDS.items():
        found: list[tuple[float, ...]] = []
        for seed in range(given.of(1, 1, 3)):
            common = ("--iterations", str(given.iterations), "--eval-interval", "0", "--seed", str(seed))
            with tempfile.TemporaryDirectory() as scratch:
                one = train(Path(scratch), given.peers, *options, *common)
            rows = (one.train_seconds, one.blocked_seconds, one.overhead_seconds, one.retrievals)
            found += zip(*map(known, rows), strict=True)
        seconds, pulled = (statistics.median(row[place] for row in found) for place in (0, 3))
        blocked, measuring = (statistics.median(row[place] / row[0] for row in found) for place in (1, 2))
        undisturbed = undisturbed or seconds
        step = seconds / given.iterations * 1e3
        table.row(name, f"{pulled:.0f}", f"{blocked:.2%}", f"{measuring:.2%}", f"{step:.2f}")
        goal = GOAL if name == "tau:10, overlapped" else None
        table.figure(f"{name}: blocked", blocked, "of wall time", most=goal)
        table.figure(f"{name}: training", seconds, "s", reference=undisturbed)
    return table


def memory(given: Given) -> Table:
    """Return the memory of a peer beside its model, when it starts a pull as soon as the last one is mixed."""
    headings = ("model", "way", "peers", "pulls per peer", "MB in addition", f"without {MODELS} models", "at most")
    table = Table("Peak memory of a peer beside its model, mean of peers, under tau:1", headings)
    for peers, megabytes in CASES:
        for transport in TRANSPORTS:
            with tempfile.TemporaryDirectory() as scratch:
                script = (resident_memory.__file__, scratch, str(int(megabytes * MB) // 4000))
                numbers = (str(ITERATIONS), str(SAMPLES), "0")
                options = ("--policy", "tau:1", "--transport", transport, "--no-save-model")
                one = train(Path(scratch), peers, *options, *script, *numbers)
                grown = resident_memory.growth(resident_memory.told(Path(scratch), peers)) / MB
            pulled, goal = statistics.fmean(known(one.retrievals)), MODELS * megabytes + FIXED
            shown = (f"{pulled:.0f}", f"{grown:.0f}", f"{grown - MODELS * megabytes:.0f}", goal)
            table.row(f"{megabytes} MB", transport, peers, *shown)
            name = f"{megabytes} MB over {transport}, {peers} peers: memory beside the model"
            table.figure(name, grown, "MB", most=goal)
    return table


PARTS = {"pulls": pulls, "secured": secured, "served": served, "training": training}
if sys.platform == "linux":  # only Linux reports a process's share of shared memory
    PARTS["memory"] = memory
OPTIONS = {
    "--iterations": {"type": int, "default": 2000},
    "--peers": {"type": int, "default": max(2, os.cpu_count() or 2), "help": "default: one per core"},
}


if __name__ == "__main__":
    bench(__file__, __doc__, PARTS, OPTIONS, smoke=("pulls", "secured", "served"))
