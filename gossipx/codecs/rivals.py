"""Codecs of other papers, which 3LC, ``int8`` and ``topk`` are compared with, and which suit some tasks better.

They encode one tensor at a time, on any device; :class:`gossipx.codecs.base.PerTensor` documents the methods that each
of them overrides. The docstring of a class begins with its name in a spec and names its paper; PowerSGD is Vogels,
Karimireddy and Jaggi, 2019.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar, final

import torch
from torch import Tensor

from gossipx.codecs import packing
from gossipx.codecs.base import PerTensor, State, fitted, floats, scale_of, scattered, uniform
from gossipx.codecs.frames import Array, unpack_numbers
from gossipx.codecs.levels import blocks_of, check_size, in_blocks
from gossipx.codecs.sparse import check_ratio, count_of
from gossipx.errors import ProtocolError


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

    def _levels(self, values: Tensor, upper: Tensor) -> tuple[float, float]:
        """Return the decoded values of negative values and of the others: ± the mean magnitude."""
        magnitude = float(values.abs().sum(dtype=torch.float64)) / len(values)
        return -magnitude, magnitude

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
        return (-self.magnitude, self.magnitude) if self.magnitude else super()._levels(values, upper)


@final
@dataclass(frozen=True)
class EFSignSGD(_Signs):
    """``efsignsgd``: the sign times ‖x‖₁ / n, with error feedback (EF-signSGD, Algorithm 1)."""

    number: ClassVar[int] = 11


@final
@dataclass(frozen=True)
class QSGD(PerTensor):
    """``qsgd``: |x| / ‖x‖₂ rounded at random to one of the two nearest of s levels: unbiased (QSGD, Eq. 1).

    With error feedback, the frame has the scale of least squared error in place of the norm, and is then biased: random
    rounding may add more than a value's size, so the accumulated error would grow.

    Frame layout per tensor: the number of levels, the block size, the norms, and the packed sign and level per value.

    Attributes:
        levels: s, the number of levels above zero.
        block: number of values that share a norm; 0: one per tensor, which rounds most values of a large one to zero.
    """

    levels: int = 7
    block: int = 512
    feedback: bool = field(default=False, kw_only=True)
    number: ClassVar[int] = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.levels < 2**16:
            raise ValueError("levels are from 1 to 65535")
        if not 0 <= self.block < 2**32:
            raise ValueError("block counts values, from 1 on; 0: all of a tensor")

    def _most(self, count: int, shape: tuple[int, ...]) -> int:
        return 6 + 4 * blocks_of(count, self.block) + packing.bits_bytes(count, 1 + self.levels.bit_length())

    def _bytes(self, values: Tensor, shape: tuple[int, ...], state: State, index: int) -> Sequence[Tensor | bytes]:
        blocks = in_blocks(values, self.block)
        norms = torch.linalg.vector_norm(blocks, dim=1, dtype=torch.float64).float()
        part = (blocks.abs() / norms.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).view(-1)[: len(values)]
        drawn = uniform(values, state, index)
        level = (part * self.levels + drawn).floor().clamp(max=self.levels).to(torch.int64)
        scales = self.levels * fitted(blocks.abs(), in_blocks(level, self.block)) if self.feedback else norms
        if not bool((norms.isfinite() & scales.isfinite()).all()):
            return ()
        packed = packing.pack_bits(level * 2 + (values < 0), 1 + self.levels.bit_length())
        return struct.pack("<HI", self.levels, self.block), scales, packed

    @classmethod
    def _values(cls, data: Array, shape: tuple[int, ...], count: int, device: torch.device) -> Tensor:
        levels, block = unpack_numbers("<HI", data)
        end = 6 + 4 * blocks_of(count, block)
        check_size(data, end + packing.bits_bytes(count, 1 + levels.bit_length()), count)
        norms = floats(data[6:end], device)
        packed = packing.unpack_bits(torch.from_numpy(data[end:].copy()).to(device), count, 1 + levels.bit_length())
        if not levels or int((packed >> 1).max()) > levels or not bool((norms >= 0).all()):
            raise ProtocolError("a tensor of a codec's frame has a level or a norm out of range")
        signed = (packed >> 1) * (1 - 2 * (packed & 1))
        values: Tensor = in_blocks(signed, block) * (norms / levels)[:, None]
        return values.view(-1)[:count]


@final
@dataclass(frozen=True)
class Stochastic3(PerTensor):
    """``stochastic3``: ±max |x| with probability |x| / max |x|, else 0, and base-3⁵ (3LC, section 4.2; TernGrad).

    It is unbiased, and does not converge with error feedback (3LC, section 3.1). With ``feedback=true`` it therefore
    sends the magnitude of least squared error, which is biased.

    Frame layout per tensor: the magnitude and the packed trits.
    """

    feedback: bool = field(default=False, kw_only=True)
    number: ClassVar[int] = 4

    def _most(self, count: int, shape: tuple[int, ...]) -> int:
        return 4 + packing.trit_bytes(count)

    def _bytes(self, values: Tensor, shape: tuple[int, ...], state: State, index: int) -> Sequence[Tensor | bytes]:
        scale = values.abs().max()
        drawn = uniform(values, state, index)
        trits = torch.sign(values) * (drawn * scale < values.abs())
        if self.feedback:
            scale = fitted(values, trits)
        return scale.view(1), packing.pack_trits(trits)

    @classmethod
    def _values(cls, data: Array, shape: tuple[int, ...], count: int, device: torch.device) -> Tensor:
        scale = torch.tensor(scale_of(data, 0), dtype=torch.float32, device=device)
        return packing.unpack_trits(torch.from_numpy(data[4:].copy()), count).to(device) * scale


@final
@dataclass(frozen=True)
class PowerSGD(PerTensor):
    """``powersgd``: M ≈ P Qᵀ by one step of power iteration (PowerSGD, Algorithm 1).

    The step starts from the Q of the previous frame, which the encoder keeps in its state; the decoder needs no state.
    A tensor is reshaped to a matrix: its first dimension becomes the rows, all others together the columns.

    Frame layout per tensor: rank (2 bytes), number of rows (8 bytes), P, Q. Tensors that P and Q would not make
    smaller, such as vectors, are sent as their float32 values, with rank 0 and 0 rows.

    Attributes:
        rank: number of columns of P and Q.
    """

    rank: int = 2
    number: ClassVar[int] = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.rank < 2**16:
            raise ValueError("rank must be from 1 to 65535")

    def _most(self, count: int, shape: tuple[int, ...]) -> int:
        return 10 + 4 * count

    def _begin(self, state: State, device: torch.device) -> None:
        """Draw the first Q of each matrix (PowerSGD, section 3)."""
        assert state.plan is not None
        for index, shape in enumerate(state.plan.shapes):
            rank = self._rank_for(shape)
            if rank:
                size, draws = (_matrix(shape)[1], rank), state.draws(device, index)
                state.kept[f"q{index}"] = torch.randn(size, generator=draws, device=device, dtype=torch.float32)

    def _rank_for(self, shape: tuple[int, ...]) -> int:
        """Return the rank for a tensor; 0 if P and Q would have as many elements as the tensor, or more."""
        rows, columns = _matrix(shape)
        return self.rank if self.rank * (rows + columns) < rows * columns else 0

    def _bytes(self, values: Tensor, shape: tuple[int, ...], state: State, index: int) -> Sequence[Tensor | bytes]:
        rank = self._rank_for(shape)
        if not rank:
            return struct.pack("<HQ", 0, 0), values
        matrix = values.view(_matrix(shape))
        p = torch.linalg.qr(matrix @ state.kept[f"q{index}"]).Q
        q = matrix.T @ p
        if not bool(p.isfinite().all() & q.isfinite().all()):
            return ()  # the tensor has no encoding: an intermediate result overflowed
        # A zero matrix has a zero Q. All later products with it would be zero, so keep the previous Q.
        state.kept[f"q{index}"] = q if bool(q.any()) else state.kept[f"q{index}"]
        return struct.pack("<HQ", rank, len(p)), p, q

    @classmethod
    def _values(cls, data: Array, shape: tuple[int, ...], count: int, device: torch.device) -> Tensor:
        rank, rows = unpack_numbers("<HQ", data)
        columns = count // rows if rows else 0
        if len(data) != 10 + 4 * (rank * (rows + columns) if rank else count) or (rank and rows * columns != count):
            raise ProtocolError(f"{count} values in a codec's frame do not fit {rows} rows and rank {rank}")
        values = floats(data[10:], device)
        if not rank:
            return values
        p, q = values[: rank * rows].view(rows, rank), values[rank * rows :].view(columns, rank)
        product = torch.zeros(rows, columns, dtype=torch.float32, device=device)
        # Not p @ q.T: its order of summation, and so its rounding, depends on the processor; all peers must decode a
        # frame to the same bits.
        for column in range(rank):
            product += p[:, column, None] * q[:, column]
        return product.view(-1)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the numbers of rows and columns of the matrix that a tensor is reshaped to; a vector has one row."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


_TOPK2_HEAD = struct.Struct("<QIB")
_LEVEL_BYTES = 4
"""Bytes of the levels of a chunk, two values of bfloat16."""


@final
@dataclass(frozen=True)
class TopK2(PerTensor):
    """``topk2``: the largest values of each chunk, as a sign and one of two magnitudes, with decayed error feedback.

    SparseLoCo, arXiv 2508.15706, Algorithm 1. Per frame: e ← decay · e + Δ; the frame holds Q(top-k of each chunk of
    e); e ← e − what the frame decodes to. The paper lets the decaying error stand in for momentum across exchanges. The
    levels of Q and the coding of indices are our own:

    - A chunk has four levels: ± the mean of the magnitudes below their mean, and ± the mean of the others. With means
      an error is never larger than the values, and levels per chunk follow layers and rows of different scale.
    - Indices are coded as gaps, in a Rice code. At a ratio of 2 % an index takes 7.2 bits; the entropy is 7.1, and a
      plain number below 4096 takes 12.

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
        return _TOPK2_HEAD.size + _LEVEL_BYTES * chunks + bits // 8 + count.bit_length() + 8

    def _wanted(self, values: Tensor, error: Tensor) -> Tensor:
        return values + self.decay * error

    def _bytes(self, values: Tensor, shape: tuple[int, ...], state: State, index: int) -> Sequence[Tensor | bytes]:
        places = self._chosen(values)
        sent, chunks = len(places), -(-len(values) // self.chunk)
        if not sent:  # all values are zero
            return _TOPK2_HEAD.pack(0, self.chunk, 1), bytes(_LEVEL_BYTES * chunks)
        magnitudes, chunk_of = values[places].abs().double(), places // self.chunk
        means = _group_means(magnitudes, chunk_of, chunks)
        is_high = (magnitudes >= means[chunk_of]).long()
        levels = _group_means(magnitudes, 2 * chunk_of + is_high, 2 * chunks).float()
        shortened = (levels.view(torch.int32) >> 16).to(torch.int16)  # to bfloat16, towards zero

        codes = packing.pack_bits((values[places] < 0).long() | is_high << 1, 2)
        width, low, unary = packing.pack_gaps(places, len(values))
        return _TOPK2_HEAD.pack(sent, self.chunk, width), shortened, codes, low, unary

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
        sent, chunk, width = unpack_numbers(_TOPK2_HEAD.format, data)
        chunks = -(-count // max(1, chunk))
        sizes = _LEVEL_BYTES * chunks, packing.bits_bytes(sent, 2), packing.bits_bytes(sent, width)
        ends = [*accumulate(sizes, initial=_TOPK2_HEAD.size)]
        # These bounds keep sums of gaps within 64 bits, and the memory for unary numbers in proportion to the tensor.
        fits = chunk >= 1 and width >= 1 and sent <= count and sent << width < 2**62 and ends[-1] <= len(data)
        if not fits or 8 * (len(data) - ends[-1]) > sent + (count >> width) + 7:
            raise ProtocolError(f"a tensor of a codec's frame is not {count} values in chunks")
        _, bits, codes, low, unary = torch.from_numpy(data.copy()).to(device).tensor_split(ends)
        levels = bits.clone().view(torch.bfloat16).float()  # a copy is aligned
        places = packing.unpack_gaps(low, unary, sent, width)
        if not bool(levels.isfinite().all()) or (sent and int(places[-1]) >= count):
            raise ProtocolError(f"a tensor of a codec's frame has a level out of range, or an index above its {count}")
        code = packing.unpack_bits(codes, sent, 2)
        values = levels[2 * (places // chunk) + (code >> 1)] * (1 - 2 * (code & 1))
        return scattered(count, places, values)


def _group_means(values: Tensor, groups: Tensor, many: int) -> Tensor:
    """Return the mean of the values in each of ``many`` groups; 0 for empty ones."""
    sums = torch.bincount(groups, weights=values, minlength=many)
    return sums / torch.bincount(groups, minlength=many).clamp(min=1)


@final
@dataclass(frozen=True)
class LocalSteps(PerTensor):
    """``localsteps``: all accumulated values in every k-th frame, nothing in the others (3LC, section 4.2).

    Frame layout per tensor: a byte 1 and the float32 values, or a byte 0.

    Attributes:
        k: one frame in k has values.
    """

    k: int = 2
    number: ClassVar[int] = 17

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 1:
            raise ValueError("k must be at least 1 frame")
        if self.small:
            raise ValueError("small must be 0: all tensors are sent in the same frame")

    def _most(self, count: int, shape: tuple[int, ...]) -> int:
        return 1 + 4 * count

    def _bytes(self, values: Tensor, shape: tuple[int, ...], state: State, index: int) -> Sequence[Tensor | bytes]:
        return (b"\1", values) if state.frames % self.k == self.k - 1 else (b"\0",)

    @classmethod
    def _values(cls, data: Array, shape: tuple[int, ...], count: int, device: torch.device) -> Tensor:
        if len(data) != 1 + 4 * count * int(data[0] == 1) or data[0] > 1:
            raise ProtocolError(f"{count} values of a codec's frame do not take {len(data)} bytes")
        if not data[0]:
            return torch.zeros(count, device=device)
        return floats(data[1:], device)
