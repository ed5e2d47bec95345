"""Runs of gossipx in real processes, for tests: started, watched and ended within time limits."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import client as forks
from ports import places
from safetensors.torch import load_file

LONG = 240.0  # seconds, after which a hanging test fails; a run takes a few on an idle machine

PRELUDE = """
import json
import os
import signal
import sys
import threading
from pathlib import Path

import torch
from torch import nn

import gossipx

FOLDER = Path(sys.argv[1])


def tell(peer, **figures):
    (FOLDER / f"{peer.rank}.json").write_text(json.dumps(figures))


def batch(peer, n=8, features=4):
    generator = torch.Generator().manual_seed(1000 * peer.rank + peer.iteration)
    return torch.randn(n, features, generator=generator)


def train(peer, model, optimizer, until):
    while peer.iteration < until:
        optimizer.zero_grad()
        (model(batch(peer)).double() - 1).square().mean().backward()
        optimizer.step()


def strike(number):
    # A signal to the process may be taken by another thread, while this one continues.
    signal.pthread_kill(threading.get_ident(), number)


def all_have(peer, what, done, ranks, most=2_000_000):
    # Says so once this peer is done. True when all of them have said so, or it takes too long.
    if done:
        (FOLDER / f"{peer.rank}-{what}").touch()
    return peer.iteration >= most or all((FOLDER / f"{rank}-{what}").exists() for rank in ranks)

"""
"""The start of the tests' training scripts; their first argument is the folder into which ``tell`` writes."""


TEN_LINES = """
torch.manual_seed(int.from_bytes(os.urandom(4), "big"))
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
peer = gossipx.join(model, optimizer)
first = [float(parameter.detach().sum()) for parameter in model.parameters()]
"""
"""A training script up to its loop."""


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    code: int
    output: str
    errors: str

    @property
    def shown(self) -> str:
        """All output, for messages."""
        return f"exit code {self.code}\n--- stdout\n{self.output}\n--- stderr\n{self.errors}"


