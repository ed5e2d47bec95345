"""Process-wide exit handling: the one open peer of this process is finished or closed when the script ends.

A process is at most one peer. The state is global because interpreter exit hooks are.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import sys
import threading
from _sitebuiltins import Quitter
from collections.abc import Callable
from multiprocessing import util
from types import ModuleType
from typing import Any, NoReturn, Protocol

from gossipx.errors import GossipxError, UsageError
from gossipx.runtime.ending.stop_signals import INTERRUPTED


class Finishable(Protocol):
    """The part of a peer that the exit hook uses.

    Attributes:
        finishes_at_exit: whether a script that ends normally without closing the peer has completed its training.
    """

    finishes_at_exit: bool

    @property
    def leaves_in_order(self) -> bool:
        """Whether a signal has asked it to leave, so that an error of the script does not count."""

    def finish(self) -> None:
        """End a completed training with the finish."""

    def leave(self) -> None:
        """End a failed training without a finish."""

    def end_failed(self, error: BaseException) -> None:
        """End as the script fails with ``error``."""

    def close(self) -> None:
        """End without a notice."""


_open: list[Finishable] = []
_pid = 0
_thread: threading.Thread | None = None
_has_left = False
_failed = False
_code = 0
_watching = False
_exit: Callable[[Any], NoReturn]
_quit = Quitter.__call__


def register(peer: Finishable, under_run: bool) -> None:
    """Make ``peer`` the open peer of this process, to be finished or closed when the script ends.

    Args:
        under_run: whether ``gossipx run`` started this process.

    Raises:
        UsageError: the process has an open peer, or it has left the ``gossipx run`` that started it.
    """
    global _watching, _pid, _thread
    check_unregistered(under_run)
    if not _watching:
        _watching = True
        _watch_exits()
        _register()
    _open.append(peer)
    _pid = os.getpid()
    _thread = threading.current_thread()


def check_unregistered(under_run: bool) -> None:
    """Check that :func:`register` would succeed.

    Raises:
        UsageError: as :func:`register`.
    """
    if _open:
        raise UsageError(
            "this process has joined already: finish its peer, or leave its with block, before the next join"
        )
    if under_run and _has_left:
        raise UsageError("this process has left its run already: under gossipx run a script joins once")


def training_continues() -> None:
    """Forget an earlier sys.exit: the script caught it, since it still trains."""
    global _failed
    _failed = False


def exit_with(code: int) -> None:
    """Make this process end with ``code``, unless its script fails by itself."""
    global _code
    _code = _code or code


def script_failed(error: BaseException) -> BaseException:
    """Let a peer that was asked to stop leave in order. Return with which error the script ends, by default the given.

    For an exception hook: an exit hook comes after the traceback, and cannot change the exit code.
    """
    if os.getpid() == _pid and threading.current_thread() is _thread:
        for peer in [one for one in _open if one.leaves_in_order]:
            try:
                peer.end_failed(error)
            except KeyboardInterrupt:
                return SystemExit(INTERRUPTED)
            except (GossipxError, SystemExit) as end:
                return end
    return error


def _register() -> None:
    if multiprocessing.parent_process() is not None:  # forked by multiprocessing, it ends without exit hooks
        util.Finalize(None, _at_process_end, exitpriority=0)
        util.Finalize(None, _end_process, exitpriority=-sys.maxsize)  # the last one
    atexit.register(_end)  # before the next, so that it is called after it
    # The finish starts threads, which atexit callbacks cannot do from Python 3.12 on. Threading's own exit callbacks
    # run earlier, before the interpreter joins other threads; registering fails once the main thread has ended.
    if sys.version_info >= (3, 12) and hasattr(threading, "_register_atexit"):
        with contextlib.suppress(RuntimeError):
            threading._register_atexit(_at_exit)
            return
    atexit.register(_at_exit)


def unregister(peer: Finishable) -> None:
    """Remove a peer that was closed."""
    global _has_left
    if peer in _open:
        _open.remove(peer)
        _has_left = True


def _watch_exits() -> None:
    """Record the code that is given to sys.exit, exit or quit: an exit hook cannot see it.

    The interpreter has forgotten a SystemExit when it calls exit hooks, so one that the script raises itself is unseen.
    """
    global _exit
    found = sys.exit
    for module in list(sys.modules.values()):  # sys, and those that have imported the function
        if isinstance(module, ModuleType):
            for name in [name for name, value in list(vars(module).items()) if value is found]:
                setattr(module, name, _record_exit)
    _exit = found
    Quitter.__call__ = _record_quit  # type: ignore[method-assign]


def _record_exit(code: object = None, /) -> NoReturn:
    _record(code)
    _exit(code)


def _record_quit(self: Quitter, code: object = None) -> NoReturn:
    _record(code)
    _quit(self, code)  # type: ignore[arg-type]


def _record(code: object) -> None:
    global _failed
    _failed = bool(code) and threading.current_thread() is threading.main_thread()


def _at_exit() -> None:
    if os.getpid() != _pid:
        return  # a process that the script forked, such as a data loader's worker
    if _thread not in (None, threading.current_thread()):
        _thread.join()  # the script trains in another thread
    for peer in list(_open):
        try:
            if peer.finishes_at_exit and getattr(sys, "last_value", None) is None and not _failed:
                peer.finish()
            else:
                peer.leave()
        except GossipxError as error:
            with contextlib.suppress(SystemExit):
                sys.excepthook(type(error), error, error.__traceback__)
            exit_with(error.exit_code)
        except (SystemExit, KeyboardInterrupt) as end:  # asked to stop during the finish; the script itself has ended
            code = getattr(end, "code", INTERRUPTED)
            exit_with(code if isinstance(code, int) else int(code is not None))
            peer.close()


def _at_process_end() -> None:
    """End the peer of a process of multiprocessing, which calls this while it handles the error of its function."""
    global _failed
    error = sys.exc_info()[1]
    _failed = _failed or bool(error.code if isinstance(error, SystemExit) else error)
    _at_exit()


def _end_process() -> None:
    if _code and not _failed:
        raise SystemExit(_code)


def _end() -> None:
    """Replace the exit code 0 of a script that has succeeded: an exit hook cannot do so in another way."""
    if _code and os.getpid() == _pid and getattr(sys, "last_value", None) is None and not _failed:
        # The C library calls these, the last one first, when all exit hooks have run and the script's files are closed.
        libc = ctypes.CDLL(None)
        libc.__cxa_atexit(libc._exit, ctypes.c_void_p(_code), None)
        libc.__cxa_atexit(libc.fflush, None, None)
