"""How gradients and tables are encoded between workers and servers, a bucket as one frame.

*Pushes.* A worker keeps, for each bucket, the error of what it has sent (3LC, section 3.1), and encodes a gradient once
an iteration: what has to be sent again, as it did not arrive, is the same frame. A push that a server takes in late
or leaves out, as ``drop`` does, is gone as it would be without a codec; the error stays what it is.

*Pulls.* A worker is sent the change of a bucket since the values that it has (:mod:`gossipx.codecs.changes`; 3LC,
section 3, "model deltas"). Under bsp all have the same: one frame is made a clock, and a server keeps two copies of its
tables; where each worker has values of its own it keeps up to two a worker. Who has no base that the server knows, as
at first, or after another server has taken over, is given the values as they are.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossipx.codecs import Codec, State, Tensors, describe, encoder
from gossipx.codecs.feedback import ERROR, GATHERED, rescale
from gossipx.errors import UsageError
from gossipx.server.placement import Partition

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Coding:
    """The codecs of a run with servers.

    Attributes:
        push, pull: of gradients, and of tables; None: as they are.
        shapes: of all tables; empty: each is taken to be flat.
        norms: tables of normalisation layers, which codecs with ``small`` leave as they are.
        groups: for each table its parameter group in the optimizer.
        rescale: whether an error follows the learning rate.
        seed: of what is drawn.
    """

    push: Codec | None = None
    pull: Codec | None = None
    shapes: Sequence[tuple[int, ...]] = ()
    norms: frozenset[int] = frozenset()
    groups: Sequence[int] = ()
    rescale: bool = False
    seed: int = 0

    def tensors(self, partitions: Sequence[Partition], dtype: torch.dtype) -> Tensors:
        """Those of a bucket, side by side: tables as they are shaped, parts of tables flat."""
        shapes, starts, end = [], [], 0
        for one in partitions:
            count = one.stop - one.start
            shape = self.shapes[one.table] if self.shapes else (count,)
            shapes.append(shape if _size(shape) == count else (count,))
            starts.append(end)
            end += count
        plain = tuple(one.table in self.norms for one in partitions)
        return Tensors(tuple(shapes), dtype, tuple(starts), plain)


class PushEncoder:
    """A worker's side of one bucket's gradients.

    Args:
        coding: with a codec of pushes.
        partitions: of the bucket.
        values: its gradients, flat.
        seed: of what is drawn.

    Attributes:
        rates: by table, the learning rate that its error is of; where errors follow it.
    """

    def __init__(self, coding: Coding, partitions: Sequence[Partition], values: Tensor, seed: int):
        assert coding.push is not None
        self._coding, self._values = coding, values
        self.partitions = partitions
        self._encoder = encoder(coding.push)
        self.state: State = self._encoder.init(coding.tensors(partitions, values.dtype), seed)
        self._frame = np.empty(self._encoder.most(self.state), np.uint8)
        self.rates: dict[int, float] = {}

    def encode(self, settings: Sequence[Mapping[str, float]]) -> memoryview:
        """The frame of the gradients as they are now; good until the next.

        Args:
            settings: of the optimizer's parameter groups, that go with these gradients.
        """
        if self._coding.rescale:
            self._follow(settings)
        if _is_finite(self._values):
            frame, self.state = self._encoder.encode(self._values, self.state, self._frame)
        else:  # servers leave out the whole bucket, and nothing of the error is to go with it
            frame, _ = self._encoder.encode(self._values, self._encoder.init(self.state.tensors), self._frame)
        return frame

    def _follow(self, settings: Sequence[Mapping[str, float]]) -> None:
        """An error was made at a learning rate, and is to move the model by as much at another one."""
        error = self.state.kept.get(ERROR)
        start = 0
        for one in self.partitions:
            stop = start + one.stop - one.start
            group = self._coding.groups[one.table]
            rate = settings[group].get("lr", 0.0) if 0 <= group < len(settings) else 0.0
            before = self.rates.get(one.table, rate)
            if error is not None and rate > 0 and before != rate:
                rescale(error[start:stop], before / rate)
            if rate > 0:
                self.rates[one.table] = rate
            start = stop

    def kept(self) -> dict[str, list[tuple[Partition, Tensor]]]:
        """What is kept for each value, by partition."""
        return {
            name: list(zip(self.partitions, torch.split(vector, self._sizes), strict=True))
            for name, vector in self.state.kept.items()
            if len(vector) == sum(self._sizes) and vector.dim() == 1
        }

    @property
    def _sizes(self) -> list[int]:
        return [one.stop - one.start for one in self.partitions]

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; tensors are no copies."""
        return {
            "codec": self._name,
            "frames": self.state.frames,
            "kept": dict(self.state.kept),
            "rates": sorted(self.rates.items()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave. Of another codec's, what it has left out is taken alone.

        Raises:
            UsageError: it is of another bucket.
        """
        kept, own = state["kept"], self.state.kept
        if state["codec"] == self._name:
            pairs = [(kept[name], vector) for name, vector in own.items()]
            self.state.frames = state["frames"]
        else:
            left, here = _left_out(kept), _left_out(own)
            pairs = [] if left is None or here is None else [(left, here)]
            if here is None:
                tell_lost(state, self._name)
        if any(theirs.shape != ours.shape for theirs, ours in pairs):
            raise UsageError("an error is of another bucket: leave --placement and --bucket as they were")
        for theirs, ours in pairs:
            ours.copy_(theirs)
        self.rates = dict(state["rates"])

    @property
    def _name(self) -> str:
        assert self._coding.push is not None
        return describe(self._coding.push)


def tell_lost(state: dict[str, Any], name: str) -> None:
    """Pushes go on without what :meth:`PushEncoder.state_dict` gave, as the codec ``name`` has no use for it."""
    if _left_out(state["kept"]) is not None:
        log.warning("what %s has left out of gradients is lost: %s keeps nothing", state["codec"], name)


def _is_finite(values: Tensor) -> bool:
    return not len(values) or all(math.isfinite(end) for end in values.aminmax())


def _left_out(kept: Mapping[str, Tensor]) -> Tensor | None:
    """Of what a state keeps, what has been left out of frames until now."""
    return kept.get(ERROR, kept.get(GATHERED))


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) if shape else 1


@dataclass
class Redistribution:
    """What workers keep for each value of each table, on its way from one layout of buckets to another."""

    vectors: dict[str, dict[int, list[tuple[Partition, Tensor]]]] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    frames: int = 0  # that were made of a bucket

    def take(self, pushing: PushEncoder) -> None:
        """What one bucket has kept."""
        self.frames = max(self.frames, pushing.state.frames)
        self.rates |= pushing.rates
        for name, pieces in pushing.kept().items():
            for partition, vector in pieces:
                self.vectors.setdefault(name, {}).setdefault(partition.table, []).append((partition, vector))

    def give(self, pushing: PushEncoder) -> None:
        """What another bucket is to keep."""
        pushing.state.frames = self.frames
        pushing.rates = {one.table: self.rates[one.table] for one in pushing.partitions if one.table in self.rates}
        for name, pieces in pushing.kept().items():
            for wanted, vector in pieces:
                for had, kept in self.vectors.get(name, {}).get(wanted.table, []):
                    first, last = max(had.start, wanted.start), min(had.stop, wanted.stop)
                    if first < last:
                        vector[first - wanted.start : last - wanted.start] = kept[first - had.start : last - had.start]
