"""The schedule of a shard's checkpoints: after a number of clock ticks, or of seconds."""

from __future__ import annotations

from gossipx.settings.interval import CheckpointInterval

NOTICE = 2
"""Ticks between the moment when a checkpoint by seconds becomes due and the checkpoint itself. With bsp, two are enough
to tell all shards and workers: at clock c the replies of the current tick are already sent, the next replies tell the
workers before they compute iteration c + 1, and their pushes of that iteration tell the other shards before these tick
to c + 2.
"""


class CheckpointSchedule:
    """Decides when to take a checkpoint of one shard.

    Args:
        every: the interval between two checkpoints, in ticks or seconds.
        leads: whether this shard announces a checkpoint by seconds to all other shards and workers.

    Attributes:
        due_clock: the clock of the next checkpoint by seconds, or of the last one if none is scheduled.
        last_clock: the clock of the last checkpoint.
        last_time: when that was taken, or when the shard began.
    """

    def __init__(self, every: CheckpointInterval, leads: bool):
        self.due_clock = self.last_clock = 0
        self.last_time = 0.0
        self._every = every
        self._leads = leads
        self._handed_over = False

    def take_over(self, last_clock: int, now: float) -> None:
        """Continue after the last checkpoint of another layout. It does not fit this layout, so the next one is taken
        even if the clock has not advanced.
        """
        self.last_clock, self.last_time, self._handed_over = last_clock, now, True

    def take(self, clock: int, now: float, last: bool, first: bool, leaves: bool) -> bool:
        """Return whether to take a checkpoint now, and if so record it as taken.

        Args:
            clock: the shard's.
            now: in seconds.
            last: training is over.
            first: the shard begins.
            leaves: the shard's holder is about to leave.
        """
        ticks, seconds = self._every.iterations, self._every.seconds
        if seconds and self._leads and self.due_clock <= self.last_clock and now - self.last_time >= seconds:
            self.due_clock = clock + NOTICE
        by_ticks = ticks and clock // ticks > self.last_clock // ticks
        at_an_end = (last or first) and (ticks or seconds)
        due = leaves or self.last_clock < self.due_clock <= clock or by_ticks or at_an_end
        if (clock == self.last_clock and not (first or self._handed_over)) or not due:
            return False
        self.last_clock, self.last_time, self._handed_over = clock, now, False
        return True
