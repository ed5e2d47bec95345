"""The parts of a model that codecs encode: the trained tensors of each section, but not its buffers.

A section is a vector of all values of one dtype in the parameter arena.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from gossipx.codecs import Codec, State, Tensors, decode_into
from gossipx.codecs.changes import ALONE, FULL, Changes, checksum
from gossipx.errors import ProtocolError
from gossipx.model.arena import Fragment
from gossipx.model.pool import typed
from gossipx.model.section import Section, Slot, TensorKind


class Sections:
    """The sections of a fragment of a peer's model, with the codec that encodes them.

    Args:
        codec: encodes them.
        fragment: the fragment.
        slots: the places of all tensors in the sections of the model.
        norms: names of the parameters of normalisation layers.

    Attributes:
        codec: the codec, set up for error feedback.
        tensors: layout of the trained tensors in each section; of a tensor that lies in several fragments, the piece
            in this one, as a flat vector.
    """

    def __init__(self, codec: Codec, fragment: Fragment, slots: Sequence[Slot], norms: Collection[str] = ()):
        rows = zip(fragment.sections, fragment.ranges, strict=True)
        self.tensors = [_tensors(section, own, slots, norms) for section, own in rows]
        self.codec = codec.in_feedback()
        self._fragment = fragment
        self._max_bytes = [self.codec.longest(tensors) for tensors in self.tensors]

    def states(self, seed: int) -> list[State]:
        """Return an initial codec state for each section."""
        return [self.codec.init(tensors, seed + number) for number, tensors in enumerate(self.tensors)]

    def changes(self, seed: int, max_receivers: int = 0) -> list[Changes]:
        """Return the sender's delta encoder for each section."""
        return [Changes(self.codec, tensors, seed + index, max_receivers) for index, tensors in enumerate(self.tensors)]

    def trained(self, model: Sequence[Tensor]) -> list[Tensor]:
        """Return views of the encoded part of each section's vector."""
        return [vector[: tensors.length] for vector, tensors in zip(model, self.tensors, strict=True)]

    def nbytes(self, sizes: Sequence[int]) -> int:
        """Return the size of a payload, buffers included."""
        return sum(sizes) + sum(self._buffers())

    def fit(self, sizes: Sequence[int], bases: Sequence[int]) -> bool:
        """Return whether the sections' encoded sizes are possible for their bases."""
        if not len(sizes) == len(bases) == len(self.tensors):
            return False
        plain = [tensors.length * tensors.dtype.itemsize for tensors in self.tensors]
        rows = zip(sizes, bases, self._max_bytes, plain, strict=True)
        return all(size == full if base == FULL else size <= bound for size, base, bound, full in rows)

    def joined(self, parts: Sequence[memoryview], model: Sequence[Tensor]) -> memoryview:
        """Return the payload: the encoded values of each section, followed by its buffers."""
        rows = zip(parts, model, self._fragment.sections, strict=True)
        pieces = [piece for part, vector, section in rows for piece in (part, as_bytes(vector[section.trainable :]))]
        return memoryview(bytearray().join(pieces))

    def cut(self, sizes: Sequence[int], content: memoryview) -> tuple[list[memoryview], list[memoryview]]:
        """Split a payload into the encoded values and the buffers of each section."""
        parts, others = [], []
        start = 0
        for size, buffers in zip(sizes, self._buffers(), strict=True):
            parts.append(content[start : start + size])
            others.append(content[start + size : start + size + buffers])
            start += size + buffers
        return parts, others

    def laid_out(self, values: Sequence[Tensor], buffers: Sequence[memoryview]) -> list[memoryview]:
        """Return a model in its memory layout, in pieces."""
        views = []
        for section, vector, others in zip(self._fragment.sections, values, buffers, strict=True):
            trained = torch.zeros(section.trainable, dtype=vector.dtype)
            trained[: len(vector)] = vector
            views += [as_bytes(trained), others]
        return views

    def decoded(
        self,
        number: int,
        part: memoryview,
        base: int,
        base_values: Tensor | None = None,
        reference: Tensor | None = None,
    ) -> Tensor:
        """Decode the trained values of a section.

        Args:
            number: index of the section.
            part: the encoded values.
            base: checksum of the base that ``part`` changes, :data:`FULL` or :data:`ALONE`.
            base_values: this side's base; None: not available.
            reference: values near the encoded ones, for codecs that need them; None: not available.

        Raises:
            ProtocolError: it is malformed, or changes another base.
            TooFarError: ``reference`` is too far away.
        """
        tensors = self.tensors[number]
        if base == FULL:
            return typed(memoryview(bytearray(part)), tensors.dtype)
        if base == ALONE:
            values = torch.zeros(tensors.length, dtype=tensors.dtype)
            decode_into(part, values, tensors=tensors, near=reference)
            return values
        if base_values is None or checksum(base_values) != base:
            raise ProtocolError("a model arrived as a change from another base than this peer's")
        values = base_values.clone()
        decode_into(part, values, add=True, tensors=tensors)
        return values

    def _buffers(self) -> list[int]:
        """Return the size of each section's buffers in bytes."""
        return [(one.mixed - one.trainable) * one.values.itemsize for one in self._fragment.sections]


def as_bytes(vector: Tensor) -> memoryview:
    """Return a vector's bytes as a view."""
    flat: np.ndarray[tuple[int], np.dtype[np.uint8]] = vector.contiguous().view(torch.uint8).numpy()
    return memoryview(flat.data) if len(flat) else memoryview(b"")


def _tensors(section: Section, own: slice, slots: Sequence[Slot], norms: Collection[str]) -> Tensors:
    """Return the layout of the trained tensors in a section of a fragment; tied ones are listed once.

    Args:
        own: the range of the model's section that belongs to the fragment.
    """
    found: dict[int, tuple[tuple[int, ...], bool]] = {}  # by start: shape, and whether it is sent unencoded
    for slot in slots:
        if slot.kind is not TensorKind.TRAINABLE or slot.tensor.dtype != section.storage.dtype:
            continue
        count = slot.tensor.numel()
        begin, end = max(slot.start, own.start), min(slot.start + count, own.stop)
        if begin < end:
            is_cut = end - begin < count
            flat = is_cut or not slot.tensor.is_contiguous()
            shape = (end - begin,) if flat else tuple(slot.tensor.shape)
            found.setdefault(begin - own.start, (shape, slot.name in norms))
    starts = tuple(sorted(found))
    shapes = tuple(found[start][0] for start in starts)
    return Tensors(shapes, section.values.dtype, starts, tuple(found[start][1] for start in starts))
