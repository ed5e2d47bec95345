"""A codec of models that needs no reference: what is sent is told modulo a range, and recovered near another model."""

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
from gossipx.codecs.frames import Array, numbers
from gossipx.codecs.packing import as_bytes
from gossipx.codecs.per_tensor import PerTensor
from gossipx.codecs.state import State
from gossipx.errors import ProtocolError, TooFarError

_FIXED = struct.Struct("<BfQ")
_WHOLE = 2.0**53
"""From here on not every whole number is a float64."""
_WIDER = 1 + 2.0**-22
"""Steps are that much wider than the paper's: what rounding takes of theta, in float32 and in float64, is less."""
_TOGETHER = 2**16
"""So many values are worked on at a time, which a processor's cache holds."""
_SINGLE = torch.finfo(torch.float32)


@final
@dataclass(frozen=True)
class Moniqua(PerTensor):
    """``moniqua``: a value modulo a range B, in 2^bits levels of it (Moniqua, Algorithm 1).

    Whoever takes it has a value of its own less than theta away, and there is one such value alone (Lemma 1), no more
    than half a level off (Lemma 2): with B = 2 theta / (1 - 2^-bits) a level is B / 2^bits = 2 theta / (2^bits - 1).

    In a frame, a tensor is the bits, the level, a hash of all values in levels before they are taken modulo, and the
    values, packed. By the hash it is known where two were so far apart that another value has been recovered.

    Attributes:
        bits: of each value.
        theta: how far models are from each other at most, value by value; of float32 values, in their units.
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
            raise ValueError("bits are from 1 to 16")
        if not (self.theta > 0 and _SINGLE.tiny <= self._level <= _SINGLE.max):
            raise ValueError("theta is a distance above zero, whose levels float32 can tell")

    @property
    def _level(self) -> float:
        return float(2 * self.theta / (2**self.bits - 1) * _WIDER)

    def _most(self, count: int, shape: tuple[int, ...]) -> int:
        return _FIXED.size + packing.bits_bytes(count, self.bits)

    def _bytes(self, values: Tensor, shape: tuple[int, ...], state: State, number: int) -> Sequence[Tensor | bytes]:
        level = float(np.float32(self._level))
        rest = torch.empty(len(values), dtype=torch.int32, device=values.device)
        look = xxhash.xxh3_64()
        for start in range(0, len(values), _TOGETHER):
            some = slice(start, start + _TOGETHER)
            whole = (values[some].double() / level).round_()
            if not _is_exact(whole):
                return ()
            levels = whole.to(torch.int64)
            look.update(as_bytes(levels).data)
            rest[some] = levels.bitwise_and_(2**self.bits - 1)
        return _FIXED.pack(self.bits, level, look.intdigest()), packing.pack_bits(rest, self.bits)

    @classmethod
    def _values(cls, data: Array, shape: tuple[int, ...], count: int, device: torch.device) -> Tensor:
        raise ProtocolError("a codec's frame tells values modulo a range, and none are known that they are near")

    @classmethod
    def _values_near(cls, data: Array, shape: tuple[int, ...], near: Tensor) -> Tensor:
        bits, level, told = numbers(_FIXED.format, data)
        if not (1 <= bits <= 16 and 0 < level <= _SINGLE.max):
            raise ProtocolError(f"a tensor of a codec's frame has {bits} bits and levels of {level}")
        packed = torch.from_numpy(data[_FIXED.size :].copy()).to(near.device)
        rest = packing.unpack_bits(packed, len(near), bits)
        values = torch.empty(len(near), dtype=torch.float32, device=near.device)
        look = xxhash.xxh3_64()
        for start in range(0, len(near), _TOGETHER):
            some = slice(start, start + _TOGETHER)
            here = near[some].double() / level
            if not _is_exact(here):
                raise _too_far(bits, level)
            levels = _nearest(rest[some], here, bits)
            look.update(as_bytes(levels).data)
            values[some] = levels.double().mul_(level).clamp_(_SINGLE.min, _SINGLE.max)
        if look.intdigest() != told:
            raise _too_far(bits, level)
        return values


def _nearest(rest: Tensor, here: Tensor, bits: int) -> Tensor:
    """The whole numbers nearest to ``here`` that are ``rest``, which is dead then, modulo 2^bits; of two the lower."""
    half = 1 << bits - 1
    start = here.round()
    away = rest.sub_(start.to(torch.int64)).add_(half).bitwise_and_(2 * half - 1).sub_(half)
    # One half of the range is as far from a whole number to both sides, and nearer on the one where ``here`` lies.
    away[(away == -half) & (here > start)] = half
    return away.add_(start.to(torch.int64))


def _is_exact(values: Tensor) -> bool:
    low, high = values.aminmax()  # NaN where one is
    return bool((low > -_WHOLE) & (high < _WHOLE))


def _too_far(bits: int, level: float) -> TooFarError:
    theta = level * (2**bits - 1) / 2
    return TooFarError(
        f"a model is further from the one here than moniqua's theta of {theta:g}:"
        f" give a larger theta, with more than {bits} bits where values are to stay as near as they were"
    )
