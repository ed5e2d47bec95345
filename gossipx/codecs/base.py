"""The base classes of codecs: immutable values that encode tensors into frames, with explicit, plain state.

The interface is ``init(tensor) -> state`` and ``encode(tensor, state) -> (frame, state)``. The functions
``decode(frame)`` and ``decode_into(frame, out)``, which overwrites or adds, decode frames of every codec. Frames are
self-describing, so decoding needs no state. Codecs work on float32 values; other floating-point types are converted to
float32 and back.

A tensor with a non-finite value, or whose scale overflows, has no encoding. It decodes to NaN everywhere, so the
receiver notices the fault as it would without a codec. Its accumulated error stays unchanged.

:class:`PerTensor` encodes one tensor at a time with torch. The other codecs, such as ``3lc``, are :class:`Compiled`:
they encode all tensors of a vector in one loop, which is faster on a CPU. :class:`ErrorFeedback` adds the encoding
error of one frame to the input of the next (3LC, section 3.1, "error accumulation"), so that no part of a gradient is
lost, only delayed.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor

from gossipx.codecs.frames import (
    LIMIT,
    SQUEEZERS,
    Array,
    Buffer,
    Contents,
    OpenedFrame,
    Tensors,
    head,
    open_frame,
    seal,
    squeeze,
    unpack_numbers,
    width,
)
from gossipx.codecs.packing import as_bytes
from gossipx.errors import ProtocolError, UsageError
from gossipx.specs import NOT_A_KEY
from gossipx.specs.codecs import RETIRED_NUMBERS, retired


@dataclass
class FramePlan:
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
    plan: FramePlan | None = field(default=None, repr=False, compare=False)  # derived from the above, on demand

    def draws(self, device: torch.device, index: int = 0) -> torch.Generator:
        """Return a random generator for one tensor of the current frame, by its index."""
        seeds = np.random.SeedSequence((self.seed, self.frames, index)).generate_state(1, np.uint64)
        return torch.Generator(device).manual_seed(int(seeds[0] >> np.uint64(1)))


KINDS: dict[int, type[Codec]] = {}
"""All codec classes, by the number that identifies them in frames."""


@dataclass(frozen=True)
class Codec(abc.ABC):
    """An encoding of tensors.

    Attributes:
        small: tensors with fewer elements, and those of normalisation layers, are sent unencoded; 0: all are encoded.
        feedback: whether links that send changes add error feedback; unbiased codecs default to False.
        squeezed: general-purpose compressor of the frame's body, ``zlib`` or ``zstd``, written ``+zlib`` or ``+zstd``
            in a spec; empty: none.
        number: identifies the codec in frames; 128 to 255 are reserved for custom codecs.
        gradients_only: whether it encodes gradients only, and no changes of a model.
        alone: whether it is precise enough to encode a model itself, not only its changes.
        needs_numba: whether it uses loops that numba compiles.
    """

    small: int = field(default=0, kw_only=True)
    feedback: bool = field(default=True, kw_only=True)
    squeezed: str = field(default="", kw_only=True, metadata=NOT_A_KEY)
    number: ClassVar[int]
    gradients_only: ClassVar[bool] = False
    alone: ClassVar[bool] = False
    needs_numba: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        number = cls.__dict__.get("number")
        if number is None:
            return
        if number in RETIRED_NUMBERS:
            raise ValueError(f"codec number {number} was that of '{RETIRED_NUMBERS[number]}' and is not given again")
        known = KINDS.setdefault(number, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"codec number {number} is already taken by {known.__qualname__}")
        KINDS[number] = cls  # dataclasses with slots, and reloaded modules, define the same class twice

    def __post_init__(self) -> None:
        if self.small < 0:
            raise ValueError("small must be a number of elements, 0 or more")
        if self.squeezed not in SQUEEZERS:
            raise ValueError(f"squeezed is one of {', '.join(SQUEEZERS[1:])}, or nothing")

    def init(self, tensor: Tensor | Tensors, seed: int = 0, device: torch.device | None = None) -> State:
        """Return the state before the first frame.

        Args:
            tensor: an example of the tensors to encode, or a description of several tensors in one vector.
            seed: seeds the random draws.
            device: where the vector is that is described; None: in host memory. That of an example is known.
        """
        tensors = tensor if isinstance(tensor, Tensors) else Tensors.of(tensor)
        self._planned(state := State(tensors, seed))
        self._begin(state, device_of(tensor, device))
        return state

    def most(self, state: State) -> int:
        """Return the size of the longest possible frame in bytes, the least size of ``out`` in :meth:`encode`."""
        return self._planned(state).max_bytes

    def longest(self, tensors: Tensors) -> int:
        """Return an upper bound in bytes for a frame of such tensors from another peer.

        That peer may list shapes differently, and a compressor may lengthen its input a little.
        """
        max_bytes = self._planned(State(tensors)).max_bytes
        return max_bytes + max_bytes // 64 + 1024

    def in_feedback(self) -> Codec:
        """Return a copy of this codec for use with error feedback."""
        return dataclasses.replace(self, feedback=True)

    def encode(
        self, tensor: Tensor, state: State, out: Array | None = None, left: Tensor | None = None
    ) -> tuple[memoryview, State]:
        """Return a frame of a tensor's current values, and the next state.

        Args:
            tensor: has the shape and dtype that the state was made for, or is a vector that holds all its tensors.
            out: uint8 buffer of at least :meth:`most` bytes for the frame; None: allocate. A compressed frame is always
                allocated.
            left: the accumulated error, what earlier frames left out: added to the tensor first, and overwritten by
                the error of this frame. A float32 vector as long as that of the tensors, on their device.

        Raises:
            UsageError: the tensor does not match the state, another codec made the state, or ``out`` or ``left`` has a
                wrong size or dtype.
        """
        plan = self._planned(state)
        vector = _vector(tensor, state.tensors)
        _check_buffers(out, plan.max_bytes, left, state.tensors)
        frame = np.empty(plan.max_bytes, np.uint8) if out is None else out
        begin = len(plan.head)
        frame[:begin] = np.frombuffer(plan.head, np.uint8)
        sizes = np.zeros(len(plan.counts), np.int64)
        end = table = begin + len(sizes) * plan.size_width
        if len(sizes):
            end = self._encode(vector.float(), left, state, plan, frame, end, sizes)
            frame[begin:table] = sizes.astype(f"<u{plan.size_width}").view(np.uint8)
        for index in plan.contents.plain_indices:
            end = _put_plain(vector, left, state.tensors, index, frame, end)
        frame = frame[:end]
        if self.squeezed:
            frame = squeeze(self.squeezed, frame, begin)
        seal(frame)
        state.frames += 1
        return frame.data, state

    def _begin(self, state: State, device: torch.device) -> None:  # noqa: B027 (most codecs are stateless)
        """Add the codec's own vectors to a new state."""

    def _planned(self, state: State) -> FramePlan:
        if state.plan is None:
            tensors = state.tensors
            contents = Contents(tensors, self._plain(tensors))
            shapes = [tensors.shapes[index] for index in contents.encoded]
            bounds = [self._most(count, shape) for count, shape in zip(contents.counts.tolist(), shapes, strict=True)]
            largest = max(bounds, default=0)
            size_width, begin = width(largest), head(self.number, tensors, contents.plain, largest, self.squeezed)
            max_bytes = len(begin) + len(bounds) * size_width + sum(bounds) + contents.plain_bytes
            starts = np.array(tensors.starts, np.int64)[contents.encoded]
            state.plan = FramePlan(self, contents, bytes(begin), max_bytes, size_width, starts, contents.counts, shapes)
        elif state.plan.codec is not self and state.plan.codec != self:
            raise UsageError(f"the state was made by {state.plan.codec}, it cannot be used with {self}")
        return state.plan

    def _plain(self, tensors: Tensors) -> tuple[bool, ...]:
        """Return for each tensor whether it is sent unencoded."""
        if not tensors.dtype.is_floating_point:
            raise UsageError(f"this codec encodes floating-point tensors, not {tensors.dtype}: use 'none' for these")
        return tensors.are_plain(self.small)

    @abc.abstractmethod
    def _most(self, count: int, shape: tuple[int, ...]) -> int:
        """Return an upper bound for the bytes of an encoded tensor, scratch space of the encoder included."""

    @abc.abstractmethod
    def _encode(
        self, x: Tensor, error: Tensor | None, state: State, plan: FramePlan, frame: Array, end: int, sizes: Array
    ) -> int:
        """Encode the plan's tensors into ``frame[end:]`` and return the new end.

        Args:
            error: the accumulated error, as ``left`` of :meth:`encode`.
            sizes: output: the bytes that each tensor takes; 0: it is empty or not finite.
        """

    @classmethod
    @abc.abstractmethod
    def _read(cls, opened: OpenedFrame) -> Any:
        """Check all encoded tensors of a frame and return what :meth:`_write` needs to decode them.

        This is the only check between bytes from a peer and compiled loops without bounds checks.

        Raises:
            ProtocolError: a tensor is malformed.
        """

    @classmethod
    @abc.abstractmethod
    def _write(cls, opened: OpenedFrame, read: Any, out: Tensor, starts: Array, add: bool) -> None:
        """Decode the encoded tensors into a float32 vector, each at its entry of ``starts``; skip those of size 0."""


