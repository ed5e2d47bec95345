"""A model that comes in: where its bytes go, and what is made of them on the way.

Of trained values only the difference to a base, one's own model as of the request, is kept: it is formed piece by piece
as they come, in the base's own memory where nobody else needs that. So a pull with its averaging moves little more
memory than the pull alone, and needs one buffer.
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass

from torch import Tensor

from gossipx.memory import STAGED, copy
from gossipx.model import kernels
from gossipx.model.arena import ParameterArena
from gossipx.model.buffers import HostBuffer, typed
from gossipx.model.snapshots import Snapshot


@dataclass(frozen=True)
class _Segment:
    """A run of bytes that are treated alike."""

    start: int
    stop: int
    section: int
    first: int  # element of the section's vector at ``start``
    trained: bool


class Incoming:
    """Takes in one model; a :class:`gossipx.wire.Sink`.

    Args:
        arena: whose model it will be mixed into.
        whole: a whole model, to be adopted.
        base: what trained values are compared with, held by the caller, who gives that hold away here; None: everything
            is kept as it comes.

    Attributes:
        nbytes: that are to come.
        compares: whether trained values are compared with a base.
    """

    def __init__(self, arena: ParameterArena, base: Snapshot | None, whole: bool = False):
        self.nbytes = arena.nbytes(whole)
        self._arena, self._pool = arena, arena.pool
        self.compares = base is not None
        self._whole = whole
        self._base = base
        self._buffer: HostBuffer | None = None
        self._squared = 0.0
        self._brings = False  # it is on its way to the device
        self._segments = _segments(arena, whole, self.compares)
        self._starts = [segment.start for segment in self._segments]
        self._staging: memoryview | None = None

    @property
    def buffer(self) -> HostBuffer:
        """x_j − base for trained values, x_j for all others; of worth only when all has come."""
        if self._buffer is None:
            if self._base is not None:
                self._pool.has_both(self._base)
            self._buffer = self._pool.buffer(self._whole)
        return self._buffer

    def compared_with(self, number: int) -> Tensor | None:
        """What the trained values of a section are compared with, before the first has come; None: with nothing."""
        return None if self._base is None else self._base.buffer.vectors[number]

    def room(self, start: int) -> memoryview:
        """Where the bytes from ``start`` on belong; see :class:`gossipx.wire.Sink`."""
        segment = self._segment(start)
        self._settle(start)
        if not segment.trained:
            return self.buffer.view[start : segment.stop]
        stop = min(start + STAGED, segment.stop)
        if self._staging is None:
            self._staging = self._pool.staging()
        return self._staging[: stop - start]

    def filled(self, start: int) -> None:
        """The room from ``start`` on is full."""
        segment = self._segment(start)
        if segment.trained:
            self.take(start, self.room(start))
        else:
            self._bring(segment, start, segment.stop)

    def take(self, start: int, view: memoryview) -> None:
        """Take the bytes from ``start`` on from where they lie."""
        done = 0
        while done < len(view):
            segment = self._segment(start + done)
            stop = min(len(view), segment.stop - start)
            self._settle(start + done)
            if segment.trained:
                stop = min(stop, done + STAGED)
                self._compare(segment, start + done, view[done:stop])
            else:
                copy(view[done:stop], self.buffer.view[start + done : start + stop])
                self._bring(segment, start + done, start + stop)
            done = stop

    def _compare(self, segment: _Segment, start: int, view: memoryview) -> None:
        """Take a piece of trained values."""
        dtype = self._arena.sections[segment.section].values.dtype
        theirs = typed(view, dtype)
        first = segment.first + (start - segment.start) // dtype.itemsize
        here = slice(first, first + len(theirs))
        difference = self.buffer.vectors[segment.section][here]
        own = difference if self._base is None else self._base.buffer.vectors[segment.section][here]
        self._squared += kernels.difference(theirs, own, difference)
        self._bring(segment, start, start + len(view))

    def _bring(self, segment: _Segment, start: int, stop: int) -> None:
        """What has come, and is to be mixed as it is now, goes on to the device."""
        if self.compares:
            size = self._arena.sections[segment.section].values.itemsize
            first = segment.first + (start - segment.start) // size
            self._pool.bring(self.buffer, segment.section, slice(first, first + (stop - start) // size))
            self._brings = True

    def norm(self) -> float:
        """‖x_j − base‖₂ over the trained values, once all has come; NaN if any value is not finite.

        ‖x_j‖₂ where nothing is compared. A buffer may hold −∞ on both sides, as attention masks do.
        """
        self._let_base_go()
        if not self.compares:
            rows = zip(self._arena.sections, self.buffer.vectors, strict=True)
            self._squared = sum(kernels.squared_norm(vector[: section.trainable]) for section, vector in rows)
        others = sum(
            kernels.squared_norm(theirs.masked_fill(theirs == ours, 0))
            for theirs, ours in self._arena.buffers_of(self.buffer)
        )
        if not math.isfinite(self._squared + others):
            return math.nan
        self._wait_until_brought()
        self._pool.upload(self.buffer)  # it is to be mixed: let it be there when training comes to that
        return math.sqrt(self._squared)

    def give_away(self) -> HostBuffer:
        """:attr:`buffer`, the caller's own from now on; all other memory is given back."""
        buffer, self._buffer = self.buffer, None
        self.release()
        return buffer

    def release(self) -> None:
        """Give all memory back; nothing may come any more."""
        self._let_base_go()
        self._wait_until_brought()
        if self._buffer is not None:
            self._pool.free(self._buffer)
            self._buffer = None
        if self._staging is not None:
            self._pool.free_staging(self._staging)
            self._staging = None

    def _segment(self, start: int) -> _Segment:
        return self._segments[bisect.bisect(self._starts, start) - 1]

    def _settle(self, done: int) -> None:
        """Go on in the base's own memory, as soon as nobody else needs it: what is ``done`` moves there.

        Where it is the last boundary and others are given an older one, a copy of it is made at the beginning, and the
        base given back: with the next boundary it would be one model more.
        """
        if self._base is None:
            return
        taken = self._pool.take_over(self._base)
        if taken is None:
            if self._buffer is None and self._pool.would_crowd(self._base):
                with self._pool.copying_base():
                    self._buffer = self._pool.buffer()
                    self._buffer.view[:] = self._base.buffer.view
                    self._base.release()
                self._base = None
            return
        if self._buffer is not None:
            taken.view[:done] = self._buffer.view[:done]
            self._wait_until_brought()
            taken.on_device, self._buffer.on_device = self._buffer.on_device, None
            self._pool.free(self._buffer)
            self._pool.has_one(self._base)
        self._buffer, self._base = taken, None

    def _wait_until_brought(self) -> None:
        if self._brings:
            self._pool.brought()
            self._brings = False

    def _let_base_go(self) -> None:
        """It is needed no more."""
        if self._base is not None:
            self._base.release()
            self._pool.has_one(self._base)
            self._base = None


def _segments(arena: ParameterArena, whole: bool, compares: bool) -> list[_Segment]:
    found = []
    start = 0
    for number, section in enumerate(arena.sections):
        size = section.values.itemsize
        ends = [0, len(section.storage)] if whole else [0, section.trainable, section.mixed]
        for first, last in itertools.pairwise(ends):
            if last > first:
                stop = start + (last - first) * size
                found.append(_Segment(start, stop, number, first, trained=compares and first == 0 < section.trainable))
                start = stop
    return found
