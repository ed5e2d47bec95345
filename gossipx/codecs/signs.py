"""Codecs that send the sign of each value, one bit, and two scales per tensor."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor

from gossipx.codecs import packing
from gossipx.codecs.frames import Array
from gossipx.codecs.per_tensor import PerTensor, scale_of
from gossipx.codecs.state import State


class _Signs(PerTensor):
    """Base class of sign codecs.

    A tensor in a frame: two float32 values, which bits 0 and 1 decode to, then one bit per value, 1 for values ≥ 0.
    """

    def _most(self, count: int, shape: tuple[int, ...]) -> int:
        return 8 + packing.bits_bytes(count, 1)

    def _bytes(self, values: Tensor, shape: tuple[int, ...], state: State, index: int) -> Sequence[Tensor | bytes]:
        upper = values >= 0
        pair = torch.tensor(self._levels(values, upper), dtype=torch.float32)
        if not bool(pair.isfinite().all()):
            return ()  # the tensor is sent as it is
        return pair, packing.pack_bits(upper.to(torch.int64), 1)

    @abc.abstractmethod
    def _levels(self, values: Tensor, upper: Tensor) -> tuple[float, float]:
        """Return the decoded values of negative values and of the others."""

    @classmethod
    def _values(cls, data: Array, shape: tuple[int, ...], count: int, device: torch.device) -> Tensor:
        below, above = torch.tensor([scale_of(data), scale_of(data, 4)], dtype=torch.float32, device=device)
        upper = packing.unpack_bits(torch.from_numpy(data[8:].copy()).to(device), count, 1).bool()
        return torch.where(upper, above, below)


@final
@dataclass(frozen=True)
class OneBit(_Signs):
    """``onebit``: values below zero become their mean, and the others theirs: least squared error (1-bit SGD)."""

    number: ClassVar[int] = 9

    def _levels(self, values: Tensor, upper: Tensor) -> tuple[float, float]:
        many = int(upper.sum())
        above = float(values[upper].sum(dtype=torch.float64))
        below = float(values[~upper].sum(dtype=torch.float64))
        return below / max(1, len(values) - many), above / max(1, many)


@final
@dataclass(frozen=True)
class SignSGD(_Signs):
    """``signsgd``: the sign times one magnitude, without error feedback (signSGD, Algorithm 1).

    Attributes:
        magnitude: magnitude of all decoded values, 1 in the paper; 0: the mean magnitude of the tensor, which suits
            changes of models as well as gradients.
    """

    magnitude: float = 0.0
    feedback: bool = field(default=False, kw_only=True)
    number: ClassVar[int] = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.magnitude >= 0 and math.isfinite(self.magnitude)):
            raise ValueError("magnitude must be a finite number of at least 0")

    def _levels(self, values: Tensor, upper: Tensor) -> tuple[float, float]:
        magnitude = self.magnitude or _mean(values)
        return -magnitude, magnitude


@final
@dataclass(frozen=True)
class EFSignSGD(_Signs):
    """``efsignsgd``: the sign times ‖x‖₁ / n, with error feedback (EF-signSGD, Algorithm 1)."""

    number: ClassVar[int] = 11

    def _levels(self, values: Tensor, upper: Tensor) -> tuple[float, float]:
        magnitude = _mean(values)
        return -magnitude, magnitude


def _mean(values: Tensor) -> float:
    return float(values.abs().sum(dtype=torch.float64)) / len(values)
