"""Timers by name on one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Timers:
    """Calls ``fire(name)`` when the time of a name has come.

    Args:
        fire: called from the timers' thread.
        name: of the thread.
    """

    def __init__(self, fire: Callable[[str], None], name: str):
        self._fire = fire
        self._at: dict[str, float] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"gossipx-timers-{name}", daemon=True)
        self._thread.start()

    def set(self, name: str, at: float) -> None:
        """Fire ``name`` at ``at`` on time.monotonic(), in place of an earlier setting."""
        with self._changed:
            self._at[name] = at
            self._changed.notify()

    def close(self) -> None:
        """Fire nothing any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
        self._fire = lambda name: None  # who is told holds us

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
