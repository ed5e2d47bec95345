"""``3lc``, which quantizes to three values (3LC, section 3), and its steps as functions."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from gossipx.codecs import packing
from gossipx.codecs.base import Compiled, FramePlan, State, compiled, norm
from gossipx.codecs.frames import Array, unpack_numbers
from gossipx.codecs.packing import as_bytes
from gossipx.errors import ProtocolError, UsageError

MAX_PASSES = 255
_SCALE = 4
"""Bytes of a scale, and of the size field that every pass but the last has."""
_LARGEST = torch.finfo(torch.float32).max


def compress(x: Tensor | Array, sparsity: float) -> tuple[float, bytes]:
    """Encode by 3-value quantization with sparsity multiplication, base-3⁵ and zero-run encoding (3LC, section 3).

    Args:
        x: real numbers in a dense tensor or array of any shape; converted to float32.
        sparsity: s, 1 ≤ s < 2.

    Returns:
        The scale m = max |x| · s, and the encoded bytes.

    Raises:
        UsageError: s is out of range, x or m is not finite, or x does not consist of real numbers.
    """
    _check_sparsity(sparsity, UsageError)
    tensor = torch.as_tensor(x).detach()
    if tensor.is_complex() or tensor.layout != torch.strided:
        raise UsageError(f"3LC encodes dense tensors of real numbers, not {tensor.dtype} in {tensor.layout} layout")
    values = tensor.reshape(-1).float().cpu().contiguous().numpy()
    loops = compiled()
    with np.errstate(over="ignore"):
        scale = np.float32(loops.peak(values, None, 0, len(values))) * np.float32(sparsity)
    if not np.isfinite(scale):
        raise UsageError("a tensor with NaN or Inf, or whose scale overflows, cannot be quantized")
    codes = np.empty(packing.trit_bytes(len(values)) + 1, np.uint8)
    end = loops.ternary(values, None, 0, len(values), scale, codes, 0)
    return float(scale), codes[:end].tobytes()


def decompress(scale: float, data: bytes, n: int) -> Tensor:
    """Decode ``n`` float32 values that :func:`compress` encoded; other encoders may split runs of zeros differently.

    Raises:
        ProtocolError: the bytes do not encode ``n`` trits, or the scale is not a finite float32 number.
        UsageError: an argument has another type.
    """
    try:
        codes, count, size = np.frombuffer(memoryview(data), np.uint8), operator.index(n), abs(scale)
    except TypeError as error:
        raise UsageError(f"decompress takes a number, bytes and an integer, not {scale!r}, {data!r}, {n!r}") from error
    if not size <= _LARGEST:  # nor if it is NaN
        raise ProtocolError(f"the scale of trits is {scale}, not a finite float32 number")
    codes.flags.writeable = False  # the codecs' loops are compiled by numba, for read-only arrays only
    # A byte encodes 70 trits at most; check that before allocating memory.
    if count < 0 or count > 70 * len(codes) or not compiled().ternary_fits(codes, 0, len(codes), count):
        raise ProtocolError(f"{len(codes)} bytes do not encode {count} trits")
    out = np.zeros(count, np.float32)
    compiled().ternary_into(codes, 0, len(codes), np.float32(scale), out, 0, count, False)
    return torch.from_numpy(out)


@final
@dataclass(frozen=True)
class ThreeLC(Compiled):
    """``3lc``: round(x / m) with m = max |x| · s, five trits per byte, zero-run encoded (3LC, section 3).

    Frame layout per tensor: the number of passes, the size of each pass's codes except the last one's, the scales, and
    the codes.

    Attributes:
        sparsity: s, from 1 to below 2; a larger one turns more values to zero.
        residual: encode the error of a pass by another pass with s = 1, until its norm is at most this fraction of the
            tensor's norm, or the passes take as many bytes as the float32 values; 1: one pass.
    """

    sparsity: float = 1.0
    residual: float = 1.0
    number: ClassVar[int] = 3
    meant: ClassVar[str] = "3LC"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_sparsity(self.sparsity, ValueError)
        if not 0 < self.residual <= 1:
            raise ValueError("residual is a fraction of a norm, above 0 and at most 1")

    def _most(self, count: int, shape: tuple[int, ...]) -> int:
        one = packing.trit_bytes(count) + 2 * _SCALE
        return 2 + one * (1 if self.residual == 1 else self._passes(count))

    def _passes(self, count: int) -> int:
        """Return the maximum number of passes, which take as many bytes as the float32 values."""
        return max(2, min(MAX_PASSES, 4 * count // (packing.trit_bytes(count) + 2 * _SCALE)))

    @classmethod
    def _loops(cls) -> tuple[Callable[..., int], Callable[..., None]]:
        return compiled().three_lc_fits, compiled().three_lc_into

    def _encode(
        self, x: Tensor, error: Tensor | None, state: State, plan: FramePlan, frame: Array, end: int, sizes: Array
    ) -> int:
        if x.is_cpu and self.residual == 1:
            host = x.numpy(), None if error is None else error.numpy()
            sparsity = np.float32(self.sparsity)
            end = compiled().three_lc(*host, plan.starts, plan.counts, sparsity, frame, end, sizes)
            return int(end)
        for index, (start, count) in enumerate(zip(plan.starts.tolist(), plan.counts.tolist(), strict=True)):
            place = slice(start, start + count)
            data = self._passes_of(x[place], None if error is None else error[place])
            frame[end : end + len(data)] = data
            sizes[index] = len(data)
            end += len(data)
        return end

    def _passes_of(self, x: Tensor, error: Tensor | None) -> Array:
        """Encode one tensor in as many passes as ``residual`` requires; return no bytes if it is not finite."""
        values = x + error if error is not None else x.clone()
        peak = values.abs().max() if len(values) else values.new_zeros(())
        if not len(values) or not math.isfinite(float(peak * self.sparsity)):
            return np.empty(0, np.uint8)
        enough = self.residual * norm(values)
        scales: list[float] = []
        codes: list[Array] = []
        while len(scales) < (1 if self.residual == 1 else self._passes(len(values))):
            scale, packed = _pass(values, 1.0 if scales else self.sparsity)
            scales.append(scale)
            codes.append(packed)
            if scale == 0 or norm(values) <= enough:
                break
        if error is not None:
            error.copy_(values)
        sizes = [len(packed) for packed in codes[:-1]]
        begin = struct.pack(f"<B{len(sizes)}I{len(scales)}f", len(scales), *sizes, *scales)
        return np.concatenate((np.frombuffer(begin, np.uint8), *codes))

    @classmethod
    def _write_one(cls, data: Array, out: Tensor, add: bool) -> None:
        passes = int(data[0])
        sizes = unpack_numbers(f"<{passes - 1}I", data, 1)
        scales = unpack_numbers(f"<{passes}f", data, 1 + _SCALE * (passes - 1))
        ends = [*accumulate(sizes, initial=1 + _SCALE * (2 * passes - 1)), len(data)]
        for nth, (first, last) in enumerate(pairwise(ends)):
            codes = torch.from_numpy(data[first:last].copy()).to(out.device)
            packed = packing.lengthen_runs(codes, packing.trit_bytes(len(out)))
            values = packing.unpack_trits(packed, len(out)) * torch.tensor(
                scales[nth], dtype=torch.float32, device=out.device
            )
            out.add_(values) if add or nth else out.copy_(values)


def _pass(values: Tensor, sparsity: float) -> tuple[float, Array]:
    """Encode one pass and return its scale and codes; overwrites ``values`` with the error."""
    if not values.is_cpu:
        return pass_on_device(values, sparsity)
    loops, vector = compiled(), values.numpy()
    scale = np.float32(loops.peak(vector, None, 0, len(vector))) * np.float32(sparsity)
    codes = np.empty(packing.trit_bytes(len(vector)) + 1, np.uint8)
    return float(scale), codes[: loops.ternary(None, vector, 0, len(vector), scale, codes, 0)]


def pass_on_device(values: Tensor, sparsity: float) -> tuple[float, Array]:
    """Encode one pass by torch, on any device, and return its scale and codes; overwrites ``values`` with the error."""
    scale = values.abs().max() * sparsity
    trits = (values + values > scale).to(torch.int8) - (values + values < -scale).to(torch.int8)
    values.sub_(scale * trits)
    return float(scale), as_bytes(packing.shorten_runs(packing.pack_trits(trits)))


def _check_sparsity(sparsity: float, error: type[Exception]) -> None:
    if not 1 <= sparsity < 2:
        raise error(f"sparsity must be at least 1 and below 2, not {sparsity}")
