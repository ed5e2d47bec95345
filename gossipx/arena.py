"""One flat buffer over a module's parameters, and consistent copies of it.

Every parameter becomes a view of a buffer that holds all parameters of its dtype, so that measuring, copying and mixing
are single passes over one vector. Parameters stay the same objects with the same shape and strides, so optimizers,
parameter groups and compiled modules keep working.

How tensors are laid out, and which cannot be, stands in :mod:`gossipx.layout`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gossipx.errors import UsageError
from gossipx.layout import Section, lay_out, plain_name, slots_of

PIECE = 1 << 20
"""Elements that are worked on at once: 4 MiB of float32, so that several passes over a piece stay in cache."""
BLOCK = 1024
"""Elements whose squares are summed in the vector's own precision; blocks are summed in float64."""


class HostBuffer:
    """Room for one model in host memory, as raw bytes and as one flat vector a section.

    Attributes:
        view: the bytes, writable, for the wire.
        vectors: for each section its elements in this buffer.
        whole: whether it has room for all of the model, or for what a retrieval exchanges.
    """

    def __init__(self, lengths: list[tuple[torch.dtype, int]], whole: bool):
        self.whole = whole
        sizes = [length * dtype.itemsize for dtype, length in lengths]
        raw = torch.empty(sum(sizes), dtype=torch.uint8)
        self.view = raw.numpy().data
        ends = itertools.accumulate(sizes)  # multiples of ALIGNMENT: every part is aligned to its dtype
        self.vectors = [
            raw[end - size : end].view(dtype) for end, size, (dtype, _) in zip(ends, sizes, lengths, strict=True)
        ]


