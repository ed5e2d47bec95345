"""The source of tables, and the codecs between workers and servers; each bucket is encoded as one frame.

*Pushes.* A worker keeps the error feedback of each bucket (3LC, section 3.1) and encodes a gradient once per iteration;
a retry sends the same frame. If a server drops a late push, as the sync model ``drop`` does, that gradient is lost as
it would be without a codec, and the error feedback stays as it is.

*Pulls.* A server sends the change of a bucket since the values that the worker has (:mod:`gossipx.codecs.changes`; 3LC,
section 3, "model deltas"). Under bsp all workers have the same values: the server encodes one frame per clock and keeps
two copies of its tables. Under other sync models it keeps up to two copies per worker. A worker whose base the server
does not know, as at the start or after a failover, receives the full values.
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
from gossipx.codecs.base import ERROR, GATHERED
from gossipx.errors import UsageError
from gossipx.protocol.fields import MAX_SETTING, Setting
from gossipx.server.placement import Partition
from gossipx.tables.parts import Storages

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Coding:
    """The codecs of a run with servers.

    Attributes:
        push: the codec of gradients; None: sent as they are.
        pull: the codec of tables; None: sent as they are.
        shapes: of all tables; empty: every table counts as flat.
        norms: tables of normalisation layers, which codecs with ``small`` do not compress.
        groups: each table's parameter group in the optimizer; -1: not trained.
        seed: of the codecs' random draws.
    """

    push: Codec | None = None
    pull: Codec | None = None
    shapes: Sequence[tuple[int, ...]] = ()
    norms: frozenset[int] = frozenset()
    groups: Sequence[int] = ()
    seed: int = 0

    def tensors(self, partitions: Sequence[Partition], dtype: torch.dtype) -> Tensors:
        """Return the tensors of a bucket, one after the other: whole tables in their shape, parts of tables flat."""
        shapes, starts, end = [], [], 0
        for one in partitions:
            count = one.stop - one.start
            shape = self.shapes[one.table] if self.shapes else (count,)
            shapes.append(shape if _elements_in(shape) == count else (count,))
            starts.append(end)
            end += count
        plain = tuple(one.table in self.norms for one in partitions)
        return Tensors(tuple(shapes), dtype, tuple(starts), plain)


Settings = tuple[dict[str, Setting], ...]
"""The numeric hyperparameters of an optimizer's parameter groups, one dict per group."""


@dataclass(frozen=True)
class TableSource:
    """The source of one peer's tables, those of its worker and those of the shards that it hosts.

    Attributes:
        parameters: the parameter of each table; their memory must not move.
        optimizer: the worker's. Its hyperparameters go with each push, and each shard makes one of the same class.
        storages: the classes that tables are built from.
        coding: the codecs of pushes and pulls.
    """

    parameters: Sequence[Tensor]
    optimizer: torch.optim.Optimizer
    storages: Storages
    coding: Coding


def group_settings(optimizer: torch.optim.Optimizer) -> Settings:
    """Return the optimizer's current numeric hyperparameters, such as a schedule's learning rate and betas."""
    return tuple(
        {name: value for name, given in group.items() if name != "params" and (value := _sendable(given)) is not None}
        for group in optimizer.param_groups
    )


