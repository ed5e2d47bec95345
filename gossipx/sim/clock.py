"""Virtual time for a peer's driver: its workers and timers are actions of the simulated world, not threads."""

from __future__ import annotations

from collections.abc import Callable

from gossipx.runtime.driver.clock import DriverClock

Later = Callable[[float, Callable[[], None]], None]
"""Schedules an action of one peer at a time; it is dropped if the peer is down by then."""


class VirtualWorker:
    """Runs each job as soon as the action that queued it is over.

    Args:
        later: schedules an action of the peer.
        now: returns the time.
        failed: called with the error of a job; None: errors are raised.

    Attributes:
        busy_for: 0: a job takes no time.
    """

    busy_for = 0.0

    def __init__(self, later: Later, now: Callable[[], float], failed: Callable[[Exception], None] | None):
        self._later = later
        self._now = now
        self._failed = failed

    def put(self, job: Callable[[], None]) -> None:
        """Queue a job."""
        self._later(self._now(), lambda: self._run(job))

    def close(self, wait: bool = False) -> None:
        """Do nothing: no action of a peer follows its end."""

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            if self._failed is None:
                raise
            self._failed(error)


class VirtualTimers:
    """Named timers in virtual time.

    Args:
        later: schedules an action of the peer.
        fire: called with the name of the timer that expires.
        paused: returns the length of all pauses of the peer so far.
    """

    def __init__(self, later: Later, fire: Callable[[str], None], paused: Callable[[], float]):
        self._later = later
        self._fire = fire
        self._paused = paused
        self._paused_before = paused()
        self._at: dict[str, float] = {}

    def set(self, name: str, at: float) -> None:
        """Set the timer ``name`` to expire at ``at``; replace its earlier setting."""
        self._at[name] = at
        self._later(at, lambda: self._expire(name, at))

    def gap(self) -> float:
        """Return the length of the pauses since the last call."""
        before, self._paused_before = self._paused_before, self._paused()
        return self._paused_before - before

    def close(self) -> None:
        """Let no timer expire any more."""
        self._at.clear()

    def _expire(self, name: str, at: float) -> None:
        if self._at.get(name) == at:
            del self._at[name]
            self._fire(name)


class VirtualClock(DriverClock):
    """The clock of one peer in virtual time.

    Args:
        now: returns the virtual time in seconds.
        later: schedules an action of the peer.
        paused: returns the length of all pauses of the peer so far.
    """

    def __init__(self, now: Callable[[], float], later: Later, paused: Callable[[], float] = float):
        self._now = now
        self._later = later
        self._paused = paused

    def now(self) -> float:
        return self._now()

    def worker(self, name: str, failed: Callable[[Exception], None] | None = None) -> VirtualWorker:
        """Return a worker whose jobs are actions of the peer."""
        return VirtualWorker(self._later, self._now, failed)

    def timers(self, fire: Callable[[str], None], name: str) -> VirtualTimers:
        """Return timers whose expiries are actions of the peer."""
        return VirtualTimers(self._later, fire, self._paused)
