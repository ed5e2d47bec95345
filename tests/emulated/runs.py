"""Runs of gossipx whose peers are the hosts of an emulated network."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from emulated.network import EmulatedNetwork
from gossipx.metrics import summary
from gossipx.metrics.summary import Summary

LONGEST = 600.0
"""Maximum seconds of most runs."""


def train(
    net: EmulatedNetwork,
    folder: Path,
    name: str,
    *options: str | Path,
    longest: float = LONGEST,
    hidden: Collection[int] = (),
) -> list[Summary]:
    """Run ``gossipx run`` on every host as on separate machines: same hosts file and options, separate folders.

    Args:
        net: the network.
        folder: folder in which each host writes its part, ``host-0/NAME``.
        name: name of the run.
        options: options of ``gossipx run``; the last ones may be a script with its arguments.
        longest: maximum seconds of the run.
        hidden: numbers of the hosts that have ``nat`` in the hosts file.

    Returns:
        The summary of each host.

    Raises:
        RuntimeError: a host has failed; has its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    hosts = folder / "hosts.txt"
    words = ["nat" if number in hidden else "" for number in range(len(net.hosts))]
    hosts.write_text("".join(f"{host.address} {word}\n" for host, word in zip(net.hosts, words, strict=True)))
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    started = []
    for number, host in enumerate(net.hosts):
        logdir = folder / f"host-{number}"
        logdir.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "gossipx", "run", "--peers", hosts, "--logdir", logdir, "--name", name]
        output = logdir / f"{name}.txt"
        with output.open("w") as written:
            whole = [*map(str, command), "--bind", host.address, "--secret-file", str(secret), *map(str, options)]
            started.append((host.popen(whole, stdout=written, stderr=subprocess.STDOUT), output))
    for process, output in started:
        if process.wait(longest):
            raise RuntimeError(f"gossipx run ended with {process.returncode} ({output}):\n{output.read_text()}")
    return [summary.read(folder / f"host-{number}" / name) for number in range(len(net.hosts))]
