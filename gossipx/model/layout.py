"""The layout of a module's tensors in flat buffers, and the checks of which tensors can be laid out.

All tensors of one dtype form a section, laid out as ``[trainable | mixed buffers | frozen | local buffers]``. A
retrieval exchanges the head of it, up to the mixed buffers; a joining peer receives all of it. Buffers of integers and
truth values have no average, so they are local.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from gossipx.errors import UsageError

ALIGNMENT = 64
"""Bytes: every tensor starts on a cache line."""


class Kind(enum.IntEnum):
    """The kinds of tensors, in the order of the layout; their names in lower case stand in the manifest."""

    TRAINABLE = 0
    MIXED = 1
    FROZEN = 2
    LOCAL = 3


@dataclass(frozen=True)
class Slot:
    """The place of one tensor in the layout.

    Attributes:
        start: index of its first element in its section's vector; tied tensors share one place.
    """

    name: str
    tensor: Tensor
    kind: Kind
    start: int

    @property
    def end(self) -> int:
        """Index at which the next tensor may begin."""
        step = ALIGNMENT // self.tensor.dtype.itemsize
        return self.start + -(-self.tensor.numel() // step) * step

    def line(self, masters: bool) -> str:
        """Return its line of the manifest; ``masters``: it is exchanged in float32."""
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        shape = "x".join(map(str, self.tensor.shape)) or "scalar"
        strides = "x".join(map(str, self.tensor.stride())) or "-"
        exchanged = f"{dtype} as float32" if masters else dtype
        return f"{self.name} {exchanged} {shape} strides {strides} {self.kind.name.lower()}"


@dataclass
class Section:
    """All tensors of one dtype.

    Attributes:
        storage: flat vector on the module's device; the module's tensors lie in its memory.
        values: vector that is measured, exchanged and mixed: the storage itself, or its float32 masters for training in
            16 bits (see :mod:`gossipx.model.master_weights`).
        trainable: number of leading elements that are trained.
        mixed: number of leading elements that a retrieval exchanges.
    """

    storage: Tensor
    values: Tensor
    trainable: int
    mixed: int

    def part(self, start: int, stop: int) -> Section:
        """Return a range of the values that a retrieval exchanges, as views of the same memory."""
        storage = self.storage[start:stop]
        values = storage if self.values is self.storage else self.values[start:stop]
        return Section(storage, values, min(max(self.trainable - start, 0), stop - start), stop - start)


def slots_of(module: nn.Module, mix_buffers: bool) -> Iterator[Slot]:
    """Yield all tensors of a module that a joining peer needs, checked, in the order of the layout."""
    found: list[tuple[str, Tensor, Kind]] = []
    for name, parameter in module.named_parameters():
        name = plain_name(name)
        reason = _refusal(parameter)
        if reason:
            raise UsageError(f"parameter '{name}' cannot be joined: {reason}")
        found.append((name, parameter, Kind.TRAINABLE if parameter.requires_grad else Kind.FROZEN))
    devices = {tensor.device for _, tensor, _ in found}
    for name, buffer in module.named_buffers():
        if _refusal(buffer) is not None:
            continue
        is_counted = not (buffer.is_floating_point() or buffer.is_complex())
        if is_counted and (buffer.device not in devices or buffer.nbytes != buffer.untyped_storage().nbytes()):
            continue  # a counter in host memory, or a part of another tensor: it stays as it is
        found.append((plain_name(name), buffer, Kind.MIXED if mix_buffers and has_average(buffer) else Kind.LOCAL))
    slots = list(_placed(sorted(found, key=lambda row: row[2])))
    _check_devices(slots)
    _check_storage(slots)
    yield from slots


def _placed(tensors: Iterable[tuple[str, Tensor, Kind]]) -> Iterator[Slot]:
    """Yield the slots of tensors ordered by kind."""
    ends: dict[torch.dtype, int] = {}
    starts: dict[int, int] = {}  # by address
    for name, tensor, kind in tensors:
        end = ends.get(tensor.dtype, 0)
        slot = Slot(name, tensor, kind, starts.setdefault(tensor.data_ptr(), end) if tensor.numel() else end)
        ends[tensor.dtype] = max(end, slot.end)
        yield slot


def plain_name(name: str) -> str:
    """Return a name without the prefix of torch.compile, so that compiled and plain peers agree."""
    return name.replace("_orig_mod.", "")


def _refusal(tensor: Tensor) -> str | None:
    """Return why a tensor cannot be laid out, or None if it can."""
    kinds = {kind.__name__ for kind in type(tensor).__mro__}
    if kinds & {"UninitializedParameter", "UninitializedBuffer"}:
        return "it is not initialised yet (a lazy module): run one batch through the model before joining"
    if "DTensor" in kinds or getattr(tensor, "_is_flat_param", False) or "FlatParameter" in kinds:
        return (
            "it is sharded (FSDP or DTensor), so no process has all of it: with fully_shard use"
            " gossipx.integrations.fsdp.join, else join a replicated model"
        )
    if tensor.is_meta:
        return "it is on the meta device and has no values: materialise the model before joining"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}: gossipx exchanges dense tensors"
    if tensor.is_quantized:
        return "it is quantized: join the model before quantizing it"
    if tensor.requires_grad and not can_be_mixed(tensor):
        return f"it is trained as {tensor.dtype}, which has no arithmetic: train in bfloat16 or wider"
    if not _is_dense(tensor):
        return "its elements overlap or leave gaps in memory (an expanded or sliced tensor): make it contiguous"
    return None


def can_be_mixed(tensor: Tensor) -> bool:
    """Return whether values can be averaged; 8-bit floats are storage formats without addition."""
    return tensor.dtype.itemsize > 1


def has_average(tensor: Tensor) -> bool:
    """Return whether peers can exchange a buffer: integers and truth values have no average."""
    return (tensor.is_floating_point() or tensor.is_complex()) and can_be_mixed(tensor)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one block of memory, in any order of dimensions (such as channels-last)."""
    if not tensor.numel():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _check_devices(slots: list[Slot]) -> None:
    for other in slots:
        one = slots[0]
        if other.tensor.device != one.tensor.device:
            raise UsageError(
                f"parameter '{other.name}' is on {other.tensor.device}, '{one.name}' on {one.tensor.device}: "
                "a peer trains on one device; start one peer per device"
            )


