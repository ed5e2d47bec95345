"""Progress reports from a peer to its parent process, ``gossipx run``: JSON lines on a pipe.

The pipe also shows when the parent has died, because its other end is then closed. The peer ends itself in that case,
so that no peer outlives its run.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from types import TracebackType
from typing import Any

from gossipx.errors import GossipxError

INTERVAL = 0.25
"""Minimum seconds between two progress lines; nobody can read them faster."""
ORPHAN_GRACE = 5.0
"""Seconds for the script's own cleanup once the parent has died: between SIGINT and a forced exit."""
ORPHANED = 130
"""Exit code of that forced exit, the same as after Ctrl-C."""


class Progress:
    """The pipe to the parent process.

    Args:
        fd: file descriptor of the pipe's write end; None: there is no parent, so nothing is written.
    """

    def __init__(self, fd: int | None):
        self._fd = fd
        self._last = 0.0
        self._ending = threading.Lock()  # acquired once, by the thread that ends this process

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

    def watch_parent(self) -> None:
        """Start a thread that ends this process when the parent dies, even while nothing is written."""
        if self._fd is None:
            return
        poll = select.poll()
        poll.register(self._fd, 0)  # errors and hang-ups only

        def watch() -> None:
            poll.poll()
            self._end()

        threading.Thread(target=watch, name="gossipx-parent", daemon=True).start()

    def _end(self) -> None:
        """Interrupt the main thread as Ctrl-C would, even in a blocking call; exit after :data:`ORPHAN_GRACE`."""
        if not self._ending.acquire(blocking=False):
            return
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(ORPHAN_GRACE)
        os._exit(ORPHANED)

    def take_errors(self, with_traceback: bool = False) -> None:
        """Install an exception hook that reports a GossipxError to the parent instead of printing its traceback.

        A KeyboardInterrupt is not reported at all. Tracebacks of other exceptions are printed as usual.

        Args:
            with_traceback: also print the tracebacks of GossipxErrors and of KeyboardInterrupt.
        """
        print_others = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if isinstance(error, GossipxError):
                self.tell(error=str(error), exit=error.exit_code)
            if with_traceback or not isinstance(error, GossipxError | KeyboardInterrupt):
                print_others(kind, error, trace)

        sys.excepthook = hook