def decode(frame: Buffer, limit: int = LIMIT) -> Tensor:
    """Return the tensor in a frame of any codec; of several tensors, the vector that holds them all.

    Args:
        limit: most bytes that the result may take.

    Raises:
        ProtocolError: the frame is malformed or damaged, or its tensors take more than ``limit`` bytes.
    """
    opened = open_frame(frame, limit)
    tensors = opened.contents.tensors
    read = _kind(opened)._read(opened)
    try:
        out = torch.empty(tensors.shapes[0] if tensors.single else (tensors.length,), dtype=tensors.dtype)
    except RuntimeError as error:  # no elements, but a dimension too large for torch
        raise ProtocolError(f"a codec's frame has a shape that torch refuses: {error}") from error
    _decode(opened, read, out.view(-1), np.array(tensors.starts, np.int64), False)
    return out


def decode_into(frame: Buffer, out: Tensor, *, add: bool = False, tensors: Tensors | None = None) -> None:
    """Decode a frame of any codec into ``out``. On error, ``out`` stays unchanged.

    Args:
        out: a tensor of the shape in the frame, or a vector.
        add: add to the values in ``out`` rather than overwrite them.
        tensors: the tensors that the frame must hold, and their places in ``out``; None: they fill it, side by side.

    Raises:
        ProtocolError: the frame is malformed or damaged, or holds other tensors.
        UsageError: ``out`` is too short for its tensors.
    """
    read_into(frame, out, tensors=tensors)(add)


