"""The interface by which a run records metrics, and recorders for tests."""

from __future__ import annotations

from typing import Protocol


class Recorder(Protocol):
    """Records metrics of a run: in TensorBoard, in memory for a test, or nowhere."""

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Record ``value`` under ``tag`` (such as ``sync/delta``) at iteration ``step``."""

    def close(self) -> None:
        """Flush and close."""


class NullRecorder:
    """Discards everything."""

    def scalar(self, tag: str, value: float, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class MemoryRecorder:
    """Keeps everything in ``scalars``: tag to list of (step, value)."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}

    def scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.setdefault(tag, []).append((step, value))

    def close(self) -> None:
        pass
