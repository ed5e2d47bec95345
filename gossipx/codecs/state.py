"""What a codec keeps between frames, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossipx.codecs.frames import Array, Contents, Tensors


@dataclass
class Plan:
    """What is the same for all frames of a state, found out once.

    Attributes:
        codec: that makes them.
        contents: what they hold.
        head: how they begin.
        most: bytes of the longest.
        wide: bytes of a number in their table.
        starts, counts, shapes: of the tensors that are encoded.
        room: what compiled loops work in, of codecs that need any.
    """

    codec: Any
    contents: Contents
    head: bytes
    most: int
    wide: int
    starts: Array
    counts: Array
    shapes: list[tuple[int, ...]]
    room: Any = None


@dataclass
class State:
    """What a codec keeps from one frame of a link to the next. One that was given to ``encode`` is dead afterwards.

    Attributes:
        tensors: that are encoded.
        seed: of what is drawn; with the number of the frame it makes draws that can be repeated.
        frames: that were encoded.
        kept: vectors as long as that of the tensors, or as their codec says, by name: all that a checkpoint needs
            beside the number of frames.
    """

    tensors: Tensors
    seed: int = 0
    frames: int = 0
    kept: dict[str, Tensor] = field(default_factory=dict)
    plan: Plan | None = field(default=None, repr=False, compare=False)

    def draws(self, device: torch.device, number: int = 0) -> torch.Generator:
        """A generator for one tensor of the frame that is encoded now."""
        seeds = np.random.SeedSequence((self.seed, self.frames, number)).generate_state(1, np.uint64)
        return torch.Generator(device).manual_seed(int(seeds[0] >> np.uint64(1)))
