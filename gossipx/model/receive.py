"""The sink for an incoming model, which subtracts a base from the trained values as they arrive.

The base is this peer's own model as of the request. The difference is formed piece by piece, while the bytes are in
cache, and stored in the base's own memory if nobody else reads it. So a pull with its averaging moves little more
memory than the pull alone, and needs one buffer.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gossipx.memory import STAGED, copy
from gossipx.model import kernels
from gossipx.model.arena import ParameterArena
from gossipx.model.buffers import HostBuffer, typed
from gossipx.model.layout import Section
from gossipx.model.snapshots import Snapshot


@dataclass(frozen=True)
class _Segment:
    """A range of bytes that are treated alike."""

    start: int
    stop: int
    section: int
    first: int  # index in the section's vector of the element at ``start``
    trained: bool


class Incoming:
    """Receives one model; a :class:`gossipx.wire.Sink`.

    Args:
        arena: arena of the model that it will be mixed into.
        whole: whether a whole model is received, to replace this peer's.
        fragment: number of the fragment that is received otherwise; 0: all that exchanges move.
        base: model to subtract from trained values; takes ownership of the caller's reference. None: values are
            stored as they arrive.

    Attributes:
        nbytes: number of bytes to receive.
        fragment: the fragment that is received.
        compares: whether a base is subtracted.
    """

    def __init__(self, arena: ParameterArena, base: Snapshot | None, whole: bool = False, fragment: int = 0):
        self.fragment = arena.fragment(fragment)
        self.nbytes = arena.nbytes(whole=True) if whole else self.fragment.nbytes
        self._pool = self.fragment.pool
        self.compares = base is not None
        self._whole = whole
        self._base = base
        self._buffer: HostBuffer | None = None
        self._squared = 0.0
        self._uploading = False
        self._segments = _segments(arena.whole if whole else self.fragment.sections, whole, self.compares)
        self._starts = [segment.start for segment in self._segments]
        self._staging: memoryview | None = None

    @property
    def buffer(self) -> HostBuffer:
        """x_j − base for trained values, x_j for all others; valid once all bytes have arrived."""
        if self._buffer is None:
            if self._base is not None:
                self._pool.begin_second_buffer(self._base)
            self._buffer = self._pool.buffer(self._whole)
        return self._buffer

    def compared_with(self, number: int) -> Tensor | None:
        """Return the base of a section, before the first byte has arrived; None: there is no base."""
        return None if self._base is None else self._base.buffer.vectors[number]

    def buffer_at(self, start: int) -> memoryview:
        """Return the memory for the bytes from ``start`` on; see :class:`gossipx.wire.Sink`."""
        segment = self._segment(start)
        self._reuse_base(start)
        if not segment.trained:
            return self.buffer.view[start : segment.stop]
        stop = min(start + STAGED, segment.stop)
        if self._staging is None:
            self._staging = self._pool.staging()
        return self._staging[: stop - start]

    def filled(self, start: int) -> None:
        """Process the memory from :meth:`buffer_at` of ``start``, which is now full."""
        segment = self._segment(start)
        if segment.trained:
            self.take(start, self.buffer_at(start))
        else:
            self._upload(segment, start, segment.stop)

    def take(self, start: int, view: memoryview) -> None:
        """Process the bytes from ``start`` on, which lie in ``view``."""
        done = 0
        while done < len(view):
            segment = self._segment(start + done)
            stop = min(len(view), segment.stop - start)
            self._reuse_base(start + done)
            if segment.trained:
                stop = min(stop, done + STAGED)
                self._compare(segment, start + done, view[done:stop])
            else:
                copy(view[done:stop], self.buffer.view[start + done : start + stop])
                self._upload(segment, start + done, start + stop)
            done = stop

    def _compare(self, segment: _Segment, start: int, view: memoryview) -> None:
        """Subtract the base from a piece of trained values."""
        dtype = self.fragment.sections[segment.section].values.dtype
        theirs = typed(view, dtype)
        first = segment.first + (start - segment.start) // dtype.itemsize
        here = slice(first, first + len(theirs))
        difference = self.buffer.vectors[segment.section][here]
        own = difference if self._base is None else self._base.buffer.vectors[segment.section][here]
        self._squared += kernels.difference(theirs, own, difference)
        self._upload(segment, start, start + len(view))

    def _upload(self, segment: _Segment, start: int, stop: int) -> None:
        """Start to copy finished bytes to the device, if they will be mixed."""
        if self.compares:
            size = self.fragment.sections[segment.section].values.itemsize
            first = segment.first + (start - segment.start) // size
            self._pool.upload_piece(self.buffer, segment.section, slice(first, first + (stop - start) // size))
            self._uploading = True

    def norm(self) -> float:
        """Return ‖x_j − base‖₂ over the trained values, or ‖x_j‖₂ without a base; NaN if any value is not finite.

        Call it once all bytes have arrived. A buffer may hold −∞ or NaN on both sides, as attention masks and values
        that nobody has set do.
        """
        self._release_base()
        if not self.compares:
            rows = zip(self.fragment.sections, self.buffer.vectors, strict=True)
            self._squared = sum(kernels.squared_norm(vector[: section.trainable]) for section, vector in rows)
        others = sum(
            kernels.squared_norm(theirs.masked_fill(kernels.same(theirs, ours), 0))
            for theirs, ours in self.fragment.buffers_of(self.buffer)
        )
        if not math.isfinite(self._squared + others):
            return math.nan
        self._finish_uploads()
        self._pool.upload(self.buffer)  # ahead of mixing, so that training does not wait for the copy
        return math.sqrt(self._squared)

    def give_away(self) -> HostBuffer:
        """Return :attr:`buffer`, which the caller then owns; release all other memory."""
        buffer, self._buffer = self.buffer, None
        self.release()
        return buffer

    def release(self) -> None:
        """Release all memory; nothing may arrive afterwards."""
        self._release_base()
        self._finish_uploads()
        if self._buffer is not None:
            self._pool.free(self._buffer)
            self._buffer = None
        if self._staging is not None:
            self._pool.free_staging(self._staging)
            self._staging = None

    def _segment(self, start: int) -> _Segment:
        return self._segments[bisect.bisect(self._starts, start) - 1]

    def _reuse_base(self, done: int) -> None:
        """Continue in the base's own memory once nobody else reads it; the first ``done`` bytes move there.

        If the base is the last boundary and other peers hold an older one, it is copied at the start and released.
        Otherwise the next boundary would need memory for one more model.
        """
        if self._base is None:
            return
        taken = self._pool.take_over(self._base)
        if taken is None:
            if self._buffer is None and self._pool.is_needed_for_boundary(self._base):
                with self._pool.copying_base():
                    self._buffer = self._pool.buffer()
                    self._buffer.view[:] = self._base.buffer.view
                    self._base.release()
                self._base = None
            return
        if self._buffer is not None:
            taken.view[:done] = self._buffer.view[:done]
            self._finish_uploads()
            taken.on_device, self._buffer.on_device = self._buffer.on_device, None
            self._pool.free(self._buffer)
            self._pool.end_second_buffer(self._base)
        self._buffer, self._base = taken, None

    def _finish_uploads(self) -> None:
        if self._uploading:
            self._pool.finish_uploads()
            self._uploading = False

    def _release_base(self) -> None:
        if self._base is not None:
            self._base.release()
            self._pool.end_second_buffer(self._base)
            self._base = None


def _segments(sections: Sequence[Section], whole: bool, compares: bool) -> list[_Segment]:
    found = []
    start = 0
    for number, section in enumerate(sections):
        size = section.values.itemsize
        ends = [0, len(section.storage)] if whole else [0, section.trainable, section.mixed]
        for first, last in itertools.pairwise(ends):
            if last > first:
                stop = start + (last - first) * size
                found.append(_Segment(start, stop, number, first, trained=compares and first == 0 < section.trainable))
                start = stop
    return found
