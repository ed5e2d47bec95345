"""Commands as a reader of the documentation would type them, for tests: in a shell, with ports of their own."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from forks import client as forks
from pages import HOUSE

PORTS = 16
"""Most peers that one test may start."""
LOCAL = re.compile(r"\b(localhost|127\.0\.0\.1)(?::294(\d\d))?(?![\w.:-])")


@contextlib.contextmanager
def ports() -> Iterator[int]:
    """Yield the first of a range of ports that no other test uses, since tests run in parallel."""
    places = list(range(20_000, 32_000, 20))  # below the ephemeral ports
    random.SystemRandom().shuffle(places)
    for first in places:
        with contextlib.ExitStack() as probes:
            held = socket.socket()  # reserves the range while the test runs
            try:
                for number in range(PORTS):
                    probe = probes.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", first + number))
                held.bind(("127.0.0.1", first + PORTS))
            except OSError:
                held.close()
                continue
        with held:
            yield first
        return
    raise OSError("no ports are free")


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