class Process:
    """A process whose output can be awaited line by line.

    Args:
        command: arguments of ``python``.
        fresh: start a new interpreter, for tests of imports or the environment; else fork a process that has loaded
            gossipx.

    Attributes:
        output: the lines of its standard output so far.
    """

    def __init__(self, command: Sequence[str | Path], cwd: Path, fresh: bool = False):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GOSSIPX_")}
        environment = {**kept, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
        whole = [sys.executable, *map(str, command)]
        self._process: forks.Process | subprocess.Popen[str]
        if fresh:
            self._process = subprocess.Popen(
                whole,
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            streams: tuple[Any, Any] = self._process.stdout, self._process.stderr
        else:
            pipes = os.pipe(), os.pipe()
            with Path(os.devnull).open() as nothing:
                files = (nothing.fileno(), pipes[0][1], pipes[1][1])
                self._process = forks.Process(forks.place(), whole, cwd, environment, files)
            for _, writing in pipes:
                os.close(writing)
            streams = os.fdopen(pipes[0][0]), os.fdopen(pipes[1][0])
        self.pid = self._process.pid
        self.output: list[str] = []
        self._errors: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._readers = [
            threading.Thread(target=self._read, args=part, daemon=True)
            for part in ((streams[0], self.output, True), (streams[1], self._errors, False))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe: Any, into: list[str], is_output: bool) -> None:
        with pipe:
            for line in pipe:
                into.append(line)
                if is_output:
                    self._lines.put(line)
        if is_output:
            self._lines.put(None)

    def line(self, pattern: str, within: float = LONG) -> str:
        """Return the next line of standard output that contains ``pattern``."""
        by = time.monotonic() + within
        with contextlib.suppress(queue.Empty):
            while (line := self._lines.get(timeout=max(by - time.monotonic(), 0))) is not None:
                if re.search(pattern, line):
                    return line
        self.kill()
        raise AssertionError(f"no line like {pattern!r}; {self.end().shown}")

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it and the peers that it started, whose end it must not live to report."""
        kill_processes(self.pid, *children(self.pid).values())

    def end(self, within: float = LONG, code: int | None = None) -> Ended:
        """Wait until it ends on its own; check its exit code, and that it shows no traceback, if ``code`` is given."""
        try:
            found = self._process.wait(within)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
            late = self._ended(self._process.returncode)
            raise AssertionError(f"still running after {within:g} s; {late.shown}") from None
        ended = self._ended(found)
        assert code is None or (found == code and "Traceback" not in ended.output + ended.errors), ended.shown
        return ended

    def _ended(self, code: int) -> Ended:
        for reader in self._readers:
            reader.join(10)
        return Ended(code, "".join(self.output), "".join(self._errors))

    def close(self) -> None:
        """Kill it and its peers if they are still running."""
        if self._process.poll() is None:
            self.kill()
            self._process.wait()
        for reader in self._readers:
            reader.join(10)


class Folder:
    """The folder of a test, with its hosts file, scripts and runs.

    Attributes:
        path: path of the folder.
        hosts: its hosts file, with peers on free ports.
        names: names of the peers, by rank.
    """

    def __init__(self, path: Path, peers: int):
        self.path = path
        self.hosts = path / "hosts.txt"
        self.names = places(peers)
        self.hosts.write_text("".join(f"{name}\n" for name in self.names))
        self._processes: list[Process] = []

    def start(self, *command: str | Path, fresh: bool = False) -> Process:
        """Start ``python COMMAND`` in the folder; ``fresh``: as a new interpreter."""
        process = Process(command, self.path, fresh)
        self._processes.append(process)
        return process

    def gossipx(self, *words: str | Path) -> Process:
        """Start ``gossipx WORDS``."""
        return self.start("-m", "gossipx", *words)

    def start_run(self, *options: str | Path, name: str = "x", fresh: bool = False) -> Process:
        """Start ``gossipx run`` with ``options``; the last ones may be a script with its arguments."""
        start = ("-m", "gossipx", "run", "--peers", self.hosts, "--logdir", self.path, "--name", name)
        return self.start(*start, *options, fresh=fresh)

    def run(
        self, *options: str | Path, name: str = "x", tracebacks: int = 0, fresh: bool = False, code: int = 0
    ) -> Run:
        """Run ``gossipx run`` to its end, and check its exit code."""
        ended = self.start_run(*options, name=name, fresh=fresh).end()
        assert ended.code == code, ended.shown
        assert (ended.output + ended.errors).count("Traceback") == tracebacks, ended.shown
        return Run(self.path / name, ended)

    def refused(self, *options: str | Path, name: str = "x") -> str:
        """Return the only line printed by a ``gossipx run`` that ends with exit code 2."""
        ended = self.start_run(*options, name=name).end()
        return one_line(ended, 2)

    def script(self, text: str, name: str = "train.py") -> Path:
        """Write a script."""
        path = self.path / name
        path.write_text(PRELUDE + text)
        return path

    def training(self, text: str, *options: str | Path, start: str = TEN_LINES) -> tuple[str | Path, ...]:
        """Return ``options`` of a run and its script, which joins as ``start`` says and continues with ``text``."""
        return (*options, self.script(start + text), self.path)

    def told(self, rank: int | str) -> Any:
        """Return the value that a script wrote with ``tell``."""
        return json.loads((self.path / f"{rank}.json").read_text())

    def close(self) -> None:
        """End all processes that are still running."""
        for process in self._processes:
            process.close()


@dataclass(frozen=True)
class Run:
    """A run that ended successfully."""

    directory: Path
    ended: Ended

    @property
    def summary(self) -> dict[str, Any]:
        """Return its summary.json."""
        found: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return found

    def model(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the model that a peer saved."""
        return load_file(self.directory / f"peer-{rank:02d}" / "model.safetensors")


@contextlib.contextmanager
def folder(path: Path, peers: int) -> Iterator[Folder]:
    """Yield a folder whose processes end with the test."""
    made = Folder(path, peers)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def open_files(wanted: int) -> Iterator[None]:
    """Allow this process a number of open files; skip the test if the system refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"the test needs {wanted} open files, and the hard limit is {hard}: raise ulimit -Hn")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def children(parent: int) -> dict[int, int]:
    """Return process ids of the peers that ``parent`` has started, by rank."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(stat_fields(directory)[1]) != parent:
                continue
            name, _, rank = (directory / "comm").read_text().strip().partition(" ")
            if name != "peer":  # not forked
                variables = (directory / "environ").read_bytes().split(b"\0")
                rank = next((one[13:].decode() for one in variables if one.startswith(b"GOSSIPX_RANK=")), "")
            if rank:
                found[int(rank)] = int(directory.name)
    return found


def stat_fields(directory: Path) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on; the name before them may contain any character."""
    return (directory / "stat").read_text().rpartition(")")[2].split()


def kill_processes(*pids: int) -> None:
    """Kill processes at once, and wait until they are gone: until then a port that one listens at is in use."""
    with contextlib.ExitStack() as stack:
        opened = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                opened.append(os.pidfd_open(pid))
                stack.callback(os.close, opened[-1])
                signal.pidfd_send_signal(opened[-1], signal.SIGKILL)
        for process in opened:
            assert forks.readable(process, LONG), f"one of {pids} does not end"


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return stat_fields(Path(f"/proc/{pid}"))[0] not in "ZX"
    except OSError:
        return False


def all_end(processes: Iterable[Process]) -> list[Ended]:
    """Wait until processes have ended, each with exit code 0."""
    ended = [process.end() for process in processes]
    for one in ended:
        assert one.code == 0, one.shown
    return ended


def one_line(ended: Ended, code: int) -> str:
    """Return the only line of output of a process that ended with ``code``."""
    assert ended.code == code, ended.shown
    assert ended.errors.count("\n") == 1, ended.shown
    assert "Traceback" not in ended.output, ended.shown
    return ended.errors.strip()


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest difference in each tensor of two models with the same names, except counters."""
    assert one.keys() == other.keys()
    return {name: float((one[name] - other[name]).abs().max()) for name in one if one[name].is_floating_point()}


def agree(run: Run, peers: int) -> bool:
    """Return whether all peers left the same model."""
    return all(max(differences(run.model(0), run.model(rank)).values()) <= 1e-6 for rank in range(1, peers))
