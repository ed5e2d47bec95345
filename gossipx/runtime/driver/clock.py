"""The clock of a driver, with the workers and timers that depend on it.

A driver takes all three from its :class:`DriverClock`, so that the same driver runs in real processes and in virtual
time (:mod:`gossipx.sim`).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol


class SerialJobs(Protocol):
    """Runs queued jobs one at a time, in order; see :class:`~gossipx.runtime.driver.clock.SerialWorker`."""

    def put(self, job: Callable[[], None]) -> None:
        """Queue a job."""

    @property
    def busy_for(self) -> float:
        """Seconds that the job under way has taken; 0 between jobs."""

    def close(self, wait: bool = False) -> None:
        """Ignore later jobs; with ``wait``, return when the queued ones are done."""


class NamedTimers(Protocol):
    """Named timers; see :class:`~gossipx.runtime.driver.clock.Timers`."""

    def set(self, name: str, at: float) -> None:
        """Set the timer ``name`` to expire at ``at``; replace its earlier setting."""

    def gap(self) -> float:
        """Return the longest time since the last call for which the process or its machine stood still, in seconds."""

    def close(self) -> None:
        """Let no timer expire any more."""


class DriverClock:
    """A source of time, workers and timers: here this machine's clock, and threads."""

    def now(self) -> float:
        """Return the time in seconds; it never goes back."""
        return time.monotonic()

    def worker(self, name: str, failed: Callable[[Exception], None] | None = None) -> SerialJobs:
        """Return a worker; ``failed`` is called with the error of a job."""
        return SerialWorker(name, failed)

    def timers(self, fire: Callable[[str], None], name: str) -> NamedTimers:
        """Return timers that call ``fire`` with the name of the timer that expires."""
        return Timers(fire, name)


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


log = logging.getLogger("gossipx")

CLOSE_TIMEOUT = 300.0
"""Seconds to wait for queued jobs: enough to write a checkpoint of 3 GB at 10 MB/s."""


class SerialWorker:
    """A thread that runs queued jobs in order.

    Args:
        name: the thread's name.
        failed: called with the error of a job; None: errors are logged.
    """

    def __init__(self, name: str, failed: Callable[[Exception], None] | None = None):
        self._name = name
        self._failed = failed
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._began: float | None = None  # when the job under way began
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def busy_for(self) -> float:
        """Seconds that the job under way has taken; 0 between jobs."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def put(self, job: Callable[[], None]) -> None:
        """Queue a job."""
        self._queue.put(job)

    def close(self, wait: bool = False) -> None:
        """Stop the thread after the jobs that are queued; ignore later ones.

        Args:
            wait: wait for the queued jobs, at most :data:`CLOSE_TIMEOUT` seconds.
        """
        self._queue.put(None)
        if wait:
            self._thread.join(CLOSE_TIMEOUT)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            self._began = time.monotonic()
            try:
                job()
            except Exception as error:
                if self._failed is None:
                    log.exception("%s: a job failed", self._name)
                else:
                    self._failed(error)
            self._began = None


INTERVAL = 60.0
"""Minimum seconds between two warnings, where the cause lasts for minutes."""

log = logging.getLogger("gossipx")


class LimitedLog:
    """Logs warnings; of each topic at most one per interval. Those in between are counted, and the next one says how
    many.

    Args:
        interval: in seconds.
    """

    def __init__(self, interval: float = INTERVAL):
        self._interval = interval
        self._topics: dict[str, tuple[float, int]] = {}  # time of the last warning, number of suppressed ones since

    def warn(self, topic: str, text: str) -> None:
        """Log a warning, or count it; one without a topic is logged in any case."""
        now = time.monotonic()
        last, suppressed = self._topics.get(topic, (-self._interval, 0))
        if topic and now - last < self._interval:
            self._topics[topic] = (last, suppressed + 1)
            return
        self._topics[topic] = (now, 0)
        log.warning("%s%s", text, f" ({suppressed} similar messages suppressed)" if suppressed else "")
