"""Child processes of ``gossipx run``: one per peer of this machine, and the ssh clients of other hosts."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from gossipx.launch.run.display import Display, PeerStatus
from gossipx.launch.start import Start
from gossipx.settings.sections import KEYS

READ = 1 << 16
"""Bytes per read from a pipe."""
LONGEST_LINE = 1 << 20
"""Bytes of output without a line end that are shown as a line: what never ends one must not fill the memory."""
CRASHES = frozenset(
    (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS)
)
"""Signals that a process raises by a fault of its own."""
Spawn: TypeAlias = Callable[..., "subprocess.Popen[bytes]"]


class Child:
    """A child process, in a process group of its own, so that Ctrl-C on the terminal reaches only the parent.

    Args:
        command: program and arguments.
        environment: environment variables of the process.
        progress_variable: name of the environment variable that passes the number of the progress pipe.
        on_line: called with each line of output, without the line end.
        on_event: called with each JSON object from the progress pipe.
        spawn: starts the process; called like :class:`subprocess.Popen`.
        stdin: its standard input, as for :class:`subprocess.Popen`.
    """

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str],
        progress_variable: str,
        on_line: Callable[[str], None],
        on_event: Callable[[dict[str, Any]], None] = lambda event: None,
        spawn: Spawn = subprocess.Popen,
        stdin: int = subprocess.DEVNULL,
    ):
        reading, writing = os.pipe()
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, reading)
            try:
                self.process = spawn(
                    command,
                    # What its script prints is written in the end with the encoding of this process.
                    env={**environment, progress_variable: str(writing), "PYTHONIOENCODING": f"{encoding()}:replace"},
                    pass_fds=(writing,),
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            finally:
                os.close(writing)
            undo.pop_all()
        assert self.process.stdout is not None
        self._progress = reading
        # Progress comes first, so that a peer's error is reported before its exit.
        self._pipes: dict[int, Callable[[bytes], None]] = {
            reading: lambda line: on_event(json.loads(line)),
            self.process.stdout.fileno(): lambda line: on_line(line.decode(encoding(), "replace")),
        }
        self._unfinished = dict.fromkeys(self._pipes, b"")

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register the pipes with ``selector``; the data of each key is the function to call when it is readable."""
        for pipe in self._pipes:
            selector.register(pipe, selectors.EVENT_READ, lambda pipe=pipe: self._read(pipe, selector))

    def drain(self, selector: selectors.BaseSelector) -> None:
        """Read the remaining output after the process has ended, without waiting for a grandchild that keeps a pipe
        open."""
        for pipe in list(self._pipes):
            os.set_blocking(pipe, False)
            while pipe in self._pipes and self._read(pipe, selector):
                pass
            if pipe in self._pipes:
                self._end(pipe, selector)

    def signal(self, number: int) -> None:
        """Send a signal to the process if it is still running."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    @property
    def crashed(self) -> bool:
        """Whether its script failed or it died of a fault of its own, rather than being killed; once it has ended."""
        code = self.process.returncode
        return code > 0 or -code in CRASHES

    def describe_exit(self) -> str:
        """Return ``killed by SIGKILL`` or ``exit code 1``, for example."""
        code = self.process.returncode
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _read(self, pipe: int, selector: selectors.BaseSelector) -> bool:
        try:
            data = os.read(pipe, READ)
        except BlockingIOError:
            return False
        if not data:
            self._end(pipe, selector)
            return False
        *lines, self._unfinished[pipe] = (shown_of(line) for line in (self._unfinished[pipe] + data).split(b"\n"))
        if pipe != self._progress and len(self._unfinished[pipe]) >= LONGEST_LINE:
            lines.append(self._unfinished[pipe])
            self._unfinished[pipe] = b""
        for line in lines:
            self._pipes[pipe](line.removesuffix(b"\r"))
        return True

    def _end(self, pipe: int, selector: selectors.BaseSelector) -> None:
        selector.unregister(pipe)
        handle, rest = self._pipes.pop(pipe), self._unfinished.pop(pipe)
        if pipe == self._progress:
            os.close(pipe)  # an incomplete event is dropped: the process was killed while it wrote
            return
        if rest:
            handle(rest)
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclass
class LocalPeers:
    """The peers of this machine, as ``gossipx run`` has them.

    Attributes:
        start: what the run was started with.
        script: the user's script and its arguments; empty: the built-in task.
        statuses: states of the peers, by rank.
        display: shows what happens.
        children: processes of the peers that have been started, by rank.
    """

    start: Start
    script: list[str]
    statuses: dict[int, PeerStatus]
    display: Display
    children: dict[int, Child] = field(default_factory=dict)


def encoding() -> str:
    """Return the encoding of this process's output, which is that of the processes that it starts."""
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def shown_of(line: bytes) -> bytes:
    """Return what a terminal would show of a line: a progress bar writes itself anew after each carriage return."""
    return line[line.rfind(b"\r", 0, -1) + 1 :]


def command_of(script: list[str]) -> list[str]:
    """Return the command of a peer process: the user's script with its arguments, or the built-in task."""
    return [sys.executable, *script] if script else [sys.executable, "-m", "gossipx.launch.loops.train"]


def misplaced(script: list[str]) -> str | None:
    """Return the first argument of a script that is an option of ``gossipx run`` alone and not in the script's text."""
    if not script:
        return None
    text = Path(script[0]).read_text(encoding="utf-8", errors="replace")
    exchanging = ("sync", "hub", "server", "exchange")  # scripts have options such as --seed and --model, too
    options = {key.option: key.name for key in KEYS.values() if key.table in exchanging}
    given = (word.partition("=")[0] for word in script[1:])
    return next((word for word in given if word in options and options[word] not in text.replace("-", "_")), None)
