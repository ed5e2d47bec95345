"""Caffe's habits with signals: SIGINT stops after the iteration and a snapshot, SIGHUP has one taken."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Requests:
    """What signals have asked for and nobody has done yet.

    Attributes:
        stop: SIGINT has come. A second one ends the process's work at once, as ever.
    """

    def __init__(self) -> None:
        self.stop = False
        self._snapshot = False
        self._catching = False

    def snapshot(self) -> bool:
        """Whether SIGHUP has come since the last time this was asked."""
        asked, self._snapshot = self._snapshot, False
        return asked

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """While this lasts signals are requests. On other threads than the main one none can be caught.

        Raises:
            KeyboardInterrupt: SIGINT came when nobody looked at requests any more.
        """
        if self._catching or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._catching = True
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
        try:
            signal.signal(signal.SIGINT, self._on_interrupt)
            signal.signal(signal.SIGHUP, self._on_hangup)
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
