"""SIGINT, SIGTERM and SIGHUP as requests to stop a peer: it ends its step, writes a checkpoint, and leaves the run.

The first signal only records the request, which the training thread carries out at its next step boundary or while it
waits. A second one interrupts the script at once. Signals that the process ignores stay ignored, and a handler that
was there before is called too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ONE_KEYSTROKE = 0.5
"""Seconds within which a second signal is the same request: a launcher may pass on what the terminal sends to all."""
INTERRUPTED = 130
"""Exit code of an interrupted process: 128 and the number of SIGINT, as shells report it."""

ORDERLY = "_orderly"
"""Attribute of a KeyboardInterrupt that needs no traceback: the peer has stopped in order, and said so."""

_installed: list[StopSignals] = []
_masks = threading.local()
_watching = False


class StopSignals:
    """The requests to stop this process's peer.

    Args:
        on_request: called with the first signal, in the signal handler; it says that a second one acts at once. None:
            a parent process decides that, and sends signals of its own, so only a second SIGINT does.

    Attributes:
        number: the first signal; None: no request yet.
        at_once: whether a second signal, which acts at once, followed.
    """

    def __init__(self, on_request: Callable[[int], None] | None = None) -> None:
        self.number: int | None = None
        self.at_once = False
        self._urgent = (signal.SIGINT,) if on_request is None else NUMBERS  # as a second signal
        self._on_request = on_request or _nothing
        self._received_at = 0.0
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Handle the signals from now on. Has no effect outside the main thread, where Python allows no handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        _watch_forks()
        _installed.append(self)
        for number in NUMBERS:
            before = signal.getsignal(number)
            if before not in (signal.SIG_IGN, None):  # None: a handler that Python did not install
                self._before[number] = before
                signal.signal(number, self._received)

    def restore(self) -> None:
        """Restore the handlers of before, except where the script has installed its own since."""
        self._on_request = _nothing  # break the reference cycle with the peer
        if self not in _installed or threading.current_thread() is not threading.main_thread():
            return
        _installed.remove(self)
        for number, before in self._before.items():
            if signal.getsignal(number) == self._received:
                signal.signal(number, before)

    def request(self, number: int) -> None:
        """Request a stop as the signal would; for any thread."""
        if self.number is None:
            self.number, self._received_at = number, time.monotonic()

    def end(self) -> NoReturn:
        """End the script as the first signal asks: exit code 0 after SIGTERM, which was obeyed; else it was
        interrupted.

        Raises:
            KeyboardInterrupt: after SIGINT.
            SystemExit: after other signals.
        """
        if self.number == signal.SIGINT:
            stopped = KeyboardInterrupt()
            setattr(stopped, ORDERLY, True)
            raise stopped
        raise SystemExit(0 if self.number == signal.SIGTERM else INTERRUPTED)

    def _received(self, number: int, frame: FrameType | None) -> None:
        is_first, before = self.number is None, self._before[number]
        again = number in self._urgent and time.monotonic() - self._received_at >= ONE_KEYSTROKE
        self.request(number)
        self.at_once = self.at_once or (again and not is_first)
        if is_first:
            self._on_request(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
        elif self.at_once:
            raise KeyboardInterrupt


def continue_by(framework: str, kept: str) -> str:
    """Say how a run continues whose state a framework saves; ``kept``: its checkpoint of one peer, empty if unknown."""
    if not kept:
        return f"continue from what your script has saved with {framework}"
    return f"continue with {framework}, each peer from its own checkpoint, such as {kept}"


@contextlib.contextmanager
def children_may_die() -> Iterator[None]:
    """Hold off the script's handler of SIGCHLD: torch's raises an error wherever the main thread is, if a worker of a
    data loader dies, as one does that got the signal, too."""
    handler = signal.getsignal(signal.SIGCHLD)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)


def _nothing(number: int) -> None:
    """Do nothing."""


def _watch_forks() -> None:
    """Give the processes that this one forks the handlers of before: they are not the peer."""
    global _watching
    if not _watching:
        _watching = True
        # A signal between fork and the interpreter's set-up of the child would be lost, so it is blocked until the
        # child has its handlers.
        os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_reset)


def _block() -> None:
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _reset() -> None:
    for one in list(_installed):
        one.restore()
    _unblock()
