"""``topk`` and ``dgc``, which send few of the values, as float32, and their indices."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor

from gossipx.codecs import packing
from gossipx.codecs.base import GATHERED, Compiled, FramePlan, PerTensor, State, floats, norm, scattered
from gossipx.codecs.frames import Array, unpack_numbers

VELOCITY = "velocity"
"""Key of the accumulated momentum in ``State.kept``."""
_SAMPLE = 1024
"""Least number of sampled values: the number of values above a threshold for 1 % then errs by about a third."""
_SAMPLING_GAIN = 5
"""Sampling is faster than reading all values only if there are more than this many times as many."""


class _Sparse(Compiled, PerTensor):
    """Base class of sparse codecs.

    Frame layout per tensor: the number of sent values (8 bytes), their indices (a bit mask or packed numbers, whichever
    is smaller), and the values.
    """

    meant: ClassVar[str] = "a sparse tensor"

    def _most(self, count: int, shape: tuple[int, ...]) -> int:
        return 8 + packing.bits_bytes(count, 1) + 4 * count

    @staticmethod
    def _encode_at(values: Tensor, places: Tensor) -> Sequence[Tensor | bytes]:
        """Encode the values at ``places``, which ascend."""
        sent, count = len(places), len(values)
        if _has_packed_indices(sent, count):
            where = packing.pack_bits(places, _index_bits(count))
        else:
            marks = torch.zeros(count, dtype=torch.int64, device=values.device)
            marks[places] = 1
            where = packing.pack_bits(marks, 1)
        return struct.pack("<Q", sent), where, values[places]

    @classmethod
    def _values(cls, data: Array, shape: tuple[int, ...], count: int, device: torch.device) -> Tensor:
        """Decode one tensor that :meth:`_read` has checked or that this peer encoded."""
        (sent,) = unpack_numbers("<Q", data)
        end = len(data) - 4 * sent
        where = torch.from_numpy(data[8:end].copy()).to(device)
        if _has_packed_indices(sent, count):
            places = packing.unpack_bits(where, sent, _index_bits(count))
        else:
            places = packing.unpack_bits(where, count, 1).nonzero().view(-1)
        values = floats(data[end:], device)
        return scattered(count, places, values)

    @classmethod
    def _loops(cls) -> tuple[Callable[..., int], Callable[..., None]]:
        return compiled().sparse_fits, compiled().sparse_into

    @classmethod
    def _write_one(cls, data: Array, out: Tensor, add: bool) -> None:
        values = cls._values(data, (len(out),), len(out), out.device)
        out.add_(values) if add else out.copy_(values)


@final
@dataclass(frozen=True)
class TopK(_Sparse):
    """``topk``: the values of the largest magnitude (3LC, section 4.2, "sparsification").

    Attributes:
        ratio: fraction of the values that is sent; at least one value is.
        sample: fraction of the values that the threshold is estimated from, which is faster, but sends slightly more or
            fewer than ``ratio``. At least 1024 values are sampled, and small tensors are read whole. 0: read all values
            and send exactly ``ratio`` of them.
    """

    ratio: float = 0.01
    sample: float = 0.0
    number: ClassVar[int] = 12

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio(self.ratio)
        if not 0 <= self.sample <= 1:
            raise ValueError("sample is a fraction of the values, from 0 to 1")

    def _encode(
        self, x: Tensor, error: Tensor | None, state: State, plan: FramePlan, frame: Array, end: int, sizes: Array
    ) -> int:
        if not x.is_cpu:
            return super()._encode(x, error, state, plan, frame, end, sizes)
        counts, sampled = plan.counts, plan.counts
        if self.sample:
            drawn = np.maximum(_SAMPLE, np.rint(self.sample * counts)).astype(np.int64)
            sampled = np.where(counts > _SAMPLING_GAIN * drawn, drawn, counts)
        wanted = np.clip(np.rint(self.ratio * sampled), 1, np.maximum(sampled, 1)).astype(np.int64)
        key = np.uint64(state.draws(torch.device("cpu")).initial_seed())
        host = x.numpy(), None if error is None else error.numpy()
        if plan.workspace is None:
            plan.workspace = compiled().allocate_workspace(counts, sampled)
        selection = plan.starts, counts, wanted, sampled, key
        return int(compiled().largest(*host, *selection, plan.workspace, frame, end, sizes))

    def _bytes(self, values: Tensor, shape: tuple[int, ...], state: State, index: int) -> Sequence[Tensor | bytes]:
        if not self.sample:
            wanted = count_of(self.ratio, len(values))
            return self._encode_at(values, values.abs().topk(wanted, sorted=False).indices.sort().values)
        threshold = sampled_threshold(values, self.ratio, self.sample, state.draws(values.device, index))
        return self._encode_at(values, (values.abs() >= threshold).nonzero().view(-1))


@final
@dataclass(frozen=True)
class DGC(_Sparse):
    """``dgc``: the largest accumulated gradients, with momentum correction (Deep Gradient Compression, Algorithm 4).

    The codec corrects and masks momentum, and accumulates unsent values itself. So the server's optimizer must have no
    momentum, and the codec takes no error feedback. It encodes gradients only.

    Attributes:
        ratio: fraction of the values that is sent.
        momentum: m, momentum of the gradients; 0: none.
        clip: largest norm of a tensor before it is accumulated; 0: no limit. Use the limit for a batch of all workers,
            divided by the square root of their number (section 3.3).
        warmup: number of frames in which the ratio falls to its value, by a factor of ¼ four times (section 3.3).
        sample: fraction of the values that the threshold is estimated from, see :class:`TopK`.
    """

    ratio: float = 0.001
    momentum: float = 0.9
    clip: float = 0.0
    warmup: int = 0
    sample: float = 0.01
    feedback: bool = field(default=False, kw_only=True)
    number: ClassVar[int] = 15
    gradients_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio(self.ratio)
        if self.feedback:
            raise ValueError("dgc accumulates unsent values itself: feedback=true would count them twice")
        if not 0 <= self.momentum < 1:
            raise ValueError("momentum must be at least 0 and below 1")
        if not (self.clip >= 0 and math.isfinite(self.clip)) or self.warmup < 0:
            raise ValueError("clip is a norm, a finite number of at least 0, and warmup counts frames from 0")
        if not 0 <= self.sample <= 1:
            raise ValueError("sample is a fraction of the values, from 0 to 1")

    def _begin(self, state: State, device: torch.device) -> None:
        for name in (VELOCITY, GATHERED):
            state.kept[name] = torch.zeros(state.tensors.length, dtype=torch.float32, device=device)

    def _bytes(self, values: Tensor, shape: tuple[int, ...], state: State, index: int) -> Sequence[Tensor | bytes]:
        assert state.plan is not None
        start = int(state.plan.starts[index])
        velocity, gathered = (state.kept[name][start : start + len(values)] for name in (VELOCITY, GATHERED))
        if self.clip:
            values = values * min(1.0, self.clip / max(norm(values), 1e-30))
        moving = self.momentum * velocity + values
        summed = gathered + moving
        if not bool((moving.isfinite() & summed.isfinite()).all()):
            return ()
        velocity.copy_(moving)
        gathered.copy_(summed)
        ratio = self.ratio
        if state.frames < self.warmup:
            ratio = max(ratio, 0.25 ** (1 + 4 * state.frames // self.warmup))
        draws = state.draws(values.device, index)
        threshold = sampled_threshold(gathered, ratio, self.sample, draws)
        places = (gathered.abs() >= threshold).nonzero().view(-1)
        sent = self._encode_at(gathered, places)
        velocity[places] = 0
        gathered[places] = 0
        return sent


def compiled() -> Any:
    """Return :mod:`gossipx.codecs.loops_sparse`, imported on demand, since numba takes a second and 100 MB."""
    from gossipx.codecs import loops_sparse

    return loops_sparse


def sampled_threshold(values: Tensor, ratio: float, sample: float, draws: torch.Generator) -> float:
    """Estimate the magnitude that about ``ratio`` of the values reach; at least the smallest positive float32.

    Args:
        sample: fraction of the values to sample; 0: read all.
    """
    sampled = min(len(values), max(_SAMPLE, round(sample * len(values)))) if sample else len(values)
    magnitudes = values.abs()
    if sampled < len(values):
        magnitudes = magnitudes[torch.randint(len(values), (sampled,), generator=draws, device=values.device)]
    threshold = float(magnitudes.topk(count_of(ratio, sampled), sorted=False).values.min())
    return max(threshold, 2.0**-149)


def count_of(ratio: float, count: int) -> int:
    """Return how many of ``count`` values a ratio selects, at least one."""
    return max(1, min(count, round(ratio * count)))


def _index_bits(count: int) -> int:
    return max(1, (count - 1).bit_length())


def _has_packed_indices(sent: int, count: int) -> bool:
    """Return whether ``sent`` packed indices take fewer bytes than a bit mask of all values."""
    return packing.bits_bytes(sent, _index_bits(count)) < packing.bits_bytes(count, 1)


def check_ratio(ratio: float) -> None:
    """Raise ValueError if a ratio is not a fraction of values."""
    if not 0 < ratio <= 1:
        raise ValueError("ratio is a fraction of the values, above 0 and at most 1")
