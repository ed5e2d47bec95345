"""The state of a codec between two frames, as plain data that a checkpoint can hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossipx.codecs.frames import Array, Contents, Tensors


@dataclass
class Plan:
    """Everything that all frames of a state have in common, computed once.

    Attributes:
        codec: the codec that encodes them.
        contents: the tensors in a frame.
        head: header and shapes of a frame.
        max_bytes: size of the longest possible frame.
        size_width: bytes per number in the table of sizes.
        starts, counts, shapes: first index in the vector, number of elements and shape of each encoded tensor.
        workspace: memory of the compiled loops, for codecs that need it.
    """

    codec: Any
    contents: Contents
    head: bytes
    max_bytes: int
    size_width: int
    starts: Array
    counts: Array
    shapes: list[tuple[int, ...]]
    workspace: Any = None


@dataclass
class State:
    """A codec's state for one direction of a link. ``encode`` updates it in place and returns it.

    Attributes:
        tensors: layout of the tensors to encode.
        seed: seeds the random draws; together with the frame number it makes them reproducible.
        frames: number of frames encoded so far.
        kept: the codec's own vectors by name, such as the accumulated error; with ``frames``, all that a checkpoint
            needs.
    """

    tensors: Tensors
    seed: int = 0
    frames: int = 0
    kept: dict[str, Tensor] = field(default_factory=dict)
    plan: Plan | None = field(default=None, repr=False, compare=False)  # derived from the above, on demand

    def draws(self, device: torch.device, index: int = 0) -> torch.Generator:
        """Return a random generator for one tensor of the current frame, by its index."""
        seeds = np.random.SeedSequence((self.seed, self.frames, index)).generate_state(1, np.uint64)
        return torch.Generator(device).manual_seed(int(seeds[0] >> np.uint64(1)))
