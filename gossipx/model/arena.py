"""Flat buffers over a module's parameters, and consistent copies of them.

All parameters of one dtype lie in one flat buffer, so that measuring, copying and mixing a model are single passes over
a few vectors. Parameters stay the same objects with the same shape and strides, and each has a storage of its own, so
optimizers, parameter groups, compiled modules and whatever saves or copies them keep working. A *section* is the buffer
of one dtype: first its *trained* values, then floating-point module buffers that are exchanged, then all tensors that
only a joining peer needs.

A *step boundary* is the model as an optimizer step left it. A copy for another peer is always of one boundary, never of
a half-finished step. The *delta* is the distance between two boundaries, the length of a step. In the formulas, x is
this model and x_j a received one.

:mod:`gossipx.model.layout` places the tensors, :mod:`gossipx.model.pool` reuses memory for models, and
:mod:`gossipx.model.passes` has the passes over a section.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gossipx.errors import UsageError
from gossipx.model import kernels, layout, master_weights, passes
from gossipx.model.buffers import HostBuffer
from gossipx.model.layout import Kind, Section, has_masters, lay_out, lengths, slots_of
from gossipx.model.outer_state import OuterRule, OuterState, unchanged
from gossipx.model.places import Places
from gossipx.model.pool import Pool
from gossipx.model.snapshots import Snapshot
from gossipx.model.streams import DeviceStreams, streams_of


class ParameterArena:
    """Lays a module's parameters and buffers out in flat buffers, one per dtype.

    Args:
        module: the model; all of it on one device.
        mix_buffers: whether floating-point buffers (BatchNorm's statistics) are exchanged, or stay local.
        sampled: seed of a sample of cache lines from which the delta is estimated; boundaries are then copied only on
            request. None: the delta is measured exactly, which needs a copy of each boundary.
        streams: work queues of the module's device; None: those of :func:`gossipx.model.streams.streams_of`.

    Attributes:
        manifest: one line per tensor; two peers can exchange models if their manifests are equal.
        digest: SHA-256 of the manifest, hexadecimal.
        step: number of iterations done.
        mixes: number of times that another model changed the weights.
        outer: the outer optimizer with its state; None: exchanges are plain averages.
        slots: the tensors and their places in the layout.
        places: keeps the tensors in the flat buffers while the script changes the module.
        pool: memory for models of this module.
        lock: the pool's lock, which guards reference counts; held while a boundary is written, and while a whole model
            is copied for a joining peer.

    Raises:
        UsageError: a parameter cannot be laid out; the message names it and the reason.
    """

    def __init__(
        self,
        module: nn.Module,
        mix_buffers: bool = True,
        sampled: int | None = None,
        streams: DeviceStreams | None = None,
    ):
        slots = list(slots_of(module, mix_buffers))
        if not any(slot.kind is Kind.TRAINABLE for slot in slots):
            raise UsageError("the model has no trainable parameter: there is nothing to exchange")
        kinds = layout.by_dtype(slots)
        self.manifest = tuple(slot.line(has_masters(kinds[slot.tensor.dtype])) for slot in slots)
        self.digest = hashlib.sha256("\n".join(self.manifest).encode()).hexdigest()
        self.step = 0
        self.mixes = 0
        self.outer: OuterState | None = None
        self.sections: list[Section] = [lay_out(kind) for kind in kinds.values()]
        self.slots = slots
        self.places = Places(module, slots, self.sections)
        self._streams = streams or streams_of(slots[0].tensor.device)
        self.pool = Pool(self.sections, self._streams)
        self.lock = self.pool.lock
        self._samples: list[kernels.Sampled] | None = None
        if sampled is not None:
            rows = zip(self.sections, kinds.values(), strict=True)
            self._samples = [passes.sampler(section, kind, sampled) for section, kind in rows]
        # Other peers get the model of the last step boundary, because the training thread changes weights and buffers
        # at any other time. For an exact delta each boundary is copied anyway, and that copy is shared. With a sampled
        # delta, a copy is made on request: at once while training is at a boundary, else at the end of the current
        # step.
        self._at_boundary = True
        self._training = True  # whether further boundaries follow
        self._whole: Snapshot | None = None
        self._pending: dict[bool, Snapshot] = {}
        if self._samples is None:
            self.pool.now = Snapshot(self.pool)
            self.pool.now.fill(*self.pool.boundary_memory(), 0)
        self.set_boundary(0)

    @property
    def parameters(self) -> int:
        """Number of trained values."""
        return sum(section.trainable for section in self.sections)

    def nbytes(self, whole: bool = False) -> int:
        """Return the bytes of a model on the wire: the part that retrievals exchange, or the whole model."""
        return sum(length * dtype.itemsize for dtype, length in lengths(self.sections, whole))

    # --- step boundaries --------------------------------------------------------------------------

    def step_done(self) -> float:
        """Record a step boundary; the training thread calls this after each optimizer step.

        Returns:
            Δ_t = ‖x_t − x_{t−1}‖₂ over the trained values (Adaptive Communication, Eq. 6). Models that were mixed in
            before this step are part of x_{t−1}, so they do not count. On a GPU the result is the delta of the previous
            step, to avoid a wait for the device; only the first call waits for its own.
        """
        self._streams.begin()
        with self._next_boundary() as (before, after):
            self.step += 1
            return math.sqrt(self._measured(before, after))

    def _measured(self, before: list[Tensor] | None, after: list[Tensor] | None) -> float:
        """Return Δ_t², and copy the boundary if boundaries are kept."""
        measures: list[Callable[[bool], Any]]
        if self._samples is not None:
            pairs = zip(self._samples, self.sections, strict=True)
            measures = [functools.partial(passes.sampled, sample, section) for sample, section in pairs]
        else:
            assert before is not None and after is not None
            rows = zip(self.sections, before, after, strict=True)
            measures = [functools.partial(passes.advance, *row) for row in rows]
        if self._streams.on_host:
            return float(sum(measure(False) for measure in measures))
        return self._streams.late(lambda: torch.stack([measure(True) for measure in measures]).sum())

    def set_boundary(self, step: int) -> None:
        """Record a boundary after the weights were replaced by a model that has done ``step`` iterations."""
        with self._next_boundary() as (_, after):
            self.step = step
            if after is not None:
                self._copy(after)
        self._keep_sample()

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
    def _next_boundary(self) -> Iterator[tuple[list[Tensor] | None, list[Tensor] | None]]:
        """Return a context that yields the last boundary and the memory into which the next must be copied.

        Both are the same memory, unless a reader still holds the last boundary. With a sampled delta both are None.
        When the context ends, the new boundary replaces the last, and pending snapshots are filled. The lock is held
        throughout, so no snapshot can be requested meanwhile.
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
                yield before.vectors, after.vectors
                after.refill(self.step, self._streams.mark())
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
        for is_whole, snapshot in pending.items():
            self._fill(snapshot, is_whole)
        return list(pending.values())

    def _copy(self, to: list[Tensor]) -> None:
        """Copy the exchanged values as they are now."""
        for section, vector in zip(self.sections, to, strict=True):
            self._streams.train(functools.partial(passes.copy, section, vector))

    def _keep_sample(self) -> None:
        """Let the next sampled delta start from the current weights, after something other than a step changed them."""
        for sample, section in zip(self._samples or (), self.sections, strict=False):
            self._streams.train(functools.partial(sample.keep, section.storage[: section.trainable]))

    # --- copies -----------------------------------------------------------------------------------------------------

    def snapshot(self, whole: bool = False) -> Snapshot:
        """Return the model of a step boundary; the caller must release it.

        If the last boundary was copied, or training is still at it, the result is that boundary. Otherwise the snapshot
        is pending: it is filled at the next boundary. Each boundary is copied at most once and shared by all callers.

        Args:
            whole: include the frozen parameters and local buffers, which are read as they are at the time of the copy.
        """
        whole = whole and self.pool.has_more
        with self.lock:
            found = self._whole if whole else self.pool.now
            if found is None and whole in self._pending:
                found = self._pending[whole]
            if found is None:
                found = Snapshot(self.pool)
                if self._at_boundary or self._samples is None:
                    self._fill(found, whole)
                elif self._training:
                    self._pending[whole] = found
                else:
                    found.fail()
                    return found
            found.holders += 1
            return found

    def _fill(self, snapshot: Snapshot, whole: bool) -> None:
        """Fill a snapshot with the boundary that training is at."""
        if whole:
            self._whole = snapshot
            buffer = self._copy_whole()
            snapshot.fill(buffer.vectors, buffer, self.step)
        else:
            self.pool.now = snapshot
            vectors, host_buffer = self.pool.boundary_memory()
            self._copy(vectors)
            snapshot.fill(vectors, host_buffer, self.step, self._streams.mark())

    def _copy_whole(self) -> HostBuffer:
        buffer = self.pool.buffer(whole=True)
        if self._samples is not None and self.pool.now is None:
            self._update_masters()
        boundary = [s.values[: s.mixed] for s in self.sections] if self.pool.now is None else self.pool.now.vectors

        def copy() -> None:
            for section, vector, exchanged in zip(self.sections, buffer.vectors, boundary, strict=True):
                vector[: section.mixed].copy_(exchanged)
                vector[section.mixed :].copy_(section.storage[section.mixed :])

        self._streams.on_side_stream(copy, self._streams.mark())
        self._streams.wait(self._streams.mark_side_stream())
        return buffer

    def _to_host(self, values: Tensor) -> Tensor:
        """Return a copy in host memory of values as the training stream leaves them."""
        if self._streams.on_host:
            return values
        there = torch.empty_like(values, device="cpu")
        self._streams.train(lambda: there.copy_(values))
        self._streams.wait(self._streams.mark())
        return there

    def _update_masters(self) -> None:
        """Update the float32 master weights, unless each boundary is copied: then the copy has done so."""
        for section in self.sections if self._samples is not None else ():
            self._streams.train(functools.partial(master_weights.update, section))

    # --- mixing ---------------------------------------------------------------------------------------------------

    def buffers_of(self, received: HostBuffer) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each section with exchanged module buffers: those of ``received``, and those of this model."""
        for section, theirs in zip(self.sections, received.vectors, strict=True):
            cut, end = section.trainable, section.mixed
            if end > cut:
                yield theirs[cut:], self._to_host(section.values[cut:end])

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
        self._update_masters()
        squares: list[float] = []
        rows = zip(self.sections, theirs, host_copy, passes.or_none(base, theirs), strict=True)
        self._streams.train(lambda: squares.extend(passes.subtract(*row) for row in rows))
        self._streams.wait(self._streams.mark())
        return math.sqrt(sum(squares))

    def use_outer(self, rule: OuterRule) -> None:
        """Apply an outer optimizer to the exchanges of this peer from now on."""
        self.outer = OuterState(rule, self.sections, self._streams)
        self.outer.start(is_initial=not self.step)

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
        self._update_masters()
        self.mixes += 1
        with self._next_boundary() as (_, after):
            rows = zip(self.sections, changes, passes.or_none(after, changes), strict=True)
            for number, (section, change, new) in enumerate(rows):
                work = functools.partial(passes.commit, section, change, share, new)
                if own is not None and outer is not None:
                    added = own.vectors[number], outer.kept[number], outer.update
                    work = functools.partial(passes.commit_outer, section, change, share, new, *added)
                self._streams.train(work)
        if outer is not None:
            outer.begun = True
        self._keep_sample()

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
        self._update_masters()
        self.mixes += 1
        outer = self.outer if training else None
        update = unchanged if outer is None else outer.update
        with self._next_boundary() as (_, after):
            rows = zip(self.sections, means, captured.vectors, passes.or_none(after, means), strict=True)
            for number, row in enumerate(rows):
                kept = [] if outer is None else outer.kept[number]
                self._streams.train(functools.partial(passes.apply_merged, *row, kept, update))
        if outer is not None:
            outer.begun = True
        self._keep_sample()

    def result_in(self, buffer: HostBuffer) -> list[Tensor]:
        """Return, in host memory, what :meth:`commit` or :meth:`apply_merged` have left in ``buffer``."""
        return [self._to_host(vector) for vector in self.pool.upload(buffer)]

    def snapshot_of(self, model: HostBuffer, step: int) -> Snapshot:
        """Return a snapshot that owns ``model``, a buffer of the pool; the last release of the snapshot frees it."""
        self.pool.upload(model)
        snapshot = Snapshot(self.pool)
        snapshot.fill(model.vectors, model, step)
        return snapshot

    def adopt(self, received: HostBuffer, step: int) -> bool:
        """Replace this model by a whole model of another peer or a checkpoint, which has done ``step`` iterations.

        Returns:
            False if its trained values contain NaN or Inf; nothing was changed then.
        """
        rows = list(zip(self.sections, received.vectors, strict=True))
        if not all(math.isfinite(kernels.squared_norm(vector[: section.trainable])) for section, vector in rows):
            return False
        for section, vector in rows:
            self._streams.train(functools.partial(passes.adopt, section, vector))
        self._streams.wait(self._streams.mark())
        self.mixes += 1
        self.set_boundary(step)
        if self.outer is not None:
            self.outer.start(is_initial=not step)
        return True

    def distance(self, reference: HostBuffer) -> float:
        """Return ‖x − reference‖₂ over the trained values."""
        self._update_masters()
        return math.sqrt(
            sum(
                kernels.squared_norm(self._to_host(section.values[: section.trainable]) - vector[: section.trainable])
                for section, vector in zip(self.sections, reference.vectors, strict=True)
                if section.trainable
            )
        )

    def detach(self) -> None:
        """Give every tensor memory of its own again; the arena is unusable afterwards."""
        layout.detach(self.slots)
        self.pool.close()
