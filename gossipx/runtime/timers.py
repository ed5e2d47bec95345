"""Named timers that share one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

TICK = 0.05
"""Longest wait of the thread, in seconds, half of the shortest peer_timeout: it notices when it could not run."""


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
        self._ticked, self._gap = _passed(), 0.0  # when the thread last ran, and the longest time without
        self._thread = threading.Thread(target=self._run, name=f"gossipx-timers-{name}", daemon=True)
        self._thread.start()

    def set(self, name: str, at: float) -> None:
        """Set the timer ``name`` to expire at ``at`` (time.monotonic()); replace its earlier setting."""
        with self._changed:
            self._at[name] = at
            self._changed.notify()

    def gap(self) -> float:
        """Return the longest time since the last call for which the process or its machine stood still, in seconds.

        A thread that only waits runs meanwhile in every other case, however long a training step takes.
        """
        with self._changed:
            self._tick()
            longest, self._gap = self._gap, 0.0
        return longest

    def close(self) -> None:
        """Stop the thread; no timer expires after this."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
        self._fire = lambda name: None  # break the reference cycle with the driver

    def _tick(self) -> None:
        before, self._ticked = self._ticked, _passed()
        self._gap = max(self._gap, self._ticked - before)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._tick()
                if self._closed:
                    return
                soonest = min(self._at, key=self._at.__getitem__, default=None)
                left = TICK if soonest is None else self._at[soonest] - time.monotonic()
                if soonest is None or left > 0:
                    self._changed.wait(min(left, TICK))
                    continue
                del self._at[soonest]
            self._fire(soonest)


def _passed() -> float:
    """Return a time that continues while the machine is suspended; ``time.monotonic()`` stops meanwhile."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