def read_into(frame: Buffer, out: Tensor, *, tensors: Tensors | None = None) -> Callable[[bool], None]:
    """Check a frame as :func:`decode_into` does, and return a function ``write(add)`` that decodes it without fail."""
    want = tensors or (Tensors.of(out) if out.dim() != 1 else None)
    if want is not None and (want.length > out.numel() or (tensors and out.dim() != 1)):
        raise UsageError(f"{_described(want)} do not fit into a tensor of {tuple(out.shape)}")

    def check(contents: Tensors) -> None:
        if want is None:
            fits = contents.length == len(out)
        else:
            fits = want.counts == contents.counts and (
                not contents.single or not want.single or contents.shapes == want.shapes
            )
        if not fits or not torch.can_cast(contents.dtype, out.dtype):
            raise ProtocolError(
                f"a codec's frame holds {_described(contents)}, expected {_described(want or Tensors.of(out))}"
            )

    opened = open_frame(frame, max(out.numel(), 1) * 16, check)
    read, starts = _kind(opened)._read(opened), np.array((want or opened.contents.tensors).starts, np.int64)

    def write(add: bool) -> None:
        to = out.detach()
        whole = to.contiguous()
        _decode(opened, read, whole.view(-1), starts, add)
        if whole is not to:
            to.copy_(whole)

    return write


def encoded_bytes(frame: Buffer) -> tuple[int, int]:
    """Return how many values of a frame are encoded, and how many bytes they take (3LC, Table 2)."""
    opened = open_frame(frame, 2**62)
    return int(opened.contents.counts.sum()), int(opened.offsets[-1] - opened.offsets[0])


def device_of(tensor: Tensor | Tensors, device: torch.device | None) -> torch.device:
    """Return the device of an example, or the given one of a description, as for :meth:`Codec.init`."""
    return tensor.device if isinstance(tensor, Tensor) else device or torch.device("cpu")


