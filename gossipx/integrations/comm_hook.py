"""A codec as a DDP communication hook: each rank sends encoded gradients, with error feedback, and all average them.

DDP moves parameters between its buckets after the first iteration. What a codec keeps therefore belongs to parameters,
not to buckets. Frames differ in length, so ranks gather their lengths first, and then frames padded to the longest.
"""

# Without "from __future__ import annotations": DDP compares the hook's annotations with types.

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gossipx import codecs
from gossipx.codecs import Codec, State, Tensors, decode_into
from gossipx.codecs.frames import Array
from gossipx.errors import UsageError

GradBucket: TypeAlias = dist.GradBucket  # type: ignore[attr-defined,name-defined]  # torch lists it nowhere
Future: TypeAlias = torch.futures.Future[Tensor]
Kept: TypeAlias = dict[str, Tensor]
"""The vectors that a codec keeps for one parameter, such as its accumulated error, flat, by name."""
_LENGTH = 8
"""Bytes of a frame's length."""


def hook(
    codec: str | Codec, process_group: dist.ProcessGroup | None = None
) -> tuple["HookState", Callable[..., Future]]:
    """Return state and function for DDP, as in ``model.register_comm_hook(*hook("3lc:1.75"))``. All ranks call it.

    Args:
        codec: the spec of a codec, or a codec.
        process_group: that of the DDP model, the same on all ranks; None: the default group.

    Raises:
        UsageError: a wrong spec, a codec that encodes models only, or one that needs error feedback and has none.
    """
    parsed = codecs.parse(codec)
    name = codecs.describe(parsed)
    if parsed.near:
        raise UsageError(f"codec '{name}' encodes models only, not gradients: use another one, such as 3lc:1.75")
    default = next(field.default for field in fields(parsed) if field.name == "feedback")
    if default and not parsed.feedback and not parsed.alone:
        raise UsageError(f"codec '{name}' loses part of each gradient without error feedback: leave out feedback=false")
    return HookState(parsed, process_group), average_encoded


def average_encoded(state: "HookState", bucket: GradBucket) -> Future:
    """Average a bucket's gradients over all ranks; the hook that :func:`hook` returns.

    A gradient that is not finite becomes NaN on all ranks, and leaves the error feedback of its bucket as it was on the
    rank that has it.

    Returns:
        The bucket's buffer with the average, the same bits on all ranks.
    """
    buffer = bucket.buffer()
    tensors, frame = state.encode(bucket)
    group = state.process_group or dist.group.WORLD
    size = dist.get_world_size(group)
    # A group of NCCL alone takes no tensors in host memory, where frames are.
    device = torch.device("cpu") if "cpu:" in dist.get_backend_config(group) else buffer.device

    lengths = torch.zeros(size, dtype=torch.int64, device=device)
    dist.all_gather(list(torch.split(lengths, 1)), torch.tensor([len(frame)], device=device), group=group)
    ends = lengths.tolist()
    padded = torch.zeros(max(ends), dtype=torch.uint8)
    padded[: len(frame)] = torch.frombuffer(frame, dtype=torch.uint8)
    gathered = torch.empty(size, len(padded), dtype=torch.uint8, device=device)
    work = dist.all_gather(list(gathered), padded.to(device), group=group, async_op=True)
    state.bytes_sent += (size - 1) * (_LENGTH + len(padded))

    def average(done: torch.futures.Future[Any]) -> Tensor:
        done.wait()
        total = torch.zeros(len(buffer), dtype=torch.promote_types(buffer.dtype, torch.float32), device=buffer.device)
        for row, end in zip(gathered.cpu().numpy(), ends, strict=True):
            decode_into(row[:end], total, add=True, tensors=tensors)
        return cast(Tensor, buffer.copy_(total.div_(size)))

    return cast(Future, work.get_future().then(average))


@dataclass
class _Bucket:
    """The codec's state of a bucket of DDP.

    Attributes:
        numbers: of its parameters, in order.
        state: of the codec; what it keeps of each element is a flat vector as long as the bucket.
        frame: memory for a frame.
    """

    numbers: list[int]
    state: State
    frame: Array

    def split(self) -> dict[int, Kept]:
        """Return views of what the codec keeps of each parameter, by number."""
        counts, length = self.state.tensors.counts, self.state.tensors.length
        parts: dict[int, Kept] = {number: {} for number in self.numbers}
        for name, vector in self.state.kept.items():
            if vector.shape == (length,):
                for number, part in zip(self.numbers, torch.split(vector, list(counts)), strict=True):
                    parts[number][name] = part
        return parts


