"""Codecs that encode one tensor after the other, and what they read of frames."""

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
from gossipx.codecs.frames import Array, OpenedFrame, Tensors, numbers
from gossipx.codecs.packing import as_bytes
from gossipx.codecs.state import Plan, State
from gossipx.errors import ProtocolError


class PerTensor(Codec):
    """Encodes one tensor after the other, on any device."""

    @abc.abstractmethod
    def _bytes(self, values: Tensor, shape: tuple[int, ...], state: State, number: int) -> Sequence[Tensor | bytes]:
        """What stands for a tensor in the frame, in order.

        Args:
            values: all finite, at least one, flat.
            number: of the tensor among those that are encoded.

        Returns:
            Nothing of a tensor that has no finite encoding.
        """

    @classmethod
    @abc.abstractmethod
    def _values(cls, data: Array, shape: tuple[int, ...], count: int, device: torch.device) -> Tensor:
        """The values, flat, float32.

        Raises:
            ProtocolError: it is malformed.
        """

    @classmethod
    def _values_near(cls, data: Array, shape: tuple[int, ...], near: Tensor) -> Tensor:
        """The values, where so many are known that they are near, flat, float32, on their device.

        Raises:
            ProtocolError: it is malformed.
            TooFarError: they are not near.
        """
        return cls._values(data, shape, len(near), near.device)

    def _encode(
        self, x: Tensor, left: Tensor | None, state: State, plan: Plan, frame: Array, end: int, sizes: Array
    ) -> int:
        for number, (start, count) in enumerate(zip(plan.starts.tolist(), plan.counts.tolist(), strict=True)):
            values = x[start : start + count]
            if left is not None:
                values = values + left[start : start + count]
            if not count or not bool(torch.isfinite(values).all()):
                continue
            begin = end
            for some in self._bytes(values, plan.shapes[number], state, number):
                data = np.frombuffer(some, np.uint8) if isinstance(some, bytes) else as_bytes(some)
                frame[end : end + len(data)] = data
                end += len(data)
            sizes[number] = end - begin
            if left is not None and end > begin:
                decoded = self._values_near(frame[begin:end], plan.shapes[number], values)
                torch.sub(values, decoded, out=left[start : start + count])
        return end

    @classmethod
    def _read(cls, opened: OpenedFrame, near: Sequence[Tensor] | None) -> list[Tensor | None]:
        contents = opened.contents
        read: list[Tensor | None] = []
        for number, (begin, end) in enumerate(pairwise(opened.offsets.tolist())):
            data, shape = opened.body[begin:end], contents.tensors.shapes[contents.encoded[number]]
            if begin == end:
                read.append(None)
            elif near is None:
                read.append(cls._values(data, shape, int(contents.counts[number]), torch.device("cpu")))
            else:
                read.append(cls._values_near(data, shape, near[number]))
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
    """``none``: all values as they are, of any dtype."""

    feedback: bool = field(default=False, kw_only=True)
    number: ClassVar[int] = 0
    alone: ClassVar[bool] = True

    def _plain(self, tensors: Tensors) -> tuple[bool, ...]:
        return (True,) * len(tensors.shapes)

    def _most(self, count: int, shape: tuple[int, ...]) -> int:
        return 0

    def _bytes(self, values: Tensor, shape: tuple[int, ...], state: State, number: int) -> Sequence[Tensor | bytes]:
        return ()  # never asked for: nothing is encoded

    @classmethod
    def _values(cls, data: Array, shape: tuple[int, ...], count: int, device: torch.device) -> Tensor:
        raise ProtocolError("a frame without a codec has an encoded tensor")


def fitted(values: Tensor, integers: Tensor) -> Tensor:
    """The factor, row by row, by which integers come nearest to values: of least squared error; 0 where all are zero.

    By such a factor they are never further from the values than nothing is, as error feedback needs it.
    """
    wide = integers.double()
    return ((values.double() * wide).sum(-1) / wide.square().sum(-1).clamp(min=1)).float()


def uniform(values: Tensor, state: State, number: int) -> Tensor:
    """As many numbers from 0 to below 1, drawn for a tensor of a frame, on its device."""
    draws = state.draws(values.device, number)
    return torch.rand(len(values), generator=draws, device=values.device, dtype=torch.float32)


def norm(values: Tensor) -> float:
    """‖x‖₂; of any finite values finite, too."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def scale_of(data: Array, place: int = 0) -> float:
    """A scale in a frame.

    Raises:
        ProtocolError: there is none, or it is not finite.
    """
    scale: float
    (scale,) = numbers("<f", data, place)
    if not math.isfinite(scale):
        raise ProtocolError(f"a tensor of a codec's frame has the scale {scale}")
    return scale


def floats(data: Array, device: torch.device) -> Tensor:
    """Float32 values in a frame.

    Raises:
        ProtocolError: one is not finite.
    """
    values = data.copy().view("<f4").astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        raise ProtocolError("a tensor of a codec's frame has a value that is not finite")
    return torch.from_numpy(values).to(device)
