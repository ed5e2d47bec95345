"""One flat buffer over a module's parameters, and consistent copies of it.

Every parameter becomes a view of a buffer that holds all parameters of its dtype, so that measuring, copying and mixing
are single passes over one vector. Parameters stay the same objects with the same shape and strides, so optimizers,
parameter groups and compiled modules keep working.

A section (one dtype) is laid out as ``[trainable | mixed buffers | frozen | other buffers]``: what is exchanged in a
retrieval is its head, what a joining peer takes is all of it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gossipx.errors import UsageError

ALIGNMENT = 64
"""Bytes: every tensor begins on a cache line."""
PIECE = 1 << 20
"""Elements that are worked on at once: 4 MiB of float32, so that several passes over a piece stay in cache."""


@dataclass(frozen=True)
class _Slot:
    """Where one tensor lies."""

    name: str
    tensor: Tensor
    kind: int  # 0 trainable, 1 mixed buffer, 2 frozen, 3 other buffer

    def line(self) -> str:
        kind = ("trainable", "mixed", "frozen", "local")[self.kind]
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        shape = "x".join(map(str, self.tensor.shape)) or "scalar"
        return f"{self.name} {dtype} {shape} strides {'x'.join(map(str, self.tensor.stride())) or '-'} {kind}"


@dataclass
class Section:
    """All tensors of one dtype.

    Attributes:
        storage: flat vector on the module's device.
        trainable: elements from the front that are trained.
        mixed: elements from the front that a retrieval exchanges.
    """

    storage: Tensor
    trainable: int
    mixed: int


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
    """A model as it was at one moment, shared by all who ask for the same version.

    Attributes:
        buffer: its bytes; not to be changed.
        step: iterations that it has seen.
    """

    def __init__(self, buffer: HostBuffer, step: int, arena: ParameterArena):
        self.buffer = buffer
        self.step = step
        self._arena = arena
        self._holders = 1

    def release(self) -> None:
        """Give it back; the last holder's call frees the buffer for reuse."""
        self._arena._release(self)


