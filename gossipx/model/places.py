"""The places of a module's tensors in the arena, kept while the training script changes the module.

A script may give a tensor other memory: ``parameter.data = ...``, ``vector_to_parameters``, a buffer that is assigned,
a model that is passed to another process. It trains from the values there, but the arena would measure, exchange and
mix those in the old place. So each step boundary looks for such changes and takes the values back into the arena. A
change for which the layout has no place is refused, because the peers would end with different models.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gossipx.errors import UsageError
from gossipx.model.layout import Kind, Section, Slot, plain_name, range_of

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
                if slot.kind in (Kind.MIXED, Kind.LOCAL):
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
        elif parameter.requires_grad and self._slots[index].kind is not Kind.TRAINABLE:
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
            if self._slots[index].kind is Kind.MIXED:
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
