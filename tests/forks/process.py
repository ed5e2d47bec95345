"""A Python process that is forked instead of started, with the interface of :class:`subprocess.Popen`."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib.util
import inspect
import io
import logging
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_ARGUMENTS = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]
_KEPT: list[Any] = []
"""File objects that the child must not finalize: their descriptor numbers belong to other files there."""
NETWORK = "FORKS_NETWORK"
"""The environment variable with the file of the network namespace that a forked process enters."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM)


class Forked(subprocess.Popen[Any]):
    """``python -m MODULE``, ``python -c CODE`` or ``python SCRIPT`` as a fork of this process. If this process has
    threads, which a fork would lack, a new interpreter is started: ``gossipx run`` has some when it restarts a peer."""

    def _execute_child(self, *given: Any, **named: Any) -> None:
        if threading.active_count() > 1:
            super()._execute_child(*given, **named)  # type: ignore[misc]
            return
        call = {**dict(zip(_ARGUMENTS, given, strict=False)), **named}
        files = [call["p2cread"], call["c2pwrite"], call["errwrite"]]
        pid = os.fork()
        if pid == 0:
            try:
                _become(call, files)
            finally:
                os._exit(70)  # reached only after an error in this file, which was printed
        self.pid = pid
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(call[name] for name in pipes))  # type: ignore[attr-defined]


def _become(call: Mapping[str, Any], files: Sequence[int]) -> NoReturn:
    """Run the requested program in this fork, and end the process with it."""
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if call["start_new_session"]:
        os.setsid()
    for number, file in enumerate(files):
        if file not in (-1, number):
            os.dup2(file, number)
    _close_all_but(call["pass_fds"])
    if call["cwd"] is not None:
        os.chdir(call["cwd"])
    environment = os.environ if call["env"] is None else dict(call["env"])
    os.environ.clear()
    os.environ.update(environment)
    _enter(os.environ.pop(NETWORK, ""))
    gc.freeze()  # do not collect the parent's objects: the descriptors of its files have been reused
    _streams()
    logging.root.handlers.clear()
    _name_it()
    command = [os.fspath(argument) for argument in call["args"]]
    _set_threads()
    _exit_with(lambda: _run(command[1:]))


def _enter(network: str) -> None:
    """Enter a network namespace, given by its file."""
    if network:
        with Path(network).open("rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):  # CLONE_NEWNET
                raise OSError(ctypes.get_errno(), f"cannot enter {network}")


def _exit_with(run: Callable[[], int]) -> NoReturn:
    """Exit with the code that ``run`` returns, by the program's exit handlers of the C library, not the parent's."""
    libc, codes = ctypes.CDLL(None), [70]
    end = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: os._exit(codes[-1]))
    libc.__cxa_atexit(end, None, None)
    codes.append(run())
    libc.exit(codes[-1])
    raise AssertionError("exit has returned")


def _close_all_but(kept: Iterable[int]) -> None:
    begin = 3
    for number in sorted(kept):
        os.closerange(begin, number)
        begin = number + 1
    os.closerange(begin, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 2**16 else 2**16)


def _streams() -> None:
    _KEPT.extend((sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__))
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    encoding, _, given = os.environ.get("PYTHONIOENCODING", "").partition(":")
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw: Any = io.FileIO(number, "w", closefd=False)
        errors = given or "strict" if number == 1 else "backslashreplace"
        is_line_buffered = number == 2 or os.isatty(number)
        stream = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),
            encoding or "utf-8",
            errors,
            line_buffering=is_line_buffered,
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _name_it() -> None:
    """Set ``/proc/PID/comm`` to the peer's role, since ``/proc/PID/environ`` still shows the server's environment."""
    rank = os.environ.get("GOSSIPX_RANK")
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("python" if rank is None else f"peer {rank}")


def _set_threads() -> None:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def _run(arguments: Sequence[str]) -> int:
    """Run a module, code or a script as the interpreter does, and return the exit code."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    code = 0
    try:
        exec(_code(arguments, main), main.__dict__)
    except SystemExit as error:
        code = _exit_code(error.code)
    except BaseException as error:
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        try:
            # Omit the frames of this file.
            sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        except SystemExit as ended:
            code = _exit_code(ended.code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code == -signal.SIGINT:  # like the interpreter after an uncaught KeyboardInterrupt
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code & 0xFF


def _code(arguments: Sequence[str], main: types.ModuleType) -> types.CodeType:
    kind = arguments[0]
    if kind == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        return compile(arguments[1], "<string>", "exec")
    _add_path()
    if kind == "-m":
        sys.path[0] = str(Path.cwd())
        name = arguments[1]
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        assert spec is not None and spec.loader is not None and spec.origin is not None, name
        sys.argv = [spec.origin, *arguments[2:]]
        main.__spec__, main.__file__, main.__package__ = spec, spec.origin, spec.parent
        code = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
        assert isinstance(code, types.CodeType)
        return code
    script = Path(kind)
    sys.argv, sys.path[0] = list(arguments), str(script.resolve().parent)
    main.__file__ = kind
    return compile(script.read_bytes(), kind, "exec")


def _add_path() -> None:
    """Add the folders of PYTHONPATH after that of the script, like a new interpreter."""
    given = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[1:1] = [part for part in given if part not in sys.path]


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1