def _sendable(value: object) -> Setting | None:
    """Return a hyperparameter as it is sent; None: it is not numeric."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, tuple | list) and 1 <= len(value) <= MAX_SETTING:
        numbers = [_sendable(one) for one in value]
        return tuple(one for one in numbers if isinstance(one, int | float)) if None not in numbers else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


class PushEncoder:
    """A worker's encoder of one bucket's gradients, with its error feedback.

    Args:
        coding: has a push codec.
        partitions: the bucket's.
        values: the bucket's gradients, flat.
        seed: of the codec's random draws.
    """

    def __init__(self, coding: Coding, partitions: Sequence[Partition], values: Tensor, seed: int):
        assert coding.push is not None
        self._codec, self._values = coding.push, values
        self.partitions = partitions
        self._encoder = encoder(coding.push)
        self.state: State = self._encoder.init(coding.tensors(partitions, values.dtype), seed)
        self._frame = np.empty(self._encoder.most(self.state), np.uint8)

    def encode(self) -> memoryview:
        """Return the frame of the current gradients; valid until the next call."""
        if _is_finite(self._values):
            frame, self.state = self._encoder.encode(self._values, self.state, self._frame)
        else:  # servers drop the whole bucket, so it must not consume the error feedback
            frame, _ = self._encoder.encode(self._values, self._encoder.init(self.state.tensors), self._frame)
        return frame

    def split_vectors(self) -> dict[str, list[tuple[Partition, Tensor]]]:
        """Return the vectors that the codec keeps per element, cut by partition."""
        return {
            name: list(zip(self.partitions, torch.split(vector, self._sizes), strict=True))
            for name, vector in self.state.kept.items()
            if len(vector) == sum(self._sizes) and vector.dim() == 1
        }

    @property
    def _sizes(self) -> list[int]:
        return [one.stop - one.start for one in self.partitions]

    def state_dict(self) -> dict[str, Any]:
        """Return the encoder's state for a checkpoint; tensors are not copies."""
        return {"codec": self._name, "frames": self.state.frames, "kept": dict(self.state.kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned. From another codec's state, only the error feedback is restored.

        Raises:
            UsageError: the state is of a bucket of another size.
        """
        kept, own = state["kept"], self.state.kept
        if state["codec"] == self._name:
            pairs = [(kept[name], vector) for name, vector in own.items()]
            self.state.frames = state["frames"]
        else:
            left, here = _error_of(kept), _error_of(own)
            pairs = [] if left is None or here is None else [(left, here)]
            if here is None:
                warn_error_lost(state, self._name)
        if any(theirs.shape != ours.shape for theirs, ours in pairs):
            raise UsageError(
                "the saved error feedback does not fit its bucket: keep --placement and --bucket as in the saved run"
            )
        for theirs, ours in pairs:
            ours.copy_(theirs)

    @property
    def _name(self) -> str:
        return describe(self._codec)


def warn_error_lost(state: dict[str, Any], name: str) -> None:
    """Warn that the codec ``name`` cannot use a saved error feedback, if there is one."""
    if _error_of(state["kept"]) is not None:
        log.warning("the error feedback of %s is lost: the codec %s has none", state["codec"], name)


def _is_finite(values: Tensor) -> bool:
    return not len(values) or all(math.isfinite(end) for end in values.aminmax())


def _error_of(kept: Mapping[str, Tensor]) -> Tensor | None:
    """Return the error feedback among the vectors that a codec keeps, or None."""
    return kept.get(ERROR, kept.get(GATHERED))


def _elements_in(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) if shape else 1


@dataclass
class Redistribution:
    """The push encoders' state of each element, on its way from one layout of buckets to another."""

    vectors: dict[str, dict[int, list[tuple[Partition, Tensor]]]] = field(default_factory=dict)
    frames: int = 0  # the most that any bucket has encoded

    def collect(self, pushing: PushEncoder) -> None:
        """Collect one old bucket's state."""
        self.frames = max(self.frames, pushing.state.frames)
        for name, pieces in pushing.split_vectors().items():
            for partition, vector in pieces:
                self.vectors.setdefault(name, {}).setdefault(partition.table, []).append((partition, vector))

    def fill(self, pushing: PushEncoder) -> None:
        """Fill one new bucket's state from what was collected."""
        pushing.state.frames = self.frames
        for name, pieces in pushing.split_vectors().items():
            for wanted, vector in pieces:
                for had, kept in self.vectors.get(name, {}).get(wanted.table, []):
                    first, last = max(had.start, wanted.start), min(had.stop, wanted.stop)
                    if first < last:
                        vector[first - wanted.start : last - wanted.start] = kept[first - had.start : last - had.start]
