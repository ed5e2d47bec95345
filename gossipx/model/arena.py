"""Flat buffers over a module's parameters, consistent copies of them, and how a received model is mixed in.

All parameters of one dtype lie in one flat buffer, so that measuring, copying and mixing a model are single passes over
a few vectors. Parameters stay the same objects with the same shape and strides, and each has a storage of its own, so
optimizers, parameter groups, compiled modules and whatever saves or copies them keep working. A *section* is the buffer
of one dtype: first its *trained* values, then floating-point module buffers that are exchanged, then all tensors that
only a joining peer needs.

A *step boundary* is the model as an optimizer step left it. A copy for another peer is always of one boundary, never of
a half-finished step. The *delta* is the distance between two boundaries, the length of a step. In the formulas, x is
this model, or a fragment of it, and x_j a received one.

A *fragment* is a part of a model that is exchanged on its own: a range of the bytes that an exchange moves otherwise,
of all sections, one after another. The fragments of a model are contiguous, begin on cache lines and differ in size by
one cache line at most. A tensor may lie in two of them. An exchange of one of K fragments moves one K-th of the bytes
and needs one K-th of the memory (Douillard et al., Streaming DiLoCo with overlapping communication, 2025,
arXiv:2501.18512, where a fragment consists of whole layers). Without fragments, the one fragment of a model is all
of it.

:mod:`gossipx.model.layout` places the tensors, :mod:`gossipx.model.section` has the passes over a section, and
:mod:`gossipx.model.pool` reuses memory for models.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gossipx.errors import UsageError
from gossipx.model import kernels, layout
from gossipx.model.kernels import Update
from gossipx.model.layout import Places, has_masters, lengths, slots_of
from gossipx.model.pool import DeviceStreams, HostBuffer, Pool, Snapshot, streams_of
from gossipx.model.section import ALIGNMENT, Section, TensorKind


def unchanged(own: Tensor, mixed: Tensor, kept: Sequence[Tensor]) -> None:
    """Leave the result of an exchange as it is: no outer optimizer."""


class OuterRule(Protocol):
    """The part of :class:`gossipx.outer.Momentum` that works on vectors."""

    @property
    def begin(self) -> Update:
        """The update at the first exchange."""

    @property
    def step(self) -> Update:
        """The update at every other exchange."""


class OuterState:
    """One peer's outer optimizer with its state, used by the arena. Memory is allocated when it is first needed.

    Args:
        rule: the outer optimizer.
        sections: sections of the module.
        streams: work queues of its device.

    Attributes:
        begun: whether the kept vectors hold values.
    """

    def __init__(self, rule: OuterRule, sections: Sequence[Section], streams: DeviceStreams):
        self.begun = False
        self._rule = rule
        self._sections = sections
        self._streams = streams
        self._kept: list[list[Tensor]] = []  # by section

    @property
    def update(self) -> Update:
        """The update of the next exchange."""
        return self._rule.step if self.begun else self._rule.begin

    @property
    def kept(self) -> list[list[Tensor]]:
        """The kept vectors, of trained values only, by section."""
        if not self._kept:
            for section in self._sections:
                like = section.values[: section.trainable]
                self._kept.append([self._streams.empty_like(like)])
        return self._kept

    def start(self) -> None:
        """Forget the earlier exchanges, because the weights were replaced."""
        self.begun = False

    def vectors(self) -> list[Tensor]:
        """Return the kept vectors, for a checkpoint; empty before the first exchange."""
        return [vector for kept in self._kept for vector in kept] if self.begun else []

    def load(self, vectors: Sequence[Tensor]) -> None:
        """Restore what :meth:`vectors` returned, on a peer with the same rule and layout."""
        self.begun = bool(vectors)
        if vectors:
            kept = [vector for of_section in self.kept for vector in of_section]
            for vector, saved in zip(kept, vectors, strict=True):
                with torch.no_grad():
                    vector.copy_(saved)


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
        self, boundaries: ParameterArena, number: int, ranges: Sequence[slice], sections: Sequence[Section], pool: Pool
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
                self._streams.train(functools.partial(section.copy, vector))
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
        host_copy = _or_none(received.vectors if on_host and not self._streams.on_host else None, theirs)
        self._boundaries.update_masters()
        squares: list[float] = []
        rows = zip(self.sections, theirs, host_copy, _or_none(base, theirs), strict=True)
        self._streams.train(lambda: squares.extend(s.subtract(x, copy, past) for s, x, copy, past in rows))
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
            rows = zip(self.sections, changes, _or_none(after, changes), strict=True)
            for number, (section, change, new) in enumerate(rows):
                work = functools.partial(section.commit, change, share, new)
                if own is not None and outer is not None:
                    added = own.vectors[number], outer.kept[number], outer.update
                    work = functools.partial(section.commit_outer, change, share, new, *added)
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
        shares = own / (own + theirs), theirs / (own + theirs)
        squares = [section.merge(x, h, *shares) for section, x, h in rows]
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
            rows = zip(self.sections, means, captured.vectors, _or_none(after, means), strict=True)
            for number, (section, mean, own, new) in enumerate(rows):
                kept = [] if outer is None else outer.kept[number]
                self._streams.train(functools.partial(section.apply_merged, mean, own, new, kept, update))
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


def _or_none(vectors: Sequence[Tensor] | None, like: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the vectors of each section, or as many None without any."""
    return [None] * len(like) if vectors is None else vectors


