"""The process that forks others: ``python -m forks.server SOCKET``.

Each connection stands for a process. Its first message is a JSON object, ``{"command", "cwd", "env"}``, with the
descriptors of standard input, output and error; the server responds ``{"pid"}``, and ``{"code"}`` when the process has
ended. The process is killed when its connection is closed. The server ends with the process that started it.

It has no threads and starts none, since a fork copies only the calling thread.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import selectors
import signal
import socket
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

from forks.process import Forked

LOADED = (
    "networkx",
    "numba",
    "rich.live",
    "safetensors.torch",
    "tensorboard.backend.event_processing.event_accumulator",
    "tensorboard.plugins.hparams.summary_v2",
    "torch._dynamo",
    "torch.distributed",
    "torch.optim.adamw",
    "torch.utils.data",
    "torch.utils.tensorboard",
)
"""Modules that peers import, at once or later."""
NEED_EXTRAS = {"gossipx.codecs.loops": "numba", "gossipx.tools.certs": "cryptography"}
NOT_LOADED = (
    "gossipx.integrations",
    "gossipx.__main__",
    *(name for name in NEED_EXTRAS if not find_spec(NEED_EXTRAS[name])),
)
TEST_IMAGES, TEST_WINDOWS = 500, 50
"""Images, or windows of text, on which forked peers evaluate a model; they do that three times at their end."""
LONGEST = 1 << 20


def load() -> None:
    """Import all of gossipx and the modules that it uses."""
    import torch

    import gossipx
    from gossipx.settings.sections import TaskSettings

    for name in filter(lambda name: find_spec(name.partition(".")[0]), LOADED):
        importlib.import_module(name)
    for module in pkgutil.walk_packages(gossipx.__path__, "gossipx.", onerror=lambda name: None):
        if not module.name.startswith(NOT_LOADED):
            importlib.import_module(module.name)

    from gossipx.launch.run import processes
    from gossipx.tasks import data

    whole = data.load

    @functools.cache
    def load_short(task: str, folder: Path | None = None) -> tuple[data.Samples, data.Samples]:
        own, test = whole(task, folder)
        most = TEST_WINDOWS if task == "text" else TEST_IMAGES
        return own, test.take(torch.arange(min(most, len(test))))

    data.load = load_short
    load_short(TaskSettings().task, None)  # unpacking the built-in data takes a quarter of a second
    processes.launch = functools.partial(processes.launch, spawn=Forked)  # type: ignore[assignment]


class Server:
    """The fork server of one test process."""

    def __init__(self, place: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(place)
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._processes: dict[socket.socket, Forked] = {}
        woken, waking = socket.socketpair()
        woken.setblocking(False)
        waking.setblocking(False)
        signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._waking = waking
        self._selector.register(woken, selectors.EVENT_READ, functools.partial(self._reap, woken))

    def serve(self) -> None:
        """Fork processes until standard input ends."""
        self._selector.register(sys.stdin, selectors.EVENT_READ, lambda: sys.exit(0))
        try:
            while True:
                for key, _ in self._selector.select():
                    key.data()
        finally:
            for process in self._processes.values():
                process.kill()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        self._selector.register(connection, selectors.EVENT_READ, functools.partial(self._begin, connection))

    def _begin(self, connection: socket.socket) -> None:
        message, files, _, _ = socket.recv_fds(connection, LONGEST, 3)
        if not message:
            self._close(connection)
            return
        while not message.endswith(b"\n"):
            message += connection.recv(LONGEST)
        asked = json.loads(message)
        signal.set_wakeup_fd(-1)
        streams = dict(zip(("stdin", "stdout", "stderr"), files, strict=True))
        process = Forked(asked["command"], cwd=asked["cwd"], env=asked["env"], start_new_session=True, **streams)
        signal.set_wakeup_fd(self._waking.fileno(), warn_on_full_buffer=False)
        for file in files:
            os.close(file)
        self._processes[connection] = process
        self._selector.modify(connection, selectors.EVENT_READ, functools.partial(self._close, connection))
        connection.sendall(json.dumps({"pid": process.pid}).encode() + b"\n")
        self._reap(None)  # it may have ended before SIGCHLD was handled

    def _reap(self, woken: socket.socket | None) -> None:
        if woken is not None:
            with contextlib.suppress(BlockingIOError):
                woken.recv(4096)
        for connection, process in list(self._processes.items()):
            if process.poll() is not None:
                with contextlib.suppress(OSError):
                    connection.sendall(json.dumps({"code": process.returncode}).encode() + b"\n")
                self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        process = self._processes.pop(connection, None)
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
        self._selector.unregister(connection)
        connection.close()


def main() -> None:
    """Load the modules, then serve."""
    warnings.simplefilter("ignore")
    load()
    warnings.resetwarnings()
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    threads = len(list(Path("/proc/self/task").iterdir())) if Path("/proc").is_dir() else 1
    assert threads == 1, f"{threads} threads would be lost by a fork"
    server = Server(sys.argv[1])
    print("ready", flush=True)
    server.serve()


if __name__ == "__main__":
    main()
