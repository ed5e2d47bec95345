"""Commands to a run that goes on, from another process on a machine that has its directory."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossipx.config import files
from gossipx.errors import GossipxError, UsageError
from gossipx.launch.directory import CONFIG_FILE
from gossipx.runtime.control import ANSWER, COMMAND, DIRECTORY, POLL_INTERVAL, write

TAKEN_WITHIN = 10.0
"""Seconds within which a peer that runs takes a command: many times the interval between two of its looks."""


def command(run: Path, told: Mapping[str, Any], patience: float) -> None:
    """Have a peer of ``run`` carry out a command to its parameter server.

    Args:
        run: its directory.
        told: see :class:`gossipx.runtime.control.Control`.
        patience: seconds that the carrying out may take.

    Raises:
        UsageError: there is no such run, or it refuses.
        GossipxError: no peer of it is running here.
    """
    if (run / CONFIG_FILE).is_file():
        settings = files.resolve(files.load(run / CONFIG_FILE))
        if settings.sync.mode != "server" and settings.server.servers is None:
            raise UsageError("this run has no parameter server", run)
    elif not any(run.glob("peer-*")):  # peers that call gossipx.join by themselves leave no settings
        raise UsageError("no run here: name one by its directory, or by its name and --logdir", run)
    directory = run / DIRECTORY
    directory.mkdir(exist_ok=True)
    file = directory / (secrets.token_hex(8) + COMMAND)
    answer = file.with_suffix(ANSWER)
    write(file, told)
    began = time.monotonic()
    while not answer.exists():
        waited = time.monotonic() - began
        if waited > TAKEN_WITHIN and _withdrawn(file):
            raise GossipxError(f"{run}: no peer of this run is at work on this machine, or it has no parameter server")
        if waited > TAKEN_WITHIN + patience:
            raise GossipxError(f"{run}: a peer has taken the command and does not answer")
        time.sleep(POLL_INTERVAL / 5)
    problem = json.loads(answer.read_text(encoding="utf-8"))["problem"]
    answer.unlink()
    if problem:
        raise UsageError(problem)


def _withdrawn(file: Path) -> bool:
    """Take a command back; whether nobody has taken it before."""
    with contextlib.suppress(FileNotFoundError):
        file.unlink()
        return True
    return False