class ParameterArena:
    """Lays a module's parameters and buffers out in flat buffers, one per dtype.

    Args:
        module: the model; all of it on one device.
        mix_buffers: whether floating-point buffers (BatchNorm's statistics) are exchanged, or stay local.
        sampled: seed of a sample of cache lines from which the delta is estimated; boundaries are then copied only on
            request. None: the delta is measured exactly, which needs a copy of each boundary.
        streams: work queues of the module's device; None: those of :func:`gossipx.model.pool.streams_of`.
        fragments: number of fragments in which the model is exchanged.

    Attributes:
        manifest: one line per tensor; two peers can exchange models if their manifests are equal.
        digest: SHA-256 of the manifest, hexadecimal.
        step: number of iterations done.
        mixes: number of times that another model changed the weights.
        exchanged: the part of the model that exchanges move, as one fragment, number 0.
        fragments: the fragments that are exchanged in turn; only :attr:`exchanged` if the model is exchanged as one.
        sections: the sections of which exchanges move a part.
        whole: all sections; those first.
        slots: the tensors and their places in the layout.
        constant_nans: by section, which values of mixed buffers were NaN in the model that this one began with; None:
            no one was.
        places: keeps the tensors in the flat buffers while the script changes the module.
        pool: memory for models of this module.
        lock: the pool's lock, which guards reference counts; held while a boundary is written, and while a whole model
            is copied for a joining peer.

    Raises:
        UsageError: a parameter cannot be laid out, and the message names it and the reason; or the model is too small
            for that many fragments.
    """

    def __init__(
        self,
        module: nn.Module,
        mix_buffers: bool = True,
        sampled: int | None = None,
        streams: DeviceStreams | None = None,
        fragments: int = 1,
    ):
        slots = list(slots_of(module, mix_buffers))
        if not any(slot.kind is TensorKind.TRAINABLE for slot in slots):
            raise UsageError("the model has no trainable parameter: there is nothing to exchange")
        kinds = layout.by_dtype(slots)
        self.manifest = tuple(slot.line(has_masters(kinds[slot.tensor.dtype])) for slot in slots)
        self.digest = hashlib.sha256("\n".join(self.manifest).encode()).hexdigest()
        self.step = 0
        self.mixes = 0
        self.whole = layout.sections_of(slots)
        self.sections = [section for section in self.whole if section.mixed]
        self.slots = slots
        self.places = Places(module, slots, self.whole)
        self.streams = streams or streams_of(slots[0].tensor.device)
        self.pool = Pool(self.sections, self.streams, whole=self.whole)
        self.lock = self.pool.lock
        whole = [slice(0, section.mixed) for section in self.sections]
        self.exchanged = Fragment(self, 0, whole, self.sections, self.pool)
        self.fragments = [self.exchanged] if fragments == 1 else self._in_fragments(fragments)
        self._samples: list[kernels.Sampled] | None = None
        if sampled is not None:
            rows = ((section, kinds[section.storage.dtype]) for section in self.sections)
            self._samples = [section.sampler(kind, sampled) for section, kind in rows]
        # Other peers get the model of the last step boundary, because the training thread changes weights and buffers
        # at any other time. For an exact delta each boundary is copied anyway, and that copy is shared. With a sampled
        # delta, a copy is made on request: at once while training is at a boundary, else at the end of the current
        # step.
        self._at_boundary = True
        self._training = True  # whether further boundaries follow
        self._whole: Snapshot | None = None
        self._pending: dict[Fragment | None, Snapshot] = {}  # None: the whole model
        if self._samples is None:
            self.pool.now = Snapshot(self.pool)
            self.pool.now.fill(*self.pool.boundary_memory(), 0)
        self.start_from(0)

    def _in_fragments(self, count: int) -> list[Fragment]:
        if count > (most := units_of(self.sections)):
            raise UsageError(f"--fragments {count} is too many for this model: give at most {most}")
        free: dict[int, list[HostBuffer]] = {}  # by size
        found = []
        for number in range(1, count + 1):
            ranges = ranges_of(self.sections, number, count)
            sections = [section.part(own.start, own.stop) for section, own in zip(self.sections, ranges, strict=True)]
            size = sum(section.mixed * section.values.itemsize for section in sections)
            pool = Pool(sections, self.streams, number, self.lock, free.setdefault(size, []))
            found.append(Fragment(self, number, ranges, sections, pool))
        return found

    def fragment(self, number: int) -> Fragment:
        """Return the fragment of this number; 0: :attr:`exchanged`."""
        return self.fragments[number - 1] if number else self.exchanged

    @property
    def parameters(self) -> int:
        """Number of trained values."""
        return sum(section.trainable for section in self.sections)

    def nbytes(self, whole: bool = False) -> int:
        """Return the bytes of a model on the wire: the part that retrievals exchange, or the whole model."""
        return sum(length * dtype.itemsize for dtype, length in lengths(self.whole if whole else self.sections, whole))

    # --- step boundaries --------------------------------------------------------------------------

    def step_done(self) -> float:
        """Record a step boundary; the training thread calls this after each optimizer step.

        Returns:
            Δ_t = ‖x_t − x_{t−1}‖₂ over the trained values (Adaptive Communication, Eq. 6). Models that were mixed in
            before this step are part of x_{t−1}, so they do not count. On a GPU the result is the delta of the previous
            step, to avoid a wait for the device; only the first call waits for its own.
        """
        self.streams.begin()
        with self.next_boundary() as (before, after):
            self.step += 1
            return math.sqrt(self._measured(before, after))

    def _measured(self, before: list[Tensor] | None, after: list[Tensor] | None) -> float:
        """Return Δ_t², and copy the boundary if boundaries are kept."""
        measures: list[Callable[[bool], Any]]
        if self._samples is not None:
            pairs = zip(self._samples, self.sections, strict=True)
            measures = [functools.partial(section.sampled, sample) for sample, section in pairs]
        else:
            assert before is not None and after is not None
            rows = zip(self.sections, before, after, strict=True)
            measures = [functools.partial(section.advance, old, new) for section, old, new in rows]
        if self.streams.on_host:
            return float(sum(measure(False) for measure in measures))
        return self.streams.late(lambda: torch.stack([measure(True) for measure in measures]).sum())

    def set_boundary(self, step: int) -> None:
        """Record a boundary after the weights were replaced by a model that has done ``step`` iterations."""
        with self.next_boundary() as (_, after):
            self.step = step
            if after is not None:
                for section, vector in zip(self.sections, after, strict=True):
                    self.streams.train(functools.partial(section.copy, vector))
        self.keep_sample()

    def leave_boundary(self) -> None:
        """Record that the model leaves the boundary: training is about to change weights and buffers again."""
        with self.lock:
            self._at_boundary = False

    def end_training(self) -> None:
        """Record that training has ended: no boundary follows, so snapshots that would have to wait for one fail."""
        with self.lock:
            self._training = False
            failed, self._pending = list(self._pending.values()), {}
            for snapshot in failed:
                snapshot.fail()
        for snapshot in failed:
            snapshot.notify()
            snapshot.release()

    @contextlib.contextmanager
    def next_boundary(self, whole: bool = True) -> Iterator[tuple[list[Tensor] | None, list[Tensor] | None]]:
        """Return a context that yields the last boundary and the memory into which the next must be copied.

        Both are the same memory, unless a reader still holds the last boundary. With a sampled delta both are None.
        When the context ends, the new boundary replaces the last, and pending snapshots are filled. The lock is held
        throughout, so no snapshot can be requested meanwhile.

        Args:
            whole: whether the caller copies all of the next boundary; if not, the rest stays as in the last one.
        """
        with self.lock:
            self._at_boundary = True
            before = self.pool.now
            if self._samples is not None:
                yield None, None
                self.pool.now = None
            else:
                assert before is not None
                after = before
                if before.holders > 1:
                    # If the reader is an incoming model that copies the boundary, it releases it very soon: waiting is
                    # faster than allocating.
                    self.pool.wait_for_bases()
                if before.holders > 1:
                    after = Snapshot(self.pool)
                    after.fill(*self.pool.boundary_memory(), self.step)
                    for last, vector in () if whole else zip(before.vectors, after.vectors, strict=True):
                        self.streams.train(functools.partial(kernels.copy, last, vector))
                yield before.vectors, after.vectors
                after.refill(self.step, self.streams.mark())
                self.pool.now = after
            # Released under the lock: a reader that is now its only holder may take over its memory.
            for past in (before, self._whole):
                if past is not None and past is not self.pool.now:
                    past.release()
            self._whole = None
            pending = self._fill_pending_locked()
        for snapshot in pending:
            snapshot.notify()

    def fill_pending(self) -> None:
        """Fill pending snapshots with the model as it is now.

        This is called when the training thread blocks within an iteration. Otherwise there could be a deadlock:
        training may wait for a peer, such as a restarted server, that waits for a snapshot.
        """
        with self.lock:
            pending = self._fill_pending_locked()
        for snapshot in pending:
            snapshot.notify()

    def _fill_pending_locked(self) -> list[Snapshot]:
        pending, self._pending = self._pending, {}
        for fragment, snapshot in pending.items():
            self._fill(snapshot, fragment)
        return list(pending.values())

    def keep_sample(self) -> None:
        """Let the next sampled delta start from the current weights, after something other than a step changed them."""
        for sample, section in zip(self._samples or (), self.sections, strict=False):
            self.streams.train(functools.partial(sample.keep, section.storage[: section.trainable]))

    # --- copies -----------------------------------------------------------------------------------------------------

    def snapshot(self, whole: bool = False, of: Fragment | None = None) -> Snapshot:
        """Return the model of a step boundary, or a fragment of it; the caller must release it.

        If the last boundary was copied, or training is still at it, the result is that boundary. Otherwise the snapshot
        is pending: it is filled at the next boundary. Each boundary is copied at most once and shared by all callers; a
        fragment is copied for each caller, so that the boundary need not be kept for it.

        Args:
            whole: include the frozen parameters and local buffers, which are read as they are at the time of the copy.
            of: the fragment; None: the whole of what exchanges move.
        """
        fragment = None if whole and self.pool.has_more else of or self.exchanged
        with self.lock:
            found = self._whole if fragment is None else fragment.pool.now
            found = found or self._pending.get(fragment)
            if found is not None:
                return found.hold()
            found = Snapshot(self.pool if fragment is None else fragment.pool).hold()  # the caller's, and the arena's
            is_copied = self._samples is None or (fragment is not None and self.pool.now is not None)
            if self._at_boundary or is_copied:
                self._fill(found, fragment)
            elif self._training:
                self._pending[fragment] = found
            else:
                found.fail()
                found.release()
            return found

    def _fill(self, snapshot: Snapshot, fragment: Fragment | None) -> None:
        """Fill a snapshot with the boundary that training is at, and keep the arena's reference to it if it is shared.

        Args:
            fragment: which; None: the whole model.
        """
        if fragment is None:
            self._whole = snapshot
            buffer = self._copy_whole()
            snapshot.fill(buffer.vectors, buffer, self.step)
        elif fragment is self.exchanged:
            self.pool.now = snapshot
            fragment.fill(snapshot, None, self.step)
        else:
            fragment.fill(snapshot, None if self.pool.now is None else self.pool.now.vectors, self.step)
            snapshot.release()

    def _copy_whole(self) -> HostBuffer:
        buffer = self.pool.buffer(whole=True)
        if self._samples is not None and self.pool.now is None:
            self.update_masters()
        boundary = [s.values[: s.mixed] for s in self.sections] if self.pool.now is None else self.pool.now.vectors

        def copy() -> None:
            for section, vector, exchanged in itertools.zip_longest(self.whole, buffer.vectors, boundary):
                if exchanged is not None:
                    vector[: section.mixed].copy_(exchanged)
                vector[section.mixed :].copy_(section.storage[section.mixed :])

        self.streams.on_side_stream(copy, self.streams.mark())
        self.streams.wait(self.streams.mark_side_stream())
        return buffer

    def update_masters(self) -> None:
        """Update the float32 master weights, unless each boundary is copied: then the copy has done so."""
        for section in self.sections if self._samples is not None else ():
            self.streams.train(section.update_masters)

    # --- replacing the model ----------------------------------------------------------------------------------------

    def use_outer(self, rule: OuterRule) -> None:
        """Apply an outer optimizer to the exchanges of this peer from now on."""
        for fragment in self.fragments:
            fragment.outer = OuterState(rule, fragment.sections, self.streams)

    def adopt(self, received: HostBuffer, step: int) -> bool:
        """Replace this model by a whole model of another peer or a checkpoint, which has done ``step`` iterations.

        Returns:
            False if its trained values contain NaN or Inf; nothing was changed then.
        """
        # The model may hold only what exchanges move, which comes first.
        rows = list(zip(self.whole, received.vectors, strict=False))
        if not all(math.isfinite(kernels.squared_norm(vector[: section.trainable])) for section, vector in rows):
            return False
        for section, vector in rows:
            self.streams.train(functools.partial(section.adopt, vector))
        self.streams.wait(self.streams.mark())
        self.mixes += 1
        self.start_from(step)
        return True

    def start_from(self, step: int) -> None:
        """Continue from weights that replaced this model, and have done ``step`` iterations: a boundary.

        The outer optimizer starts anew.
        """
        self.set_boundary(step)
        nans = [section.values[section.trainable : section.mixed].isnan() for section in self.sections]
        self.constant_nans = [self.streams.to_host(nan) if bool(nan.any()) else None for nan in nans]
        for fragment in self.fragments:
            if fragment.outer is not None:
                fragment.outer.start()

    def detach(self) -> None:
        """Give every tensor memory of its own again; the arena is unusable afterwards."""
        layout.detach(self.slots)
        for fragment in (self.exchanged, *self.fragments):
            fragment.pool.close()
