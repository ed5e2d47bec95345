"""Named timers that share one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Timers:
    """A thread that calls ``fire(name)`` when the timer ``name`` expires.

    Args:
        fire: called from the timer thread.
        name: suffix of the thread's name.
    """

    def __init__(self, fire: Callable[[str], None], name: str):
        self._fire = fire
        self._at: dict[str, float] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"gossipx-timers-{name}", daemon=True)
        self._thread.start()

    def set(self, name: str, at: float) -> None:
        """Set the timer ``name`` to expire at ``at`` (time.monotonic()); replace its earlier setting."""
        with self._changed:
            self._at[name] = at
            self._changed.notify()

    def close(self) -> None:
        """Stop the thread; no timer expires after this."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
        self._fire = lambda name: None  # break the reference cycle with the driver

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                soonest = min(self._at, key=self._at.__getitem__, default=None)
                left = None if soonest is None else self._at[soonest] - time.monotonic()
                if soonest is None or (left is not None and left > 0):
                    self._changed.wait(left)
                    continue
                del self._at[soonest]
            self._fire(soonest)
