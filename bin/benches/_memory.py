"""Memory of a peer beside its model, when it starts a pull as soon as the last one is mixed."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import resident_memory
from _report import figure
from _runs import train

MB = 1e6
CASES = ((2, 40), (4, 40), (2, 240))
"""Number of peers and MB per model; the peers are processes on this machine that pull from each other."""
TRANSPORTS = ("tcp", "shm")
ITERATIONS, SAMPLES = 60, 30
MODELS, FIXED = 3, 64
"""Limit beside the model: two snapshots, one receive buffer, and a number of MB."""


def held() -> tuple[str, tuple[str, ...], list[Any], list[Any]]:
    """Return title, headings, rows and figures."""
    rows, figures = [], []
    for peers, megabytes in CASES:
        for transport in TRANSPORTS:
            pulls, grown = _run(peers, megabytes, transport)
            goal = MODELS * megabytes + FIXED
            fixed = grown - MODELS * megabytes
            shown = (f"{pulls:.0f}", f"{grown:.0f}", f"{fixed:.0f}", f"{goal}")
            rows.append((f"{megabytes} MB", transport, str(peers), *shown))
            name = f"{megabytes} MB over {transport}, {peers} peers: memory beside the model"
            figures.append(figure(name, grown, "MB", goal=goal, met=grown <= goal))
    headings = ("model", "way", "peers", "pulls per peer", "MB in addition", f"without {MODELS} models", "at most")
    title = "Peak memory of a peer beside its model, mean of peers, under tau:1"
    return title, headings, rows, figures


def _run(peers: int, megabytes: int, transport: str) -> tuple[float, float]:
    """Return pulls per peer, and the MB that the run adds to a process that has trained before."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wide = str(int(megabytes * MB) // 4000)
        script = (resident_memory.__file__, scratch, wide, str(ITERATIONS), str(SAMPLES), "0")
        one = train(folder, "run", peers, "--policy", "tau:1", "--transport", transport, "--no-save-model", *script)
        grown = resident_memory.growth(resident_memory.told(folder, peers)) / MB
        return statistics.fmean(value or 0.0 for value in one.retrievals), grown
