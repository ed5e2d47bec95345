"""How gradients and tables are encoded between workers and servers, a bucket as one frame.

*Pushes.* A worker keeps, for each bucket, the error of what it has sent (3LC, section 3.1), and encodes a gradient once
an iteration: what has to be sent again, as it did not arrive, is the same frame. A push that a server takes in late
or leaves out, as ``drop`` does, is gone as it would be without a codec; the error stays what it is.

*Pulls.* A worker is sent the change of a bucket since the values that it has (3LC, section 3, "model deltas"), which
the server keeps until the worker tells, by their checksum, that it has others: its *base*. All workers with the same
base are given the same frame (section 3, "shared compression"): under bsp one is made a clock, and a server keeps two
copies of its tables; where each worker has values of its own it keeps up to two a worker. What a frame leaves out is in
the next change: that is the error of this direction. A codec without error feedback is given the change of the values
as they were and are: what it leaves out is gone, on average nothing. Who has no base that the server knows, as at
first, or after another server has taken over, is given the values as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from gossipx.codecs import Codec, State, Tensors, decode_into, encoder, feedback
from gossipx.errors import UsageError
from gossipx.memory import Source
from gossipx.server.placement import Partition

FULL = 0
"""The base of values as they are."""


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

    def most(self, codec: Codec, tensors: Tensors) -> int:
        """Bytes of a frame at most; a squeezed one may be larger than it was by little."""
        most = codec.most(codec.init(tensors))
        return most + most // 64 + 1024


class Pushing:
    """A worker's side of one bucket's gradients.

    Args:
        coding: with a codec of pushes.
        partitions: of the bucket.
        values: its gradients, flat.
        seed: of what is drawn.
    """

    def __init__(self, coding: Coding, partitions: Sequence[Partition], values: Tensor, seed: int):
        assert coding.push is not None
        self._coding, self._values = coding, values
        self._partitions = partitions
        self._encoder = encoder(coding.push)
        self.state: State = self._encoder.init(coding.tensors(partitions, values.dtype), seed)
        self._frame = np.empty(self._encoder.most(self.state), np.uint8)
        self._rates: dict[int, float] = {}  # by table, that its error is of

    def encode(self, settings: Sequence[Mapping[str, float]]) -> memoryview:
        """The frame of the gradients as they are now; good until the next.

        Args:
            settings: of the optimizer's parameter groups, that go with these gradients.
        """
        if self._coding.rescale:
            self._follow(settings)
        frame, self.state = self._encoder.encode(self._values, self.state, self._frame)
        return frame

    def _follow(self, settings: Sequence[Mapping[str, float]]) -> None:
        """An error was made at a learning rate, and is to move the model by as much at another one."""
        error = self.state.kept.get(feedback.ERROR)
        start = 0
        for one in self._partitions:
            stop = start + one.stop - one.start
            group = self._coding.groups[one.table]
            rate = settings[group].get("lr", 0.0) if 0 <= group < len(settings) else 0.0
            before = self._rates.get(one.table, rate)
            if error is not None and rate > 0 and before != rate:
                feedback.rescale(error[start:stop], before / rate)
            if rate > 0:
                self._rates[one.table] = rate
            start = stop

    def kept(self) -> dict[str, list[tuple[Partition, Tensor]]]:
        """What is kept for each value, by partition."""
        return {
            name: list(zip(self._partitions, torch.split(vector, self._sizes), strict=True))
            for name, vector in self.state.kept.items()
            if len(vector) == sum(self._sizes) and vector.dim() == 1
        }

    @property
    def _sizes(self) -> list[int]:
        return [one.stop - one.start for one in self._partitions]

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; tensors are no copies."""
        return {"frames": self.state.frames, "kept": dict(self.state.kept), "rates": sorted(self._rates.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave. Of another codec's, the error alone is taken.

        Raises:
            UsageError: it is of another bucket.
        """
        own = self.state.kept
        if any(name in own and vector.shape != own[name].shape for name, vector in state["kept"].items()):
            raise UsageError("an error is of another bucket: leave --placement and --bucket as they were")
        for name, vector in state["kept"].items():
            if name in own:
                own[name].copy_(vector)
        self.state.frames = state["frames"]
        self._rates = dict(state["rates"])


@dataclass
class Frame:
    """A change of a bucket, shared by all who have the same base.

    Attributes:
        version: of the bucket that it was made of.
        source: as it is sent.
        check: of the values that it leads to.
    """

    version: int
    source: Source
    check: int


@dataclass
class Base:
    """Values that workers have.

    Attributes:
        values: flat.
        meant: what the next change is from: the same, or without error feedback what they were to be.
        change: the last that was made from here.
    """

    values: Tensor
    meant: Tensor
    change: Frame | None = None


class Pulling:
    """A server's side of one bucket's values.

    Args:
        coding: with a codec of pulls.
        tensors: of the bucket.
        seed: of what is drawn.
    """

    def __init__(self, coding: Coding, tensors: Tensors, seed: int):
        assert coding.pull is not None
        self._codec = coding.pull
        self._state = self._codec.init(tensors, seed)
        self._room = np.empty(self._codec.most(self._state), np.uint8)
        self._bases: dict[int, Base] = {}  # by their checksums
        self._held: dict[int, set[int]] = {}  # by worker: what it has, and what it was sent

    def frame(self, worker: int, base: int, version: int, values: Tensor) -> Frame | None:
        """What leads a worker to a bucket's values, as near as the codec comes.

        Args:
            base: checksum of what it has.
            version: of the values.

        Returns:
            None: the base is not known here; the worker is to be given the values as they are.
        """
        known = self._bases.get(base)
        if known is None:
            check = checksum(values)
            if check not in self._bases:
                self._add(check, values.clone(), values)
            self._hold(worker, {check})
            return None
        change = known.change
        if change is None or change.version != version:
            frame, self._state = self._codec.encode(values - known.meant, self._state, self._room)
            kept = memoryview(bytes(frame))  # of room for the longest frame, which most are far from
            moved = self._moved(known, kept)
            change = known.change = Frame(version, Source(kept), checksum(moved))
            if change.check not in self._bases:  # it is what it is from where nothing was sent
                self._add(change.check, moved, values)
        elif change.check not in self._bases:  # nobody has had it meanwhile
            self._add(change.check, self._moved(known, change.source.view), values)
        self._hold(worker, {base, change.check})
        return change

    def _moved(self, base: Base, frame: memoryview) -> Tensor:
        moved = base.values.clone()
        decode_into(frame, moved, add=True, tensors=self._state.tensors)
        return moved

    def _add(self, check: int, values: Tensor, meant: Tensor) -> None:
        self._bases[check] = Base(values, values if self._codec.feedback else meant.clone())

    def _hold(self, worker: int, checks: set[int]) -> None:
        """Keep what this worker may have next, and drop what nobody has."""
        self._held[worker] = checks
        wanted = set().union(*self._held.values())
        self._bases = {check: base for check, base in self._bases.items() if check in wanted}


def checksum(values: Tensor) -> int:
    """Of the bytes of a flat tensor, as messages have it; never :data:`FULL`."""
    digest = xxhash.xxh3_64_intdigest(values.view(torch.uint8).numpy().data) if values.numel() else 0
    return digest >> 1 or 1


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) if shape else 1


@dataclass
class Spread:
    """What workers keep for each value of each table, on its way from one layout of buckets to another."""

    vectors: dict[str, dict[int, list[tuple[Partition, Tensor]]]] = field(default_factory=dict)

    def take(self, pushing: Pushing) -> None:
        """What one bucket has kept."""
        for name, pieces in pushing.kept().items():
            for partition, vector in pieces:
                self.vectors.setdefault(name, {}).setdefault(partition.table, []).append((partition, vector))

    def give(self, pushing: Pushing) -> None:
        """What another bucket is to keep."""
        for name, pieces in pushing.kept().items():
            for wanted, vector in pieces:
                for had, kept in self.vectors.get(name, {}).get(wanted.table, []):
                    first, last = max(had.start, wanted.start), min(had.stop, wanted.stop)
                    if first < last:
                        vector[first - wanted.start : last - wanted.start] = kept[first - had.start : last - had.start]
