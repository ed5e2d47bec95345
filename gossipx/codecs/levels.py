"""``fp16``, ``bf16``, ``int8`` and ``lloyd``, which give every value the same, fewer bits."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from gossipx.codecs.base import Compiled, FramePlan, PerTensor, State, compiled, floats
from gossipx.codecs.frames import Array, unpack_numbers
from gossipx.codecs.packing import as_bytes, bits_bytes, pack_bits, unpack_bits
from gossipx.errors import ProtocolError


class _Halves(PerTensor):
    """16-bit floats. Values beyond the largest finite one saturate, so that finite values stay finite."""

    dtype: ClassVar[torch.dtype]

    def _most(self, count: int, shape: tuple[int, ...]) -> int:
        return 2 * count

    def _bytes(self, values: Tensor, shape: tuple[int, ...], state: State, index: int) -> Sequence[Tensor | bytes]:
        largest = torch.finfo(self.dtype).max
        return (values.clamp(-largest, largest).to(self.dtype),)

    @classmethod
    def _values(cls, data: Array, shape: tuple[int, ...], count: int, device: torch.device) -> Tensor:
        check_size(data, 2 * count, count)
        return torch.from_numpy(data.copy()).to(device).view(cls.dtype).float()


@final
@dataclass(frozen=True)
class Float16(_Halves):
    """``fp16``: IEEE half precision, 11 significant bits, up to 65504."""

    number: ClassVar[int] = 1
    alone: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype] = torch.float16


@final
@dataclass(frozen=True)
class BFloat16(_Halves):
    """``bf16``: the upper half of a float32, 8 significant bits, its whole range."""

    number: ClassVar[int] = 2
    alone: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype] = torch.bfloat16


@final
@dataclass(frozen=True)
class Int8(Compiled):
    """``int8``: 255 levels from −max |x| to max |x| (3LC, section 4.2).

    Frame layout per tensor: the block size, the scales, and a byte per value.

    Attributes:
        block: number of values that share a scale; 0: one scale per tensor.
    """

    block: int = 0
    number: ClassVar[int] = 5
    alone: ClassVar[bool] = True
    meant: ClassVar[str] = "int8"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.block < 2**32:
            raise ValueError("block counts values, from 1 on; 0: all of a tensor")

    @classmethod
    def _loops(cls) -> tuple[Callable[..., int], Callable[..., None]]:
        return compiled().levels_fit, compiled().levels_into

    def _most(self, count: int, shape: tuple[int, ...]) -> int:
        return 4 + 4 * blocks_of(count, self.block) + count

    def _encode(
        self, x: Tensor, error: Tensor | None, state: State, plan: FramePlan, frame: Array, end: int, sizes: Array
    ) -> int:
        if x.is_cpu:
            host = x.numpy(), None if error is None else error.numpy()
            return int(compiled().levels(*host, plan.starts, plan.counts, self.block, frame, end, sizes))
        for index, (start, count) in enumerate(zip(plan.starts.tolist(), plan.counts.tolist(), strict=True)):
            data = self.on_device(x[start : start + count], None if error is None else error[start : start + count])
            frame[end : end + len(data)] = data
            sizes[index] = len(data)
            end += len(data)
        return end

    def on_device(self, x: Tensor, error: Tensor | None) -> Array:
        """Encode one tensor by torch, on any device; return no bytes if it is not finite."""
        values = x if error is None else x + error
        if not len(values) or not bool(torch.isfinite(values).all()):
            return np.empty(0, np.uint8)
        blocks = in_blocks(values, self.block)
        scales = (blocks.abs().amax(1) / 127).clamp(max=float(compiled().LARGEST_STEP))
        inverse = 1 / scales
        inverse[torch.isinf(inverse)] = 0
        rounded = (blocks * inverse[:, None]).round()
        if error is not None:
            error.copy_((blocks - scales[:, None] * rounded).view(-1)[: len(x)])
        data = as_bytes(rounded.view(-1)[: len(x)].to(torch.int8))
        return np.concatenate((np.frombuffer(struct.pack("<I", self.block), np.uint8), as_bytes(scales), data))

    @classmethod
    def _write_one(cls, data: Array, out: Tensor, add: bool) -> None:
        (block,) = unpack_numbers("<I", data)
        end = len(data) - len(out)
        rounded = torch.from_numpy(data[end:].copy()).view(torch.int8).to(out.device)
        values = (in_blocks(rounded, block) * floats(data[4:end], out.device)[:, None]).view(-1)[: len(out)]
        out.add_(values) if add else out.copy_(values)


ROUNDS = 12
"""Rounds of Lloyd's algorithm: enough to be within a hundredth of the least error of normal values."""
SAMPLE = 2**14
"""Values of a tensor that the rounds look at; the last one looks at all of them."""