class ParameterArena:
    """Lays a module's parameters and buffers into flat buffers, one a dtype.

    Args:
        module: all of it on one device.
        mix_buffers: whether floating-point buffers (BatchNorm's statistics) are exchanged, or stay local.

    Attributes:
        manifest: one line a tensor; two peers may exchange models if these are equal.
        digest: SHA-256 of the manifest, hexadecimal.
        step: iterations done.
        lock: held at step boundaries, while weights are measured, copied or mixed.

    Raises:
        UsageError: a parameter that cannot be laid out, by its name and the reason.
    """

    def __init__(self, module: nn.Module, mix_buffers: bool = True):
        slots = list(_slots(module, mix_buffers))
        if not any(slot.kind == 0 for slot in slots):
            raise UsageError("the model has no parameter that is trained: nothing to exchange")
        self.manifest = tuple(slot.line() for slot in slots)
        self.digest = hashlib.sha256("\n".join(self.manifest).encode()).hexdigest()
        self.lock = threading.RLock()
        self.step = 0
        self.sections: list[Section] = []
        self._tensors = [slot.tensor for slot in slots]
        for dtype in sorted({slot.tensor.dtype for slot in slots}, key=str):
            self.sections.append(_lay_out([slot for slot in slots if slot.tensor.dtype == dtype]))
        self._current: dict[bool, Snapshot] = {}
        self._free: dict[bool, list[HostBuffer]] = {False: [], True: []}
        # The model as it was at the last step boundary, what others are given: the training thread changes weights
        # (and forward passes change buffers) at any time without asking anyone.
        self._boundary = [section.storage[: section.mixed].clone() for section in self.sections]

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
        with self.lock:
            for section, before in zip(self.sections, self._boundary, strict=True):
                trained = before[: section.trainable]
                trained.sub_(section.storage[: section.trainable])
                squared += _squared_norm(trained)
            self.step += 1
            self._changed()
        return math.sqrt(squared)

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
            current = self._current.get(whole)
            if current is None:
                buffer = self.buffer(whole)
                for section, vector, boundary in zip(self.sections, buffer.vectors, self._boundary, strict=True):
                    vector[: section.mixed].copy_(boundary)
                    vector[section.mixed :].copy_(section.storage[section.mixed : len(vector)])
                current = self._current[whole] = Snapshot(buffer, self.step, self)
            current._holders += 1
            return current

    def _release(self, snapshot: Snapshot) -> None:
        with self.lock:
            snapshot._holders -= 1
            if snapshot._holders == 0:
                self.free(snapshot.buffer)

    # --- other models come in -----------------------------------------------------------------------------------

    def mix(self, received: HostBuffer, share: float, base: HostBuffer | None = None) -> float:
        """x ← x + share · (x_j − base), whole or not at all. Turns ``received`` into the change that was made.

        Args:
            received: x_j.
            share: β, see :mod:`gossipx.mixing`.
            base: the model that x_j is compared with; None: x as it is now.

        Returns:
            ‖x_j − base‖₂ over the trained values; NaN if x_j holds NaN or Inf, and then nothing was changed.
        """
        with self.lock:
            return self._mix(received, share, base)

    def _mix(self, received: HostBuffer, share: float, base: HostBuffer | None) -> float:
        trained = others = 0.0
        for index, section in enumerate(self.sections):
            change = received.vectors[index]
            against = base.vectors[index] if base else section.storage[: section.mixed].cpu()
            trained += _form_change(change[: section.trainable], against[: section.trainable], share)
            others += _form_change(change[section.trainable :], against[section.trainable :], share)
        if not math.isfinite(trained + others):
            return math.nan
        for section, change in zip(self.sections, received.vectors, strict=True):
            section.storage[: section.mixed].add_(change.to(section.storage.device))
        self._changed()
        return math.sqrt(trained)

    def adopt(self, received: HostBuffer, step: int) -> None:
        """Take another peer's whole model, that has seen ``step`` iterations, in place of one's own."""
        with self.lock:
            for section, vector in zip(self.sections, received.vectors, strict=True):
                section.storage.copy_(vector)
            self.step = step
            self._changed()

    def distance(self, reference: HostBuffer) -> float:
        """‖x − reference‖₂ over the trained values."""
        return math.sqrt(
            sum(
                _squared_norm(section.storage[: section.trainable].cpu() - vector[: section.trainable])
                for section, vector in zip(self.sections, reference.vectors, strict=True)
            )
        )

    def detach(self) -> None:
        """Give every tensor storage of its own again, as it was before; the arena is not used any further."""
        with self.lock:
            for tensor in self._tensors:
                with torch.no_grad():
                    tensor.data = tensor.detach().clone(memory_format=torch.preserve_format)

    def _changed(self) -> None:
        """Weights have changed and this is a boundary, under the lock: what was copied before is out of date."""
        for section, boundary in zip(self.sections, self._boundary, strict=True):
            boundary.copy_(section.storage[: section.mixed])
        while self._current:
            self._current.popitem()[1].release()

    def _lengths(self, whole: bool) -> list[tuple[torch.dtype, int]]:
        return [(section.storage.dtype, len(section.storage) if whole else section.mixed) for section in self.sections]


def _form_change(received: Tensor, base: Tensor, share: float) -> float:
    """Turn a received model into the change it makes, in place: ``received ← share · (received − base)``.

    Args:
        received: flat vector x_j; overwritten.
        base: flat vector of the same length, the model that x_j is compared with.
        share: β.

    Returns:
        ‖x_j − base‖₂², NaN or Inf if any element is not finite: the caller refuses the model then.
    """
    squared = 0.0
    for theirs, ours in zip(_pieces(received), _pieces(base), strict=True):
        theirs.sub_(ours)
        squared += _squared_norm(theirs)
        theirs.mul_(share)
    return squared


def _pieces(vector: Tensor) -> Iterator[Tensor]:
    return (vector[start : start + PIECE] for start in range(0, len(vector), PIECE))


