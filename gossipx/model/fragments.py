"""Fragments: the parts of a model that are exchanged one at a time, and how a received one is mixed in.

A fragment is a range of the bytes that an exchange moves otherwise: of all sections, one after another. The fragments
of a model are contiguous, begin on cache lines and differ in size by one cache line at most. A tensor may lie in two of
them. An exchange of one of K fragments moves one K-th of the bytes and needs one K-th of the memory (Douillard et al.,
Streaming DiLoCo with overlapping communication, 2025, arXiv:2501.18512, where a fragment consists of whole layers).
Without fragments, the one fragment of a model is all of it.

In the formulas, x is this fragment of the model and x_j a received one.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from gossipx.model import kernels, passes
from gossipx.model.buffers import HostBuffer
from gossipx.model.layout import ALIGNMENT, Section, lengths
from gossipx.model.outer_state import OuterState, unchanged
from gossipx.model.pool import Pool
from gossipx.model.snapshots import Snapshot
from gossipx.model.streams import DeviceStreams


class Boundaries(Protocol):
    """The step boundaries of a model; :class:`gossipx.model.arena.ParameterArena`.

    Attributes:
        mixes: number of times that another model changed the weights.
        streams: work queues of the model's device.
        parameters: number of trained values.
    """

    mixes: int
    streams: DeviceStreams

    @property
    def parameters(self) -> int:
        """Number of trained values."""

    def next_boundary(
        self, whole: bool = True
    ) -> contextlib.AbstractContextManager[tuple[list[Tensor] | None, list[Tensor] | None]]:
        """Return a context that yields the last boundary and the memory of the next; ``whole``: all of it changes."""

    def update_masters(self) -> None:
        """Update the float32 master weights from the module's tensors."""

    def keep_sample(self) -> None:
        """Let the next sampled delta start from the current weights."""


