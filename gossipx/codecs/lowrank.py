"""PowerSGD, a codec that approximates a matrix by the product of two thin ones."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from gossipx.codecs.frames import Array, numbers
from gossipx.codecs.per_tensor import PerTensor, floats
from gossipx.codecs.state import State
from gossipx.errors import ProtocolError


@final
@dataclass(frozen=True)
class PowerSGD(PerTensor):
    """``powersgd``: M ≈ P Qᵀ by one step of power iteration, starting from the last frame's Q (PowerSGD, Algorithm 1).

    A tensor is reshaped to a matrix, its first dimension by all others. Frame layout per tensor: rank (2 bytes), the
    number of rows (8), P, and Q. Tensors that would not shrink, such as vectors, have rank 0 and their float32 values.

    Attributes:
        rank: columns of P and Q.
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
        for number, shape in enumerate(state.plan.shapes):
            rank = self._rank_for(shape)
            if rank:
                size, draws = (_matrix(shape)[1], rank), state.draws(device, number)
                state.kept[f"q{number}"] = torch.randn(size, generator=draws, device=device, dtype=torch.float32)

    def _rank_for(self, shape: tuple[int, ...]) -> int:
        rows, columns = _matrix(shape)
        return self.rank if self.rank * (rows + columns) < rows * columns else 0

    def _bytes(self, values: Tensor, shape: tuple[int, ...], state: State, number: int) -> Sequence[Tensor | bytes]:
        rank = self._rank_for(shape)
        if not rank:
            return struct.pack("<HQ", 0, 0), values
        matrix = values.view(_matrix(shape))
        p = torch.linalg.qr(matrix @ state.kept[f"q{number}"]).Q
        q = matrix.T @ p
        if not bool(p.isfinite().all() & q.isfinite().all()):
            return ()
        # A zero matrix leads to a zero Q, from which the iteration could not recover.
        state.kept[f"q{number}"] = q if bool(q.any()) else state.kept[f"q{number}"]
        return struct.pack("<HQ", rank, len(p)), p, q

    @classmethod
    def _values(cls, data: Array, shape: tuple[int, ...], count: int, device: torch.device) -> Tensor:
        rank, rows = numbers("<HQ", data)
        columns = count // rows if rows else 0
        if len(data) != 10 + 4 * (rank * (rows + columns) if rank else count) or (rank and rows * columns != count):
            raise ProtocolError(f"{count} values in a codec's frame do not fit {rows} rows and rank {rank}")
        values = floats(data[10:], device)
        if not rank:
            return values
        p, q = values[: rank * rows].view(rows, rank), values[rank * rows :].view(columns, rank)
        product = torch.zeros(rows, columns, dtype=torch.float32, device=device)
        # The order of sums, and so the rounding, of a matrix product would depend on the processor.
        for number in range(rank):
            product += p[:, number, None] * q[:, number]
        return product.view(-1)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of the matrix that a tensor is reshaped to; a vector has one row."""
    rows = shape[0] if len(shape) > 1 else 1
    count = 1
    for size in shape:
        count *= size
    return rows, count // rows if rows else 0
