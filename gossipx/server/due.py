"""The schedule of a shard's checkpoints: after so many ticks of its clock, or after so many seconds."""

from __future__ import annotations

NOTICE = 2
"""Ticks from when a checkpoint is due by the clock on the wall to when it is taken. With bsp all hear of it by then: at
clock c the answers of that tick are given; those of the next tell workers, before they compute iteration c + 1, and
their pushes of that tell the other shards, before these tick to c + 2."""


class Due:
    """Says when a checkpoint of one shard is due.

    Args:
        every: a checkpoint is due after so many ticks, or after so many seconds; 0, 0: never.
        leads: it says when these seconds have passed, for all shards and workers.

    Attributes:
        at: the clock of the next checkpoint that is due by seconds, or of the last.
        kept: the clock of the last checkpoint.
        since: when that was taken, or the shard was begun.
    """

    def __init__(self, every: tuple[int, float], leads: bool):
        self.at = self.kept = 0
        self.since = 0.0
        self._every = every
        self._leads = leads
        self._handed = False

    def take_over(self, kept: int, now: float) -> None:
        """Go on from the last checkpoint of another layout, which would not do for this one."""
        self.kept, self.since, self._handed = kept, now, True

    def take(self, clock: int, now: float, last: bool, first: bool, leaves: bool) -> bool:
        """Return whether a checkpoint is due, which is taken then; arguments as those of ``Shard.keep``."""
        ticks, seconds = self._every
        if seconds and self._leads and self.at <= self.kept and now - self.since >= seconds:
            self.at = clock + NOTICE
        by_ticks = ticks and clock // ticks > self.kept // ticks
        at_an_end = (last or first) and (ticks or seconds)
        due = leaves or self.kept < self.at <= clock or by_ticks or at_an_end
        if (clock == self.kept and not (first or self._handed)) or not due:
            return False
        self.kept, self.since, self._handed = clock, now, False
        return True
