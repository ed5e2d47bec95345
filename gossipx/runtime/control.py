"""Commands to a run that goes on: files in its directory, each taken by one of its peers and answered beside it.

Whoever may write into the run's directory may command it; nothing listens for that.
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
"""In the run's directory."""
COMMAND, TAKEN, ANSWER = ".command", ".taken", ".answer"
LOOK_EVERY = 0.5
"""Seconds between two looks: a person waits for the answer, and a look costs a few microseconds."""
LARGEST = 10_000
"""Bytes of a command."""


class Control:
    """Takes commands while a peer trains.

    Args:
        directory: the run's.
        carry_out: does what a command says; returns why it cannot be done, or nothing.
    """

    def __init__(self, directory: Path, carry_out: Callable[[Mapping[str, Any]], str]):
        self._directory = directory / DIRECTORY
        self._carry_out = carry_out
        self._closed = threading.Event()
        threading.Thread(target=self._work, name="gossipx-control", daemon=True).start()

    def close(self) -> None:
        """Take no more."""
        self._closed.set()

    def _work(self) -> None:
        while not self._closed.wait(LOOK_EVERY):
            for command in sorted(self._directory.glob(f"*{COMMAND}")):
                self._take(command)

    def _take(self, command: Path) -> None:
        taken = command.with_suffix(TAKEN)
        try:
            command.rename(taken)  # of several peers one succeeds
        except OSError:
            return
        try:
            with taken.open("rb") as file:
                told = json.loads(file.read(LARGEST))
            if not isinstance(told, dict):
                raise ValueError("it is no JSON object")
            problem = self._carry_out(told)
        except Exception as error:  # whatever was written there: training goes on
            log.warning("%s is no command: %s", command, error)
            problem = f"no command: {error}"
        with contextlib.suppress(OSError):
            write(command.with_suffix(ANSWER), {"problem": problem})
            taken.unlink()


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file that is whole as soon as it is there."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(json.dumps(content), encoding="utf-8")
    unfinished.replace(path)
