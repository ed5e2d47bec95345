"""What a peer tells ``gossipx run``, its parent process: JSON lines on a pipe."""

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

EVERY = 0.25
"""Seconds between two lines of progress: as often as a person can follow."""
ORPHAN_GRACE = 5.0
"""Seconds that a process has to end by itself once its run is gone: as long as an interrupted script may tidy up."""
ORPHANED = 130
"""Exit code of one that did not: that of one that was interrupted."""


class Progress:
    """The pipe to the parent.

    Args:
        fd: its write end; None: nobody listens.
    """

    def __init__(self, fd: int | None):
        self._fd = fd
        self._last = 0.0
        self._ending = threading.Lock()  # held once this process is being ended

    @property
    def due(self) -> bool:
        """Whether the next line of progress is to be told."""
        return self._fd is not None and time.monotonic() - self._last >= EVERY

    def tell(self, **line: Any) -> None:
        """Tell one line. If the parent is gone this process is ended: no peer outlives its run."""
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
        """Notice from here on that the parent has died, also while there is nothing to tell."""
        if self._fd is None:
            return
        poll = select.poll()
        poll.register(self._fd, 0)  # errors and hang-ups alone

        def watch() -> None:
            poll.poll()
            self._end()

        threading.Thread(target=watch, name="gossipx-parent", daemon=True).start()

    def _end(self) -> None:
        """As Ctrl-C would, which wakes a script that waits for something, too; then whatever it makes of that."""
        if not self._ending.acquire(blocking=False):
            return
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(ORPHAN_GRACE)
        os._exit(ORPHANED)

    def take_errors(self, with_traceback: bool = False) -> None:
        """Tell the parent, rather than print, errors that end this process: one line each, an interruption none."""
        print_others = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if isinstance(error, GossipxError):
                self.tell(error=str(error), exit=error.exit_code)
            if with_traceback or not isinstance(error, GossipxError | KeyboardInterrupt):
                print_others(kind, error, trace)

        sys.excepthook = hook
