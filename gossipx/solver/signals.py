"""Caffe's signal handling: SIGINT stops training after the iteration and a snapshot, SIGHUP requests a snapshot.

SIGINT is left alone if the script, or the peer that the solver is, has a handler of its own.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Requests:
    """Pending requests by signal.

    Attributes:
        stop: whether SIGINT was received. A second SIGINT raises KeyboardInterrupt at once.
    """

    def __init__(self) -> None:
        self.stop = False
        self._snapshot = False
        self._catching = False

    def take_snapshot_request(self) -> bool:
        """Return whether SIGHUP was received since the last call."""
        requested, self._snapshot = self._snapshot, False
        return requested

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Turn signals into requests within this context. Has no effect outside the main thread.

        Raises:
            KeyboardInterrupt: SIGINT was received after the last check of the requests.
        """
        if self._catching or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._catching = True
        before = {signal.SIGHUP: signal.getsignal(signal.SIGHUP)}
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            before[signal.SIGINT] = signal.default_int_handler
        try:
            signal.signal(signal.SIGHUP, self._on_hangup)
            if signal.SIGINT in before:
                signal.signal(signal.SIGINT, self._on_interrupt)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            stopped, self.stop, self._catching = self.stop, False, False
        if stopped:
            raise KeyboardInterrupt

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True

    def _on_hangup(self, number: int, frame: FrameType | None) -> None:
        self._snapshot = True
