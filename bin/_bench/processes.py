"""Processes of a benchmark besides its own. Each ends with its parent, and computes on one thread.

A process is a module of a benchmark with a function, and talks in lines over its standard input and output.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

PYTHON = os.environ.get("GOSSIPX_PYTHON", sys.executable)
"""The interpreter: that of the scripts in bin/."""
SECONDS = 120.0
"""Timeout of every wait, longer than any transfer."""


def command_of(work: Callable[..., None], *arguments: Any, python: str = sys.executable) -> list[str]:
    """Return the command that runs a module-level function with JSON arguments."""
    return [python, __file__, str(sys.modules[work.__module__].__file__), work.__name__, json.dumps(arguments)]


class Spawned:
    """A process that runs a function with JSON arguments, for the duration of a ``with`` block.

    Args:
        work: a module-level function.
        arguments: of the function.
        inside: starts a command elsewhere than on this machine, such as in a network namespace.
    """

    def __init__(self, work: Callable[..., None], *arguments: Any, inside: Callable[..., Any] = subprocess.Popen):
        command = command_of(work, *arguments, python=PYTHON if inside is subprocess.Popen else sys.executable)
        self.process = inside(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        """Return the next line that it prints; empty: it has ended."""
        assert self.process.stdout is not None
        return str(self.process.stdout.readline()).strip()

    def tell(self, line: object = "") -> None:
        """Give it a line."""
        print(line, file=self.process.stdin, flush=True)

    def ask(self, line: object) -> str:
        """Give it a line, and return its answer."""
        self.tell(line)
        return self.line()

    def close(self, kill: bool = False) -> None:
        """End its input, at which it ends, and wait."""
        assert self.process.stdin is not None and self.process.stdout is not None
        if kill:
            self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(SECONDS)
        self.process.stdout.close()

    def __enter__(self) -> Spawned:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(kill=error is not None)


def call(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function in a process of its own, as JSON gives it."""
    with Spawned(work, *arguments) as spawned:
        told = spawned.line()
    if spawned.process.returncode:
        raise SystemExit(f"{work.__name__} of {work.__module__} has failed")
    return json.loads(told)


def pin(place: int) -> None:
    """Pin this process to a core: otherwise both sides sometimes share a core, which halves the rate."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(range(os.cpu_count() or 1))
        os.sched_setaffinity(0, {cores[place % len(cores)]})


def _end_with_parent() -> None:
    """End this process when the benchmark ends, however it ends."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    """Run the function that the arguments name, in its module, and print its result if it has one."""
    import torch

    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    file, name, arguments = sys.argv[1:]
    sys.path[0] = str(Path(file).parent)
    made = getattr(importlib.import_module(Path(file).stem), name)(*json.loads(arguments))
    if made is not None:
        print(json.dumps(made), flush=True)


if __name__ == "__main__":
    main()
