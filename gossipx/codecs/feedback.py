"""Error feedback: what a codec left out is added to what it encodes next (3LC, section 3.1, "error accumulation").

And ``localsteps``, which leaves all out but every k-th time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from gossipx.codecs.base import Codec, decode, decode_into
from gossipx.codecs.frames import LIMIT, Array, Buffer, Tensors
from gossipx.codecs.per_tensor import PerTensor, floats
from gossipx.codecs.state import State
from gossipx.errors import ProtocolError

ERROR = "error"
"""What the error is called among what a state keeps."""
GATHERED = "gathered"
"""What a codec calls it that keeps what it leaves out itself."""


@final
@dataclass(frozen=True)
class ErrorFeedback:
    """A codec with an error for each link, tensor and direction: the one that its state keeps.

    What goes in and the error before is what comes out and the error after, in float32: what values of another dtype
    lose when they are decoded is not in it. Frames are the codec's own.

    Attributes:
        codec: any.
    """

    codec: Codec

    def init(self, tensor: Tensor | Tensors, seed: int = 0) -> State:
        """As :meth:`Codec.init`; the error is zero."""
        state = self.codec.init(tensor, seed)
        device = torch.device("cpu") if isinstance(tensor, Tensors) else tensor.device
        state.kept[ERROR] = torch.zeros(state.tensors.length, dtype=torch.float32, device=device)
        return state

    def most(self, state: State) -> int:
        """As :meth:`Codec.most`."""
        return self.codec.most(state)

    def encode(self, tensor: Tensor, state: State, out: Array | None = None) -> tuple[memoryview, State]:
        """As :meth:`Codec.encode`, of the tensor and the error together."""
        return self.codec.encode(tensor, state, out, left=state.kept[ERROR])

    def decode(self, frame: Buffer, limit: int = LIMIT) -> Tensor:
        """As :func:`gossipx.codecs.decode`."""
        return decode(frame, limit)

    def decode_into(
        self,
        frame: Buffer,
        out: Tensor,
        *,
        add: bool = False,
        tensors: Tensors | None = None,
        near: Tensor | None = None,
    ) -> None:
        """As :func:`gossipx.codecs.decode_into`."""
        decode_into(frame, out, add=add, tensors=tensors, near=near)


def rescale(error: Tensor, ratio: float) -> None:
    """Scale the error of gradients, when the learning rate that they will be multiplied by has changed by 1 / ratio.

    Raises:
        ValueError: the ratio is not a positive number.
    """
    if not (ratio > 0 and math.isfinite(ratio)):
        raise ValueError(f"a ratio of learning rates is a positive number, not {ratio}")
    error.mul_(ratio)


@final
@dataclass(frozen=True)
class LocalSteps(PerTensor):
    """``localsteps``: every k-th time all that has gathered, as it is; nothing else (3LC, section 4.2, "local steps").

    In a frame, a tensor is 1 and its values, or 0.

    Attributes:
        k: of so many frames one has values.
    """

    k: int = 2
    number: ClassVar[int] = 17

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 1:
            raise ValueError("k counts frames and is at least 1")
        if self.small:
            raise ValueError("no tensor may be ahead of the others: small is of other codecs")

    def _most(self, count: int, shape: tuple[int, ...]) -> int:
        return 1 + 4 * count

    def _bytes(self, values: Tensor, shape: tuple[int, ...], state: State, number: int) -> Sequence[Tensor | bytes]:
        return (b"\1", values) if state.frames % self.k == self.k - 1 else (b"\0",)

    @classmethod
    def _values(cls, data: Array, shape: tuple[int, ...], count: int, device: torch.device) -> Tensor:
        if len(data) != 1 + 4 * count * int(data[0] == 1) or data[0] > 1:
            raise ProtocolError(f"{count} values of a codec's frame do not take {len(data)} bytes")
        if not data[0]:
            return torch.zeros(count, device=device)
        return floats(data[1:], device)
