"""One child process a peer, its output and what it tells."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

READ = 1 << 16
Spawn: TypeAlias = Callable[..., "subprocess.Popen[bytes]"]


class Child:
    """A peer's process. It has a process group of its own, so that Ctrl-C on the terminal reaches the parent alone.

    Args:
        command: what to run.
        environment: of the process, beside this pipe's number under ``progress_variable``.
        on_line: told of each line that it prints, without the line's end.
        on_word: told of each JSON object on its pipe.
        spawn: starts the process; called as :class:`subprocess.Popen` is.
    """

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str],
        progress_variable: str,
        on_line: Callable[[str], None],
        on_word: Callable[[dict[str, Any]], None],
        spawn: Spawn = subprocess.Popen,
    ):
        reading, writing = os.pipe()
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, reading)
            try:
                self.process = spawn(
                    command,
                    env={**environment, progress_variable: str(writing)},
                    pass_fds=(writing,),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            finally:
                os.close(writing)
            undo.pop_all()  # it runs, and its pipe is read
        assert self.process.stdout is not None
        self._progress = reading
        # Progress is read first: what ended a peer is known before its exit is told.
        self._pipes: dict[int, Callable[[bytes], None]] = {
            reading: lambda line: on_word(json.loads(line)),
            self.process.stdout.fileno(): lambda line: on_line(line.decode(errors="replace")),
        }
        self._rests = dict.fromkeys(self._pipes, b"")

    def register(self, selector: selectors.BaseSelector) -> None:
        """Have ``selector`` tell when there is something to read; its data is what to call then."""
        for pipe in self._pipes:
            selector.register(pipe, selectors.EVENT_READ, lambda pipe=pipe: self._read(pipe, selector))

    def drain(self, selector: selectors.BaseSelector) -> None:
        """Read what is left after the process has ended. A grandchild that holds the pipe open is not waited for."""
        for pipe in list(self._pipes):
            os.set_blocking(pipe, False)
            while pipe in self._pipes and self._read(pipe, selector):
                pass
            if pipe in self._pipes:
                self._end(pipe, selector)

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def how_it_ended(self) -> str:
        """``killed by SIGKILL`` or ``exit code 1``."""
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
        *lines, self._rests[pipe] = (self._rests[pipe] + data).split(b"\n")
        for line in lines:
            self._pipes[pipe](line)
        return True

    def _end(self, pipe: int, selector: selectors.BaseSelector) -> None:
        selector.unregister(pipe)
        tell, rest = self._pipes.pop(pipe), self._rests.pop(pipe)
        if pipe == self._progress:
            os.close(pipe)  # half a word is none: its teller was killed
            return
        if rest:
            tell(rest)
        assert self.process.stdout is not None
        self.process.stdout.close()


def command_of(script: list[str]) -> list[str]:
    """What a peer's process runs: the user's script with its arguments, or the built-in task."""
    return [sys.executable, *script] if script else [sys.executable, "-m", "gossipx.launch.loops.train"]


def script_exists(script: list[str]) -> bool:
    """Whether there is a script of that name to run, if one is given."""
    return not script or Path(script[0]).is_file()
