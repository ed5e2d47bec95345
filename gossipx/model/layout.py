"""The layout of a module's tensors in flat buffers, the checks of which tensors can be laid out, and their places.

All tensors of one dtype form a section, laid out as ``[trainable | mixed buffers | frozen | local buffers]``. A
retrieval exchanges the head of it, up to the mixed buffers; a joining peer receives all of it. Buffers of integers and
truth values have no average, so they are local.

A script may give a tensor other memory: ``parameter.data = ...``, ``vector_to_parameters``, a buffer that is assigned,
a model that is passed to another process. It trains from the values there, but the arena would measure, exchange and
mix those in the old place. So at each step boundary :class:`Places` looks for such changes and takes the values back
into the arena. A change for which the layout has no place is refused, because peers would end with different models.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from gossipx.errors import UsageError
from gossipx.model.section import Section, Slot, TensorKind


def slots_of(module: nn.Module, mix_buffers: bool) -> Iterator[Slot]:
    """Yield all tensors of a module that a joining peer needs, checked, in the order of the layout."""
    found: list[tuple[str, Tensor, TensorKind]] = []
    for name, parameter in module.named_parameters():
        name = plain_name(name)
        reason = _refusal(parameter)
        if reason:
            raise UsageError(f"parameter '{name}' cannot be joined: {reason}")
        found.append((name, parameter, TensorKind.TRAINABLE if parameter.requires_grad else TensorKind.FROZEN))
    devices = {tensor.device for _, tensor, _ in found}
    for name, buffer in module.named_buffers():
        if _refusal(buffer) is not None:
            continue
        is_counted = not (buffer.is_floating_point() or buffer.is_complex())
        if is_counted and (buffer.device not in devices or buffer.nbytes != buffer.untyped_storage().nbytes()):
            continue  # a counter in host memory, or a part of another tensor: it stays as it is
        kind = TensorKind.MIXED if mix_buffers and has_average(buffer) else TensorKind.LOCAL
        found.append((plain_name(name), buffer, kind))
    slots = list(_placed(sorted(found, key=lambda row: row[2])))
    _check_devices(slots)
    _check_storage(slots)
    yield from slots


def _placed(tensors: Iterable[tuple[str, Tensor, TensorKind]]) -> Iterator[Slot]:
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
    ends = dict.fromkeys(TensorKind, 0)
    for slot in slots:
        ends[slot.kind] = max(ends[slot.kind], slot.end)
    return ends[TensorKind.TRAINABLE], max(ends[TensorKind.TRAINABLE], ends[TensorKind.MIXED]), max(ends.values())


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
    return any(
        slot.kind is TensorKind.TRAINABLE and slot.tensor.dtype in (torch.float16, torch.bfloat16) for slot in slots
    )


log = logging.getLogger("gossipx")

BEFORE = "make such changes before gossipx.join"


@dataclass(frozen=True)
class _Place:
    """A slot's memory, and the form of its tensor there."""

    storage: Tensor
    start: int
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def address(self) -> int:
        return self.storage.data_ptr() + self.start * self.storage.itemsize

    def refusal(self, tensor: Tensor) -> str | None:
        """Return why a tensor cannot be taken back, or None if it can."""
        for before, now in (
            (self.storage.dtype, tensor.dtype),
            (self.storage.device, tensor.device),
            (tuple(self.shape), tuple(tensor.shape)),
        ):
            if before != now:
                return f"was changed from {before} to {now}".replace("torch.", "")
        return None

    def has_stride_of(self, tensor: Tensor) -> bool:
        rows = zip(self.shape, self.stride, tensor.stride(), strict=True)
        return all(size == 1 or before == now for size, before, now in rows)