def _vector(tensor: Tensor, tensors: Tensors) -> Tensor:
    whole = tensors.single and tuple(tensor.shape) == tensors.shapes[0]
    if tensor.dtype != tensors.dtype or not (whole or (tensor.dim() == 1 and len(tensor) >= tensors.length)):
        raise UsageError(f"cannot encode {tensor.dtype} {tuple(tensor.shape)}: the state is for {_described(tensors)}")
    return tensor.detach().reshape(-1).contiguous()


def _check_buffers(out: Array | None, max_bytes: int, left: Tensor | None, tensors: Tensors) -> None:
    """Check sizes and dtypes, since compiled loops do not check bounds."""
    if out is not None and not (out.dtype == np.uint8 and out.ndim == 1 and len(out) >= max_bytes):
        raise UsageError(f"out must have at least {max_bytes} bytes of uint8, not {len(out)} elements of {out.dtype}")
    if left is not None and not (left.dtype == torch.float32 and left.dim() == 1 and len(left) >= tensors.length):
        raise UsageError(f"left must be float32 [{tensors.length}], not {left.dtype} {tuple(left.shape)}")


def _described(tensors: Tensors) -> str:
    dtype = str(tensors.dtype).removeprefix("torch.")
    if tensors.single:
        return f"{dtype} {tensors.shapes[0]}"
    return f"{len(tensors.shapes)} tensors of {sum(tensors.counts)} {dtype}"


def _put_plain(vector: Tensor, error: Tensor | None, tensors: Tensors, index: int, frame: Array, end: int) -> int:
    place = slice(tensors.starts[index], tensors.starts[index] + tensors.counts[index])
    values = vector[place]
    if error is not None and error[place].any():  # left by an earlier codec that encoded this tensor
        wanted = values.double() + error[place]
        sent = wanted.to(values.dtype)
        is_finite = sent.isfinite()
        values = torch.where(is_finite, sent, values)
        error[place] = torch.where(is_finite, (wanted - sent.double()).float(), error[place])
    data = as_bytes(values)
    frame[end : end + len(data)] = data
    return end + len(data)


def _kind(opened: OpenedFrame) -> type[Codec]:
    kind = KINDS.get(opened.codec)
    if opened.codec in RETIRED_NUMBERS:
        raise ProtocolError(f"a codec's frame is of an earlier version: {retired(RETIRED_NUMBERS[opened.codec])}")
    if kind is None:
        raise ProtocolError(f"a codec's frame has codec number {opened.codec}, which this peer does not know")
    return kind


def _decode(opened: OpenedFrame, read: Any, out: Tensor, starts: Array, add: bool) -> None:
    """Decode into a flat vector of any dtype to which the values can be cast."""
    contents = opened.contents
    vector = out if out.dtype == torch.float32 else torch.zeros(len(out), dtype=torch.float32, device=out.device)
    if len(contents.encoded):
        kind = _kind(opened)
        kind._write(opened, read, vector, starts[contents.encoded], add and vector is out)
        for index in np.flatnonzero(np.diff(opened.offsets) == 0).tolist():
            start, count = int(starts[contents.encoded[index]]), int(contents.counts[index])
            vector[start : start + count] = float("nan")
        if vector is not out:
            for start, count in zip(starts[contents.encoded].tolist(), contents.counts.tolist(), strict=True):
                _put(vector[start : start + count], out[start : start + count], add)
    place = int(opened.offsets[-1])
    for index in contents.plain_indices:
        start, count = int(starts[index]), contents.tensors.counts[index]
        data = opened.body[place : place + count * contents.tensors.dtype.itemsize]
        place += len(data)
        if count:
            values = torch.from_numpy(data.copy()).view(contents.tensors.dtype)
            _put(values, out[start : start + count], add)


def _put(values: Tensor, to: Tensor, add: bool) -> None:
    to.add_(values.to(to.device)) if add else to.copy_(values)


