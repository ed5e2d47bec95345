"""Commands to a run in progress, sent from another process through files in the run's directory."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossipx.errors import GossipxError, UsageError
from gossipx.launch.directory import CONFIG_FILE, no_run, refuse_simulated
from gossipx.runtime.ending.control import ANSWER, COMMAND, DIRECTORY, POLL_INTERVAL, write
from gossipx.settings import files
from gossipx.settings.modes import Server

TAKEN_WITHIN = 10.0
"""Seconds within which a running peer accepts a command: many times the interval at which it looks for one."""


RESTART = ".restart"
"""Suffix of a command for the ``gossipx run`` that has a peer, which restarts it: ``{"peer": NAME}``."""


def command(run: Path, request: Mapping[str, Any], patience: float) -> None:
    """Send a command to the parameter server of a run, and wait until it has been carried out.

    Args:
        run: directory of the run.
        request: the command; see :class:`gossipx.runtime.ending.control.Control`.
        patience: seconds that carrying it out may take.

    Raises:
        UsageError: the run does not exist, or it refuses the command.
        GossipxError: no peer of the run is running on this machine.
    """
    refuse_simulated(run)
    if (run / CONFIG_FILE).is_file():
        settings = files.resolve(files.load(run / CONFIG_FILE))
        if not isinstance(settings.mode, Server):
            raise UsageError("this run has no parameter server", run)
    elif not any(run.glob("peer-*")):  # peers that were started without 'gossipx run' write no settings
        raise no_run(str(run), run.parent, CONFIG_FILE)
    if not send(run, COMMAND, request, patience):
        raise GossipxError(f"{run}: no peer of this run is running on this machine, or the run has no parameter server")


def send(run: Path, suffix: str, request: Mapping[str, Any], patience: float) -> bool:
    """Send a command to a process of a run, and wait until it has been carried out.

    Args:
        run: directory of the run.
        suffix: ``COMMAND`` or ``RESTART``.
        request: the command.
        patience: seconds that carrying it out may take.

    Returns:
        Whether a process has taken it.

    Raises:
        UsageError: the process refuses the command.
        GossipxError: it did not report its completion.
    """
    directory = run / DIRECTORY
    try:
        directory.mkdir(exist_ok=True)
        directory.chmod(0o700)  # whatever the umask: who can write here commands the run
    except OSError as error:
        raise UsageError(f"commands cannot be written: {error.strerror}", directory) from error
    file = directory / (secrets.token_hex(8) + suffix)
    answer = file.with_suffix(ANSWER)
    write(file, request)
    began = time.monotonic()
    while not answer.exists():
        waited = time.monotonic() - began
        if waited > TAKEN_WITHIN and _withdrawn(file):
            return False
        if waited > TAKEN_WITHIN + patience:
            raise GossipxError(f"{run}: a process accepted the command but did not report its completion")
        time.sleep(POLL_INTERVAL / 5)
    problem = json.loads(answer.read_text(encoding="utf-8"))["problem"]
    answer.unlink()
    if problem:
        raise UsageError(problem)
    return True


def _withdrawn(file: Path) -> bool:
    """Withdraw a command; return False if a peer has already accepted it."""
    with contextlib.suppress(FileNotFoundError):
        file.unlink()
        return True
    return False