class HookState:
    """The state of a communication hook on one rank.

    Attributes:
        codec: encodes the gradients.
        process_group: that of the DDP model; None: the default group.
        bytes_sent: bytes that this rank has sent to the other ranks so far, lengths and padding included.
    """

    def __init__(self, codec: Codec, process_group: dist.ProcessGroup | None):
        self.codec, self.process_group = codec, process_group
        self.bytes_sent = 0
        self._encoder = codecs.encoder(codec)
        self._numbers: dict[Tensor, int] = {}  # of the parameters, in the order of the first iteration
        self._sizes: list[list[int]] = []  # elements of each parameter, by bucket of the first iteration
        self._saved_sizes: list[list[int]] | None = None
        self._buckets: dict[int, _Bucket] = {}
        self._unassigned: dict[int, Kept] = {}  # of parameters whose bucket has changed, or that were loaded
        self._frames = 0

    def encode(self, bucket: GradBucket) -> tuple[Tensors, memoryview]:
        """Encode a bucket's gradients; return their layout, and the frame, which is valid until the next call.

        Raises:
            UsageError: the codec cannot encode such gradients, or the loaded state is of other parameters.
        """
        buffer = bucket.buffer()
        if buffer.layout != torch.strided:
            raise UsageError("codecs do not encode sparse gradients: use nn.Embedding with sparse=False")
        numbers = self._numbered(bucket.parameters())
        known = self._buckets.get(bucket.index())
        if known is None or known.numbers != numbers:
            known = self._rebuilt(bucket, numbers)
        state = known.state
        if not bool(buffer.isfinite().all()):  # a step with it is skipped, so it must not consume the error feedback
            state = self._encoder.init(state.tensors, device=buffer.device)
            known.state.frames += 1  # as on the other ranks
        frame, _ = self._encoder.encode(buffer, state, known.frame)
        return known.state.tensors, frame

    def _numbered(self, parameters: Sequence[Tensor]) -> list[int]:
        """Return the parameters' numbers; new ones get the next numbers."""
        new = [parameter for parameter in parameters if parameter not in self._numbers]
        if new:
            self._numbers |= {parameter: number for number, parameter in enumerate(new, len(self._numbers))}
            self._sizes.append([parameter.numel() for parameter in new])
            self._check_sizes()
        return [self._numbers[parameter] for parameter in parameters]

    def _check_sizes(self) -> None:
        if self._saved_sizes is not None and self._saved_sizes[: len(self._sizes)] != self._sizes:
            raise UsageError(
                "the hook's saved state is of other parameters, or of other buckets: keep the model and bucket_cap_mb"
            )

    def _rebuilt(self, bucket: GradBucket, numbers: list[int]) -> _Bucket:
        """Return a new state for a bucket, with what was kept of its parameters."""
        for index, one in list(self._buckets.items()):
            if index == bucket.index() or not set(numbers).isdisjoint(one.numbers):
                self._frames = max(self._frames, one.state.frames)
                self._unassigned |= one.split()
                del self._buckets[index]
        tensors = Tensors.of(*bucket.gradients())
        seed = dist.get_rank(self.process_group) << 32 | bucket.index()
        state = self._encoder.init(tensors, seed, bucket.buffer().device)
        state.frames = self._frames
        made = _Bucket(numbers, state, np.empty(self._encoder.most(state), np.uint8))
        for number, parts in made.split().items():
            for name, kept in self._unassigned.pop(number, {}).items():
                parts[name].copy_(kept)
        self._buckets[bucket.index()] = made
        return made

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for a checkpoint; ranks differ, so each saves its own."""
        kept = dict(self._unassigned)
        for one in self._buckets.values():
            kept |= one.split()
        return {
            "codec": codecs.describe(self.codec),
            "rank": dist.get_rank(self.process_group),
            "world_size": dist.get_world_size(self.process_group),
            "sizes": [list(sizes) for sizes in self._sizes or self._saved_sizes or []],
            "frames": max([self._frames, *(one.state.frames for one in self._buckets.values())]),
            "bytes_sent": self.bytes_sent,
            "kept": {number: {name: part.clone() for name, part in parts.items()} for number, parts in kept.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned on the same rank, before or during training.

        Raises:
            UsageError: the state is of another codec, rank or number of ranks, or, here or at the next backward pass,
                of other parameters.
        """
        rank, size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        if state["codec"] != (name := codecs.describe(self.codec)):
            raise UsageError(f"the hook's saved state is of codec '{state['codec']}', this hook has '{name}'")
        if (state["rank"], state["world_size"]) != (rank, size):
            raise UsageError(
                f"the hook's saved state is of rank {state['rank']} of {state['world_size']}, this is rank {rank} of "
                f"{size}: save and load one state per rank"
            )
        self._saved_sizes = [list(sizes) for sizes in state["sizes"]]
        self._check_sizes()
        self._buckets.clear()
        self._unassigned = {number: dict(parts) for number, parts in state["kept"].items()}
        self._frames, self.bytes_sent = state["frames"], state["bytes_sent"]