class Snapshot:
    """A model as it was at one step boundary, shared by all who ask for it and not changed while anyone holds it.

    Attributes:
        vectors: for each section its elements, on the module's device.
        step: iterations that it has seen.
    """

    def __init__(self, arena: ParameterArena, vectors: list[Tensor], step: int, buffer: HostBuffer | None):
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

    def hold(self) -> bool:
        """One more holds it; False if it was given back by the last already."""
        with self._arena.lock:
            self.holders += self.holders > 0
            return self.holders > 0

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
        lock: guards who holds what; not held while a vector is worked on, but for the copy of a whole model that a
            joining peer asks for.
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
        self._free: dict[bool, list[HostBuffer]] = {False: [], True: []}
        self._free_vectors: list[list[Tensor]] = []
        # The model as of the last step boundary is what others are given: the training thread changes weights, and
        # forward passes change buffers, at any time without asking anyone. Each boundary is written to memory that
        # nobody holds, so that giving it away costs no copy.
        self._now = self._boundary(*self._room())
        self._whole: Snapshot | None = None

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
        vectors, buffer = self._room()
        for section, before, after in zip(self.sections, self._now.vectors, vectors, strict=True):
            if section.trainable:
                change = after[: section.trainable]
                torch.sub(section.storage[: section.trainable], before[: section.trainable], out=change)
                squared += _squared_norm(change)
        self.step += 1
        self._advance(vectors, buffer)
        return math.sqrt(squared)

    def set_boundary(self, step: int) -> None:
        """The weights were set from outside, to a model that has seen ``step`` iterations: count from here."""
        self.step = step
        self._advance(*self._room())

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

    def _boundary(self, vectors: list[Tensor], buffer: HostBuffer | None) -> Snapshot:
        for section, vector in zip(self.sections, vectors, strict=True):
            vector.copy_(section.storage[: section.mixed])
        return Snapshot(self, vectors, self.step, buffer)

    def _advance(self, vectors: list[Tensor], buffer: HostBuffer | None) -> None:
        """This is a new boundary: what was given away before is out of date."""
        now = self._boundary(vectors, buffer)
        with self.lock:
            before, self._now = self._now, now
            whole, self._whole = self._whole, None
        before.release()
        if whole is not None:
            whole.release()

    # --- copies -----------------------------------------------------------------------------------------------------

    def buffer(self, whole: bool = False) -> HostBuffer:
        """A buffer of the size of a model, reused where one is free; give it back by :meth:`free`."""
        with self.lock:
            free = self._free[whole]
            return free.pop() if free else HostBuffer(self._lengths(whole), whole)

    def free(self, buffer: HostBuffer) -> None:
        """Take back what :meth:`buffer` gave."""
        with self.lock:
            self._free[buffer.whole].append(buffer)

    def snapshot(self, whole: bool = False) -> Snapshot:
        """The model as of the last step boundary, never torn: copied at most once a boundary, and shared.

        Release it after use. Of a whole model the frozen parameters and local buffers are read as they are now.
        """
        with self.lock:
            if not whole:
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
        return Snapshot(self, buffer.vectors, self._now.step, buffer)

    def reuse(self, vectors: list[Tensor], buffer: HostBuffer | None) -> None:
        """Take back what a snapshot held; for :meth:`Snapshot.release`."""
        if buffer is not None:
            self.free(buffer)
        if buffer is None or buffer.vectors is not vectors:
            self._free_vectors.append(vectors)

    # --- other models come in -----------------------------------------------------------------------------------

    def mix(self, received: HostBuffer, share: float, base: HostBuffer | None = None) -> float:
        """x ← x + share · (x_j − base), whole or not at all: :meth:`compare` and :meth:`commit` in one.

        Returns:
            As :meth:`compare`.
        """
        distance = self.compare(received, base)
        if math.isfinite(distance):
            self.commit(received, share)
        return distance

    def compare(self, received: HostBuffer, base: HostBuffer | None = None) -> float:
        """Turn a received model into what :meth:`commit` mixes, in place. Changes no weights; any thread may do it.

        Args:
            received: x_j; its trained values become x_j − base.
            base: None: x as of the last boundary.

        Returns:
            ‖x_j − base‖₂ over the trained values; NaN if any value is not finite: the model is to be refused then.
        """
        trained = others = 0.0
        against = base.vectors if base else [vector.cpu() for vector in self._now.vectors]
        for section, theirs, ours in zip(self.sections, received.vectors, against, strict=True):
            if section.mixed:
                cut = section.trainable
                trained += _subtract(theirs[:cut], ours[:cut])
                # A buffer may hold −∞ on both sides, as attention masks do: equal values are no difference.
                others += _squared_norm(theirs[cut:].masked_fill(theirs[cut:] == ours[cut:], 0))
        return math.sqrt(trained) if math.isfinite(trained + others) else math.nan

    def commit(self, compared: HostBuffer, share: float) -> None:
        """x ← x + share · (x_j − base) for trained values: a step boundary, for the training thread or while it waits.

        A buffer b becomes b + share · (b_j − b): running statistics follow the data and do not add up, so that a
        difference to what they were at the request could make a variance negative. An infinite one stays.
        """
        for section, vector in zip(self.sections, compared.vectors, strict=True):
            if section.mixed:
                cut = section.trainable
                theirs = vector.to(section.storage.device)
                section.storage[:cut].add_(theirs[:cut], alpha=share)
                if cut == section.mixed:
                    continue
                own, other = section.storage[cut : section.mixed], theirs[cut:]
                as_is = (own == other) | ~own.isfinite()
                own.copy_(torch.where(as_is, own, own + share * (other - own)))
        self._advance(*self._room())

    def adopt(self, received: HostBuffer, step: int) -> bool:
        """Take another peer's whole model, that has seen ``step`` iterations, in place of one's own.

        Returns:
            False if its trained values hold NaN or Inf: nothing was changed then.
        """
        rows = list(zip(self.sections, received.vectors, strict=True))
        if not all(math.isfinite(_squared_norm(vector[: section.trainable])) for section, vector in rows):
            return False
        for section, vector in rows:
            section.storage.copy_(vector)
        self.step = step
        self._advance(*self._room())
        return True

    def distance(self, reference: HostBuffer) -> float:
        """‖x − reference‖₂ over the trained values."""
        return math.sqrt(
            sum(
                _squared_norm(section.storage[: section.trainable].cpu() - vector[: section.trainable])
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


def _subtract(theirs: Tensor, ours: Tensor) -> float:
    """``theirs ← theirs − ours`` in place, piece by piece; returns the squared norm, NaN or Inf if any value is."""
    return sum(_squared_norm(one.sub_(other)) for one, other in zip(_pieces(theirs), _pieces(ours), strict=True))


def _pieces(vector: Tensor) -> Iterator[Tensor]:
    return (vector[start : start + PIECE] for start in range(0, len(vector), PIECE))


def _squared_norm(vector: Tensor) -> float:
    """‖vector‖₂², summed in float64 over blocks: as fast as float32 and as exact as is needed."""
    whole = len(vector) // BLOCK * BLOCK
    total = 0.0
    for part in (vector[:whole].view(-1, BLOCK), vector[whole:].view(1, -1)):
        if part.numel():
            norms = torch.linalg.vector_norm(part, dim=1, dtype=_norm_dtype(part.dtype))
            total += float(norms.double().square().sum())
    return total


def _norm_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what a block's norm is computed: at least float32."""
    return torch.promote_types(dtype, torch.float32)
