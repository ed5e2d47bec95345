"""Commands as a reader of the documentation would type them, for tests: in a shell, with ports of their own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from forks import client as forks
from pages import HOUSE
from ports import free_ports

PORTS = 16
"""Most peers that one test may start."""
LOCAL = re.compile(r"\b(localhost|127\.0\.0\.1)(?::294(\d\d))?(?![\w.:-])")


def first_port() -> int:
    """Return the first of :data:`PORTS` neighbouring ports that are free and that no other test gets."""
    while True:
        found = free_ports(PORTS)
        if found[-1] - found[0] == PORTS - 1:
            return found[0]


def with_ports(text: str, first: int) -> str:
    """Give the peers of this machine in a text ports from ``first`` on."""
    return LOCAL.sub(lambda found: f"{found[1]}:{first + int(found[2] or 0)}", text)


def environment() -> dict[str, str]:
    """Return an environment whose ``gossipx`` and ``python`` are those of this test and its source tree."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GOSSIPX_")}
    path = os.pathsep.join([str(forks.commands()), str(Path(sys.executable).parent), kept.get("PATH", "")])
    return kept | {"PATH": path, "PYTHONPATH": str(HOUSE), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def run(command: Sequence[str], folder: Path, timeout: float) -> tuple[int | str, str]:
    """Run a command to its end, and end the processes that it leaves in the background.

    Returns:
        Its exit code, or a message that it took too long; and its output.
    """
    output = folder / ".output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(), stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | str = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = f"nothing after {timeout:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, output.read_text(encoding="utf-8", errors="replace")


def bash(text: str) -> list[str]:
    """Return the command that runs a text as the documentation's examples are run."""
    return ["bash", "-e", "-o", "pipefail", "-c", text]
