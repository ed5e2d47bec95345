"""One flat buffer over a module's parameters, and consistent copies of it.

Every parameter becomes a view of a buffer that holds all parameters of its dtype, so that measuring, copying and mixing
are single passes over one vector. Parameters stay the same objects with the same shape and strides, so optimizers,
parameter groups and compiled modules keep working.

How tensors are laid out, and which cannot be, stands in :mod:`gossipx.layout`.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gossipx import kernels
from gossipx.buffers import HostBuffer
from gossipx.errors import UsageError
from gossipx.layout import Section, lay_out, plain_name, slots_of
from gossipx.memory import PIECE

COPY_SECONDS = 1.0
"""Longest that a boundary waits for a copy: several times what the largest models take."""


class Snapshot:
    """A model as it was at one step boundary, shared by all who ask for it and not changed while anyone holds it.

    Attributes:
        vectors: for each section its elements, on the module's device.
        step: iterations that it has seen.
    """

    def __init__(self, arena: ParameterArena, vectors: list[Tensor], buffer: HostBuffer | None, step: int):
        self.vectors = vectors
        self.step = step
        self.holders = 1
        self._arena = arena
        self._buffer = buffer

    @property
    def buffer(self) -> HostBuffer:
        """Its bytes in host memory: the vectors themselves on a CPU, else a copy made when it is first asked for."""
        with self._arena.copying:
            if self._buffer is None:
                self._buffer = self._arena.buffer()
                for ours, theirs in zip(self._buffer.vectors, self.vectors, strict=True):
                    ours.copy_(theirs)
            return self._buffer

    def became(self, step: int) -> None:
        """Its vectors hold the model after ``step`` iterations now."""
        self.step = step
        if self._buffer is not None and self._buffer.vectors is not self.vectors:  # a copy of what was there before
            self._arena.free(self._buffer)
            self._buffer = None

    def hold(self) -> Snapshot:
        """Hold it once more; to be given back once more."""
        with self._arena.lock:
            self.holders += 1
        return self

    def release(self) -> None:
        """Give it back; after the last holder's call its memory is used again."""
        with self._arena.lock:
            self.holders -= 1
            if self.holders == 0:
                self._arena.reuse(self.vectors, self._buffer)