class Fragment:
    """One fragment of a model.

    Args:
        boundaries: the model's step boundaries.
        number: from 1, or 0 for all of the model that exchanges move.
        ranges: of each section, the values that belong to it.
        sections: these values of each section.
        pool: memory for models that consist of these values.

    Attributes:
        nbytes: its size on the wire, without a codec.
        outer: the outer optimizer with its state; None: exchanges are plain averages.
    """

    def __init__(
        self, boundaries: Boundaries, number: int, ranges: Sequence[slice], sections: Sequence[Section], pool: Pool
    ):
        self.number = number
        self.ranges = ranges
        self.sections = sections
        self.pool = pool
        self.nbytes = sum(length * dtype.itemsize for dtype, length in lengths(sections, whole=False))
        self.outer: OuterState | None = None
        self._boundaries = weakref.proxy(boundaries)  # a cycle would keep the weights until the garbage is collected
        self._streams = boundaries.streams

    def vectors_of(self, model: Sequence[Tensor]) -> list[Tensor]:
        """Return this fragment of a model, given by the vectors of its sections, as views."""
        return [vector[own] for vector, own in zip(model, self.ranges, strict=True)]

    def distance_of_model(self, distance: float) -> float | None:
        """Return the estimate of a distance between two whole models that a distance between their fragments gives.

        It is √(parameters / parameters of this fragment) times as large; None: this fragment has no trained values.
        """
        own = sum(section.trainable for section in self.sections)
        return distance * math.sqrt(self._boundaries.parameters / own) if own else None

    # --- copies -----------------------------------------------------------------------------------------------------

    def fill(self, snapshot: Snapshot, boundary: Sequence[Tensor] | None, step: int) -> None:
        """Fill a snapshot of this fragment's pool; the caller holds the lock.

        Args:
            boundary: vectors of the last boundary of the model; None: copy the values as they are now.
            step: iterations that they have done.
        """
        vectors, buffer = self.pool.boundary_memory()
        if boundary is None:
            for section, vector in zip(self.sections, vectors, strict=True):
                self._streams.train(functools.partial(passes.copy, section, vector))
        else:
            for own, vector in zip(self.vectors_of(boundary), vectors, strict=True):
                self._streams.train(functools.partial(kernels.copy, own, vector))
        snapshot.fill(vectors, buffer, step, self._streams.mark())

    def snapshot_of(self, model: HostBuffer, step: int) -> Snapshot:
        """Return a snapshot that owns ``model``, a buffer of the pool; the last release of the snapshot frees it."""
        self.pool.upload(model)
        snapshot = Snapshot(self.pool)
        snapshot.fill(model.vectors, model, step)
        return snapshot

    def buffers_of(self, received: HostBuffer) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each section with exchanged module buffers: those of ``received``, and those of this model."""
        for section, theirs in zip(self.sections, received.vectors, strict=True):
            cut, end = section.trainable, section.mixed
            if end > cut:
                yield theirs[cut:], self._streams.to_host(section.values[cut:end])

    def result_in(self, buffer: HostBuffer) -> list[Tensor]:
        """Return, in host memory, what :meth:`commit` or :meth:`apply_merged` have left in ``buffer``."""
        return [self._streams.to_host(vector) for vector in self.pool.upload(buffer)]

    def squared_distance(self, reference: Sequence[Tensor]) -> float:
        """Return ‖x − reference‖₂² over the trained values; ``reference``: this fragment's vectors, in host memory."""
        self._boundaries.update_masters()
        return sum(
            kernels.squared_norm(
                self._streams.to_host(section.values[: section.trainable]) - vector[: section.trainable]
            )
            for section, vector in zip(self.sections, reference, strict=True)
            if section.trainable
        )

    # --- mixing -----------------------------------------------------------------------------------------------------

    def subtract(self, received: HostBuffer, on_host: bool = False, base: Sequence[Tensor] | None = None) -> float:
        """Subtract this model from a received one: x_j ← x_j − x for trained values, in place in ``received``.

        Must run on the training thread, or while that waits.

        Args:
            on_host: if the model is on a GPU, also update the copy of ``received`` in host memory.
            base: trained values by section, in host memory, to subtract instead of x.

        Returns:
            ‖x_j − x‖₂ over the trained values; blocks until the device has computed it.
        """
        theirs = self.pool.upload(received)
        host_copy = passes.or_none(received.vectors if on_host and not self._streams.on_host else None, theirs)
        self._boundaries.update_masters()
        squares: list[float] = []
        rows = zip(self.sections, theirs, host_copy, passes.or_none(base, theirs), strict=True)
        self._streams.train(lambda: squares.extend(passes.subtract(*row) for row in rows))
        self._streams.wait(self._streams.mark())
        return math.sqrt(sum(squares))

    def commit(self, compared: HostBuffer, share: float, own: Snapshot | None = None) -> None:
        """Mix a received model in: x ← x + share · (x_j − base) for trained values. The result is a step boundary.

        Must run on the training thread, or while that waits. The base is x as of the request or, after
        :meth:`subtract`, as of now. A module buffer b becomes b + share · (b_j − b), with b as of now: a difference to
        an earlier b could make a running variance negative. An infinite buffer value stays.

        Args:
            compared: x_j − base for trained values, and x_j for module buffers; all finite or equal to this model's.
            own: the base, if the outer optimizer takes part: x ← x̄ + (x − base), with its result x̄, which is left in
                ``compared`` for :meth:`result_in`. None: without it.
        """
        changes = self.pool.upload(compared)
        outer = None if own is None else self.outer
        with self._mixed() as after:
            rows = zip(self.sections, changes, passes.or_none(after, changes), strict=True)
            for number, (section, change, new) in enumerate(rows):
                work = functools.partial(passes.commit, section, change, share, new)
                if own is not None and outer is not None:
                    added = own.vectors[number], outer.kept[number], outer.update
                    work = functools.partial(passes.commit_outer, section, change, share, new, *added)
                self._streams.train(work)
        if outer is not None:
            outer.begun = True

    def merge(self, received: HostBuffer, captured: HostBuffer, own: float, theirs: float) -> float:
        """Average two models: x_j ← (own · h + theirs · x_j) / (own + theirs), in place in ``received``.

        The weights of the module do not change. Two peers that merge each other's models get identical bits, because
        each product is rounded separately.

        Args:
            received: x_j, the mean of ``theirs`` models.
            captured: h, the mean of ``own`` models; if ``own`` is 0, the result is x_j.

        Returns:
            ‖x_j − h‖₂ over the trained values; NaN if a value is not finite, and then ``received`` is unusable.
        """
        rows = zip(self.sections, received.vectors, captured.vectors, strict=True)
        squares = [passes.merge(*row, own / (own + theirs), theirs / (own + theirs)) for row in rows]
        is_finite = all(math.isfinite(sum(pair)) for pair in squares)
        return math.sqrt(sum(trained for trained, _ in squares)) if is_finite else math.nan

    def apply_merged(self, merged: Snapshot, captured: Snapshot, training: bool = True) -> None:
        """Write a merged model into the weights, and keep the steps that were made since the capture.

        Trained values: x ← merged + (x − captured), exactly ``merged`` if no step was made. Module buffers: as in
        ``merged``. The result is a step boundary; the thread is as for :meth:`commit`.

        Args:
            merged: nobody else may read it: the outer optimizer leaves its result there, for :meth:`result_in`.
            training: whether the outer optimizer takes part; not in the finish, which is a plain average.
        """
        means = self.pool.upload(merged.buffer)
        outer = self.outer if training else None
        update = unchanged if outer is None else outer.update
        with self._mixed() as after:
            rows = zip(self.sections, means, captured.vectors, passes.or_none(after, means), strict=True)
            for number, row in enumerate(rows):
                kept = [] if outer is None else outer.kept[number]
                self._streams.train(functools.partial(passes.apply_merged, *row, kept, update))
        if outer is not None:
            outer.begun = True

    @contextlib.contextmanager
    def _mixed(self) -> Iterator[list[Tensor] | None]:
        """Return a context in which another model changes this fragment; it yields the next boundary's memory for it.

        None: boundaries are not copied.
        """
        self._boundaries.update_masters()
        self._boundaries.mixes += 1
        with self._boundaries.next_boundary(whole=not self.number) as (_, after):
            yield None if after is None else self.vectors_of(after)
        self._boundaries.keep_sample()


def ranges_of(sections: Sequence[Section], number: int, count: int) -> list[slice]:
    """Return, for each section, the values that belong to fragment ``number`` of ``count``."""
    units = units_of(sections)
    edges = [units * edge // count * ALIGNMENT for edge in (number - 1, number)]
    found, begin = [], 0
    for section in sections:
        size, end = section.values.itemsize, begin + section.mixed * section.values.itemsize
        found.append(slice(*((min(max(edge, begin), end) - begin) // size for edge in edges)))
        begin = end
    return found


def units_of(sections: Sequence[Section]) -> int:
    """Return the largest number of fragments: that of the cache lines in a model that exchanges move."""
    return sum(length * dtype.itemsize for dtype, length in lengths(sections, whole=False)) // ALIGNMENT
