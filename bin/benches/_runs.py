"""Whole runs of ``gossipx run`` for the benchmarks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from _ports import reserved

from gossipx.metrics import summary
from gossipx.metrics.summary import Summary


def train(logdir: Path, name: str, peers: int, *options: str) -> Summary:
    """Run the built-in task on this machine, and return the run's summary."""
    logdir.mkdir(parents=True, exist_ok=True)
    hosts = logdir / f"{name}-hosts.txt"
    command = [sys.executable, "-m", "gossipx", "run", "--peers", str(hosts), "--logdir", str(logdir), "--name", name]
    with reserved(peers) as port:
        hosts.write_text(f"127.0.0.1:{port} slots={peers}\n")
        done = subprocess.run([*command, "--overwrite", *options], capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return summary.read(logdir / name)
