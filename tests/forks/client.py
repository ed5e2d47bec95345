"""Processes that the fork server starts, as their user sees them."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

TESTS = Path(__file__).parents[1]


@functools.cache
def place() -> str:
    """Return the socket of this process's server, which is started by the first call and ends with the process."""
    folder = tempfile.mkdtemp(prefix="forks-")
    where = f"{folder}/socket"
    paths = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-m", "forks.server", where],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert server.stdin is not None and server.stdout is not None
    if server.stdout.readline() != b"ready\n":
        raise RuntimeError(f"the fork server ended with {server.wait()}")

    def end() -> None:
        assert server.stdin is not None
        server.stdin.close()
        server.wait(10)
        shutil.rmtree(folder)

    atexit.register(end)
    return where


@functools.cache
def commands() -> Path:
    """Return a folder with ``gossipx`` and ``python`` whose processes this server forks."""
    folder = Path(place()).parent / "bin"
    folder.mkdir()
    forked = shlex.join([sys.executable, "-I", "-S", str(TESTS / "forks" / "command.py"), place(), sys.executable])
    python = shlex.quote(sys.executable)
    scripts = {
        "gossipx": f'exec {forked} -m gossipx "$@"',
        # An interpreter's own options are for a new one.
        "python": f'case "${{1--}}" in -m | -c | [!-]*) exec {forked} "$@" ;; *) exec {python} "$@" ;; esac',
    }
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


class Process:
    """A process that the server at a socket has forked, with what is used of :class:`subprocess.Popen`.

    Args:
        command: of this interpreter: ``[sys.executable, "-m", ...]``, ``"-c"`` or a script, and arguments.
        files: its standard input, output and error.

    Attributes:
        pid: of the process.
        returncode: its exit code, or minus the signal that ended it; None: it runs.
    """

    def __init__(
        self, where: str, command: Sequence[str], cwd: str | Path, env: Mapping[str, str], files: Sequence[int]
    ):
        self.returncode: int | None = None
        self._rest = b""
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(where)
        asked = json.dumps({"command": list(command), "cwd": str(cwd), "env": dict(env)}).encode() + b"\n"
        sent = socket.send_fds(self._connection, [asked], list(files))
        self._connection.sendall(asked[sent:])
        self.pid = int(self._told(None)["pid"])

    def poll(self) -> int | None:
        """Return the exit code, or None if it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it runs still.
        """
        if self.returncode is None:
            self.returncode = int(self._told(timeout)["code"])
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, if it runs."""
        self.send_signal(signal.SIGKILL)

    def _told(self, timeout: float | None) -> dict[str, int]:
        while b"\n" not in self._rest:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0)
            read = self._connection.recv(4096)
            if not read:
                raise RuntimeError("the fork server has ended")
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        told: dict[str, int] = json.loads(line)
        return told
