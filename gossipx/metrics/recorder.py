"""What a run writes down about itself, and the interface of whoever keeps it."""

from __future__ import annotations

from typing import Protocol


class Recorder(Protocol):
    """Keeps figures of a run: in TensorBoard, in memory for a test, or nowhere."""

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Keep ``value`` under ``tag`` (``sync/delta``) at iteration ``step``."""

    def close(self) -> None:
        """Write out what is still held back."""


class NullRecorder:
    """Keeps nothing."""

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
