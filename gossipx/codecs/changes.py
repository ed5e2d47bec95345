"""Delta encoding: a sender encodes a vector as its change since the receiver's copy.

The sender keeps a copy of what each receiver has, its *base*. A checksum identifies the base, so that both ends are
sure to use the same values. Receivers with the same base get the same frame (3LC, section 3, "shared compression").
The encoding error of one frame is part of the next change, which is error feedback for any codec. Without it a
receiver's copy would drift away from the values.
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
"""Base of values that are sent in full, without a codec."""
ALONE = 1
"""Base of values that are encoded themselves, not as a change."""


@dataclass
class SharedFrame:
    """An encoded change, shared by all receivers with the same base.

    Attributes:
        version: identifies the values that it encodes.
        source: the payload.
        check: checksum of the values that a receiver has after decoding it.
    """

    version: int
    source: Source
    check: int


@dataclass
class Base:
    """Values that at least one receiver may have.

    Attributes:
        values: flat.
        frames: number of frames encoded on the path to and from these values; codecs that act every k-th frame use it.
        change: the last change encoded from this base.
    """

    values: Tensor
    frames: int = 0
    change: SharedFrame | None = None


class Changes:
    """The sender's side for one vector. Not thread-safe.

    It keeps the common initial values, and at most two bases per receiver: the one it reported and the one it was sent.

    Args:
        codec: encodes the changes.
        tensors: the tensors in the vector.
        seed: seeds the codec's random draws.
        max_receivers: receivers to keep bases for; the least recently served one then gets full values. 0: no limit.

    Attributes:
        initial: checksum of the initial values that every receiver has; :data:`FULL`: no common initial values.
    """

    def __init__(self, codec: Codec, tensors: Tensors, seed: int, max_receivers: int = 0):
        self._codec = codec.in_feedback()
        self._max_receivers = max_receivers
        self.initial: int = FULL
        self._seed = seed
        self._state = self._codec.init(tensors, seed)
        self._buffer = np.empty(self._codec.most(self._state), np.uint8)
        self._bases: dict[int, Base] = {}  # by checksum
        # Checksums of the bases of each receiver, of which it was sent the last; the receiver served last is last.
        self._checks: dict[int, tuple[int, ...]] = {}

    def set_initial(self, values: Tensor) -> None:
        """Set the initial values, which every receiver has and nobody may modify, before the first frame."""
        self.initial = checksum(values)
        self._bases[self.initial] = Base(values)

    def frame(self, receiver: int, base: int, version: int, values: Tensor) -> SharedFrame | None:
        """Return the change from a receiver's base to ``values``, encoded.

        Args:
            receiver: rank of the receiver.
            base: checksum of the values that it has.
            version: identifies ``values``.
            values: flat, in host memory.

        Returns:
            None if the base is unknown: the caller must then send the values in full.
        """
        known = self._bases.get(base)
        if known is None:
            check = checksum(values)
            if check not in self._bases:
                self._bases[check] = Base(values.clone())
            self._retain(receiver, (check,))
            return None
        change = known.change
        if change is None or change.version != version:
            self._state.seed, self._state.frames = self._seed ^ base, known.frames
            frame, self._state = self._codec.encode(values - known.values, self._state, self._buffer)
            known.frames = self._state.frames
            payload = memoryview(bytes(frame))  # a copy, as the buffer is reused and most frames are far shorter
            values_after = self._apply(known, payload)
            change = known.change = SharedFrame(version, Source(payload), checksum(values_after))
            if change.check not in self._bases:  # an empty change leads back to its own base
                self._bases[change.check] = Base(values_after, known.frames)
        elif change.check not in self._bases:  # dropped since, as no receiver had it
            self._bases[change.check] = Base(self._apply(known, change.source.view), known.frames)
        self._retain(receiver, (base, change.check))
        return change

    def sent(self, receiver: int) -> Tensor | None:
        """Return the values that a receiver has if the last frame for it has arrived; None: it was sent none."""
        checks = self._checks.get(receiver)
        return None if checks is None else self._bases[checks[-1]].values

    def _apply(self, base: Base, frame: memoryview) -> Tensor:
        values_after = base.values.clone()
        decode_into(frame, values_after, add=True, tensors=self._state.tensors)
        return values_after

    def _retain(self, receiver: int, checks: tuple[int, ...]) -> None:
        """Record the bases that a receiver may report next, and drop those that no receiver has."""
        self._checks.pop(receiver, None)
        self._checks[receiver] = checks
        while self._max_receivers and len(self._checks) > self._max_receivers:
            del self._checks[next(iter(self._checks))]
        wanted = {self.initial}.union(*self._checks.values())
        self._bases = {check: base for check, base in self._bases.items() if check in wanted}


def checksum(values: Tensor) -> int:
    """Return the 63-bit checksum of a flat tensor's bytes; never :data:`FULL` or :data:`ALONE`."""
    digest = xxhash.xxh3_64_intdigest(values.view(torch.uint8).numpy().data) if values.numel() else 0
    return max(digest >> 1, 2)
