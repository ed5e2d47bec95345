"""Runs with checkpoints that are killed and resumed, for the tests of ``gossipx run --resume``."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from gossipx.checkpoint import MANIFEST, Store
from gossipx.metrics import summary
from runs import LONG, Folder, Process, Run

BRIEF = ("--batch-size", "8", "--eval-interval", "0", "--peer-timeout", "20")


def store(here: Folder, rank: int, name: str = "x") -> Store:
    return Store(here.path / name / f"peer-{rank:02d}" / "checkpoints")


def wait_for(here: Folder, iteration: int, run: Process) -> None:
    """Wait until all peers have a checkpoint of this iteration or a later one."""
    by = time.monotonic() + LONG
    ranks = range(len(here.names))
    while not all(any(int(p.parent.name) >= iteration for p in manifests(here, rank)) for rank in ranks):
        assert time.monotonic() < by, run.end(0).shown
        os.sched_yield()


def manifests(here: Folder, rank: int) -> list[Path]:
    return list(store(here, rank).directory.glob(f"*/{MANIFEST}"))


def kill(run: Process) -> None:
    """Send SIGKILL to the run and all of its peers at once."""
    run.kill()
    run.end()


def resume(here: Folder, *options: str | Path, name: str | Path = "x") -> Process:
    return here.gossipx("run", "--logdir", here.path, "--resume", name, *options)


def resumed(here: Folder, *options: str | Path, name: str | Path = "x") -> Run:
    return Run(here.path / name, resume(here, *options, name=name).end(code=0))


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def kept(here: Folder) -> list[int | None]:
    """Return the iteration of each peer's newest checkpoint."""
    return [store(here, rank).find() for rank in range(len(here.names))]


def check_stopped(here: Folder, output: str) -> list[int]:
    """Check what a run that was stopped left behind; return each peer's iteration."""
    figures = summary.read(here.path / "x")
    found = [one for one in kept(here) if one is not None]
    assert len(found) == len(here.names) and min(found) > 0
    assert figures.stopped == here.names and figures.lost == []
    assert figures.iterations == max(found)
    assert None not in figures.retrievals and figures.test_accuracy == [None] * len(found)
    span = str(found[0]) if len(set(found)) == 1 else f"{min(found)} to {max(found)}"
    (line,) = [line for line in output.splitlines() if line.startswith("stopped")]
    assert line == f"stopped at {span}; continue with: gossipx run --resume {here.path / 'x'}"
    assert all((here.path / "x" / f"peer-{rank:02d}" / "model.safetensors").exists() for rank in range(len(found)))
    return found