class Compiled(Codec):
    """A codec whose tensors in host memory are encoded and decoded in loops that numba compiles, all in one.

    Attributes:
        meant: what its tensors in a frame are, for messages.
    """

    needs_numba: ClassVar[bool] = True
    meant: ClassVar[str]

    @classmethod
    @abc.abstractmethod
    def _loops(cls) -> tuple[Callable[..., int], Callable[..., None]]:
        """Return two loops, compiled: one that checks all tensors of a frame, and one that decodes them."""

    @classmethod
    @abc.abstractmethod
    def _write_one(cls, data: Array, out: Tensor, add: bool) -> None:
        """Decode one tensor, which has been checked, by torch on any device."""

    def _begin(self, state: State, device: torch.device) -> None:
        if device.type == "cpu":
            self._loops()  # import and compile now, not during the first encode

    @classmethod
    def _read(cls, opened: OpenedFrame) -> Any:
        fits, _ = cls._loops()
        bad = fits(opened.body, opened.offsets, opened.contents.counts)
        if bad >= 0:
            number = opened.contents.encoded[bad]
            raise ProtocolError(f"tensor {number} of a codec's frame is not {cls.meant} of its size")

    @classmethod
    def _write(cls, opened: OpenedFrame, read: Any, out: Tensor, starts: Array, add: bool) -> None:
        counts = opened.contents.counts
        if out.is_cpu:
            _, into = cls._loops()
            into(opened.body, opened.offsets, counts, out.numpy(), starts, add)
            return
        for (begin, end), start, count in zip(
            pairwise(opened.offsets.tolist()), starts.tolist(), counts.tolist(), strict=True
        ):
            if begin < end:
                cls._write_one(opened.body[begin:end], out[start : start + count], add)


class PerTensor(Codec):
    """A codec that encodes one tensor at a time, on any device; most custom codecs derive from it.

    A subclass defines ``_bytes``, which encodes a tensor, ``_values``, which decodes it, and ``_most``, which bounds
    the size of the encoding. This class does the rest: error feedback, frames and checks; see
    :class:`gossipx.codecs.base.Codec`.
    """

    @abc.abstractmethod
    def _bytes(self, values: Tensor, shape: tuple[int, ...], state: State, index: int) -> Sequence[Tensor | bytes]:
        """Encode one tensor.

        Args:
            values: the tensor as a vector of at least one value, all finite, with the accumulated error added.
            shape: the tensor's shape.
            state: the codec's state, with what it has kept from earlier frames.
            index: index of the tensor among those that are encoded.

        Returns:
            The parts of the encoding, in order; none if an intermediate result is not finite.
        """

    @classmethod
    @abc.abstractmethod
    def _values(cls, data: Array, shape: tuple[int, ...], count: int, device: torch.device) -> Tensor:
        """Decode one tensor of ``count`` elements to a float32 vector on ``device``.

        Raises:
            ProtocolError: the data is malformed.
        """

    def _wanted(self, values: Tensor, error: Tensor) -> Tensor:
        """Return the values to encode, given the accumulated error of earlier frames."""
        return values + error

    def _encode(
        self, x: Tensor, error: Tensor | None, state: State, plan: FramePlan, frame: Array, end: int, sizes: Array
    ) -> int:
        for index, (start, count) in enumerate(zip(plan.starts.tolist(), plan.counts.tolist(), strict=True)):
            values = x[start : start + count]
            if error is not None:
                values = self._wanted(values, error[start : start + count])
            if not count or not bool(torch.isfinite(values).all()):
                continue
            begin = end
            for part in self._bytes(values, plan.shapes[index], state, index):
                data = np.frombuffer(part, np.uint8) if isinstance(part, bytes) else as_bytes(part)
                frame[end : end + len(data)] = data
                end += len(data)
            sizes[index] = end - begin
            if error is not None and end > begin:
                decoded = self._values(frame[begin:end], plan.shapes[index], count, values.device)
                torch.sub(values, decoded, out=error[start : start + count])
        return end

    @classmethod
    def _read(cls, opened: OpenedFrame) -> list[Tensor | None]:
        contents, host = opened.contents, torch.device("cpu")
        read: list[Tensor | None] = []
        for index, (begin, end) in enumerate(pairwise(opened.offsets.tolist())):
            data, shape = opened.body[begin:end], contents.tensors.shapes[contents.encoded[index]]
            read.append(cls._values(data, shape, int(contents.counts[index]), host) if begin < end else None)
        return read

    @classmethod
    def _write(cls, opened: OpenedFrame, read: list[Tensor | None], out: Tensor, starts: Array, add: bool) -> None:
        for values, start in zip(read, starts.tolist(), strict=True):
            if values is not None:
                _put(values, out[start : start + len(values)], add)


