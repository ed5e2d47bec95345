"""The base class of codecs that encode one tensor at a time with torch, and helpers for such codecs.

Other codecs, such as ``3lc``, encode all tensors of a vector in one compiled loop, which is faster on a CPU.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from gossipx.codecs.base import Codec
from gossipx.codecs.frames import Array, OpenedFrame, Tensors, unpack_numbers
from gossipx.codecs.packing import as_bytes
from gossipx.codecs.state import Plan, State
from gossipx.errors import ProtocolError


class PerTensor(Codec):
    """A codec that encodes one tensor at a time, on any device; most custom codecs derive from it.

    A subclass defines ``_bytes``, which encodes a tensor, ``_values``, which decodes it, and ``_most``, which bounds
    the size of the encoding. A codec whose decoder needs reference values, such as the receiver's own model, overrides
    ``_values_near``, too. This class does the rest: error feedback, frames and checks; see
    :class:`gossipx.codecs.base.Codec`.
    """

    @abc.abstractmethod
    def _bytes(self, values: Tensor, shape: tuple[int, ...], state: State, index: int) -> Sequence[Tensor | bytes]:
        """Encode one tensor.

        Args:
            values: the tensor as a vector of at least one value, all finite, with the accumulated error added.
            shape: the tensor's shape.
            state: the codec's state, with what it has kept from earlier frames.
            index: index of the tensor among those that are encoded.

        Returns:
            The parts of the encoding, in order; none if an intermediate result is not finite.
        """

    @classmethod
    @abc.abstractmethod
    def _values(cls, data: Array, shape: tuple[int, ...], count: int, device: torch.device) -> Tensor:
        """Decode one tensor of ``count`` elements to a float32 vector on ``device``.

        Raises:
            ProtocolError: the data is malformed.
        """

    @classmethod
    def _values_near(cls, data: Array, shape: tuple[int, ...], reference: Tensor) -> Tensor:
        """Decode one tensor with the help of reference values, to a float32 vector on their device.

        Args:
            reference: values that the receiver knows to be close to the encoded ones; most codecs ignore them.

        Raises:
            ProtocolError: the data is malformed.
            TooFarError: the reference values are too far away.
        """
        return cls._values(data, shape, len(reference), reference.device)

    def _wanted(self, values: Tensor, error: Tensor) -> Tensor:
        """Return the values to encode, given the accumulated error of earlier frames."""
        return values + error

    def _encode(
        self, x: Tensor, error: Tensor | None, state: State, plan: Plan, frame: Array, end: int, sizes: Array
    ) -> int:
        for index, (start, count) in enumerate(zip(plan.starts.tolist(), plan.counts.tolist(), strict=True)):
            values = x[start : start + count]
            if error is not None:
                values = self._wanted(values, error[start : start + count])
            if not count or not bool(torch.isfinite(values).all()):
                continue
            begin = end
            for part in self._bytes(values, plan.shapes[index], state, index):
                data = np.frombuffer(part, np.uint8) if isinstance(part, bytes) else as_bytes(part)
                frame[end : end + len(data)] = data
                end += len(data)
            sizes[index] = end - begin
            if error is not None and end > begin:
                decoded = self._values_near(frame[begin:end], plan.shapes[index], values)
                torch.sub(values, decoded, out=error[start : start + count])
        return end

    @classmethod
    def _read(cls, opened: OpenedFrame, references: Sequence[Tensor] | None) -> list[Tensor | None]:
        contents = opened.contents
        read: list[Tensor | None] = []
        for index, (begin, end) in enumerate(pairwise(opened.offsets.tolist())):
            data, shape = opened.body[begin:end], contents.tensors.shapes[contents.encoded[index]]
            if begin == end:
                read.append(None)
            elif references is None:
                read.append(cls._values(data, shape, int(contents.counts[index]), torch.device("cpu")))
            else:
                read.append(cls._values_near(data, shape, references[index]))
        return read

    @classmethod
    def _write(cls, opened: OpenedFrame, read: list[Tensor | None], out: Tensor, starts: Array, add: bool) -> None:
        for values, start in zip(read, starts.tolist(), strict=True):
            if values is not None:
                to = out[start : start + len(values)]
                to.add_(values) if add else to.copy_(values)


@final
@dataclass(frozen=True)
class NoCodec(PerTensor):
    """``none``: every tensor unencoded, in its own dtype; so the methods that encode are never used."""

    feedback: bool = field(default=False, kw_only=True)
    number: ClassVar[int] = 0
    alone: ClassVar[bool] = True

    def _plain(self, tensors: Tensors) -> tuple[bool, ...]:
        return (True,) * len(tensors.shapes)

    def _most(self, count: int, shape: tuple[int, ...]) -> int:
        return 0

    def _bytes(self, values: Tensor, shape: tuple[int, ...], state: State, index: int) -> Sequence[Tensor | bytes]:
        return ()  # never called: all tensors are plain

    @classmethod
    def _values(cls, data: Array, shape: tuple[int, ...], count: int, device: torch.device) -> Tensor:
        raise ProtocolError("a codec's frame of codec 'none' has an encoded tensor")


def fitted(values: Tensor, integers: Tensor) -> Tensor:
    """Return the scale s that minimizes ‖values − s · integers‖₂ along the last dimension; 0 where all integers are 0.

    With the best s the norm of the error is at most ‖values‖₂. Error feedback needs this bound, or errors would grow.
    """
    wide = integers.double()
    return ((values.double() * wide).sum(-1) / wide.square().sum(-1).clamp(min=1)).float()


def uniform(values: Tensor, state: State, index: int) -> Tensor:
    """Draw a random number from [0, 1) for each value of a tensor, on its device.

    Args:
        state: seeds the draws, together with the frame number, so that they are reproducible.
        index: index of the tensor, which gets its own sequence.
    """
    draws = state.draws(values.device, index)
    return torch.rand(len(values), generator=draws, device=values.device, dtype=torch.float32)


def norm(values: Tensor) -> float:
    """Return ‖values‖₂. It is computed in float64, where the squares of finite float32 values do not overflow."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def scale_of(data: Array, place: int = 0) -> float:
    """Read the float32 scale at byte ``place`` of a tensor's encoding.

    Raises:
        ProtocolError: the scale is missing or not finite.
    """
    scale: float
    (scale,) = unpack_numbers("<f", data, place)
    if not math.isfinite(scale):
        raise ProtocolError(f"a tensor of a codec's frame has the scale {scale}")
    return scale


def floats(data: Array, device: torch.device) -> Tensor:
    """Read a tensor's encoding, or a part of it, as float32 values.

    Raises:
        ProtocolError: a value is not finite.
    """
    values = data.copy().view("<f4").astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        raise ProtocolError("a tensor of a codec's frame has a value that is not finite")
    return torch.from_numpy(values).to(device)
