"""The figures that a peer measures of itself while it trains, in seconds and bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gossipx.figures import COUNTED, Counters, renamed
from gossipx.runtime.driver.captures import Retrieval


@dataclass(frozen=True)
class EarlierTotals:
    """Totals of the earlier processes of this peer, from the checkpoint that it resumed from."""

    bytes_received: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    counts: Mapping[str, int] = field(default_factory=Counters)


_SAVED = ("blocked", "waited", "overhead", "distance")
"""Attributes that a checkpoint saves unchanged."""


class Figures:
    """The figures of one peer, for the whole run unless stated otherwise.

    Args:
        now: returns the time in seconds.

    Attributes:
        blocked: seconds that gossipx blocked the training thread.
        waited: the part of ``blocked`` that was spent waiting for tables of a parameter server.
        overhead: seconds that the training thread spent measuring the model and recording figures.
        distance: the last estimate of the consensus distance; None before the first.
        squared_distances: ‖x_j − x_i‖² of the retrievals since that estimate.
        retrievals: the retrievals since the last step.
        bytes_at_end: bytes that this process had received when the finish began.
        finish_bytes: bytes received in the finish.
        seconds: from the first iteration to the last.
        earlier: totals of earlier processes; zero in a new run.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.blocked = 0.0
        self.waited = 0.0
        self.overhead = 0.0
        self.distance: float | None = None
        self.squared_distances: list[float] = []
        self.retrievals: list[Retrieval] = []
        self.bytes_at_end = 0
        self.finish_bytes = 0
        self.seconds = 0.0
        self.earlier = EarlierTotals()
        self._bytes_at_start = 0
        self._now = now
        self._began = now()

    def start(self, received: int) -> None:
        """Start the clock of the training.

        Args:
            received: bytes that this process received while joining; they do not count.
        """
        self._bytes_at_start = received - self.earlier.bytes_received
        self._began = self._now() - self.earlier.seconds

    @property
    def elapsed(self) -> float:
        """Seconds of training so far."""
        return self._now() - self._began

    def all_counts(self, here: Mapping[str, int]) -> dict[str, int]:
        """Return the counters for the whole run, given those of this process."""
        return {name: number + here[name] for name, number in self.earlier.counts.items()}

    def state_dict(self, received: int, sent: int, counts: Mapping[str, int]) -> dict[str, Any]:
        """Return what a checkpoint saves, as plain data.

        Args:
            received, sent: bytes that this process has received and sent.
            counts: the counters of this process.
        """
        sent += self.earlier.bytes_sent
        totals = {"bytes_received": self.received(received), "bytes_sent": sent, "seconds": self.elapsed}
        own = {name: getattr(self, name) for name in _SAVED}
        return {"before": totals | self.all_counts(counts), **own, "squared_distances": list(self.squared_distances)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; call it before :meth:`start`."""
        before = renamed(state["before"])
        counts = {name: before.get(name, 0) for name in COUNTED}  # a checkpoint may be older than a counter
        self.earlier = EarlierTotals(before["bytes_received"], before["bytes_sent"], before["seconds"], counts)
        for name in _SAVED:
            setattr(self, name, state[name])
        self.squared_distances = list(state["squared_distances"])

    def end(self) -> None:
        """Stop the clock, after the last iteration."""
        self.seconds = self.elapsed

    def received(self, received: int) -> int:
        """Return the bytes received while training, given all bytes that this process has received."""
        return received - self._bytes_at_start

    def fraction(self, seconds: float) -> float:
        """Return ``seconds`` as a fraction of the training's wall time so far."""
        return seconds / self.elapsed
