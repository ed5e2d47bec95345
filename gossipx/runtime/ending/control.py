"""Commands to a running run: files in its directory, each taken by one peer and answered by a file beside it.

No network port is opened for this: the write permission on the run's directory is the access control.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("gossipx")

DIRECTORY = "control"
"""Name of the directory for commands, within the run's directory."""
COMMAND, TAKEN, ANSWER = ".command", ".taken", ".answer"
POLL_INTERVAL = 0.5
"""Seconds between two checks for commands: a person waits for the answer, and a check costs a few microseconds."""
MAX_BYTES = 10_000
"""Maximum size of a command."""


class Control:
    """A thread that takes commands while a peer trains.

    Args:
        directory: the run's directory.
        carry_out: carries out a command; returns why that failed, empty on success.
    """

    def __init__(self, directory: Path, carry_out: Callable[[Mapping[str, Any]], str]):
        self._directory = directory / DIRECTORY
        self._carry_out = carry_out
        self._closed = threading.Event()
        threading.Thread(target=self._work, name="gossipx-control", daemon=True).start()

    def close(self) -> None:
        """Stop taking commands."""
        self._closed.set()

    def _work(self) -> None:
        while not self._closed.wait(POLL_INTERVAL):
            for command in sorted(self._directory.glob(f"*{COMMAND}")):
                take(command, self._carry_out)


def take(command: Path, carry_out: Callable[[Mapping[str, Any]], str]) -> None:
    """Take a command and answer it, unless another process has just taken it; ``carry_out`` as for :class:`Control`."""
    taken = command.with_suffix(TAKEN)
    try:
        command.rename(taken)  # atomic: of several processes on this directory one succeeds
    except OSError:
        return
    try:
        with taken.open("rb") as file:
            content = json.loads(file.read(MAX_BYTES))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        problem = carry_out(content)
    except Exception as error:  # a malformed command must not end the training
        log.warning("%s is not a command: %s", command, error)
        problem = f"not a command: {error}"
    with contextlib.suppress(OSError):
        write(command.with_suffix(ANSWER), {"problem": problem})
        taken.unlink()


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(json.dumps(content), encoding="utf-8")
    unfinished.replace(path)