@final
@dataclass(frozen=True)
class Lloyd(PerTensor):
    """``lloyd:bits=2``: the sign, and the nearest of a few magnitudes, which lie where the squared error is least.

    Lloyd, "Least squares quantization in PCM" (1982), method I, for the magnitudes of each tensor. A tensor in a frame:
    the magnitudes in float32, then the number of bits for each value; the highest bit is 1 for values ≥ 0.

    Attributes:
        bits: per value, 1 to 8; with 1 it is ``efsignsgd``.
    """

    bits: int = 2
    number: ClassVar[int] = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.bits <= 8:
            raise ValueError("bits must be from 1 to 8")

    def _most(self, count: int, shape: tuple[int, ...]) -> int:
        return 1 + (4 << self.bits - 1) + bits_bytes(count, self.bits)

    def _bytes(self, values: Tensor, shape: tuple[int, ...], state: State, index: int) -> Sequence[Tensor | bytes]:
        magnitudes = values.abs().double()
        if not bool(magnitudes.sum().isfinite()):
            return ()
        count = 1 << self.bits - 1
        sample = magnitudes[:: len(magnitudes) // SAMPLE + 1].contiguous()
        places = (torch.arange(count, dtype=torch.float64, device=values.device) + 0.5) / count
        # The largest magnitudes are few, and need levels of their own.
        levels = (1.5 * torch.quantile(sample, places)).clamp(max=sample.max())
        for _ in range(ROUNDS):
            levels, _ = _moved(levels, sample)
        levels, nearest = _moved(levels, magnitudes)
        numbers = nearest + (values >= 0).to(torch.int64) * count
        return bytes([self.bits]), levels.float(), pack_bits(numbers, self.bits)

    @classmethod
    def _values(cls, data: Array, shape: tuple[int, ...], count: int, device: torch.device) -> Tensor:
        (bits,) = unpack_numbers("<B", data)
        if not 1 <= bits <= 8:
            raise ProtocolError(f"a tensor of a codec's frame has {bits} bits per value")
        begin = 1 + (4 << bits - 1)
        check_size(data, begin + bits_bytes(count, bits), count)
        levels = floats(data[1:begin], device)
        numbers = unpack_bits(torch.from_numpy(data[begin:].copy()).to(device), count, bits)
        return torch.cat((-levels, levels))[numbers]


def _moved(levels: Tensor, magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means of the values nearest to each level, ascending, and to which level each is nearest."""
    nearest = torch.bucketize(magnitudes, (levels[1:] + levels[:-1]) / 2)
    counts = torch.bincount(nearest, minlength=len(levels))
    sums = torch.bincount(nearest, magnitudes, minlength=len(levels))
    return torch.where(counts > 0, sums / counts.clamp(min=1), levels), nearest


def blocks_of(count: int, block: int) -> int:
    """Return the number of blocks of a tensor; ``block`` 0: one."""
    return -(-count // block) if block else 1


def in_blocks(values: Tensor, block: int) -> Tensor:
    """Return flat values as a matrix with one block per row, the last one padded with zeros."""
    size = min(block, len(values)) or len(values)
    padded = values.new_zeros(-(-len(values) // size) * size)
    padded[: len(values)] = values
    return padded.view(-1, size)


def check_size(data: Array, size: int, count: int) -> None:
    """Refuse the encoding of ``count`` values that is not ``size`` bytes long.

    Raises:
        ProtocolError: it has another length.
    """
    if len(data) != size:
        raise ProtocolError(f"{count} values in a codec's frame take {size} bytes, not {len(data)}")
