"""Buffers for models in host memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from gossipx.memory import Memory


class HostBuffer:
    """A buffer for one model in host memory, as raw bytes and as one flat vector per section (dtype).

    Args:
        lengths: dtype and number of elements of each section.
        whole: whether it is sized for the whole model, or for the part that retrievals exchange.
        fragment: number of the fragment that it holds; 0: all of that model.

    Attributes:
        view: the bytes, writable, for the wire.
        descriptor: file descriptor of the same memory, for sharing it; None if not supported.
        vectors: the elements of each section.
        on_device: the same on the module's device, once uploaded for mixing.
    """

    def __init__(self, lengths: Sequence[tuple[torch.dtype, int]], whole: bool, fragment: int = 0):
        self.whole = whole
        self._memory = Memory(sum(length * dtype.itemsize for dtype, length in lengths))
        self.view = self._memory.view
        self.descriptor = self._memory.descriptor
        self.on_device: list[torch.Tensor] | None = None
        self.lay_out(lengths, fragment)

    def lay_out(self, lengths: Sequence[tuple[torch.dtype, int]], fragment: int) -> None:
        """Use the memory for a fragment of the same size, given by the lengths of its sections."""
        self.fragment = fragment
        sizes = [length * dtype.itemsize for dtype, length in lengths]
        ends = itertools.accumulate(sizes)  # multiples of ALIGNMENT, so every section is aligned for its dtype
        self.vectors = [
            typed(self.view[end - size : end], dtype)
            for end, size, (dtype, _) in zip(ends, sizes, lengths, strict=True)
        ]


def typed(view: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor over the bytes of ``view``, which must be writable."""
    return torch.frombuffer(view, dtype=dtype) if view.nbytes else torch.empty(0, dtype=dtype)
