"""Progress reports from a peer to its parent process, ``gossipx run``: JSON lines on a pipe.

The pipe also detects that the parent has died; the peer then ends itself, so that no peer outlives its run.
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
"""Minimum seconds between two progress lines: as often as a person can read them."""
ORPHAN_GRACE = 5.0
"""Seconds between SIGINT and a forced exit once the parent has died, for the script's own cleanup."""
ORPHANED = 130
"""Exit code of that forced exit, the same as after Ctrl-C."""


class Progress:
    """The pipe to the parent process.

    Args:
        fd: its write end; None: there is no parent, and nothing is written.
    """

    def __init__(self, fd: int | None):
        self._fd = fd
        self._last = 0.0
        self._ending = threading.Lock()  # acquired once, by the thread that ends this process

    @property
    def due(self) -> bool:
        """Whether :data:`INTERVAL` has passed since the last line."""
        return self._fd is not None and time.monotonic() - self._last >= INTERVAL

    def tell(self, **line: Any) -> None:
        """Write one line. If the parent has died, end this process."""
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
        """Interrupt the main thread as Ctrl-C would, also in a blocking call; force an exit after ORPHAN_GRACE."""
        if not self._ending.acquire(blocking=False):
            return
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(ORPHAN_GRACE)
        os._exit(ORPHANED)

    def take_errors(self, with_traceback: bool = False) -> None:
        """Report GossipxErrors that end this process to the parent, not on stderr, and do not report interruptions.

        Args:
            with_traceback: print the traceback of every error, too.
        """
        print_others = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if isinstance(error, GossipxError):
                self.tell(error=str(error), exit=error.exit_code)
            if with_traceback or not isinstance(error, GossipxError | KeyboardInterrupt):
                print_others(kind, error, trace)

        sys.excepthook = hook
