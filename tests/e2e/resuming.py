"""Runs with checkpoints that are killed and resumed, for the tests of ``gossipx run --resume``."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from gossipx.checkpoint import Store
from gossipx.checkpoint.store import MANIFEST
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
    return here.start("-m", "gossipx", "run", "--logdir", here.path, "--resume", name, *options)


def resumed(here: Folder, *options: str | Path, name: str | Path = "x") -> Run:
    ended = resume(here, *options, name=name).end()
    assert ended.code == 0 and "Traceback" not in ended.output + ended.errors, ended.shown
    return Run(here.path / "x", ended)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
