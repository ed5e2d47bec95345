"""A thread that does one thing after the other."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger("gossipx")

LONGEST = 300.0
"""Seconds that the end of a lane is waited for: a checkpoint of 3 GB at 10 MB/s."""


class SerialWorker:
    """Does what is put into it, in order, in a thread of its own.

    Args:
        name: of the thread.
        failed: told of an error, which is logged otherwise.
    """

    def __init__(self, name: str, failed: Callable[[Exception], None] | None = None):
        self._name = name
        self._failed = failed
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, what: Callable[[], None]) -> None:
        """Have ``what`` done."""
        self._queue.put(what)

    def close(self, wait: bool = False) -> None:
        """Do nothing that is put into it from now on; ``wait`` for what was put into it before."""
        self._queue.put(None)
        if wait:
            self._thread.join(LONGEST)

    def _work(self) -> None:
        while (what := self._queue.get()) is not None:
            try:
                what()
            except Exception as error:
                if self._failed is None:
                    log.exception("%s: something could not be done", self._name)
                else:
                    self._failed(error)