def _check_storage(slots: list[Slot]) -> None:
    """Check that tensors share either all of their memory (tied) or none."""
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


def lay_out(slots: list[Slot]) -> Section:
    """Move the tensors of one dtype, ordered by kind, into one new vector.

    Each gets a storage that is exactly its range of the vector's memory and keeps all of it alive. Saving, copying and
    sharing a tensor work on its storage, so with a view they would take the whole vector with it.
    """
    trainable, mixed, end = _ends(slots)
    storage = torch.zeros(end, dtype=slots[0].tensor.dtype, device=slots[0].tensor.device)
    ranges: dict[tuple[int, int], Tensor] = {}  # tied tensors share one storage
    with torch.no_grad():
        for slot in slots:
            place = slot.start, slot.tensor.numel()
            if place not in ranges:
                ranges[place] = range_of(storage, *place)
            alias = ranges[place].as_strided(slot.tensor.shape, slot.tensor.stride())
            alias.copy_(slot.tensor)
            slot.tensor.data = alias
    return Section(storage, storage.float() if has_masters(slots) else storage, trainable, mixed)


def sections_of(slots: Iterable[Slot]) -> list[Section]:
    """Move tensors into new sections, in the same order in all processes; those that exchanges do not move are last."""
    return sorted((lay_out(kind) for kind in by_dtype(slots).values()), key=lambda section: not section.mixed)


