"""The clock of a driver, with the workers and timers that depend on it.

A driver takes all three from its :class:`Clock`, so that the same driver runs in real processes and in virtual time
(:mod:`gossipx.sim`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from gossipx.runtime.serial_worker import SerialWorker
from gossipx.runtime.timers import Timers


class Worker(Protocol):
    """Runs queued jobs one at a time, in order; see :class:`~gossipx.runtime.serial_worker.SerialWorker`."""

    def put(self, job: Callable[[], None]) -> None:
        """Queue a job."""

    def close(self, wait: bool = False) -> None:
        """Ignore later jobs; with ``wait``, return when the queued ones are done."""


class NamedTimers(Protocol):
    """Named timers; see :class:`~gossipx.runtime.timers.Timers`."""

    def set(self, name: str, at: float) -> None:
        """Set the timer ``name`` to expire at ``at``; replace its earlier setting."""

    def gap(self) -> float:
        """Return the longest time since the last call for which the process or its machine stood still, in seconds."""

    def close(self) -> None:
        """Let no timer expire any more."""


class Clock(Protocol):
    """A source of time, workers and timers."""

    def now(self) -> float:
        """Return the time in seconds; it never goes back."""

    def worker(self, name: str, failed: Callable[[Exception], None] | None = None) -> Worker:
        """Return a worker; ``failed`` is called with the error of a job."""

    def timers(self, fire: Callable[[str], None], name: str) -> NamedTimers:
        """Return timers that call ``fire`` with the name of the timer that expires."""


class SystemClock:
    """The clock of this machine; workers and timers are threads."""

    def now(self) -> float:
        """Return the machine's monotonic time in seconds."""
        return time.monotonic()

    def worker(self, name: str, failed: Callable[[Exception], None] | None = None) -> SerialWorker:
        """Return a thread that runs jobs."""
        return SerialWorker(name, failed)

    def timers(self, fire: Callable[[str], None], name: str) -> Timers:
        """Return timers with a thread of their own."""
        return Timers(fire, name)
