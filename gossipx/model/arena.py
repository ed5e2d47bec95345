"""One flat buffer over a module's parameters, and consistent copies of it.

Every parameter becomes a view of a buffer that holds all parameters of its dtype, so that measuring, copying and mixing
are single passes over one vector. Parameters stay the same objects with the same shape and strides, so optimizers,
parameter groups and compiled modules keep working.

How tensors are laid out, and which cannot be, stands in :mod:`gossipx.model.layout`; what memory models are kept in, in
:mod:`gossipx.model.pool`; the passes themselves, in :mod:`gossipx.model.passes`.
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
from gossipx.memory import PIECE
from gossipx.model import kernels, layout, master_weights, passes
from gossipx.model.buffers import HostBuffer
from gossipx.model.layout import Section, has_masters, lay_out, lengths, plain_name, slots_of
from gossipx.model.pool import Pool
from gossipx.model.snapshots import Snapshot
from gossipx.model.streams import DeviceStreams, streams_of


class ParameterArena:
    """Lays a module's parameters and buffers into flat buffers, one a dtype.

    Args:
        module: all of it on one device.
        mix_buffers: whether floating-point buffers (BatchNorm's statistics) are exchanged, or stay local.
        sampled: the delta is estimated from the cache lines that this seed draws, and a boundary is copied only if
            somebody asks for it; None: it is measured exactly, which needs a copy of each boundary.
        streams: of the module's device; None: those that there are.

    Attributes:
        manifest: one line a tensor; two peers may exchange models if these are equal.
        digest: SHA-256 of the manifest, hexadecimal.
        step: iterations done.
        mixes: how often another's model has entered: the weights are not what the last step left.
        slots: where each tensor lies.
        pool: memory for models of this module.
        lock: the pool's, which guards who holds what; held while a boundary is written, and while a whole model is
            copied for a joining peer.

    Raises:
        UsageError: a parameter that cannot be laid out, by its name and the reason.
    """

    def __init__(
        self,
        module: nn.Module,
        mix_buffers: bool = True,
        sampled: int | None = None,
        streams: DeviceStreams | None = None,
    ):
        slots = list(slots_of(module, mix_buffers))
        if not any(slot.kind == 0 for slot in slots):
            raise UsageError("the model has no parameter that is trained: nothing to exchange")
        kinds = layout.by_dtype(slots)
        self.manifest = tuple(slot.line(has_masters(kinds[slot.tensor.dtype])) for slot in slots)
        self.digest = hashlib.sha256("\n".join(self.manifest).encode()).hexdigest()
        self.step = 0
        self.mixes = 0
        self.sections: list[Section] = [lay_out(kind) for kind in kinds.values()]
        self.slots = slots
        self._slots_at = {slot.tensor.data_ptr(): slot for slot in slots if slot.tensor.numel()}
        self._streams = streams or streams_of(slots[0].tensor.device)
        self.pool = Pool(self.sections, self._streams)
        self.lock = self.pool.lock
        self._samples: list[kernels.Sampled] | None = None
        if sampled is not None:
            rows = zip(self.sections, kinds.values(), strict=True)
            self._samples = [passes.sampler(section, kind, sampled) for section, kind in rows]
        # What others are given is the model as of the last step boundary: the training thread changes weights, and
        # forward passes change buffers, at any time without asking anyone. An exact delta needs a copy of each boundary
        # anyway; it is written to memory that nobody holds, so that giving it away costs nothing more. Where none is
        # kept, one is made when it is asked for: at once while training rests, at the end of the step that is under way
        # otherwise.
        self._rests = True
        self._goes_on = True
        self._whole: Snapshot | None = None
        self._promised: dict[bool, Snapshot] = {}
        if self._samples is None:
            self.pool.now = Snapshot(self.pool)
            self.pool.now.fill(*self.pool.room(), 0)
        self.set_boundary(0)

    @property
    def parameters(self) -> int:
        """Number of trained values."""
        return sum(section.trainable for section in self.sections)

    def nbytes(self, whole: bool = False) -> int:
        """Bytes of a model on the wire: as a retrieval exchanges it, or whole."""
        return sum(length * dtype.itemsize for dtype, length in lengths(self.sections, whole))

    # --- step boundaries --------------------------------------------------------------------------

    def step_done(self) -> float:
        """Called by the training thread after each change of the weights, the optimizer's step. Training rests then.

        Returns:
            Δ_t = ‖x_t − x_{t−1}‖₂ over the trained values (Adaptive Communication, Eq. 6); x_{t−1} is taken after any
            mixing. On a device that works beside the processor Δ of the step before, Δ_t for the first.
        """
        self._streams.begin()
        with self._next_boundary() as (before, after):
            self.step += 1
            return math.sqrt(self._measured(before, after))

    def _measured(self, before: list[Tensor] | None, after: list[Tensor] | None) -> float:
        """Δ_t², and the copy of the boundary, if one is kept."""
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
        """The weights were set from outside, to a model that has seen ``step`` iterations: count from here.

        Training rests, as after a step.
        """
        with self._next_boundary() as (_, after):
            self.step = step
            if after is not None:
                self._copy(after)
        self._keep_sample()

    def go_on(self) -> None:
        """Training does not rest any more: weights and buffers may change from now on, until the next boundary."""
        with self.lock:
            self._rests = False

    def give_up(self) -> None:
        """No boundary comes any more: whoever waits for one is told, and nobody is made to wait from here on."""
        with self.lock:
            self._goes_on = False
            given_up, self._promised = list(self._promised.values()), {}
            for snapshot in given_up:
                snapshot.fail()
        for snapshot in given_up:
            snapshot.tell()
            snapshot.release()

    def check(self, module: nn.Module) -> None:
        """See that what ``module`` trains is still what was laid out; what moves elsewhere is not exchanged.

        Raises:
            UsageError: the first parameter that is not, by its name, and why.
        """
        for name, parameter in module.named_parameters():
            slot = self._slots_at.get(parameter.data_ptr())
            if not (parameter.requires_grad and parameter.numel()) or (slot is not None and slot.kind == 0):
                continue
            if slot is not None:
                reason = "is trained, which was frozen"
            elif any(plain_name(name) == one.name for one in self.slots):
                reason = "lies in other memory (load_state_dict(assign=True), a change of dtype or device)"
            else:
                reason = "was added to the model"
            told = f"'{plain_name(name)}' {reason} since the model was joined"
            raise UsageError(f"{told}: change the model before gossipx.join")

    @contextlib.contextmanager
    def _next_boundary(self) -> Iterator[tuple[list[Tensor] | None, list[Tensor] | None]]:
        """The last boundary, and where the next one is to be written: the same memory unless somebody holds it.

        None where no boundary is kept: those who were promised a snapshot get theirs at the end. Nobody can ask for any
        meanwhile.
        """
        with self.lock:
            self._rests = True
            before = self.pool.now
            if self._samples is not None:
                yield None, None
                self.pool.now = None
            else:
                assert before is not None
                after = before
                if before.holders > 1:
                    # A base that is being copied is given back in a moment, sooner than new memory could be had.
                    self.pool.wait_for_bases()
                if before.holders > 1:
                    after = Snapshot(self.pool)
                    after.fill(*self.pool.room(), self.step)
                yield before.vectors, after.vectors
                after.became(self.step, self._streams.mark())
                self.pool.now = after
            # Before anybody else looks: whoever alone holds the boundary before this one may take its memory over.
            for past in (before, self._whole):
                if past is not None and past is not self.pool.now:
                    past.release()
            self._whole = None
            promised = self._fill_promised()
        for snapshot in promised:
            snapshot.tell()

    def stand_still(self) -> None:
        """Training waits in the middle of an iteration: who was promised a model is given it as it is now.

        Whom it waits for may be waiting for just that: a server that was started again, say.
        """
        with self.lock:
            promised = self._fill_promised()
        for snapshot in promised:
            snapshot.tell()

    def _fill_promised(self) -> list[Snapshot]:
        promised, self._promised = self._promised, {}
        for is_whole, snapshot in promised.items():
            self._fill(snapshot, is_whole)
        return list(promised.values())

    def _copy(self, to: list[Tensor]) -> None:
        """Copy the values that are exchanged, as they are now."""
        for section, vector in zip(self.sections, to, strict=True):
            self._streams.train(functools.partial(passes.copy, section, vector))

    def _keep_sample(self) -> None:
        """Something else than a step has changed the weights: the next delta counts from here."""
        for sample, section in zip(self._samples or (), self.sections, strict=False):
            self._streams.train(functools.partial(sample.keep, section.storage[: section.trainable]))

    # --- copies -----------------------------------------------------------------------------------------------------

    def snapshot(self, whole: bool = False) -> Snapshot:
        """The model as of a step boundary, never torn: copied at most once a boundary, and shared.

        It is the last boundary if that was copied or training rests, else the next, and promised until then. Release it
        after use. Of a whole model the frozen parameters and local buffers are read as they are now.
        """
        whole = whole and self.pool.has_more
        with self.lock:
            found = self._whole if whole else self.pool.now
            if found is None and whole in self._promised:
                found = self._promised[whole]
            if found is None:
                found = Snapshot(self.pool)
                if self._rests or self._samples is None:
                    self._fill(found, whole)
                elif self._goes_on:
                    self._promised[whole] = found
                else:
                    found.fail()
                    return found
            found.holders += 1
            return found

    def _fill(self, snapshot: Snapshot, whole: bool) -> None:
        """Copy the boundary at which training is."""
        if whole:
            self._whole = snapshot
            buffer = self._copy_whole()
            snapshot.fill(buffer.vectors, buffer, self.step)
        else:
            self.pool.now = snapshot
            vectors, room = self.pool.room()
            self._copy(vectors)
            snapshot.fill(vectors, room, self.step, self._streams.mark())

    def _copy_whole(self) -> HostBuffer:
        buffer = self.pool.buffer(whole=True)
        if self._samples is not None and self.pool.now is None:
            self._follow()
        boundary = [s.values[: s.mixed] for s in self.sections] if self.pool.now is None else self.pool.now.vectors

        def copy() -> None:
            for section, vector, exchanged in zip(self.sections, buffer.vectors, boundary, strict=True):
                vector[: section.mixed].copy_(exchanged)
                vector[section.mixed :].copy_(section.storage[section.mixed :])

        self._streams.on_side_stream(copy, self._streams.mark())
        self._streams.wait(self._streams.mark_side_stream())
        return buffer

    def _to_host(self, values: Tensor) -> Tensor:
        """Values as they are now in training's lane."""
        if self._streams.on_host:
            return values
        there = torch.empty_like(values, device="cpu")
        self._streams.train(lambda: there.copy_(values))
        self._streams.wait(self._streams.mark())
        return there

    def _follow(self) -> None:
        """Bring masters up to the module's tensors, where no boundary is kept, which would have done that."""
        for section in self.sections if self._samples is not None else ():
            self._streams.train(functools.partial(master_weights.take, section))

    # --- other models come in -----------------------------------------------------------------------------------

    def buffers_of(self, received: HostBuffer) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each section with buffers that are exchanged, those in ``received``, and one's own."""
        for section, theirs in zip(self.sections, received.vectors, strict=True):
            cut, end = section.trainable, section.mixed
            if end > cut:
                yield theirs[cut:], self._to_host(section.values[cut:end])

    def subtract(self, received: HostBuffer, on_host: bool = False) -> float:
        """x_j ← x_j − x for trained values, in place of what was received; for the training thread or while it waits.

        Args:
            on_host: in host memory, too, where the model lies on a device.

        Returns:
            ‖x_j − x‖₂ over the trained values; a device is waited for.
        """
        theirs = self.pool.upload(received)
        kept = received.vectors if on_host and not self._streams.on_host else None
        self._follow()
        squares: list[float] = []
        rows = zip(self.sections, theirs, _or_none(kept, theirs), strict=True)
        self._streams.train(lambda: squares.extend(passes.subtract(*row) for row in rows))
        self._streams.wait(self._streams.mark())
        return math.sqrt(sum(squares))

    def commit(self, compared: HostBuffer, share: float) -> None:
        """x ← x + share · (x_j − base) for trained values: a step boundary, for the training thread or while it waits.

        ``compared`` holds x_j − base for trained values, x_j for buffers, all finite or equal to one's own; the base is
        x as of the request, or (:meth:`subtract`) as of now.

        A buffer b becomes b + share · (b_j − b): running statistics follow the data and do not add up, so that a
        difference to what they were at the request could make a variance negative. An infinite one stays.
        """
        changes = self.pool.upload(compared)
        self._follow()
        self.mixes += 1
        with self._next_boundary() as (_, after):
            for section, change, new in zip(self.sections, changes, _or_none(after, changes), strict=True):
                self._streams.train(functools.partial(passes.commit, section, change, share, new))
        self._keep_sample()

    def merge(self, received: HostBuffer, held: HostBuffer, own: float, theirs: float) -> float:
        """x_j ← (own · h + theirs · x_j) / (own + theirs), in place of what was received. Changes no weights.

        Both of a pair that merge each other's models come to the same bits: each product is rounded by itself.

        Args:
            received: x_j, a mean of weight ``theirs``.
            held: h, a mean of weight ``own``; 0: x_j is taken as it is.

        Returns:
            As :meth:`compare`, of x_j − h; on NaN what was received is of no more use.
        """
        a, b = own / (own + theirs), theirs / (own + theirs)
        trained = others = 0.0
        for section, their, ours in zip(self.sections, received.vectors, held.vectors, strict=True):
            cut = section.trainable
            at_once = PIECE // their.itemsize
            for start in range(0, cut, at_once):
                piece = slice(start, min(start + at_once, cut))
                x, h = their[piece], ours[piece]
                trained += kernels.squared_norm(x - h)
                x.mul_(b).add_(h * a)
            x, h = their[cut : section.mixed], ours[cut : section.mixed]
            as_is = (x == h) | ~h.isfinite()
            others += kernels.squared_norm((x - h).masked_fill(x == h, 0))
            x.copy_(torch.where(as_is, h, b * x + a * h))
        return math.sqrt(trained) if math.isfinite(trained + others) else math.nan

    def take_in(self, merged: Snapshot, captured: Snapshot) -> None:
        """x ← merged + (x − captured) for trained values, buffers as merged: a step boundary, as :meth:`commit`.

        Exactly what was merged if no step was made since the capture.
        """
        means = self.pool.upload(merged.buffer)
        self._follow()
        self.mixes += 1
        with self._next_boundary() as (_, after):
            rows = zip(self.sections, means, captured.vectors, _or_none(after, means), strict=True)
            for row in rows:
                self._streams.train(functools.partial(passes.take_in, *row))
        self._keep_sample()

    def held(self, model: HostBuffer, step: int) -> Snapshot:
        """``model``, in a buffer of the pool, as a snapshot: shared, and given back after its last holder's release."""
        self.pool.upload(model)
        snapshot = Snapshot(self.pool)
        snapshot.fill(model.vectors, model, step)
        return snapshot

    def adopt(self, received: HostBuffer, step: int) -> bool:
        """Take another peer's whole model, that has seen ``step`` iterations, in place of one's own.

        Returns:
            False if its trained values hold NaN or Inf: nothing was changed then.
        """
        rows = list(zip(self.sections, received.vectors, strict=True))
        if not all(math.isfinite(kernels.squared_norm(vector[: section.trainable])) for section, vector in rows):
            return False
        for section, vector in rows:
            self._streams.train(functools.partial(passes.adopt, section, vector))
        self._streams.wait(self._streams.mark())
        self.mixes += 1
        self.set_boundary(step)
        return True

    def distance(self, reference: HostBuffer) -> float:
        """‖x − reference‖₂ over the trained values."""
        self._follow()
        return math.sqrt(
            sum(
                kernels.squared_norm(self._to_host(section.values[: section.trainable]) - vector[: section.trainable])
                for section, vector in zip(self.sections, reference.vectors, strict=True)
                if section.trainable
            )
        )

    def detach(self) -> None:
        """Give every tensor storage of its own again, as it was before; the arena is not used any further."""
        layout.detach(self.slots)
        self.pool.close()


def _or_none(after: list[Tensor] | None, like: list[Tensor]) -> Sequence[Tensor | None]:
    return [None] * len(like) if after is None else after
