"""Memory that the peers of a run hold: a training script that reports it, and the evaluation of its reports.

Started by ``gossipx run ... resident_memory.py FOLDER WIDE ITERATIONS SAMPLES MIXES``; the model has WIDE · 1000
weights, and each peer trains until it has mixed MIXES times.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gossipx

MOST_STEPS = 200_000
"""Until all peers are there and have mixed; ends a run in which one is missing."""


def told(folder: Path, peers: int) -> list[dict[str, Any]]:
    """By rank: bytes before it joined, and those that all peers held at each sample."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(peers)]


def growth(figures: list[dict[str, Any]]) -> float:
    """Return the peak of the memory that all peers held beyond that before they joined, in bytes per peer."""
    most = max(max(one["seen"]) for one in figures) - sum(one["before"] for one in figures)
    return float(most / len(figures))


def resident(process: str) -> int:
    """Bytes of one process.

    Proportional: memory that peers of one machine share counts once, not with each of them. No files: libraries.
    """
    lines = [line.split() for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()]
    return sum(1024 * int(words[1]) for words in lines if words[0] in ("Pss_Anon:", "Pss_Shmem:"))


def main() -> None:
    """Train, and tell the folder what is held."""
    folder, wide, iterations, samples, mixes = Path(sys.argv[1]), *map(int, sys.argv[2:])
    model = nn.Linear(wide, 1000, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    before, seen = resident("self"), []
    with gossipx.join(model, optimizer) as peer:
        written = folder / f"{peer.rank}.new"
        written.write_text(str(os.getpid()))
        written.replace(folder / f"{peer.rank}.process")
        places = [folder / f"{rank}.process" for rank in range(peer.size)]
        while not all(place.exists() for place in places) and peer.iteration < MOST_STEPS:
            optimizer.step()
        processes = [place.read_text() for place in places]
        while peer.iteration < iterations or (peer.mixes < mixes and peer.iteration < MOST_STEPS):
            optimizer.step()
            if peer.iteration % (iterations // samples) == 0:
                seen.append(sum(map(resident, processes)))  # all at one time: what is shared moves from one to another
    (folder / f"{peer.rank}.json").write_text(json.dumps({"before": before, "seen": seen}))


if __name__ == "__main__":
    main()
