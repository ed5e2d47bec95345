"""Memory for the models of one module, used again and again: in host memory, on the module's device, and between them.

Memory of a model is large, and new memory is slow to be had: so it is known who holds what, and what nobody needs any
more is taken over or used for the next model.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from torch import Tensor

from gossipx.memory import STAGED
from gossipx.model.buffers import HostBuffer
from gossipx.model.layout import Section, lengths
from gossipx.model.snapshots import Snapshot
from gossipx.model.streams import DeviceStreams, Mark

COPY_SECONDS = 1.0
"""Longest that a boundary waits for a copy: several times what the largest models take."""


class Pool:
    """Gives room for models and takes it back; :class:`gossipx.model.snapshots.BufferOwner` of their snapshots.

    Args:
        sections: of the module.
        streams: of its device.

    Attributes:
        lock: guards who holds what.
        copying: guards copies from the device to host memory.
        has_more: whether a whole model has more than a retrieval exchanges.
        now: the last boundary, if that was copied; it may be asked for at any time.
    """

    def __init__(self, sections: Sequence[Section], streams: DeviceStreams):
        self.lock = threading.RLock()
        self.copying = threading.Lock()
        self.has_more = lengths(sections, whole=True) != lengths(sections, whole=False)
        self.now: Snapshot | None = None
        self._sections = sections
        self._streams = streams
        self._free: list[HostBuffer] = []
        self._made = 0  # buffers, those that are free among them
        self._copied = 0  # bases that are being copied
        self._doubled: list[Snapshot] = []  # bases of models that have buffers of their own
        self._given_back = threading.Condition(self.lock)
        self._free_vectors: list[tuple[list[Tensor], Mark]] = []
        self._free_staging: list[memoryview] = []

    # --- room ---------------------------------------------------------------------------------------

    def buffer(self, whole: bool = False) -> HostBuffer:
        """A buffer of the size of a model, reused where one is free; give it back by :meth:`free`."""
        if whole and self.has_more:
            return HostBuffer(lengths(self._sections, whole=True), whole=True)  # they travel once a run: none is kept
        with self.lock:
            if self._free:
                return self._free.pop()
            self._made += 1
            made = HostBuffer(lengths(self._sections, whole=False), whole=False)
            self._streams.pin(made)
            return made

    def free(self, buffer: HostBuffer) -> None:
        """Take back what :meth:`buffer` gave."""
        with self.lock:
            if buffer.on_device is not None:
                self._free_vectors.append((buffer.on_device, self._streams.mark()))
                buffer.on_device = None
            if not buffer.whole:
                self._free.append(buffer)

    def close(self) -> None:
        """Keep nothing any more: neither the last boundary, which holds us in turn, nor what was to be used again."""
        with self.lock:
            self.now = None
            for free in (self._free, self._free_vectors, self._free_staging):
                free.clear()

    def staging(self) -> memoryview:
        """Room for one piece, reused where one is free; give it back by :meth:`free_staging`."""
        with self.lock:
            return self._free_staging.pop() if self._free_staging else memoryview(bytearray(STAGED))

    def free_staging(self, staging: memoryview) -> None:
        """Take back what :meth:`staging` gave."""
        with self.lock:
            self._free_staging.append(staging)

    def room(self) -> tuple[list[Tensor], HostBuffer | None]:
        """Memory for one boundary on the module's device, that nobody holds, and the buffer if it is one's."""
        if self._streams.on_host:
            buffer = self.buffer()
            return buffer.vectors, buffer
        return self._room_on_device()[0], None

    def _room_on_device(self) -> tuple[list[Tensor], Mark]:
        """The same, and when training's lane is done with it; training's own later work need not look at that."""
        with self.lock:
            if self._free_vectors:
                return self._free_vectors.pop()
        made = [self._streams.room(section.values[: section.mixed]) for section in self._sections]
        return made, self._streams.mark()

    # --- of snapshots -------------------------------------------------------------------------------

    def reuse(self, vectors: list[Tensor], buffer: HostBuffer | None) -> None:
        """Take back what a snapshot held; for :meth:`Snapshot.release`."""
        if buffer is not None:
            self.free(buffer)
        if buffer is None or buffer.vectors is not vectors:
            with self.lock:
                self._free_vectors.append((vectors, self._streams.mark()))

    def take_over(self, snapshot: Snapshot) -> HostBuffer | None:
        """The memory of a snapshot that only the caller holds and nobody can ask for any more; None: others need it."""
        buffer = snapshot.buffer
        with self.lock:
            if snapshot is self.now or snapshot.holders > 1:
                return None
            snapshot.holders = 0
            if buffer.vectors is not snapshot.vectors:
                self._free_vectors.append((snapshot.vectors, self._streams.mark()))
            return buffer

    def would_crowd(self, base: Snapshot) -> bool:
        """Whether ``base`` is the last boundary and one more is kept: the next boundary would find no room but new."""
        with self.lock:
            return base is self.now and self._made - len(self._free) >= 2

    @contextlib.contextmanager
    def copying_base(self) -> Iterator[None]:
        """Around the copy of a base and its release: a boundary that would need more memory waits for it."""
        with self.lock:
            self._copied += 1
        try:
            yield
        finally:
            with self.lock:
                self._copied -= 1
                self._given_back.notify_all()

    def has_both(self, base: Snapshot) -> None:
        """A model comes in to a buffer of its own, as others read its ``base``: until :meth:`has_one`."""
        with self.lock:
            self._doubled.append(base)

    def has_one(self, base: Snapshot) -> None:
        """It has gone on in the base, or come to an end."""
        with self.lock:
            self._doubled = [one for one in self._doubled if one is not base]
            self._given_back.notify_all()

    def wait_for_buffers(self) -> None:
        """Before one more model is given: wait until no buffer is about to be free.

        That is where nobody reads a base any more and its model goes on in it with the next piece. The boundary after
        the one that is given would find no room but new.
        """
        with self.lock:
            self._given_back.wait_for(lambda: all(base.holders > 1 for base in self._doubled), COPY_SECONDS)

    def wait_for_bases(self) -> None:
        """With :attr:`lock` held, wait until no base is being copied."""
        self._given_back.wait_for(lambda: not self._copied, COPY_SECONDS)

    # --- between the device and host memory -----------------------------------------------------------

    def on_host(self, vectors: list[Tensor], written: Mark) -> HostBuffer:
        """A copy of vectors on the device, complete; for :class:`Snapshot`. Who asks waits, and training does not."""
        buffer = self.buffer()
        rows = list(zip(buffer.vectors, vectors, strict=True))
        self._streams.on_side_stream(
            lambda: [ours.copy_(theirs, non_blocking=self._streams.later) for ours, theirs in rows], written
        )
        self._streams.wait(self._streams.mark_side_stream())
        return buffer

    def bring(self, buffer: HostBuffer, section: int, piece: slice) -> None:
        """Copy some elements of a model that comes in to the module's device, while the rest of it comes.

        They stay as they are until :meth:`brought`.
        """
        if self._streams.on_host:
            return
        after = self._streams.mark_side_stream()
        if buffer.on_device is None:
            buffer.on_device, after = self._room_on_device()
        there, here = buffer.on_device[section][piece], buffer.vectors[section][piece]
        self._streams.on_side_stream(lambda: there.copy_(here, non_blocking=self._streams.later), after)

    def brought(self) -> None:
        """Wait until all is there that :meth:`bring` was told of."""
        self._streams.wait(self._streams.mark_side_stream())

    def upload(self, buffer: HostBuffer) -> list[Tensor]:
        """The vectors of a model that came in, on the module's device; done beside training if called ahead."""
        if self._streams.on_host:
            return buffer.vectors
        if buffer.on_device is None:
            for section in range(len(buffer.vectors)):
                self.bring(buffer, section, slice(None))
            self.brought()
        assert buffer.on_device is not None, "a model has a section"
        return buffer.on_device
