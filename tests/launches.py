"""Runs of small scripts in place of peers, without torch and sockets, for the tests of ``gossipx run``'s parent."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from gossipx.launch.run.processes import launch
from gossipx.launch.start import HostsFile
from gossipx.settings import files as config_files

Run = Callable[..., int]
Capture = pytest.CaptureFixture[str]

NAMES = [f"localhost:{29400 + rank}" for rank in range(4)]
DEADLINE = 120.0
"""Seconds after which a process that should have ended long ago fails the test."""

PRELUDE = f"""\
import contextlib, json, os, signal, sys
from pathlib import Path

signal.alarm({DEADLINE:.0f})  # ends a process that outlives a failed test
here = Path(__file__).parent
rank = int(os.environ["GOSSIPX_RANK"])
told = int(os.environ["GOSSIPX_PROGRESS_FD"])

def tell(**word):
    os.write(told, json.dumps(word).encode() + b"\\n")

def await_end(pid):
    # Returns once "gossipx run" has noticed the end of another of its peers: until then it is a zombie.
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pid, 0)

def wait():
    while True:
        signal.pause()

def stop_run(number):
    # Sends a signal to "gossipx run", whose third peer this is, once all can receive what it passes on.
    (here / f"ready-{{rank}}").touch()
    if rank == 2:
        while not all((here / f"ready-{{other}}").exists() for other in range(3)):
            pass
        os.kill(os.getppid(), number)
    wait()

def train(step=5):
    tell(state="train", step=step, iterations=10, loss=0.5, accuracy=None, retrievals=rank, bytes=100 * rank)

def report(rank):
    return {{
        "retrievals": 10 + rank, "bytes_received": 1000 * rank, "finish_bytes": 7, "test_accuracy": 0.5 + rank / 8,
        "test_accuracy_before_finish": 0.25, "consensus_distance": 1.5, "train_seconds": 4.0, "blocked_seconds": 1.0,
        "overhead_seconds": 0.5, "skipped": 2, "failed": 1, "poisoned": 0, "corrupted": 0, "strangers": 0,
        "expiry_warnings": 0, "suspicions": 0, "shard_rollbacks": 0, "outliers": 0,
    }}

def leave_when_asked(code=0, error=None):
    # From now on SIGTERM ends this peer, which reports its figures, and the error, if there is one.
    def leave(*_):
        tell(state="left", step=5, report={{**report(rank), "iterations": 5}})
        if error:
            tell(error=error, exit=1)
        sys.exit(code)
    signal.signal(signal.SIGTERM, leave)

def stop_alone():
    # Sends SIGTERM to "gossipx run", whose only peer here this is, and leaves when that asks for it.
    leave_when_asked()
    train()
    os.kill(os.getppid(), signal.SIGTERM)
    wait()

def finish(doubted=(), digest=None, **reports):
    tell(result={{
        "doubted": doubted, "report": {{**report(rank), **({{"digest": digest}} if digest is not None else {{}})}},
        "reports": {{name.strip("_"): value for name, value in reports.items()}},
        "missing": [], "consensus_accuracy": 0.875, "consensus_loss": 0.375,
    }})
"""
"""The start of a script in place of a peer: it reports progress as ``gossipx.runtime.figures.progress`` does."""


def script(directory: Path, body: str) -> Path:
    file = directory / "child.py"
    file.write_text(PRELUDE + dedent(body), encoding="utf-8")
    return file


def hosts(directory: Path, text: str) -> Path:
    file = directory / "hosts.txt"
    file.write_text(text + "\n", encoding="utf-8")
    return file


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Launches a script as every peer of the run ``mine``, in this process; returns the exit code."""

    def launched(body: str, *arguments: str, peers: str = "localhost slots=3", **settings: Any) -> int:
        given = config_files.resolve({"logdir": str(tmp_path / "runs"), "name": "mine", **settings})
        return launch(HostsFile(hosts(tmp_path, peers)), given, [str(script(tmp_path, body)), *arguments]).code

    return launched


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The directory of the run ``mine``."""
    return tmp_path / "runs" / "mine"


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
