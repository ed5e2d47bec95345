"""A worker thread with a queue: it runs jobs one at a time, in order."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

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
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

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
            try:
                job()
            except Exception as error:
                if self._failed is None:
                    log.exception("%s: a job failed", self._name)
                else:
                    self._failed(error)