class Places:
    """Keeps a module's tensors in the arena.

    Args:
        module: the model that was laid out.
        slots: its tensors; a slot whose buffer the script replaces is replaced in the list.
        sections: the vectors in which they lie.
    """

    def __init__(self, module: nn.Module, slots: list[Slot], sections: Sequence[Section]):
        self._module = module
        self._slots = slots
        storages = {section.storage.dtype: section.storage for section in sections}
        self._places = [
            _Place(storages[slot.tensor.dtype], slot.start, slot.tensor.shape, slot.tensor.stride()) for slot in slots
        ]
        self._at: dict[int, int] = {}  # by address; of tied tensors, one that is trained
        self._buffers: dict[str, int] = {}
        for index, slot in reversed(list(enumerate(slots))):
            if slot.tensor.numel():
                self._at[self._places[index].address] = index
                if slot.kind in (TensorKind.MIXED, TensorKind.LOCAL):
                    self._buffers[slot.name] = index
        self._at_join = {plain_name(name) for name, _ in module.named_buffers()}
        self._told: set[str] = set()
        self._remember()

    def check(self) -> None:
        """Take tensors that the script moved to other memory back into the arena, with their values.

        The training thread calls this at each step boundary, before the model is measured. It compares addresses and
        ``requires_grad``, not values, so it costs little.

        Raises:
            UsageError: a change cannot be followed; the message names the parameter, the reason and the remedy.
        """
        if self._look() == self._seen:
            return
        for name, parameter in self._module.named_parameters():
            if parameter.numel():
                self._check_parameter(plain_name(name), parameter)
        for name, buffer in self._module.named_buffers():
            if buffer.numel() and buffer.data_ptr() not in self._at and plain_name(name) in self._buffers:
                self._check_buffer(plain_name(name), buffer)
            elif plain_name(name) not in self._at_join:
                self._check_new_buffer(name, buffer)
        self._remember()

    def _remember(self) -> None:
        modules = list(self._module.modules())
        # The modules' own dicts: to walk through the modules takes twice as long.
        self._tensors = [held for module in modules for held in (module._parameters, module._buffers)]
        self._children = [module._modules for module in modules]
        self._seen = self._look()

    def _look(self) -> tuple[Any, ...]:
        return (
            [(one.data_ptr(), one.requires_grad) for held in self._tensors for one in held.values() if one is not None],
            [child for children in self._children for child in children.values()],
        )

    def _check_parameter(self, name: str, parameter: Tensor) -> None:
        at = self._at.get(parameter.data_ptr())
        index = next((i for i, slot in enumerate(self._slots) if slot.tensor is parameter), None) if at is None else at
        if index is None:
            if any(name == slot.name for slot in self._slots):
                raise UsageError(
                    f"'{name}' is another Parameter than at gossipx.join (load_state_dict(assign=True)?), which the"
                    f" optimizer does not train: {BEFORE}"
                )
            if parameter.requires_grad:
                raise UsageError(f"'{name}' was added to the model after gossipx.join: {BEFORE}")
        elif parameter.requires_grad and self._slots[index].kind is not TensorKind.TRAINABLE:
            raise UsageError(
                f"'{name}' was unfrozen after gossipx.join, so peers do not exchange it: unfreeze it before"
                " gossipx.join, and freeze it after, for as long as it is not to be trained"
            )
        elif reason := self._places[index].refusal(parameter):
            raise UsageError(f"'{name}' {reason} after gossipx.join: {BEFORE}")
        elif at is None:
            self._take_back(name, parameter, index)

    def _check_buffer(self, name: str, buffer: Tensor) -> None:
        index = self._buffers[name]
        if reason := self._places[index].refusal(buffer):  # such as a table that grows with the longest input
            if self._slots[index].kind is TensorKind.MIXED:
                self._tell(
                    "changed", f"buffer '{name}' {reason} after gossipx.join: peers no longer exchange its values"
                )
            return
        self._slots[index] = replace(self._slots[index], tensor=buffer)
        self._take_back(name, buffer, index)

    def _check_new_buffer(self, name: str, buffer: Tensor) -> None:
        """Tell of a buffer that changes what the model computes on this peer alone, such as the mask of pruning."""
        outer, _, own = name.rpartition(".")
        cache = own in self._module.get_submodule(outer)._non_persistent_buffers_set
        if not cache and (buffer.is_floating_point() or buffer.is_complex()):
            self._tell(
                "added",
                f"buffer '{plain_name(name)}' was added after gossipx.join: peers do not exchange it; register it"
                " before gossipx.join",
            )

    def _take_back(self, name: str, moved: Tensor, index: int) -> None:
        """Copy a tensor's values to its place, and let it and the tensors tied to it lie there again."""
        place = self._places[index]
        if moved.device.type == "cpu" and moved.is_shared():  # type: ignore[no-untyped-call]
            self._tell("shared", f"'{name}' was passed to another process, which keeps a copy of it as it was then")
        if not place.has_stride_of(moved):
            self._tell("format", f"'{name}' keeps the memory format that it had at gossipx.join: {BEFORE}")
        own = range_of(place.storage, place.start, moved.numel())
        with torch.no_grad():
            own.as_strided(place.shape, place.stride).copy_(moved)
        for slot, other in zip(self._slots, self._places, strict=True):
            if (other.storage is place.storage and other.start == place.start) and slot.tensor.numel():
                slot.tensor.data = own.as_strided(other.shape, other.stride)
                torch.autograd.graph.increment_version(slot.tensor)  # the loop has written to it

    def _tell(self, kind: str, text: str) -> None:
        """Log a kind of change once, for the first of its tensors."""
        if kind not in self._told:
            self._told.add(kind)
            log.warning(text)
