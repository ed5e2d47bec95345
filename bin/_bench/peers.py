"""Runs of gossipx whose peers are processes of this machine, and the loopback ports that they use."""

from __future__ import annotations

import contextlib
import random
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from _bench.processes import PYTHON
from gossipx.launch.ports import reserve
from gossipx.metrics import summary
from gossipx.metrics.summary import Summary
from gossipx.transports import Address

HERE = "127.0.0.1"
FIRST, END = 10_000, 32_000
"""Below the ports of outgoing connections, of which some remain in use after hundreds of connections."""


@contextlib.contextmanager
def reserved(count: int) -> Iterator[int]:
    """Return a context that yields the first of ``count`` consecutive ports, which no other process gets meanwhile."""
    for _ in range(100):
        first = random.randrange(FIRST, END - count)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(reserve(Address(HERE, port)))
            until_end = held.pop_all()
            break
    else:
        raise SystemExit(f"no {count} consecutive ports on loopback are free")
    with until_end:
        yield first


@contextlib.contextmanager
def hosts_file(folder: Path, peers: int) -> Iterator[Path]:
    """Return a context that yields a hosts file of peers of this machine, whose ports are reserved meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    hosts = folder / "hosts.txt"
    with reserved(peers) as port:
        hosts.write_text(f"{HERE}:{port} slots={peers}\n")
        yield hosts


def train(peers: int, *options: str) -> Summary:
    """Run the built-in task on this machine, or the script in the options, and return the run's summary."""
    with tempfile.TemporaryDirectory() as logdir, hosts_file(Path(logdir), peers) as hosts:
        command = [PYTHON, "-m", "gossipx", "run", "--peers", str(hosts), "--logdir", logdir, "--name", "run", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return summary.read(Path(logdir) / "run")
