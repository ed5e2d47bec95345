"""The PowerSGD codec, which approximates each matrix by a product of two thin matrices.

Section and algorithm references are to Vogels, Karimireddy and Jaggi, PowerSGD: Practical Low-Rank Gradient Compression
for Distributed Optimization (2019). :class:`gossipx.codecs.base.Codec` and
:class:`gossipx.codecs.per_tensor.PerTensor` document the methods that this codec overrides.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from gossipx.codecs.frames import Array, unpack_numbers
from gossipx.codecs.per_tensor import PerTensor, floats
from gossipx.codecs.state import State
from gossipx.errors import ProtocolError


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
    rows = shape[0] if len(shape) > 1 else 1
    count = 1
    for size in shape:
        count *= size
    return rows, count // rows if rows else 0
