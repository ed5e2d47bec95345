"""Moniqua, a codec of whole models: values are sent modulo a range, and the receiver's own, similar model resolves the
ambiguity. So neither end has to keep a reference copy of the other's model.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

import numpy as np
import torch
import xxhash
from torch import Tensor

from gossipx.codecs import packing
from gossipx.codecs.frames import Array, unpack_numbers
from gossipx.codecs.packing import as_bytes
from gossipx.codecs.per_tensor import PerTensor
from gossipx.codecs.state import State
from gossipx.errors import ProtocolError, TooFarError

_FIXED = struct.Struct("<BfQ")
_WHOLE = 2.0**53
"""Above this, float64 does not represent every integer."""
_WIDER = 1 + 2.0**-22
"""Factor on the paper's level width. It exceeds the rounding errors of float32 and float64, so theta stays a bound."""
_CHUNK = 2**16
"""Values processed at a time, so that they fit the processor's cache."""
_SINGLE = torch.finfo(torch.float32)


@final
@dataclass(frozen=True)
class Moniqua(PerTensor):
    """``moniqua``: values modulo a range B, quantized to 2^bits levels (Moniqua, Algorithm 1).

    If the receiver's own value is less than theta away, the decoded value is unique (Lemma 1) and at most half a level
    off (Lemma 2). With B = 2 theta / (1 - 2^-bits), the level width is B / 2^bits = 2 theta / (2^bits - 1).

    Frame layout per tensor: the bits, the level width, a hash of all level numbers before the modulo, and the packed
    values. The hash detects models that are further apart than theta, which decode to wrong values.

    Attributes:
        bits: bits per value.
        theta: largest distance between two models' values, in the units of the weights.
    """

    bits: int = 8
    theta: float = 0.1
    feedback: bool = field(default=False, kw_only=True)
    number: ClassVar[int] = 18
    alone: ClassVar[bool] = True
    near: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.bits <= 16:
            raise ValueError("bits must be from 1 to 16")
        if not (self.theta > 0 and _SINGLE.tiny <= self._level <= _SINGLE.max):
            raise ValueError("theta must be above 0, with a level width that float32 can represent")

    @property
    def _level(self) -> float:
        return float(2 * self.theta / (2**self.bits - 1) * _WIDER)

    def _most(self, count: int, shape: tuple[int, ...]) -> int:
        return _FIXED.size + packing.bits_bytes(count, self.bits)

    def _bytes(self, values: Tensor, shape: tuple[int, ...], state: State, index: int) -> Sequence[Tensor | bytes]:
        level = float(np.float32(self._level))
        rest = torch.empty(len(values), dtype=torch.int32, device=values.device)
        digest = xxhash.xxh3_64()
        for start in range(0, len(values), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            whole = (values[chunk].double() / level).round_()
            if not _is_exact(whole):
                return ()
            levels = whole.to(torch.int64)
            digest.update(as_bytes(levels).data)
            rest[chunk] = levels.bitwise_and_(2**self.bits - 1)
        return _FIXED.pack(self.bits, level, digest.intdigest()), packing.pack_bits(rest, self.bits)

    @classmethod
    def _values(cls, data: Array, shape: tuple[int, ...], count: int, device: torch.device) -> Tensor:
        raise ProtocolError("a codec's frame has values modulo a range, and no reference model to decode them")

    @classmethod
    def _values_near(cls, data: Array, shape: tuple[int, ...], reference: Tensor) -> Tensor:
        bits, level, expected = unpack_numbers(_FIXED.format, data)
        if not (1 <= bits <= 16 and 0 < level <= _SINGLE.max):
            raise ProtocolError(f"a tensor of a codec's frame has {bits} bits per value and a level width of {level}")
        packed = torch.from_numpy(data[_FIXED.size :].copy()).to(reference.device)
        rest = packing.unpack_bits(packed, len(reference), bits)
        values = torch.empty(len(reference), dtype=torch.float32, device=reference.device)
        digest = xxhash.xxh3_64()
        for start in range(0, len(reference), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            own = reference[chunk].double() / level
            if not _is_exact(own):
                raise _too_far(bits, level)
            levels = _nearest(rest[chunk], own, bits)
            digest.update(as_bytes(levels).data)
            values[chunk] = levels.double().mul_(level).clamp_(_SINGLE.min, _SINGLE.max)
        if digest.intdigest() != expected:
            raise _too_far(bits, level)
        return values


def _nearest(rest: Tensor, own: Tensor, bits: int) -> Tensor:
    """Return the integers nearest to ``own`` that equal ``rest`` modulo 2^bits; overwrites ``rest``."""
    half = 1 << bits - 1
    start = own.round()
    away = rest.sub_(start.to(torch.int64)).add_(half).bitwise_and_(2 * half - 1).sub_(half)
    # Half a range is equally far from the rounded number in both directions; choose the side of the exact number.
    away[(away == -half) & (own > start)] = half
    return away.add_(start.to(torch.int64))


def _is_exact(values: Tensor) -> bool:
    low, high = values.aminmax()  # NaN if any value is
    return bool((low > -_WHOLE) & (high < _WHOLE))


def _too_far(bits: int, level: float) -> TooFarError:
    theta = level * (2**bits - 1) / 2
    return TooFarError(
        f"a model differs from this peer's by more than moniqua's theta of {theta:g}:"
        f" give a larger theta, and more than {bits} bits to keep the precision"
    )
