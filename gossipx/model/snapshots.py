"""Models as they were at a step boundary: shared, and never torn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from gossipx.errors import LocalFaultError
from gossipx.memory import Source
from gossipx.model.buffers import HostBuffer
from gossipx.model.streams import Mark

Retrieval = TypeVar("Retrieval")

PATIENCE = 30.0
"""Seconds that a thread is kept for a snapshot of the next boundary: as long as a peer is waited for by default."""


class BufferOwner(Protocol):
    """Whose snapshots they are; :class:`gossipx.model.pool.Pool`.

    Attributes:
        lock: guards who holds what.
        copying: guards copies from the device to host memory.
    """

    lock: threading.RLock
    copying: threading.Lock

    def on_host(self, vectors: list[Tensor], written: Mark) -> HostBuffer:
        """A copy in host memory of vectors on the device, complete; ``written``: when they are."""

    def free(self, buffer: HostBuffer) -> None:
        """Take a buffer back."""

    def reuse(self, vectors: list[Tensor], buffer: HostBuffer | None) -> None:
        """Take back what a snapshot held."""


class Snapshot:
    """A model as it was at one step boundary, shared by all who ask for it and not changed while anyone holds it.

    One that is only promised, because training is in the midst of a step, is filled at the next boundary.
    """

    def __init__(self, owner: BufferOwner):
        self.holders = 1
        self._owner = owner
        self._vectors: list[Tensor] | None = None
        self._buffer: HostBuffer | None = None
        self._source: Source | None = None
        self._step = 0
        self._written: Mark = None
        self._settled = threading.Event()
        self._then: list[Callable[[], None]] = []

    def fill(self, vectors: list[Tensor], buffer: HostBuffer | None, step: int, written: Mark = None) -> None:
        """It is the model after ``step`` iterations, in memory that is given back with it.

        Args:
            vectors: for each section its elements, on the module's device.
            buffer: the same in host memory, if that is where they are.
            written: when they are on the device.
        """
        self._vectors, self._buffer, self._step, self._written = vectors, buffer, step, written
        self._source = None
        self._settled.set()

    def became(self, step: int, written: Mark) -> None:
        """Its vectors hold the model after ``step`` iterations now."""
        self._step, self._written, self._source = step, written, None
        if self._buffer is not None and self._buffer.vectors is not self._vectors:  # a copy of what was there before
            self._owner.free(self._buffer)
            self._buffer = None

    def fail(self) -> None:
        """There will be no further boundary: whoever waits for it is told so."""
        self._settled.set()

    @property
    def settled(self) -> bool:
        """Whether it is filled or has failed; nobody has to wait for it."""
        return self._settled.is_set()

    def when_settled(self, then: Callable[[], None]) -> None:
        """Call ``then`` once it is filled or has failed: at once, or from :meth:`tell`'s thread."""
        with self._owner.lock:
            if not self._settled.is_set():
                self._then.append(then)
                return
        then()

    def tell(self) -> None:
        """Tell those who wait; without locks."""
        with self._owner.lock:
            told, self._then = self._then, []
        for then in told:
            then()

    @property
    def vectors(self) -> list[Tensor]:
        """For each section its elements, on the module's device.

        Raises:
            LocalFaultError: it was promised, and no step boundary has come.
        """
        return self._wait()

    @property
    def step(self) -> int:
        """Iterations that it has seen; as :attr:`vectors`."""
        self._wait()
        return self._step

    @property
    def buffer(self) -> HostBuffer:
        """Its bytes in host memory: the vectors themselves on a CPU, else a copy made when it is first asked for."""
        vectors = self._wait()
        with self._owner.copying:
            if self._buffer is None:
                self._buffer = self._owner.on_host(vectors, self._written)
            return self._buffer

    def _wait(self) -> list[Tensor]:
        """Until it is filled; its vectors. Errors as :attr:`vectors`."""
        if not self._settled.wait(PATIENCE):
            raise LocalFaultError(f"a model is given at a step boundary, and the step takes longer than {PATIENCE:g} s")
        if self._vectors is None:
            raise LocalFaultError("a model is given at a step boundary, and training has ended before the next")
        return self._vectors

    @property
    def source(self) -> Source:
        """The same to be sent, by all who send this version."""
        buffer = self.buffer
        with self._owner.lock:
            if self._source is None:
                self._source = Source(buffer.view, buffer.descriptor)
            return self._source

    def hold(self) -> Snapshot:
        """Hold it once more; to be given back once more."""
        with self._owner.lock:
            self.holders += 1
        return self

    def release(self) -> None:
        """Give it back; after the last holder's call its memory is used again."""
        with self._owner.lock:
            self.holders -= 1
            if self.holders == 0 and self._vectors is not None:
                self._owner.reuse(self._vectors, self._buffer)


@dataclass
class CapturedModel(Generic[Retrieval]):
    """A model that was captured for an exchange; it holds ``base`` and ``now``.

    Attributes:
        base: the model as it was captured.
        now: what it has become by merging others into it.
        retrievals: these, in order.
    """

    base: Snapshot
    now: Snapshot = field(init=False)
    retrievals: list[Retrieval] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now = self.base.hold()

    def release(self) -> None:
        """Let both go."""
        self.base.release()
        self.now.release()
