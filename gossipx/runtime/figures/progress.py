"""Progress reports from a peer to its parent process, ``gossipx run``: JSON lines on a pipe.

The pipe also shows when the parent has died, because its other end is then closed. The peer stops in that case as on a
signal, or is ended, so that no peer outlives its run.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from gossipx.errors import GossipxError
from gossipx.runtime.ending import exit_hooks
from gossipx.runtime.ending.stop_signals import INTERRUPTED, ORDERLY

INTERVAL = 0.25
"""Minimum seconds between two progress lines; nobody can read them faster."""
ORPHAN_GRACE = 5.0
"""Seconds for the script's own cleanup once the parent has died and the peer has left; as many again follow an
interruption, before a forced exit."""
TAKES_ERRORS = "_takes_errors"
"""Attribute of the exception hook."""


class Progress:
    """The pipe to the parent process.

    Args:
        fd: file descriptor of the pipe's write end; None: there is no parent, so nothing is written.
    """

    def __init__(self, fd: int | None):
        self._fd = fd
        self._last = 0.0
        self._ending = threading.Lock()  # acquired once, by the thread that ends this process
        self._patience = 0.0
        self._stop: Callable[[bool], bool] = _no_peer

    @property
    def has_parent(self) -> bool:
        """Whether there is a parent process to write to."""
        return self._fd is not None

    @property
    def due(self) -> bool:
        """Whether the next line may be written: :data:`INTERVAL` has passed since the last one."""
        return self._fd is not None and time.monotonic() - self._last >= INTERVAL

    def tell(self, **line: Any) -> None:
        """Write one line: the arguments as a JSON object. If the parent has died, end this process."""
        if self._fd is None:
            return
        self._last = time.monotonic()
        data = json.dumps(line).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            self._fd = None
            threading.Thread(target=self._end, name="gossipx-parent", daemon=True).start()

    def watch_parent(self, patience: float, stop: Callable[[bool], bool]) -> None:
        """Start a thread that ends this process when the parent dies, even while nothing is written.

        Args:
            patience: seconds within which the peer must then reach a step boundary.
            stop: asks the peer to leave the run; its argument is whether the patience has ended. Returns whether to
                wait until it has left.
        """
        if self._fd is None:
            return
        self._patience, self._stop = patience, stop
        # With a reader of its own, a script that prints while the parent dies gets no BrokenPipeError.
        for stream in _pipes():
            with contextlib.suppress(OSError):
                os.open(f"/proc/self/fd/{stream}", os.O_RDONLY | os.O_NONBLOCK)
        poll = select.poll()
        poll.register(self._fd, 0)  # errors and hang-ups only

        def watch() -> None:
            poll.poll()
            self._end()

        threading.Thread(target=watch, name="gossipx-parent", daemon=True).start()

    def peer_closed(self) -> None:
        """Ask no peer to leave when the parent dies: it is closed."""
        self._stop = _no_peer

    def _end(self) -> None:
        """Let the peer leave. After that, or if it does not, interrupt the main thread as Ctrl-C would, even in a
        blocking call, and finally exit."""
        if not self._ending.acquire(blocking=False):
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in _pipes():
            os.dup2(nowhere, stream)
        by = time.monotonic() + self._patience
        while self._stop(time.monotonic() >= by):
            time.sleep(INTERVAL)
        main = threading.main_thread().ident
        assert main is not None
        time.sleep(ORPHAN_GRACE)
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(ORPHAN_GRACE)
        os._exit(INTERRUPTED)

    def take_errors(self, with_traceback: bool = False) -> None:
        """Install an exception hook for a GossipxError that ends this process.

        It tells the parent, or without a parent prints the message, instead of the traceback, and the process ends with
        the error's exit code. A KeyboardInterrupt is not shown under a parent, nor after an orderly stop, which was
        told. Tracebacks of other exceptions are printed as usual, unless a peer was asked to stop: it leaves in order,
        and the process ends as after that. There is one hook per process, from the first call on.

        Args:
            with_traceback: also print the tracebacks of GossipxErrors and of KeyboardInterrupt.
        """
        print_others = sys.excepthook
        if hasattr(print_others, TAKES_ERRORS):
            return

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if (end := exit_hooks.script_failed(error)) is not error:
                kind, error, trace = type(end), end, end.__traceback__
            if isinstance(error, SystemExit):
                raise error from None
            stopped = isinstance(error, KeyboardInterrupt) and (self._fd is not None or hasattr(error, ORDERLY))
            if with_traceback or not (stopped or isinstance(error, GossipxError)):
                print_others(kind, error, trace)
            if isinstance(error, GossipxError):
                if self._fd is not None:
                    self.tell(error=str(error), exit=error.exit_code)
                elif not with_traceback:
                    with contextlib.suppress(OSError, ValueError):  # nobody reads it: the code tells
                        print(error, file=sys.stderr)
                raise SystemExit(error.exit_code)  # the interpreter ends with the code that a hook raises

        setattr(hook, TAKES_ERRORS, True)
        sys.excepthook = hook


def _pipes() -> list[int]:
    """Return those of standard output and error that are pipes: to the parent process, if it waits for progress."""
    return [stream for stream in (1, 2) if _is_pipe(stream)]


def _is_pipe(stream: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(stream).st_mode)
    except OSError:  # closed
        return False


def _no_peer(late: bool) -> bool:
    """Wait for no peer."""
    return False
