"""The client of the fork server: starts processes and watches them like :class:`subprocess.Popen`."""

from __future__ import annotations

import atexit
import contextlib
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


def readable(file: int | socket.socket, timeout: float | None) -> bool:
    """Wait until there is something to read. Return False after ``timeout`` seconds; None waits without an end."""
    poll = select.poll()  # select.select() refuses descriptors over 1,023, of which a test process may have as many
    poll.register(file, select.POLLIN)
    return bool(poll.poll(None if timeout is None else 1000 * timeout))


@functools.cache
def place() -> str:
    """Return the socket of this process's server. The first call starts the server, which ends with this process."""
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
        # Options of the interpreter need a new interpreter.
        "python": f'case "${{1--}}" in -m | -c | [!-]*) exec {forked} "$@" ;; *) exec {python} "$@" ;; esac',
    }
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


class Process:
    """A process forked by the server at a socket, with the needed part of the interface of :class:`subprocess.Popen`.

    Args:
        command: ``[sys.executable, "-m", ...]``, or ``"-c"`` or a script in place of ``"-m"``, with arguments.
        files: its standard input, output and error.

    Attributes:
        pid: process id.
        returncode: exit code, or the negative number of the signal that ended it; None: it is running.
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
        self.pid = int(self._receive(None)["pid"])

    def poll(self) -> int | None:
        """Return the exit code, or None if it is running."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it is still running.
        """
        if self.returncode is None:
            self.returncode = int(self._receive(timeout)["code"])
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal if it is running."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its exit code is still on its way here
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it if it is running."""
        self.send_signal(signal.SIGKILL)

    def _receive(self, timeout: float | None) -> dict[str, int]:
        while b"\n" not in self._rest:
            if not readable(self._connection, timeout):
                raise subprocess.TimeoutExpired("a forked process", timeout or 0)
            read = self._connection.recv(4096)
            if not read:
                raise RuntimeError("the fork server has ended")
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        told: dict[str, int] = json.loads(line)
        return told


class Piped(Process):
    """A forked process with pipes, as a context that kills it.

    Attributes:
        stdin, stdout: text.
    """

    def __init__(self, *command: str | Path):
        (theirs, ours), (output, written) = os.pipe(), os.pipe()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        super().__init__(place(), [sys.executable, *map(str, command)], Path.cwd(), environment, (theirs, written, 2))
        os.close(theirs)
        os.close(written)
        self.stdin, self.stdout = os.fdopen(ours, "w"), os.fdopen(output)

    def __enter__(self) -> Piped:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()
        self.stdin.close()
        self.stdout.close()
