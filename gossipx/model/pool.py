"""Reused memory for the models of one module: buffers in host memory, vectors on the device, and copies between them.

A model is large and allocation is slow. So buffers are reference-counted (:class:`gossipx.model.snapshots.Snapshot`),
and a buffer that is no longer needed is reused for the next model.

A *boundary* is the model as an optimizer step left it. An *incoming model* is one that is being received
(:class:`gossipx.model.receive.Incoming`). Its *base* is the snapshot of this peer's model that is subtracted from it,
piece by piece, while it arrives. If nobody else reads the base, the differences overwrite it, and the incoming model
takes over its memory. If others read it, the incoming model starts in a second buffer and moves later.

A snapshot's memory is in use as long as it has holders. If the last boundary has readers, the next one needs other
memory. The waits in this module keep that from being newly allocated memory.

Each fragment of a model that is exchanged in fragments has a pool. They share their free memory, so that it is that of
the fragments under way, rather than of all.
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
"""Maximum seconds of a wait for memory, several times as long as a copy of the largest models."""


class Pool:
    """Allocates and reuses memory for models; owns that of snapshots (:class:`gossipx.model.snapshots.BufferOwner`).

    Args:
        sections: sections of the module, or of a fragment of it.
        streams: work queues of its device.
        fragment: number of the fragment; 0: the whole model.
        lock: guards reference counts; None: a new one.
        free: unused buffers, shared with other fragments of the same size; None: a list of its own.
        whole: all sections of the module, for whole models; none for a fragment.

    Attributes:
        lock: guards reference counts.
        copying: guards copies from the device to host memory.
        has_more: whether a whole model, for a joining peer, is larger than the part that exchanges transfer.
        now: the last boundary, if it was copied; a further reference to it may be requested at any time.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        streams: DeviceStreams,
        fragment: int = 0,
        lock: threading.RLock | None = None,
        free: list[HostBuffer] | None = None,
        whole: Sequence[Section] = (),
    ):
        self.lock = lock or threading.RLock()
        self.copying = threading.Lock()
        self._whole = lengths(whole, whole=True)
        self.has_more = bool(whole) and self._whole != lengths(sections, whole=False)
        self.now: Snapshot | None = None
        self._sections = sections
        self._streams = streams
        self._fragment = fragment
        self._free: list[HostBuffer] = [] if free is None else free
        self._allocated = 0  # number of buffers, including free ones
        self._copying = 0  # number of incoming models that are copying their base, to release it
        self._shared_bases: list[Snapshot] = []  # bases that others read: their incoming models are in a second buffer
        self._given_back = threading.Condition(self.lock)
        self._free_vectors: list[tuple[list[Tensor], Mark]] = []
        self._free_staging: list[memoryview] = []

    # --- allocation ---------------------------------------------------------------------------------

    def buffer(self, whole: bool = False) -> HostBuffer:
        """Return a free or new buffer for a model; the caller gives it back with :meth:`free`."""
        if whole and self.has_more:
            return HostBuffer(self._whole, whole=True)  # needed once per run: not reused
        with self.lock:
            if self._free:
                free = self._free.pop()
                if free.fragment != self._fragment:
                    free.lay_out(lengths(self._sections, whole=False), self._fragment)
                return free
            self._allocated += 1
            made = HostBuffer(lengths(self._sections, whole=False), whole=False, fragment=self._fragment)
            self._streams.pin(made)
            return made

    def free(self, buffer: HostBuffer) -> None:
        """Take back a buffer from :meth:`buffer`."""
        with self.lock:
            if buffer.on_device is not None:
                self._free_device(buffer.on_device)
                buffer.on_device = None
            if not buffer.whole:
                self._free.append(buffer)

    def _free_device(self, vectors: list[Tensor]) -> None:
        """Keep unused vectors for reuse; those of a fragment return to torch, which reuses them for other fragments."""
        if not self._fragment:
            self._free_vectors.append((vectors, self._streams.mark()))

    def close(self) -> None:
        """Drop all free memory, and the last boundary: it refers to this pool, and so would keep both alive."""
        with self.lock:
            self.now = None
            for free in (self._free, self._free_vectors, self._free_staging):
                free.clear()

    def staging(self) -> memoryview:
        """Return memory for one piece of an incoming model; the caller gives it back with :meth:`free_staging`."""
        with self.lock:
            return self._free_staging.pop() if self._free_staging else memoryview(bytearray(STAGED))

    def free_staging(self, staging: memoryview) -> None:
        """Take back memory from :meth:`staging`."""
        with self.lock:
            self._free_staging.append(staging)

    def boundary_memory(self) -> tuple[list[Tensor], HostBuffer | None]:
        """Return unused vectors on the device for one boundary; on a CPU also the host buffer that they lie in."""
        if self._streams.on_host:
            buffer = self.buffer()
            return buffer.vectors, buffer
        return self._vectors_on_device()[0], None

    def _vectors_on_device(self) -> tuple[list[Tensor], Mark]:
        """Return unused vectors, and a mark of their last use on the training stream, for other streams to await."""
        with self.lock:
            if self._free_vectors:
                return self._free_vectors.pop()
        made = [self._streams.empty_like(section.values[: section.mixed]) for section in self._sections]
        return made, self._streams.mark()

    # --- snapshots ----------------------------------------------------------------------------------

    def reuse(self, vectors: list[Tensor], buffer: HostBuffer | None) -> None:
        """Take back the memory of a snapshot that has no holders any more."""
        if buffer is not None:
            self.free(buffer)
        if buffer is None or buffer.vectors is not vectors:
            with self.lock:
                self._free_device(vectors)

    def take_over(self, snapshot: Snapshot) -> HostBuffer | None:
        """Take the memory of a snapshot and return it. None: others hold the snapshot, or it is the last boundary."""
        buffer = snapshot.buffer
        with self.lock:
            if snapshot is self.now or snapshot.holders > 1:
                return None
            snapshot.holders = 0
            if buffer.vectors is not snapshot.vectors:
                self._free_device(snapshot.vectors)
            return buffer

    def is_needed_for_boundary(self, base: Snapshot) -> bool:
        """Return whether the next boundary would have to allocate memory if an incoming model kept its ``base``.

        The next boundary overwrites the last one, unless that has readers. So it lacks memory if ``base`` is the last
        boundary, and at least two buffers are in use.
        """
        with self.lock:
            return base is self.now and self._allocated - len(self._free) >= 2

    @contextlib.contextmanager
    def copying_base(self) -> Iterator[None]:
        """Return a context in which an incoming model copies its base and then releases it.

        A boundary that would need more memory waits until the context ends: see :meth:`wait_for_bases`.
        """
        with self.lock:
            self._copying += 1
        try:
            yield
        finally:
            with self.lock:
                self._copying -= 1
                self._given_back.notify_all()

    def begin_second_buffer(self, base: Snapshot) -> None:
        """Record that an incoming model starts in a second buffer, because others read its ``base``."""
        with self.lock:
            self._shared_bases.append(base)

    def end_second_buffer(self, base: Snapshot) -> None:
        """Record that the incoming model has moved to the memory of ``base``, or that receiving it has ended."""
        with self.lock:
            self._shared_bases = [other for other in self._shared_bases if other is not base]
            self._given_back.notify_all()

    def wait_for_buffers(self) -> None:
        """Wait while an incoming model is about to free its second buffer; called before a snapshot is handed out.

        This is so once nobody else reads its base: with the next piece, it moves to the base's memory. If a snapshot
        were handed out before, the next boundary would have to allocate memory.
        """
        with self.lock:
            self._given_back.wait_for(lambda: all(base.holders > 1 for base in self._shared_bases), COPY_SECONDS)

    def wait_for_bases(self) -> None:
        """Wait until no incoming model is copying its base (:meth:`copying_base`); the caller holds :attr:`lock`."""
        self._given_back.wait_for(lambda: not self._copying, COPY_SECONDS)

    # --- between the device and host memory -----------------------------------------------------------

    def on_host(self, vectors: list[Tensor], written: Mark) -> HostBuffer:
        """Copy vectors from the device to host memory; blocks the calling thread, but not the training stream.

        Args:
            written: mark of the last write to ``vectors``.
        """
        buffer = self.buffer()
        rows = list(zip(buffer.vectors, vectors, strict=True))
        self._streams.on_side_stream(
            lambda: [ours.copy_(theirs, non_blocking=self._streams.later) for ours, theirs in rows], written
        )
        self._streams.wait(self._streams.mark_side_stream())
        return buffer

    def upload_piece(self, buffer: HostBuffer, section: int, piece: slice) -> None:
        """Start to copy a piece of an incoming model to the module's device, while the rest is still being received.

        The piece in host memory must not change until :meth:`finish_uploads` returns.
        """
        if self._streams.on_host:
            return
        after = self._streams.mark_side_stream()
        if buffer.on_device is None:
            buffer.on_device, after = self._vectors_on_device()
        there, here = buffer.on_device[section][piece], buffer.vectors[section][piece]
        self._streams.on_side_stream(lambda: there.copy_(here, non_blocking=self._streams.later), after)

    def finish_uploads(self) -> None:
        """Wait until all copies of :meth:`upload_piece` are complete."""
        self._streams.wait(self._streams.mark_side_stream())

    def upload(self, buffer: HostBuffer) -> list[Tensor]:
        """Return a received model's vectors on the module's device; copy them there first, unless that was done."""
        if self._streams.on_host:
            return buffer.vectors
        if buffer.on_device is None:
            for section in range(len(buffer.vectors)):
                self.upload_piece(buffer, section, slice(None))
            self.finish_uploads()
        assert buffer.on_device is not None, "a model has a section"
        return buffer.on_device
