"""What a peer holds in memory beside its model, when it pulls whenever its last pull is mixed."""

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
"""Peers, and MB a model; whole processes on this machine, all of which pull from each other."""
TRANSPORTS = ("tcp", "shm")
ITERATIONS, SAMPLES = 60, 30
MODELS, FIXED = 3, 64
"""Beside the model: two snapshots, one receive buffer, and MB."""


def held() -> tuple[str, tuple[str, ...], list[Any], list[Any]]:
    """Title, headings, rows and figures."""
    rows, figures = [], []
    for peers, megabytes in CASES:
        for transport in TRANSPORTS:
            pulls, grown = _run(peers, megabytes, transport)
            goal = MODELS * megabytes + FIXED
            fixed = grown - MODELS * megabytes
            shown = (f"{pulls:.0f}", f"{grown:.0f}", f"{fixed:.0f}", f"{goal}")
            rows.append((f"{megabytes} MB", transport, str(peers), *shown))
            name = f"{megabytes} MB over {transport}, {peers} peers: held beside the model"
            figures.append(figure(name, grown, "MB", goal=goal, met=grown <= goal))
    headings = ("model", "way", "peers", "pulls a peer", "MB beside it", f"without {MODELS} models", "at most")
    title = "What a peer holds in memory beside its model: the most at one time, mean of peers, under tau:1"
    return title, headings, rows, figures


def _run(peers: int, megabytes: int, transport: str) -> tuple[float, float]:
    """Pulls a peer, and MB that the run has added to a process that trained before."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wide = str(int(megabytes * MB) // 4000)
        script = (resident_memory.__file__, scratch, wide, str(ITERATIONS), str(SAMPLES))
        one = train(folder, "run", peers, "--policy", "tau:1", "--transport", transport, "--no-save-model", *script)
        grown = resident_memory.growth(resident_memory.told(folder, peers)) / MB
        return statistics.fmean(value or 0.0 for value in one.retrievals), grown