class ParameterArena:
    """Lays a module's parameters and buffers into flat buffers, one a dtype.

    Args:
        module: all of it on one device.
        mix_buffers: whether floating-point buffers (BatchNorm's statistics) are exchanged, or stay local.

    Attributes:
        manifest: one line a tensor; two peers may exchange models if these are equal.
        digest: SHA-256 of the manifest, hexadecimal.
        step: iterations done.
        lock: guards who holds what; held while a boundary is written, and while a whole model is copied for a joining
            peer.
        copying: guards copies from the device to host memory.

    Raises:
        UsageError: a parameter that cannot be laid out, by its name and the reason.
    """

    def __init__(self, module: nn.Module, mix_buffers: bool = True):
        slots = list(slots_of(module, mix_buffers))
        if not any(slot.kind == 0 for slot in slots):
            raise UsageError("the model has no parameter that is trained: nothing to exchange")
        self.manifest = tuple(slot.line() for slot in slots)
        self.digest = hashlib.sha256("\n".join(self.manifest).encode()).hexdigest()
        self.lock = threading.RLock()
        self.step = 0
        self.sections: list[Section] = []
        self._tensors = [slot.tensor for slot in slots]
        self._names = {slot.name for slot in slots}
        for dtype in sorted({slot.tensor.dtype for slot in slots}, key=str):
            self.sections.append(lay_out([slot for slot in slots if slot.tensor.dtype == dtype]))
        self._slots_at = {slot.tensor.data_ptr(): slot for slot in slots if slot.tensor.numel()}
        self.copying = threading.Lock()
        self._on_host = all(section.storage.device.type == "cpu" for section in self.sections)
        self._free: list[HostBuffer] = []
        self._has_more = any(section.mixed < len(section.storage) for section in self.sections)  # a whole model has
        self._made = 0  # buffers, those that are free among them
        self._copied = 0  # bases that are being copied
        self._given_back = threading.Condition(self.lock)
        self._free_vectors: list[list[Tensor]] = []
        self._free_staging: list[memoryview] = []
        # The model as of the last step boundary is what others are given: the training thread changes weights, and
        # forward passes change buffers, at any time without asking anyone. Each boundary is written to memory that
        # nobody holds, so that giving it away costs no copy; the delta needs the boundary anyway.
        self._now = Snapshot(self, *self._room(), 0)
        self._whole: Snapshot | None = None
        self.set_boundary(0)

    @property
    def parameters(self) -> int:
        """Number of trained values."""
        return sum(section.trainable for section in self.sections)

    def nbytes(self, whole: bool = False) -> int:
        """Bytes of a model on the wire: as a retrieval exchanges it, or whole."""
        return sum(length * dtype.itemsize for dtype, length in self._lengths(whole))

    # --- step boundaries --------------------------------------------------------------------------

    def step_done(self) -> float:
        """Called by the training thread after each change of the weights, the optimizer's step.

        Returns:
            Δ_t = ‖x_t − x_{t−1}‖₂ over the trained values (Adaptive Communication, Eq. 6); x_{t−1} is taken after any
            mixing.
        """
        squared = 0.0
        with self._next_boundary() as (before, after):
            for section, old, new in zip(self.sections, before, after, strict=True):
                cut, end = section.trainable, section.mixed
                past = old[:cut]
                squared += kernels.advance(section.storage[:cut], past, past if new is old else new[:cut])
                new[cut:].copy_(section.storage[cut:end])
            self.step += 1
        return math.sqrt(squared)

    def set_boundary(self, step: int) -> None:
        """The weights were set from outside, to a model that has seen ``step`` iterations: count from here."""
        with self._next_boundary() as (_, after):
            for section, new in zip(self.sections, after, strict=True):
                new.copy_(section.storage[: section.mixed])
            self.step = step

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
            elif plain_name(name) in self._names:
                reason = "lies in other memory (load_state_dict(assign=True), a change of dtype or device)"
            else:
                reason = "was added to the model"
            told = f"'{plain_name(name)}' {reason} since the model was joined"
            raise UsageError(f"{told}: change the model before gossipx.join")

    def _room(self) -> tuple[list[Tensor], HostBuffer | None]:
        """Memory for one boundary on the module's device, that nobody holds."""
        if self._on_host:
            buffer = self.buffer()
            return buffer.vectors, buffer
        with self.lock:
            if self._free_vectors:
                return self._free_vectors.pop(), None
        return [torch.empty_like(section.storage[: section.mixed]) for section in self.sections], None

    @contextlib.contextmanager
    def _next_boundary(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """The last boundary, and where the next one is to be written: the same memory unless somebody holds it.

        Nobody can ask for either meanwhile.
        """
        with self.lock:
            before = after = self._now
            if before.holders > 1:
                # A base that is being copied is given back in a moment, sooner than new memory could be had.
                self._given_back.wait_for(lambda: not self._copied, COPY_SECONDS)
            if before.holders > 1:
                after = Snapshot(self, *self._room(), self.step)
            yield before.vectors, after.vectors
            after.became(self.step)
            self._now = after
            whole, self._whole = self._whole, None
            # Before anybody else looks: whoever alone holds the boundary before this one may take its memory over.
            if after is not before:
                before.release()
            if whole is not None:
                whole.release()

    # --- copies -----------------------------------------------------------------------------------------------------

    def buffer(self, whole: bool = False) -> HostBuffer:
        """A buffer of the size of a model, reused where one is free; give it back by :meth:`free`."""
        if whole and self._has_more:
            return HostBuffer(self._lengths(True), whole=True)  # whole models travel once a run: nothing is kept
        with self.lock:
            if self._free:
                return self._free.pop()
            self._made += 1
            return HostBuffer(self._lengths(False), whole=False)

    def would_crowd(self, base: Snapshot) -> bool:
        """Whether ``base`` is the last boundary and one more is kept: the next boundary would find no room but new."""
        with self.lock:
            return base is self._now and self._made - len(self._free) >= 2

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

    def take_over(self, snapshot: Snapshot) -> HostBuffer | None:
        """The memory of a snapshot that only the caller holds and nobody can ask for any more; None: others need it."""
        buffer = snapshot.buffer
        with self.lock:
            if snapshot is self._now or snapshot.holders > 1:
                return None
            snapshot.holders = 0
            if buffer.vectors is not snapshot.vectors:
                self._free_vectors.append(snapshot.vectors)
            return buffer

    def staging(self) -> memoryview:
        """Room for one piece, reused where one is free; give it back by :meth:`free_staging`."""
        with self.lock:
            return self._free_staging.pop() if self._free_staging else memoryview(bytearray(PIECE))

    def free_staging(self, staging: memoryview) -> None:
        """Take back what :meth:`staging` gave."""
        with self.lock:
            self._free_staging.append(staging)

    def free(self, buffer: HostBuffer) -> None:
        """Take back what :meth:`buffer` gave."""
        if not buffer.whole:
            with self.lock:
                self._free.append(buffer)

    def snapshot(self, whole: bool = False) -> Snapshot:
        """The model as of the last step boundary, never torn: copied at most once a boundary, and shared.

        Release it after use. Of a whole model the frozen parameters and local buffers are read as they are now.
        """
        with self.lock:
            if not whole or not self._has_more:
                snapshot = self._now
            elif self._whole is not None:
                snapshot = self._whole
            else:
                snapshot = self._whole = self._copy_whole()
            snapshot.holders += 1
            return snapshot

    def _copy_whole(self) -> Snapshot:
        buffer = self.buffer(whole=True)
        for section, vector, boundary in zip(self.sections, buffer.vectors, self._now.vectors, strict=True):
            vector[: section.mixed].copy_(boundary)
            vector[section.mixed :].copy_(section.storage[section.mixed :])
        return Snapshot(self, buffer.vectors, buffer, self._now.step)

    def reuse(self, vectors: list[Tensor], buffer: HostBuffer | None) -> None:
        """Take back what a snapshot held; for :meth:`Snapshot.release`."""
        if buffer is not None:
            self.free(buffer)
        if buffer is None or buffer.vectors is not vectors:
            self._free_vectors.append(vectors)

    # --- other models come in -----------------------------------------------------------------------------------

    def buffers_of(self, received: HostBuffer) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each section with buffers that are exchanged, those in ``received``, and one's own as of the boundary."""
        for section, theirs, ours in zip(self.sections, received.vectors, self._now.vectors, strict=True):
            if section.mixed > section.trainable:
                yield theirs[section.trainable :], ours[section.trainable :].cpu()

    def commit(self, compared: HostBuffer, share: float) -> None:
        """x ← x + share · (x_j − base) for trained values: a step boundary, for the training thread or while it waits.

        ``compared`` holds x_j − base for trained values, x_j for buffers, all finite or equal to one's own.

        A buffer b becomes b + share · (b_j − b): running statistics follow the data and do not add up, so that a
        difference to what they were at the request could make a variance negative. An infinite one stays.
        """
        with self._next_boundary() as (_, after):
            for section, vector, new in zip(self.sections, compared.vectors, after, strict=True):
                cut, end = section.trainable, section.mixed
                theirs = vector.to(section.storage.device)
                kernels.commit(section.storage[:cut], theirs[:cut], share, new[:cut])
                if cut < end:
                    own, other = section.storage[cut:end], theirs[cut:]
                    as_is = (own == other) | ~own.isfinite()
                    own.copy_(torch.where(as_is, own, own + share * (other - own)))
                    new[cut:].copy_(own)

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
        rows = zip(self.sections, merged.buffer.vectors, captured.vectors, strict=True)
        with self._next_boundary() as (_, after):
            for (section, their, base), new in zip(rows, after, strict=True):
                cut, end = section.trainable, section.mixed
                theirs = their.to(section.storage.device)
                section.storage[:cut].sub_(base[:cut]).add_(theirs[:cut])
                own = section.storage[cut:end]
                own.copy_(torch.where(own.isfinite(), theirs[cut:], own))
                new.copy_(section.storage[:end])

    def held(self, model: HostBuffer, step: int) -> Snapshot:
        """``model``, given by :meth:`buffer`, as a snapshot: shared, and given back after its last holder's release."""
        return Snapshot(self, model.vectors, model, step)

    def adopt(self, received: HostBuffer, step: int) -> bool:
        """Take another peer's whole model, that has seen ``step`` iterations, in place of one's own.

        Returns:
            False if its trained values hold NaN or Inf: nothing was changed then.
        """
        rows = list(zip(self.sections, received.vectors, strict=True))
        if not all(math.isfinite(kernels.squared_norm(vector[: section.trainable])) for section, vector in rows):
            return False
        for section, vector in rows:
            section.storage.copy_(vector)
        self.set_boundary(step)
        return True

    def distance(self, reference: HostBuffer) -> float:
        """‖x − reference‖₂ over the trained values."""
        return math.sqrt(
            sum(
                kernels.squared_norm(section.storage[: section.trainable].cpu() - vector[: section.trainable])
                for section, vector in zip(self.sections, reference.vectors, strict=True)
                if section.trainable
            )
        )

    def detach(self) -> None:
        """Give every tensor storage of its own again, as it was before; the arena is not used any further."""
        own: dict[tuple[int, torch.Size], Tensor] = {}  # by place: tied tensors stay tied
        for tensor in self._tensors:
            place = tensor.data_ptr(), tensor.shape
            if place not in own:
                own[place] = tensor.detach().clone(memory_format=torch.preserve_format)
            tensor.data = own[place]

    def _lengths(self, whole: bool) -> list[tuple[torch.dtype, int]]:
        return [(section.storage.dtype, len(section.storage) if whole else section.mixed) for section in self.sections]
