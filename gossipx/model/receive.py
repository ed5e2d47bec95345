"""An incoming model, the distance that a peer's own steps have moved its model, and the checksum of a final model.

The sink of an incoming model subtracts a base from the trained values as they arrive: this peer's own model as of the
request. The difference is formed piece by piece, while the bytes are in cache, and stored in the base's own memory if
nobody else reads it. So a pull with its averaging moves little more memory than the pull alone, and needs one buffer.

*Drift* is the distance that a peer's own steps, without mixing, have moved its model; some policies use it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor, nn

from gossipx.memory import STAGED_PIECE, copy
from gossipx.model import kernels, layout
from gossipx.model.arena import ParameterArena
from gossipx.model.layout import has_average
from gossipx.model.pool import HostBuffer, Snapshot, typed
from gossipx.model.section import Section, TensorKind


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

    def base(self) -> Sequence[Tensor]:
        """Return the base of each section, before the first byte has arrived; none: there is no base."""
        return () if self._base is None else self._base.buffer.vectors

    def buffer_at(self, start: int) -> memoryview:
        """Return the memory for the bytes from ``start`` on; see :class:`gossipx.wire.Sink`."""
        segment = self._segment(start)
        self._reuse_base(start)
        if not segment.trained:
            return self.buffer.view[start : segment.stop]
        stop = min(start + STAGED_PIECE, segment.stop)
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
                stop = min(stop, done + STAGED_PIECE)
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


class DriftReference:
    """The reference model x_r of the drift ‖x_t − x_r‖₂; for one thread at a time.

    Args:
        arena: holds x_t. Until a method first keeps a copy, x_r is the model at the last step boundary.
    """

    def __init__(self, arena: ParameterArena):
        self._arena = arena
        self._model: HostBuffer | None = None

    def set(self, model: HostBuffer | None = None) -> None:
        """Set x_r to a copy of ``model``, or of the fragment in it; None: of the last boundary."""
        if model is None:
            now = self._arena.snapshot()
            self.set(now.buffer)
            now.release()
            return
        self.load(model.vectors, model.fragment)

    def commit(self, difference: HostBuffer, share: float, base: Snapshot | None) -> None:
        """Mix a received model into the weights, and move x_r with them. Mixing is not drift.

        Args:
            difference, share: as for :meth:`gossipx.model.arena.Fragment.commit`.
            base: our model at the request; x_r becomes what the exchange makes of it, so that drift counts the steps
                since then. None: another peer pushed the model, and the share is added to x_r.
        """
        fragment = self._arena.fragment(difference.fragment)
        fragment.commit(difference, share, base)
        if base is not None and fragment.outer is not None:
            self.load(fragment.result_in(difference), fragment.number)
            return
        if self._model is None:  # x_r is the last boundary, which contains the mix: keep a copy of it
            self.set()
            return
        references = fragment.vectors_of(self._model.vectors)
        begun = references if base is None else base.buffer.vectors
        rows = zip(fragment.sections, references, begun, difference.vectors, strict=True)
        for section, reference, begin, mixed in rows:
            cut = section.trainable
            torch.add(begin[:cut], mixed[:cut], alpha=share, out=reference[:cut])

    def apply_merged(self, merged: Snapshot, captured: Snapshot) -> None:
        """Write a merged model into the weights while training, and make its result x_r."""
        fragment = self._arena.fragment(merged.buffer.fragment)
        fragment.apply_merged(merged, captured)
        self.load(fragment.result_in(merged.buffer), fragment.number)

    def vectors(self) -> list[torch.Tensor]:
        """Return x_r as flat vectors, one per section; empty if x_r is the model of the last boundary."""
        return [] if self._model is None else list(self._model.vectors)

    def load(self, vectors: Sequence[torch.Tensor], fragment: int = 0) -> None:
        """Set x_r, or a fragment of it, to a copy of ``vectors``: those of :meth:`vectors` with the same layout."""
        if self._model is None and fragment:
            self.set()
        self._model = self._model or self._arena.pool.buffer()
        references = self._arena.fragment(fragment).vectors_of(self._model.vectors)
        for reference, vector in zip(references, vectors, strict=True):
            reference.copy_(vector)

    def distance(self, begun: HostBuffer | None = None) -> float:
        """Return ‖x_t − x_r‖₂ over the trained values; keeps a copy of x_r from then on.

        Args:
            begun: our model, or a fragment of it, as an exchange under way began; drift of that is measured from there.
                None: no exchange is under way.
        """
        squared = 0.0
        for fragment in self._arena.fragments:
            if begun is not None and begun.fragment == fragment.number:
                squared += fragment.squared_distance(begun.vectors)
                continue
            if self._model is None:
                self.set()
            assert self._model is not None
            squared += fragment.squared_distance(fragment.vectors_of(self._model.vectors))
        return math.sqrt(squared)


def digest(arena: ParameterArena) -> str:
    """Return the checksum of the part of the model that peers exchange, as it is now; that is a step boundary then.

    Two peers with the same result hold the same bits: 128 of them are too many for a coincidence. Empty: the model has
    a :func:`flaw`, so that no other peer must adopt it.
    """
    snapshot = _snapshot(arena)
    try:
        found = xxhash.xxh3_128()
        if _flaw(arena, snapshot.buffer.vectors):
            return ""
        for vector in snapshot.buffer.vectors:
            if vector.numel():
                found.update(vector.view(torch.uint8).numpy().data)
        return found.hexdigest()
    finally:
        snapshot.release()


def unshared(arena: ParameterArena, module: nn.Module) -> dict[str, int]:
    """Return a checksum of each tensor that no exchange moves and all peers had alike at the start, by name.

    These are frozen parameters, and buffers that have no average. BatchNorm's counts of batches are left out: they are
    of the batches of one peer. So are floating-point buffers that are local by choice.
    """
    own = layout.batch_counters(module)
    return {
        slot.name: xxhash.xxh32_intdigest(
            slot.tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data
        )
        for slot in arena.slots
        if (slot.kind is TensorKind.FROZEN or (slot.kind is TensorKind.LOCAL and not has_average(slot.tensor)))
        and slot.name not in own
        and slot.tensor.numel()
    }


def flaw(arena: ParameterArena) -> str:
    """Return what makes a model unfit for other peers, and what to do; empty: it is fit.

    A trained value is NaN or infinite, or a buffer has become NaN. A buffer that was NaN from the start is a constant.
    """
    snapshot = _snapshot(arena)
    try:
        return _flaw(arena, snapshot.buffer.vectors)
    finally:
        snapshot.release()


def _snapshot(arena: ParameterArena) -> Snapshot:
    arena.set_boundary(arena.step)  # a parameter server's tables, for one, are written between boundaries
    return arena.snapshot()


def _flaw(arena: ParameterArena, vectors: Sequence[Tensor]) -> str:
    rows = list(zip(arena.sections, vectors, arena.constant_nans, strict=True))
    if not all(math.isfinite(kernels.squared_norm(vector[: section.trainable])) for section, vector, _ in rows):
        return "NaN or Inf in its model: lower the learning rate"
    spoiled = []
    for section, vector, constant in rows:
        now = torch.zeros(len(vector), dtype=torch.bool)
        buffers = vector[section.trainable :].isnan()
        now[section.trainable :] = buffers if constant is None else buffers & ~constant
        spoiled.append(now)
    if not any(bool(now.any()) for now in spoiled):
        return ""
    mixed = [slot for slot in arena.slots if slot.kind is TensorKind.MIXED]
    name = next(name for name, now in layout.named(mixed, arena.sections, spoiled).items() if bool(now.any()))
    return f"NaN in its buffer '{name}', while all trained values are finite"
