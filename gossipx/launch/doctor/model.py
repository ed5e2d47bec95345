"""The fingerprint of what a run would train: its own process builds the model, up to ``gossipx.join``, and tells."""

from __future__ import annotations

import os
import selectors
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from gossipx import config
from gossipx.errors import GossipxError
from gossipx.launch.children import Child, command_of
from gossipx.launch.environment import ENV_CONFIG, ENV_DESCRIBE, ENV_DEVICE, ENV_PEERS, ENV_PROGRESS, ENV_RANK
from gossipx.settings import RunConfig

WITHIN = 120.0
"""Seconds in which a script is to come to its ``gossipx.join``: it may have data to read first."""


def manifest(settings: RunConfig, hosts: Path, rank: int, device: str, script: list[str]) -> str:
    """The description of the model, a line a tensor.

    Args:
        settings: with presets filled in.
        hosts: the hosts file.
        rank: as which peer the process is started; it joins nobody.
        device: that it would train on.
        script: a user's script and its arguments; empty: the built-in task.

    Raises:
        GossipxError: it ends, or takes too long, without ``gossipx.join``; or what it says is wrong.
    """
    told: list[dict[str, Any]] = []
    printed: list[str] = []
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file, selectors.DefaultSelector() as selector:
        file.write(config.dump(settings))
        file.flush()
        environment = {
            "OMP_NUM_THREADS": str(settings.run.threads),
            **os.environ,
            ENV_CONFIG: file.name,
            ENV_PEERS: str(hosts.resolve()),
            ENV_RANK: str(rank),
            ENV_DEVICE: device,
            ENV_DESCRIBE: "1",
        }
        child = Child(command_of(script), environment, ENV_PROGRESS, on_line=printed.append, on_word=told.append)
        try:
            _follow(child, selector)
        finally:
            child.signal(signal.SIGKILL)
            child.process.wait()
    what = script[0] if script else "the built-in task"
    for word in told:
        if "error" in word:
            raise GossipxError(f"{what}: {word['error']}")
        if "manifest" in word:
            return str(word["manifest"])
    if child.process.returncode == -signal.SIGKILL:
        raise GossipxError(f"{what} did not come to gossipx.join within {WITHIN:g} s")
    last = f"; it printed last: {printed[-1].strip()}" if printed else ""
    raise GossipxError(f"{what} ended without gossipx.join ({child.how_it_ended()}){last}")


def _follow(child: Child, selector: selectors.BaseSelector) -> None:
    child.register(selector)
    until = time.monotonic() + WITHIN
    while child.process.poll() is None and time.monotonic() < until:
        for key, _ in selector.select(0.1):
            if key.fd in selector.get_map():
                key.data()
    child.drain(selector)
