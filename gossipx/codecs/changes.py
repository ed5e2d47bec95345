"""Changes of a vector since what another has of it, by a codec.

Who gives keeps what each of those that take has: its *base*, named by a checksum, so that both are sure to mean the
same. All who have the same base are given the same frame (3LC, section 3, "shared compression"). What a frame leaves
out is in the next change: that is error feedback, whatever the codec. Without it what another has would walk away from
the values, as far as chance takes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from gossipx.codecs.base import Codec, decode_into
from gossipx.codecs.frames import Tensors
from gossipx.memory import Source

FULL = 0
"""The base of values as they are."""
ALONE = 1
"""The base of values that are encoded by themselves."""


@dataclass
class Frame:
    """A change, shared by all who have the same base.

    Attributes:
        version: of the values that it was made of.
        source: as it is sent.
        check: of the values that it leads to.
    """

    version: int
    source: Source
    check: int


@dataclass
class Base:
    """Values that others have.

    Attributes:
        values: flat.
        frames: made on the way here and from here: what codecs do by turns is each taker's turn.
        change: the last that was made from here.
    """

    values: Tensor
    frames: int = 0
    change: Frame | None = None


class Changes:
    """The giver's side of one vector; for one thread at a time.

    Two bases are kept for each who takes, at most: what it has, and what it was sent; and what all began with.

    Args:
        codec: of the changes.
        tensors: in the vector.
        seed: of what is drawn.
        most: of those who take; of more, whoever took longest ago is given the values as they are. 0: no limit.

    Attributes:
        begun: checksum of what whoever has taken nothing yet has.
    """

    def __init__(self, codec: Codec, tensors: Tensors, seed: int, most: int = 0):
        self._codec = codec.in_feedback()
        self._most = most
        self.begun: int = FULL
        self._seed = seed
        self._state = self._codec.init(tensors, seed)
        self._room = np.empty(self._codec.most(self._state), np.uint8)
        self._bases: dict[int, Base] = {}  # by their checksums
        self._held: dict[int, set[int]] = {}  # by who takes

    def common(self, values: Tensor | None) -> None:
        """Whoever has taken nothing yet has these values, which nobody alters; None: there are none that all have."""
        self._bases.pop(self.begun, None)
        self.begun = FULL
        if values is not None:
            self.begun = checksum(values)
            self._bases[self.begun] = Base(values)

    def frame(self, taker: int, base: int, version: int, values: Tensor) -> Frame | None:
        """What leads another to these values, as near as the codec comes.

        Args:
            taker: its rank.
            base: checksum of what it has.
            version: of the values.
            values: flat, in host memory.

        Returns:
            None: the base is not known here; it is to be given the values as they are.
        """
        known = self._bases.get(base)
        if known is None:
            check = checksum(values)
            if check not in self._bases:
                self._bases[check] = Base(values.clone())
            self._hold(taker, {check})
            return None
        change = known.change
        if change is None or change.version != version:
            self._state.seed, self._state.frames = self._seed ^ base, known.frames
            frame, self._state = self._codec.encode(values - known.values, self._state, self._room)
            known.frames = self._state.frames
            kept = memoryview(bytes(frame))  # of room for the longest frame, which most are far from
            moved = self._moved(known, kept)
            change = known.change = Frame(version, Source(kept), checksum(moved))
            if change.check not in self._bases:  # it is what it is from where nothing was sent
                self._bases[change.check] = Base(moved, known.frames)
        elif change.check not in self._bases:  # nobody has had it meanwhile
            self._bases[change.check] = Base(self._moved(known, change.source.view), known.frames)
        self._hold(taker, {base, change.check})
        return change

    def _moved(self, base: Base, frame: memoryview) -> Tensor:
        moved = base.values.clone()
        decode_into(frame, moved, add=True, tensors=self._state.tensors)
        return moved

    def _hold(self, taker: int, checks: set[int]) -> None:
        """Keep what this one may have next, and drop what nobody has."""
        self._held.pop(taker, None)
        self._held[taker] = checks
        while self._most and len(self._held) > self._most:
            del self._held[next(iter(self._held))]
        wanted = {self.begun}.union(*self._held.values())
        self._bases = {check: base for check, base in self._bases.items() if check in wanted}


def checksum(values: Tensor) -> int:
    """Of the bytes of a flat tensor, as messages have it; never :data:`FULL` or :data:`ALONE`."""
    digest = xxhash.xxh3_64_intdigest(values.view(torch.uint8).numpy().data) if values.numel() else 0
    return max(digest >> 1, 2)
