"""Whole runs of ``gossipx run`` for the benchmarks."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from gossipx.metrics import summary
from gossipx.metrics.summary import Summary


def free_port(count: int) -> int:
    """Return the first of ``count`` consecutive free ports on loopback."""
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first: int = probe.getsockname()[1]
        if first + count < 65536 and all(_is_free(port) for port in range(first, first + count)):
            return first
    raise SystemExit(f"no {count} consecutive free ports on loopback")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def train(logdir: Path, name: str, peers: int, *options: str) -> Summary:
    """Run the built-in task on this machine, and return the run's summary."""
    logdir.mkdir(parents=True, exist_ok=True)
    hosts = logdir / f"{name}-hosts.txt"
    hosts.write_text(f"127.0.0.1:{free_port(peers)} slots={peers}\n")
    command = [sys.executable, "-m", "gossipx", "run", "--peers", str(hosts), "--logdir", str(logdir), "--name", name]
    done = subprocess.run([*command, "--overwrite", *options], capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return summary.read(logdir / name)
