"""Top-k per chunk with 2-bit values and decayed error feedback (SparseLoCo, arXiv 2508.15706, Algorithm 1).

Per frame: e ← decay · e + Δ; the frame holds Q(top-k of each chunk of e); e ← e − what the frame decodes to. The paper
lets the decaying error stand in for momentum across exchanges. The levels of Q and the coding of indices are our own:

- A chunk has four levels: ± the mean of the magnitudes below their mean, and ± the mean of the others. With means an
  error is never larger than the values, and levels per chunk follow layers and rows of different scale.
- Indices are coded as gaps, in a Rice code. At a ratio of 2 % an index takes 7.2 bits; the entropy is 7.1, and a plain
  number below 4096 takes 12.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from gossipx.codecs import packing
from gossipx.codecs.frames import Array, unpack_numbers
from gossipx.codecs.per_tensor import PerTensor
from gossipx.codecs.sparse import check_ratio, count_of
from gossipx.codecs.state import State
from gossipx.errors import ProtocolError

_START = struct.Struct("<QIB")
_LEVELS = 4
"""Bytes of the levels of a chunk, two values of bfloat16."""


@final
@dataclass(frozen=True)
class TopK2(PerTensor):
    """``topk2``: the largest values of each chunk, as a sign and one of two magnitudes, with decayed error feedback.

    Frame layout per tensor: the number of sent values (8 bytes), the chunk size (4), a width w (1), the levels (two
    bfloat16 per chunk), a sign bit and a level bit per value, the low w bits of each gap, and the rest of each gap in
    unary: that many 0 bits and a 1 bit. A gap is the number of values between two sent ones.

    Attributes:
        ratio: fraction of the values of a chunk that is sent; at least one value is.
        chunk: number of consecutive values of a tensor among which the largest are chosen; the last chunk is shorter.
        decay: factor of the accumulated error at each frame, above 0 and at most 1; 1: nothing is lost. Where a frame
            holds the difference from a reference, the difference carries the error, and nothing decays.
    """

    ratio: float = 0.02
    chunk: int = 4096
    decay: float = 0.95
    number: ClassVar[int] = 19

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio(self.ratio)
        if not 1 <= self.chunk < 2**32:
            raise ValueError("chunk is a number of values, from 1 on")
        if not 0 < self.decay <= 1:
            raise ValueError("decay is a factor, above 0 and at most 1")

    def _most(self, count: int, shape: tuple[int, ...]) -> int:
        chunks = -(-count // self.chunk)
        sent = min(count, chunks * count_of(self.ratio, self.chunk))
        # Per value: two bits of its level, and at most three bits more than log2 of the mean gap.
        bits = sent * (5 + (count // max(1, sent)).bit_length())
        return _START.size + _LEVELS * chunks + bits // 8 + count.bit_length() + 8

    def _wanted(self, values: Tensor, error: Tensor) -> Tensor:
        return values + self.decay * error

    def _bytes(self, values: Tensor, shape: tuple[int, ...], state: State, index: int) -> Sequence[Tensor | bytes]:
        places = self._chosen(values)
        sent, chunks = len(places), -(-len(values) // self.chunk)
        if not sent:  # all values are zero
            return _START.pack(0, self.chunk, 1), bytes(_LEVELS * chunks)
        magnitudes, chunk_of = values[places].abs().double(), places // self.chunk
        means = _means(magnitudes, chunk_of, chunks)
        is_high = (magnitudes >= means[chunk_of]).long()
        levels = _means(magnitudes, 2 * chunk_of + is_high, 2 * chunks).float()
        shortened = (levels.view(torch.int32) >> 16).to(torch.int16)  # to bfloat16, towards zero

        gaps = places.diff(prepend=places.new_full((1,), -1)) - 1
        widest = (len(values) // sent).bit_length()  # a Rice code is shortest with a width near log2 of the mean gap
        width = min(range(max(1, widest - 2), widest + 1), key=lambda width: width * sent + int((gaps >> width).sum()))
        ends = ((gaps >> width) + 1).cumsum(0) - 1
        marks = torch.zeros(int(ends[-1]) + 1, dtype=torch.int64, device=values.device)
        marks[ends] = 1
        codes = packing.pack_bits((values[places] < 0).long() | is_high << 1, 2)
        low = packing.pack_bits(gaps & (1 << width) - 1, width)
        return _START.pack(sent, self.chunk, width), shortened, codes, low, packing.pack_bits(marks, 1)

    def _chosen(self, values: Tensor) -> Tensor:
        """Return the ascending indices of the values to send, all of which differ from zero."""
        magnitudes, chosen = values.abs(), []
        whole = len(values) // self.chunk * self.chunk
        for start, rows in ((0, magnitudes[:whole].view(-1, self.chunk)), (whole, magnitudes[None, whole:])):
            if rows.numel():
                top = rows.topk(count_of(self.ratio, rows.shape[1]), sorted=False).indices
                begins = torch.arange(start, start + rows.numel(), rows.shape[1], device=values.device)
                chosen.append((top + begins[:, None]).view(-1))
        places = torch.cat(chosen).sort().values
        return places[values[places] != 0]

    @classmethod
    def _values(cls, data: Array, shape: tuple[int, ...], count: int, device: torch.device) -> Tensor:
        sent, chunk, width = unpack_numbers(_START.format, data)
        chunks = -(-count // max(1, chunk))
        ends = [_START.size]
        for size in (_LEVELS * chunks, packing.bits_bytes(sent, 2), packing.bits_bytes(sent, width)):
            ends.append(ends[-1] + size)
        # These bounds keep sums of gaps within 64 bits, and the memory for unary numbers in proportion to the tensor.
        fits = chunk >= 1 and width >= 1 and sent <= count and sent << width < 2**62 and ends[-1] <= len(data)
        if not fits or 8 * (len(data) - ends[-1]) > sent + (count >> width) + 7:
            raise ProtocolError(f"a tensor of a codec's frame is not {count} values in chunks")
        bits, codes, low, unary = (
            torch.from_numpy(data[begin:end].copy()).to(device)
            for begin, end in zip(ends, [*ends[1:], len(data)], strict=True)
        )
        levels = bits.view(torch.bfloat16).float()
        marks = packing.unpack_bits(unary, 8 * len(unary), 1).nonzero().view(-1)
        if len(marks) != sent or (sent and int(marks[-1]) // 8 != len(unary) - 1) or not bool(levels.isfinite().all()):
            raise ProtocolError("a tensor of a codec's frame has a level out of range, or another number of indices")
        rests = marks.diff(prepend=marks.new_full((1,), -1)) - 1
        places = ((rests << width | packing.unpack_bits(low, sent, width)) + 1).cumsum(0) - 1
        if sent and int(places[-1]) >= count:
            raise ProtocolError(f"a tensor of a codec's frame has an index above its {count} values")
        code = packing.unpack_bits(codes, sent, 2)
        values = levels[2 * (places // chunk) + (code >> 1)] * (1 - 2 * (code & 1))
        return torch.zeros(count, dtype=torch.float32, device=device).index_copy_(0, places, values)


def _means(values: Tensor, groups: Tensor, many: int) -> Tensor:
    """Return the mean of the values in each of ``many`` groups; 0 for empty ones."""
    sums = torch.bincount(groups, weights=values, minlength=many)
    return sums / torch.bincount(groups, minlength=many).clamp(min=1)