@final
@dataclass(frozen=True)
class NoCodec(PerTensor):
    """``none``: every tensor unencoded, in its own dtype; so the methods that encode are never used."""

    feedback: bool = field(default=False, kw_only=True)
    number: ClassVar[int] = 0
    alone: ClassVar[bool] = True

    def _plain(self, tensors: Tensors) -> tuple[bool, ...]:
        return (True,) * len(tensors.shapes)

    def _most(self, count: int, shape: tuple[int, ...]) -> int:
        return 0

    def _bytes(self, values: Tensor, shape: tuple[int, ...], state: State, index: int) -> Sequence[Tensor | bytes]:
        return ()  # never called: all tensors are plain

    @classmethod
    def _values(cls, data: Array, shape: tuple[int, ...], count: int, device: torch.device) -> Tensor:
        raise ProtocolError("a codec's frame of codec 'none' has an encoded tensor")


def fitted(values: Tensor, integers: Tensor) -> Tensor:
    """Return the scale s that minimizes ‖values − s · integers‖₂ along the last dimension; 0 where all integers are 0.

    With the best s the norm of the error is at most ‖values‖₂. Error feedback needs this bound, or errors would grow.
    """
    wide = integers.double()
    return ((values.double() * wide).sum(-1) / wide.square().sum(-1).clamp(min=1)).float()


def uniform(values: Tensor, state: State, index: int) -> Tensor:
    """Draw a random number from [0, 1) for each value of a tensor, on its device.

    Args:
        state: seeds the draws, together with the frame number, so that they are reproducible.
        index: index of the tensor, which gets its own sequence.
    """
    draws = state.draws(values.device, index)
    return torch.rand(len(values), generator=draws, device=values.device, dtype=torch.float32)


def norm(values: Tensor) -> float:
    """Return ‖values‖₂. It is computed in float64, where the squares of finite float32 values do not overflow."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def scale_of(data: Array, place: int = 0) -> float:
    """Read the float32 scale at byte ``place`` of a tensor's encoding.

    Raises:
        ProtocolError: the scale is missing or not finite.
    """
    scale: float
    (scale,) = unpack_numbers("<f", data, place)
    if not math.isfinite(scale):
        raise ProtocolError(f"a tensor of a codec's frame has the scale {scale}")
    return scale


def floats(data: Array, device: torch.device) -> Tensor:
    """Read a tensor's encoding, or a part of it, as float32 values.

    Raises:
        ProtocolError: a value is not finite.
    """
    values = data.copy().view("<f4").astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        raise ProtocolError("a tensor of a codec's frame has a value that is not finite")
    return torch.from_numpy(values).to(device)


ERROR = "error"
"""Key of the accumulated error in ``State.kept``."""
GATHERED = "gathered"
"""Key of the unsent values in ``State.kept``, for codecs that accumulate these themselves."""


@final
@dataclass(frozen=True)
class ErrorFeedback:
    """A codec with error feedback; the state holds the accumulated error of one direction of one link.

    Input + error before = decoded output + error after, in float32; ``topk2`` first multiplies the error before by its
    ``decay``. The error does not include what is lost when other
    dtypes are decoded. Frames are those of the codec.

    Attributes:
        codec: the wrapped codec.
    """

    codec: Codec

    def init(self, tensor: Tensor | Tensors, seed: int = 0, device: torch.device | None = None) -> State:
        """Return the initial state as :meth:`Codec.init` does, with an error of zero."""
        state = self.codec.init(tensor, seed, device)
        place = device_of(tensor, device)
        state.kept[ERROR] = torch.zeros(state.tensors.length, dtype=torch.float32, device=place)
        return state

    def most(self, state: State) -> int:
        """Return the size of the longest possible frame in bytes."""
        return self.codec.most(state)

    def encode(self, tensor: Tensor, state: State, out: Array | None = None) -> tuple[memoryview, State]:
        """Encode the sum of the tensor and the accumulated error, see :meth:`Codec.encode`."""
        return self.codec.encode(tensor, state, out, left=state.kept[ERROR])


def scattered(count: int, places: Tensor, values: Tensor) -> Tensor:
    """Return a vector of ``count`` elements with the values at their places, and zeros elsewhere."""
    return torch.zeros(count, dtype=torch.float32, device=values.device).index_copy_(0, places, values)


def compiled() -> Any:
    """Return :mod:`gossipx.codecs.loops`, imported on demand, since numba takes a second and 100 MB."""
    from gossipx.codecs import loops

    return loops
