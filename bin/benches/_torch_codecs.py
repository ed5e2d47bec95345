"""Codecs as torch operations on whole tensors, as the reference that gossipx's codecs must beat.

They follow GRACE (Xu et al. 2021), whose library implements compressors in a few tensor operations. Each operation is a
pass through memory.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

RATIO, SAMPLE = 0.01, 0.01
_DIGITS = torch.tensor([[code // 3**place % 3 - 1.0 for code in range(243)] for place in (4, 3, 2, 1, 0)])


class Reference(Protocol):
    """A codec. If given, the error ``left`` is added to the input, and then replaced by the new error."""

    def encode(self, x: Tensor, left: Tensor | None) -> Any:
        """Encode a flat tensor."""

    def decode(self, code: Any, out: Tensor, add: bool) -> None:
        """Decode into a flat tensor, or add to it."""


class ThreeLC:
    """3LC in planes, so that the five trits of a byte are from distant positions of the tensor."""

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
    """Encode runs of up to 14 zero bytes as one byte; the runs are found from the positions of the other bytes."""
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
    """Quantization to 255 levels."""

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
    """The largest values by a sampled threshold, with 64-bit positions."""

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
