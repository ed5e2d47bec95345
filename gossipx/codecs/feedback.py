"""Error feedback, and ``localsteps``, a codec that relies on it.

The encoding error of one frame is added to the input of the next (3LC, section 3.1, "error accumulation"), so that no
part of a gradient is lost, only delayed. ``localsteps`` sends values in every k-th frame only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from gossipx.codecs.base import Codec, device_of
from gossipx.codecs.frames import Array, Tensors
from gossipx.codecs.per_tensor import PerTensor, floats
from gossipx.codecs.state import State
from gossipx.errors import ProtocolError

ERROR = "error"
"""Key of the accumulated error in ``State.kept``."""
GATHERED = "gathered"
"""Key of the unsent values in ``State.kept``, for codecs that accumulate these themselves."""


@final
@dataclass(frozen=True)
class ErrorFeedback:
    """A codec with error feedback; the state holds the accumulated error of one direction of one link.

    Input + error before = decoded output + error after, in float32; ``topk2`` first multiplies the error before by its
    ``decay``. The error does not include what is lost when other
    dtypes are decoded. Frames are those of the codec.

    Attributes:
        codec: the wrapped codec.
    """

    codec: Codec

    def init(self, tensor: Tensor | Tensors, seed: int = 0, device: torch.device | None = None) -> State:
        """Return the initial state as :meth:`Codec.init` does, with an error of zero."""
        state = self.codec.init(tensor, seed, device)
        place = device_of(tensor, device)
        state.kept[ERROR] = torch.zeros(state.tensors.length, dtype=torch.float32, device=place)
        return state

    def most(self, state: State) -> int:
        """Return the size of the longest possible frame in bytes."""
        return self.codec.most(state)

    def encode(self, tensor: Tensor, state: State, out: Array | None = None) -> tuple[memoryview, State]:
        """Encode the sum of the tensor and the accumulated error, see :meth:`Codec.encode`."""
        return self.codec.encode(tensor, state, out, left=state.kept[ERROR])


def rescale(error: Tensor, ratio: float) -> None:
    """Scale the accumulated error of gradients by ``ratio``, the old learning rate divided by the new one.

    Raises:
        ValueError: the ratio is not a positive finite number.
    """
    if not (ratio > 0 and math.isfinite(ratio)):
        raise ValueError(f"a ratio of learning rates is a positive finite number, not {ratio}")
    error.mul_(ratio)


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
