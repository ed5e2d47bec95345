"""What there is once a process: the peer that is open in it, and how its script ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, Protocol

from gossipx.errors import GossipxError, UsageError


class Finishable(Protocol):
    """A peer, as far as a process's end goes.

    Attributes:
        finishes_at_exit: whether a script that ends without a word of it has trained to its end.
    """

    finishes_at_exit: bool

    def finish(self) -> None:
        """Training is over."""

    def leave(self) -> None:
        """Training has failed."""


_open: list[Finishable] = []
_pid = 0
_thread: threading.Thread | None = None
_has_left = False
_failed = False
_watching = False
_exit = sys.exit
_handlers: list[Callable[[int, FrameType | None], None]] = []
_masks = threading.local()


def register(peer: Finishable, under_run: bool) -> None:
    """The process is to be this peer, which is finished when its script ends, if it does not do so itself.

    Raises:
        UsageError: it is one already, or was one of the run that it was started for.
    """
    global _watching, _exit, _pid, _thread
    check_unregistered(under_run)
    if not _watching:
        _watching = True
        # The interpreter tells nobody at exit that sys.exit was called with a failure.
        _exit, sys.exit = sys.exit, _leaving
        _register()
    _open.append(peer)
    _pid = os.getpid()
    _thread = threading.current_thread()


def check_unregistered(under_run: bool) -> None:
    """See whether :func:`register` would be refused.

    Raises:
        UsageError: as there.
    """
    if _open:
        raise UsageError("this process has joined already: a process is one peer, until it leaves the with block")
    if under_run and _has_left:
        raise UsageError("this process has left its run already: under gossipx run a script joins once")


def training_continues() -> None:
    """Training goes on: a sys.exit before was caught."""
    global _failed
    _failed = False


def _register() -> None:
    # From Python 3.12 on no thread can be started in atexit's callbacks, as the finish has to; threading's own come
    # before, and before other threads are waited for, as long as the main thread has not ended.
    if sys.version_info >= (3, 12) and hasattr(threading, "_register_atexit"):
        with contextlib.suppress(RuntimeError):
            threading._register_atexit(_at_exit)
            return
    atexit.register(_at_exit)


def unregister(peer: Finishable) -> None:
    """The peer is closed."""
    global _has_left
    if peer in _open:
        _open.remove(peer)
        _has_left = True


def on_sigterm(handler: Callable[[int, FrameType | None], None]) -> None:
    """Have SIGTERM handled here, and not in processes that the script forks: it ends those as ever."""
    forks = not _handlers
    _handlers[:] = [handler]
    signal.signal(signal.SIGTERM, handler)
    if forks:
        # Between fork and the interpreter's own preparations a signal would be lost: it is held until it can end the
        # child.
        os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_forget)


def _hold() -> None:
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _forget() -> None:
    if signal.getsignal(signal.SIGTERM) in _handlers:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _release()


def _leaving(code: object = None, /) -> NoReturn:
    global _failed
    _failed = bool(code) and threading.current_thread() is threading.main_thread()
    _exit(code)  # type: ignore[arg-type]


def _at_exit() -> None:
    if os.getpid() != _pid:
        return  # a process that the script has forked: a worker of its data loader, say
    if _thread not in (None, threading.current_thread()):
        _thread.join()  # it trains, and ends as the script has it
    for peer in list(_open):
        try:
            if peer.finishes_at_exit and getattr(sys, "last_value", None) is None and not _failed:
                peer.finish()
            else:
                peer.leave()
        except GossipxError as error:
            sys.excepthook(type(error), error, error.__traceback__)
