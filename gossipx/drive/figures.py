"""What a peer measures of itself while it trains."""

from __future__ import annotations

import time

from gossipx.drive.held import Retrieval


class Figures:
    """Seconds and bytes.

    Attributes:
        blocked: seconds that gossipx stopped the training thread.
        overhead: seconds that it measured the model and recorded figures there.
        distance: the last estimate of the consensus distance.
        squared_distances: ‖x_j − x_i‖² of the retrievals since then.
        retrievals: those since the last step.
        seconds: from the first iteration to the last.
    """

    def __init__(self) -> None:
        self.blocked = 0.0
        self.overhead = 0.0
        self.distance: float | None = None
        self.squared_distances: list[float] = []
        self.retrievals: list[Retrieval] = []
        self.bytes_at_end = 0
        self.finish_bytes = 0
        self.seconds = 0.0
        self._bytes_at_start = 0
        self._began = time.perf_counter()

    def start(self, received: int) -> None:
        """Training begins; what came before does not count."""
        self._bytes_at_start = received
        self._began = time.perf_counter()

    def end(self, received: int) -> None:
        """Training has ended."""
        self.bytes_at_end = received
        self.seconds = time.perf_counter() - self._began

    def received(self, received: int) -> int:
        """Bytes received while training."""
        return received - self._bytes_at_start

    def blocked_fraction(self) -> float:
        """Share of the training's wall time so far that gossipx stopped the training thread."""
        return self.blocked / (time.perf_counter() - self._began)
