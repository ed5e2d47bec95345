"""Warnings at a limited rate: what happens again and again is told now and then, with a count."""

from __future__ import annotations

import logging
import time

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
