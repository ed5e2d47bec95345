"""The interface by which a run records metrics."""

from __future__ import annotations

from typing import Protocol


class Recorder(Protocol):
    """Records metrics of a run: in TensorBoard, or nowhere."""

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Record ``value`` under ``tag`` (such as ``sync/delta``) at iteration ``step``."""

    def unwritten(self) -> int:
        """Flush. Return how many records could not be written."""

    def close(self) -> None:
        """Flush and close."""
