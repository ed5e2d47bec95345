"""The figures of a running peer for requests from outside the run: by ``gossipx status`` and Prometheus."""

from __future__ import annotations

import math
import time

from gossipx.peer.status import status
from gossipx.runtime.driver import Driver
from gossipx.runtime.reporting import Reporter


class Inspection:
    """The status of one peer. Its methods may be called on any thread.

    Args:
        driver: the peer's driver.
        reporter: has the peer's figures.
    """

    def __init__(self, driver: Driver, reporter: Reporter):
        self._driver = driver
        self._reporter = reporter

    def status(self) -> dict[str, object]:
        """Return the figures of :func:`gossipx.peer.status.status`, and those of the process.

        Returns:
            Also ``waiting``: whether the training thread is blocked by gossipx; ``loss`` and ``accuracy``: the last
            ``train/loss`` and ``test/accuracy``, None if it is missing or not finite; ``bytes_received`` and
            ``bytes_sent`` of this process; ``seconds`` of training; ``blocked_seconds`` of these that the training
            thread was blocked; and the counters of faults, named as in :class:`gossipx.metrics.summary.Summary`.
        """
        reporter, comm = self._reporter, self._driver.comm
        figures = reporter.figures
        return {
            **self._driver.read(lambda role: status(role, time.monotonic())),
            "waiting": self._driver.waiting,
            "loss": _finite(reporter.last("train/loss")),
            "accuracy": _finite(reporter.last("test/accuracy")),
            "bytes_received": 0 if comm is None else comm.bytes_received,
            "bytes_sent": 0 if comm is None else comm.bytes_sent,
            "seconds": figures.elapsed,
            "blocked_seconds": figures.blocked,
            **reporter.faults(),
        }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
