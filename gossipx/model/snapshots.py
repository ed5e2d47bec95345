"""Reference-counted snapshots of a model at a step boundary, shared by all readers."""

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
"""Seconds that a thread waits for a pending snapshot: as long as the default peer timeout."""


class BufferOwner(Protocol):
    """The owner of snapshots' memory; :class:`gossipx.model.pool.Pool`.

    Attributes:
        lock: guards reference counts.
        copying: guards copies from the device to host memory.
    """

    lock: threading.RLock
    copying: threading.Lock

    def on_host(self, vectors: list[Tensor], written: Mark) -> HostBuffer:
        """Return a complete copy in host memory of vectors on the device; ``written``: mark of their last write."""

    def free(self, buffer: HostBuffer) -> None:
        """Take a buffer back."""

    def reuse(self, vectors: list[Tensor], buffer: HostBuffer | None) -> None:
        """Take back the memory of a snapshot without references."""


class Snapshot:
    """A model as it was at one step boundary; shared, and unchanged while it has references.

    A snapshot that is requested in the middle of a step is pending: it is filled at the next boundary.
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
        self._callbacks: list[Callable[[], None]] = []

    def fill(self, vectors: list[Tensor], buffer: HostBuffer | None, step: int, written: Mark = None) -> None:
        """Set the content: the model after ``step`` iterations. The memory is released with the snapshot.

        Args:
            vectors: the elements of each section, on the module's device.
            buffer: their host buffer, if the device is the host.
            written: mark of the last write to ``vectors``.
        """
        self._vectors, self._buffer, self._step, self._written = vectors, buffer, step, written
        self._source = None
        self._settled.set()

    def refill(self, step: int, written: Mark) -> None:
        """Record that the vectors now contain the model after ``step`` iterations."""
        self._step, self._written, self._source = step, written, None
        if self._buffer is not None and self._buffer.vectors is not self._vectors:  # an outdated copy
            self._owner.free(self._buffer)
            self._buffer = None

    def fail(self) -> None:
        """Mark the snapshot as failed, because no further boundary follows."""
        self._settled.set()

    @property
    def settled(self) -> bool:
        """Whether it is filled or has failed, so that nothing blocks."""
        return self._settled.is_set()

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once it is filled or has failed: now, or on the thread that calls :meth:`notify`."""
        with self._owner.lock:
            if not self._settled.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def notify(self) -> None:
        """Run the callbacks; the caller holds no locks."""
        with self._owner.lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    @property
    def vectors(self) -> list[Tensor]:
        """The elements of each section, on the module's device.

        Raises:
            LocalFaultError: the snapshot is pending, and no step boundary followed in time.
        """
        return self._wait()

    @property
    def step(self) -> int:
        """Iterations that the model has done; errors as :attr:`vectors`."""
        self._wait()
        return self._step

    @property
    def buffer(self) -> HostBuffer:
        """The bytes in host memory: the vectors themselves on a CPU, else a copy made on first use."""
        vectors = self._wait()
        with self._owner.copying:
            if self._buffer is None:
                self._buffer = self._owner.on_host(vectors, self._written)
            return self._buffer

    def _wait(self) -> list[Tensor]:
        """Wait until the snapshot is filled; return its vectors. Errors as :attr:`vectors`."""
        if not self._settled.wait(PATIENCE):
            raise LocalFaultError(f"a model is sent at a step boundary, and the step takes longer than {PATIENCE:g} s")
        if self._vectors is None:
            raise LocalFaultError("a model is sent at a step boundary, and training has ended before the next one")
        return self._vectors

    @property
    def source(self) -> Source:
        """The same bytes as a source for the wire, shared by all sends of this version."""
        buffer = self.buffer
        with self._owner.lock:
            if self._source is None:
                self._source = Source(buffer.view, buffer.descriptor)
            return self._source

    def hold(self) -> Snapshot:
        """Acquire another reference, to be released separately."""
        with self._owner.lock:
            self.holders += 1
        return self

    def release(self) -> None:
        """Release a reference; the last release frees the memory for reuse."""
        with self._owner.lock:
            self.holders -= 1
            if self.holders == 0 and self._vectors is not None:
                self._owner.reuse(self._vectors, self._buffer)


@dataclass
class CapturedModel(Generic[Retrieval]):
    """A model captured for an exchange; owns references to ``base`` and ``now``.

    Attributes:
        base: the model as it was captured.
        now: the result of merging other models into it.
        retrievals: the merged models, in order.
    """

    base: Snapshot
    now: Snapshot = field(init=False)
    retrievals: list[Retrieval] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now = self.base.hold()

    def release(self) -> None:
        """Release both references."""
        self.base.release()
        self.now.release()
