"""Buffers of models that do something once a part of their model has arrived."""

from __future__ import annotations

import threading
from collections.abc import Callable

from managers import LONG, UploadBuffer

from gossipx.memory import PIECE


class During(UploadBuffer):
    """A buffer for a model; ``first`` is called once a part of it has arrived."""

    def __init__(self, size: int, first: Callable[[], None]):
        super().__init__(memoryview(bytearray(size)))
        self._first: Callable[[], None] | None = first

    def buffer_at(self, start: int) -> memoryview:
        return self.view[start : start + PIECE]

    def filled(self, start: int) -> None:
        self._began()

    def take(self, start: int, view: memoryview) -> None:
        super().take(start, view)
        self._began()

    def _began(self) -> None:
        first, self._first = self._first, None
        if first is not None:
            first()


class Paused(During):
    """A buffer that takes the rest of its model once ``go_on`` is set.

    Attributes:
        began: is set once a part of the model has arrived.
        dropped: is set once the buffer was released.
    """

    def __init__(self, size: int):
        super().__init__(size, self._pause)
        self.began, self.go_on, self.dropped = threading.Event(), threading.Event(), threading.Event()

    def _pause(self) -> None:
        self.began.set()
        assert self.go_on.wait(LONG)

    def release(self) -> None:
        super().release()
        self.dropped.set()
