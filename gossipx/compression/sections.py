"""What of a model codecs encode: of each section its trained tensors, one after the other; buffers they do not."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from gossipx.codecs import Codec, State, Tensors, decode_into
from gossipx.codecs.changes import ALONE, FULL, Changes, checksum
from gossipx.errors import ProtocolError
from gossipx.model.arena import ParameterArena
from gossipx.model.buffers import typed
from gossipx.model.layout import Section, Slot


class Sections:
    """The sections of a peer's model.

    Args:
        codec: that encodes them.
        arena: whose they are.
        norms: names of the parameters of normalisation layers.

    Attributes:
        codec: as differences are encoded: what is left out of one is in the next.
        tensors: of each section, where they lie in it.
    """

    def __init__(self, codec: Codec, arena: ParameterArena, norms: Collection[str] = ()):
        self.tensors = [_tensors(section, arena.slots, norms) for section in arena.sections]
        self.codec = codec.in_feedback()
        self._arena = arena
        self._most = [self.codec.longest(tensors) for tensors in self.tensors]

    def states(self, seed: int) -> list[State]:
        """Of the codec, for each section one."""
        return [self.codec.init(tensors, seed + number) for number, tensors in enumerate(self.tensors)]

    def changes(self, seed: int, most: int = 0) -> list[Changes]:
        """The giver's side, for each section one."""
        return [Changes(self.codec, tensors, seed + number, most) for number, tensors in enumerate(self.tensors)]

    def trained(self, model: Sequence[Tensor]) -> list[Tensor]:
        """What is encoded of a model's vectors; views."""
        return [vector[: tensors.length] for vector, tensors in zip(model, self.tensors, strict=True)]

    def nbytes(self, sizes: Sequence[int]) -> int:
        """Of what travels, with buffers."""
        return sum(sizes) + sum(self._buffers())

    def fit(self, sizes: Sequence[int], bases: Sequence[int]) -> bool:
        """Whether sections can have such sizes, with such bases."""
        if not len(sizes) == len(bases) == len(self.tensors):
            return False
        plain = [tensors.length * tensors.dtype.itemsize for tensors in self.tensors]
        rows = zip(sizes, bases, self._most, plain, strict=True)
        return all(size == own if base == FULL else size <= most for size, base, most, own in rows)

    def joined(self, parts: Sequence[memoryview], model: Sequence[Tensor]) -> memoryview:
        """What travels: of each section what stands for its trained values, and its buffers."""
        rows = zip(parts, model, self._arena.sections, strict=True)
        pieces = [piece for part, vector, section in rows for piece in (part, as_bytes(vector[section.trainable :]))]
        return memoryview(bytearray().join(pieces))

    def cut(self, sizes: Sequence[int], content: memoryview) -> tuple[list[memoryview], list[memoryview]]:
        """Of what has travelled the parts of trained values, and those of buffers."""
        parts, others = [], []
        start = 0
        for size, buffers in zip(sizes, self._buffers(), strict=True):
            parts.append(content[start : start + size])
            others.append(content[start + size : start + size + buffers])
            start += size + buffers
        return parts, others

    def as_they_lie(self, values: Sequence[Tensor], buffers: Sequence[memoryview]) -> list[memoryview]:
        """A model as it lies in memory, piece by piece."""
        views = []
        for section, vector, others in zip(self._arena.sections, values, buffers, strict=True):
            trained = torch.zeros(section.trainable, dtype=vector.dtype)
            trained[: len(vector)] = vector
            views += [as_bytes(trained), others]
        return views

    def decoded(
        self, number: int, part: memoryview, base: int, held: Tensor | None = None, near: Tensor | None = None
    ) -> Tensor:
        """A section's trained values.

        Args:
            part: what stands for them.
            base: checksum of what it changes, :data:`FULL` or :data:`ALONE`.
            held: what is here.
            near: values that these are near, for codecs that are decoded so.

        Raises:
            ProtocolError: it is malformed, or changes what is not here.
            TooFarError: it is not near.
        """
        tensors = self.tensors[number]
        if base == FULL:
            return typed(memoryview(bytearray(part)), tensors.dtype)
        if base == ALONE:
            values = torch.zeros(tensors.length, dtype=tensors.dtype)
            decode_into(part, values, tensors=tensors, near=near)
            return values
        if held is None or checksum(held) != base:
            raise ProtocolError("a model came as a change of another than the one that is here")
        values = held.clone()
        decode_into(part, values, add=True, tensors=tensors)
        return values

    def _buffers(self) -> list[int]:
        """Bytes of each section's buffers."""
        return [(one.mixed - one.trainable) * one.values.itemsize for one in self._arena.sections]


def as_bytes(vector: Tensor) -> memoryview:
    """A vector's bytes."""
    flat: np.ndarray[tuple[int], np.dtype[np.uint8]] = vector.contiguous().view(torch.uint8).numpy()
    return memoryview(flat.data) if len(flat) else memoryview(b"")


def _tensors(section: Section, slots: Sequence[Slot], norms: Collection[str]) -> Tensors:
    """The trained tensors of a section, where they lie in it; tied ones once."""
    found: dict[int, Slot] = {}
    for slot in slots:
        if slot.kind == 0 and slot.tensor.dtype == section.storage.dtype and slot.tensor.numel():
            found.setdefault(int(slot.tensor.storage_offset()), slot)
    starts = tuple(sorted(found))
    shapes = tuple(
        tuple(found[start].tensor.shape) if found[start].tensor.is_contiguous() else (found[start].tensor.numel(),)
        for start in starts
    )
    plain = tuple(found[start].name in norms for start in starts)
    return Tensors(shapes, section.values.dtype, starts, plain)
