"""Room for models in host memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from gossipx.memory import Memory


class HostBuffer:
    """Room for one model in host memory, as raw bytes and as one flat vector a section.

    Args:
        lengths: for each section its dtype and its elements.
        whole: whether it has room for all of the model, or for what a retrieval exchanges.

    Attributes:
        view: the bytes, writable, for the wire.
        descriptor: of a file of these bytes; None where there is none.
        vectors: for each section its elements in this buffer.
        on_device: the same on the module's device, where they have been brought there to be mixed.
    """

    def __init__(self, lengths: Sequence[tuple[torch.dtype, int]], whole: bool):
        self.whole = whole
        sizes = [length * dtype.itemsize for dtype, length in lengths]
        self._memory = Memory(sum(sizes))
        self.view = self._memory.view
        self.descriptor = self._memory.descriptor
        ends = itertools.accumulate(sizes)  # multiples of ALIGNMENT: every part is aligned to its dtype
        self.vectors = [
            typed(self.view[end - size : end], dtype)
            for end, size, (dtype, _) in zip(ends, sizes, lengths, strict=True)
        ]
        self.on_device: list[torch.Tensor] | None = None


def typed(view: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over the bytes of ``view``, which must be writable."""
    return torch.frombuffer(view, dtype=dtype) if view.nbytes else torch.empty(0, dtype=dtype)
