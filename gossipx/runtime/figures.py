"""What a peer measures of itself while it trains."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossipx.runtime.captures import Retrieval


@dataclass(frozen=True)
class EarlierTotals:
    """What the processes that this one goes on from have added up, while training."""

    bytes_received: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    poisoned: int = 0


_KEPT = ("blocked", "waited", "overhead", "distance")
"""Attributes that a checkpoint keeps as they are."""


class Figures:
    """Seconds and bytes.

    Attributes:
        blocked: seconds that gossipx stopped the training thread.
        waited: of these, seconds for tables of a parameter server.
        overhead: seconds that it measured the model and recorded figures there.
        distance: the last estimate of the consensus distance.
        squared_distances: ‖x_j − x_i‖² of the retrievals since then.
        retrievals: those since the last step.
        seconds: from the first iteration to the last.
        before: what comes from a checkpoint; the others above are of the whole run.
    """

    def __init__(self) -> None:
        self.blocked = 0.0
        self.waited = 0.0
        self.overhead = 0.0
        self.distance: float | None = None
        self.squared_distances: list[float] = []
        self.retrievals: list[Retrieval] = []
        self.bytes_at_end = 0
        self.finish_bytes = 0
        self.seconds = 0.0
        self.before = EarlierTotals()
        self._bytes_at_start = 0
        self._began = time.perf_counter()

    def start(self, received: int) -> None:
        """Training begins, or goes on from a checkpoint; what came since then does not count."""
        self._bytes_at_start = received - self.before.bytes_received
        self._began = time.perf_counter() - self.before.seconds

    def kept(self, received: int, sent: int, poisoned: int) -> dict[str, Any]:
        """What a checkpoint keeps, as plain data.

        Args:
            received: bytes that this process has received; ``sent``, and ``poisoned`` models that it has refused, too.
        """
        seconds = time.perf_counter() - self._began
        before = EarlierTotals(
            self.received(received), self.before.bytes_sent + sent, seconds, self.before.poisoned + poisoned
        )
        own = {name: getattr(self, name) for name in _KEPT}
        return {"before": dataclasses.asdict(before), **own, "squared_distances": list(self.squared_distances)}

    def go_on(self, kept: Mapping[str, Any]) -> None:
        """Go on from what :meth:`kept` gave; before :meth:`start`."""
        self.before = EarlierTotals(**kept["before"])
        for name in _KEPT:
            setattr(self, name, kept[name])
        self.squared_distances = list(kept["squared_distances"])

    def end(self, received: int) -> None:
        """Training has ended."""
        self.bytes_at_end = received
        self.seconds = time.perf_counter() - self._began

    def received(self, received: int) -> int:
        """Bytes received while training."""
        return received - self._bytes_at_start

    def fraction(self, seconds: float) -> float:
        """Share that these are of the training's wall time so far."""
        return seconds / (time.perf_counter() - self._began)
