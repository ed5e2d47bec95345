"""Codecs as operations of torch on whole tensors, each of which goes through memory: what ours are to be faster than.

The way of GRACE (Xu et al. 2021), whose library has a compressor as a few lines of tensor operations.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

RATIO, SAMPLE = 0.01, 0.01
_DIGITS = torch.tensor([[code // 3**place % 3 - 1.0 for code in range(243)] for place in (4, 3, 2, 1, 0)])


class Reference(Protocol):
    """``left``, if there is one, is added first, and what the code leaves out is in it afterwards."""

    def encode(self, x: Tensor, left: Tensor | None) -> Any:
        """A flat tensor's code."""

    def decode(self, code: Any, out: Tensor, add: bool) -> None:
        """Into a flat tensor."""


class ThreeLC:
    """3LC in planes that are as long as the tensor allows, so that a byte's trits lie far apart."""

    def __init__(self, sparsity: float):
        self._sparsity = sparsity

    def encode(self, x: Tensor, left: Tensor | None) -> tuple[Tensor, Tensor]:
        values = x if left is None else x + left
        scale = values.abs().max() * self._sparsity
        trits = torch.div(values, scale).round_()
        if left is not None:
            torch.sub(values, trits * scale, out=left)
        digits = torch.ones(-(-len(x) // 5) * 5, dtype=torch.uint8)
        digits[: len(x)] = trits.add_(1).to(torch.uint8)
        planes = digits.view(5, -1)
        packed = planes[0] * 81 + planes[1] * 27 + planes[2] * 9 + planes[3] * 3 + planes[4]
        return scale, _shortened(packed)

    def decode(self, code: tuple[Tensor, Tensor], out: Tensor, add: bool) -> None:
        scale, codes = code
        stretch = torch.where(codes < 243, 1, codes.to(torch.int32) - 241)
        packed = torch.repeat_interleave(torch.where(codes < 243, codes.to(torch.int32), 121), stretch)
        values = torch.cat([plane.index_select(0, packed) for plane in _DIGITS * scale])[: len(out)]
        out.add_(values) if add else out.copy_(values)


def _shortened(packed: Tensor) -> Tensor:
    """Runs of zeros are cut to 14 bytes, and those become one: found from where the other bytes stand."""
    places = (packed != 121).nonzero().view(-1)
    bounds = torch.cat((torch.tensor([-1]), places, torch.tensor([len(packed)])))
    gaps = bounds.diff() - 1
    ends = (torch.div(gaps + 13, 14, rounding_mode="floor") + 1).cumsum(0)
    codes = torch.full((int(ends[-1]),), 255, dtype=torch.uint8)
    rest = torch.remainder(gaps - 1, 14) + 1
    some = gaps > 0
    codes[ends[some] - 2] = torch.where(rest > 1, rest + 241, 121)[some].to(torch.uint8)
    codes[ends[:-1] - 1] = packed[places]
    return codes[:-1]


class Int8:
    """255 levels."""

    def encode(self, x: Tensor, left: Tensor | None) -> tuple[Tensor, Tensor]:
        values = x if left is None else x + left
        scale = values.abs().max() / 127
        levels = torch.div(values, scale).round_()
        if left is not None:
            torch.sub(values, levels * scale, out=left)
        return scale, levels.to(torch.int8)

    def decode(self, code: tuple[Tensor, Tensor], out: Tensor, add: bool) -> None:
        scale, levels = code
        values = levels.to(torch.float32).mul_(scale)
        out.add_(values) if add else out.copy_(values)


class TopK:
    """The largest values by a sampled threshold; where they stand, as 64-bit numbers."""

    def encode(self, x: Tensor, left: Tensor | None) -> tuple[Tensor, Tensor]:
        values = x if left is None else x + left
        magnitudes = values.abs()
        many = min(len(x), max(1024, round(SAMPLE * len(x))))
        some = magnitudes[torch.randint(len(x), (many,))] if many < len(x) else magnitudes
        threshold = some.topk(max(1, round(RATIO * many)), sorted=False).values.min()
        places = (magnitudes >= threshold).nonzero().view(-1)
        sent = values[places]
        if left is not None:
            left.copy_(values)
            left[places] = 0
        return places, sent

    def decode(self, code: tuple[Tensor, Tensor], out: Tensor, add: bool) -> None:
        places, sent = code
        if not add:
            out.zero_()
        out.index_add_(0, places, sent)