def _squared_norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=_wide(vector.dtype))) ** 2


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _slots(module: nn.Module, mix_buffers: bool) -> Iterator[_Slot]:
    """All tensors of a module that a joining peer needs, checked, in the order in which they are laid out."""
    found: list[_Slot] = []
    for name, parameter in module.named_parameters():
        name = _plain(name)
        reason = _refusal(parameter)
        if reason:
            raise UsageError(f"parameter '{name}' cannot be joined: {reason}")
        found.append(_Slot(name, parameter, 0 if parameter.requires_grad else 2))
    for name, buffer in module.named_buffers():
        if _refusal(buffer) is None and (buffer.is_floating_point() or buffer.is_complex()):
            found.append(_Slot(_plain(name), buffer, 1 if mix_buffers else 3))
    devices = {slot.tensor.device for slot in found}
    if len(devices) > 1:
        other = next(slot for slot in found if slot.tensor.device != found[0].tensor.device)
        raise UsageError(
            f"parameter '{other.name}' is on {other.tensor.device}, '{found[0].name}' on {found[0].tensor.device}: "
            "a peer trains on one device; start one peer a device"
        )
    _check_storage(found)
    yield from sorted(found, key=lambda slot: slot.kind)


def _plain(name: str) -> str:
    """A name as it reads without the wrapper of torch.compile, so that compiled and plain peers agree."""
    return name.replace("_orig_mod.", "")


def _refusal(tensor: Tensor) -> str | None:
    """Why a tensor cannot be laid out, or None if it can."""
    kinds = {kind.__name__ for kind in type(tensor).__mro__}
    if kinds & {"UninitializedParameter", "UninitializedBuffer"}:
        return "it is not initialised yet (a lazy module): run one batch through the model before joining"
    if "DTensor" in kinds or getattr(tensor, "_is_flat_param", False) or "FlatParameter" in kinds:
        return "it is sharded (FSDP or DTensor), so that no process holds it whole: join a model that is replicated"
    if tensor.is_meta:
        return "it is on the meta device and has no values: materialise the model before joining"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}: gossipx exchanges dense tensors"
    if tensor.is_quantized:
        return "it is quantized: join the model before it is quantized"
    if not _is_dense(tensor):
        return "its elements overlap or leave gaps in memory (an expanded or sliced tensor): make it contiguous"
    return None


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one block of memory, in any order of the dimensions (channels-last, say)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _check_storage(slots: list[_Slot]) -> None:
    """Tensors may share all of their memory (tied), but not a part of it."""
    taken = sorted((slot for slot in slots if slot.tensor.numel()), key=lambda slot: slot.tensor.data_ptr())
    for one, other in itertools.pairwise(taken):
        if one.tensor.data_ptr() + one.tensor.nbytes > other.tensor.data_ptr() and not _tied(one.tensor, other.tensor):
            raise UsageError(
                f"parameter '{other.name}' cannot be joined: it shares a part of its memory with '{one.name}'; "
                "tie parameters whole or not at all"
            )


def _tied(one: Tensor, other: Tensor) -> bool:
    return (one.data_ptr(), one.dtype, one.shape, one.stride()) == (
        other.data_ptr(),
        other.dtype,
        other.shape,
        other.stride(),
    )


def _lay_out(slots: list[_Slot]) -> Section:
    """Move the tensors of one dtype, ordered by kind, into one new vector."""
    dtype, device = slots[0].tensor.dtype, slots[0].tensor.device
    step = ALIGNMENT // dtype.itemsize
    offsets: dict[int, int] = {}  # of tensors laid out so far, by their address: tied ones get one place
    ends = [0, 0, 0, 0]
    end = 0
    for slot in slots:
        if slot.tensor.data_ptr() not in offsets or slot.tensor.numel() == 0:
            offsets[slot.tensor.data_ptr()] = end
            end += -(-slot.tensor.numel() // step) * step
        ends[slot.kind] = end
    storage = torch.zeros(end, dtype=dtype, device=device)
    trainable, mixed = ends[0], max(ends[0], ends[1])
    with torch.no_grad():
        places = [offsets[slot.tensor.data_ptr()] for slot in slots]
        for slot, place in zip(slots, places, strict=True):
            view = storage.as_strided(slot.tensor.shape, slot.tensor.stride(), place)
            view.copy_(slot.tensor)
            slot.tensor.data = view
    return Section(storage, trainable, mixed)