def range_of(vector: Tensor, start: int, length: int) -> Tensor:
    """Return a range of a vector as a vector that has a storage of its own in the same memory."""
    part = vector.view(torch.uint8)[start * vector.itemsize : (start + length) * vector.itemsize]
    return from_dlpack(part).view(vector.dtype)  # as bytes, since DLPack does not have all dtypes


def _ends(slots: Iterable[Slot]) -> tuple[int, int, int]:
    """Return the ends of the trained, the mixed and all elements of one dtype."""
    ends = dict.fromkeys(Kind, 0)
    for slot in slots:
        ends[slot.kind] = max(ends[slot.kind], slot.end)
    return ends[Kind.TRAINABLE], max(ends[Kind.TRAINABLE], ends[Kind.MIXED]), max(ends.values())


def nbytes(module: nn.Module, mix_buffers: bool) -> tuple[int, int]:
    """Return the bytes of a module's model on the wire, exchanged and whole, without laying it out.

    Raises:
        UsageError: as :func:`slots_of`.
    """
    exchanged = whole = 0
    for dtype, slots in by_dtype(slots_of(module, mix_buffers)).items():
        size = torch.float32.itemsize if has_masters(slots) else dtype.itemsize
        _, mixed, end = _ends(slots)
        exchanged, whole = exchanged + size * mixed, whole + size * end
    return exchanged, whole


def by_dtype(slots: Iterable[Slot]) -> dict[torch.dtype, list[Slot]]:
    """Group slots by dtype, in an order that is equal in all processes with this module."""
    found = list(slots)
    dtypes = sorted({slot.tensor.dtype for slot in found}, key=str)
    return {dtype: [slot for slot in found if slot.tensor.dtype == dtype] for dtype in dtypes}


def detach(slots: Iterable[Slot]) -> None:
    """Give every tensor memory of its own again, as before :func:`lay_out`."""
    own: dict[tuple[int, torch.Size], Tensor] = {}  # by address, so that tied tensors stay tied
    for tensor in (slot.tensor for slot in slots):
        place = tensor.data_ptr(), tensor.shape
        if place not in own:
            own[place] = tensor.detach().clone(memory_format=torch.preserve_format)
        tensor.data = own[place]


def named(slots: Iterable[Slot], sections: Iterable[Section], vectors: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a whole model by name, as views of its flat vectors, one per section."""
    at = {section.storage.dtype: vector for section, vector in zip(sections, vectors, strict=True)}
    views = {}
    for slot in slots:
        tensor, vector = slot.tensor, at[slot.tensor.dtype]
        views[slot.name] = vector.as_strided(tensor.shape, tensor.stride(), vector.storage_offset() + slot.start)
    return views


NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def norms(module: nn.Module) -> set[str]:
    """Return the names of the parameters of normalisation layers, which are few and small."""
    found = set()
    for place, layer in module.named_modules():
        if isinstance(layer, NORMS):
            found |= {plain_name(f"{place}.{name}".lstrip(".")) for name, _ in layer.named_parameters(recurse=False)}
    return found


def batch_counters(module: nn.Module) -> set[str]:
    """Return the names of the buffers in which BatchNorm counts its batches."""
    layers = module.named_modules()
    return {
        plain_name(f"{place}.num_batches_tracked".lstrip("."))
        for place, layer in layers
        if isinstance(layer, nn.modules.batchnorm._NormBase)
    }


def lengths(sections: Iterable[Section], whole: bool) -> list[tuple[torch.dtype, int]]:
    """Return the dtype and the number of elements of each section of a model, exchanged or whole."""
    return [(section.values.dtype, len(section.values) if whole else section.mixed) for section in sections]


def has_masters(slots: Iterable[Slot]) -> bool:
    """Return whether tensors of one dtype are exchanged as float32 masters, as some are trained in 16 bits."""
    return any(slot.kind is Kind.TRAINABLE and slot.tensor.dtype in (torch.float16, torch.bfloat16) for slot in slots)
