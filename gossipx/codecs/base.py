"""What a codec is: an immutable value that makes frames of tensors, with explicit, plain state.

``init(tensor) -> state``, ``encode(tensor, state) -> (frame, state)``, ``decode(frame) -> tensor``, and
``decode_into(frame, out)``, which overwrites or adds. A frame tells itself what it holds, so that decoding needs no
state; some kinds are decoded near values that are there already, which ``decode_into`` is given then. Encoded are
float32 values; others are converted, and decoded to what they were.

A tensor that is not finite, or whose scale would not be, has no encoding: it decodes to NaN throughout, and the error
that was kept for it stays as it was. So whoever takes it in sees what it would have seen without a codec.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

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
    width,
)
from gossipx.codecs.packing import as_bytes
from gossipx.codecs.state import Plan, State
from gossipx.errors import ProtocolError, UsageError
from gossipx.specs import TOLD_APART

KINDS: dict[int, type[Codec]] = {}
"""By their numbers in frames."""


@dataclass(frozen=True)
class Codec(abc.ABC):
    """Encodes tensors.

    Attributes:
        small: tensors of fewer elements, and those of normalisation layers, stay as they are; 0: all are encoded.
        feedback: whether links that send changes put error feedback around it; kinds that lose nothing on average do
            without by default.
        squeezed: ``zlib`` or ``zstd``: what has a go at the frame's body at last; in a spec, ``+zlib`` or ``+zstd``.
        number: of the kind in frames; 128 to 255 are for kinds of one's own.
        gradients_only: whether it is of no use for changes of a model.
        alone: whether it keeps enough of every value to be of use for a model itself.
        near: whether it is of models alone, and decoded near values that whoever takes it has.
    """

    small: int = field(default=0, kw_only=True)
    feedback: bool = field(default=True, kw_only=True)
    squeezed: str = field(default="", kw_only=True, metadata=TOLD_APART)
    number: ClassVar[int]
    gradients_only: ClassVar[bool] = False
    alone: ClassVar[bool] = False
    near: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        number = cls.__dict__.get("number")
        if number is None:
            return
        known = KINDS.setdefault(number, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"codec number {number} is {known.__qualname__}'s already")
        KINDS[number] = cls  # dataclasses with slots, and reloaded modules, make a class twice

    def __post_init__(self) -> None:
        if self.small < 0:
            raise ValueError("small counts elements and is not negative")
        if self.squeezed not in SQUEEZERS:
            raise ValueError(f"squeezed is one of {', '.join(SQUEEZERS[1:])}, or nothing")

    def init(self, tensor: Tensor | Tensors, seed: int = 0) -> State:
        """The state before the first frame.

        Args:
            tensor: one like those that will be encoded, or what several in one vector are.
            seed: of what is drawn.
        """
        tensors = tensor if isinstance(tensor, Tensors) else Tensors.of(tensor)
        device = torch.device("cpu") if isinstance(tensor, Tensors) else tensor.device
        self._planned(state := State(tensors, seed))
        self._begin(state, device)
        return state

    def most(self, state: State) -> int:
        """Bytes of the longest frame, for ``out``."""
        return self._planned(state).most

    def longest(self, tensors: Tensors) -> int:
        """Bytes of the longest frame of such tensors that another may send, who tells shapes in its own way.

        What is squeezed may be a little longer than it was.
        """
        most = self._planned(State(tensors)).most
        return most + most // 64 + 1024

    def in_feedback(self) -> Codec:
        """The same for what is left out of one frame to be in the next."""
        return dataclasses.replace(self, feedback=True)

    def encode(
        self, tensor: Tensor, state: State, out: Array | None = None, left: Tensor | None = None
    ) -> tuple[memoryview, State]:
        """A frame of a tensor's values as they are now.

        Args:
            tensor: of the shape and dtype that the state is for; or a vector that holds all of its tensors.
            out: where the frame is made if it is not squeezed: uint8, at least :meth:`most`; None: in new memory.
            left: an error that is added to the tensor first; afterwards what the frame leaves out. A float32 vector as
                long as that of the tensors, on their device.

        Raises:
            UsageError: the tensor is not what the state is for, another codec has begun that, or ``out`` or ``left``
                are not as they are to be.
        """
        plan = self._planned(state)
        vector = _vector(tensor, state.tensors)
        _check_rooms(out, plan.most, left, state.tensors)
        frame = np.empty(plan.most, np.uint8) if out is None else out
        begin = len(plan.head)
        frame[:begin] = np.frombuffer(plan.head, np.uint8)
        sizes = np.zeros(len(plan.counts), np.int64)
        end = table = begin + len(sizes) * plan.wide
        if len(sizes):
            end = self._encode(vector.float(), left, state, plan, frame, end, sizes)
            frame[begin:table] = sizes.astype(f"<u{plan.wide}").view(np.uint8)
        for number in plan.contents.as_they_are:
            end = _put_plain(vector, left, state.tensors, number, frame, end)
        frame = frame[:end]
        if self.squeezed:
            frame = squeeze(self.squeezed, frame, begin)
        seal(frame)
        state.frames += 1
        return frame.data, state

    def decode(self, frame: Buffer, limit: int = LIMIT) -> Tensor:
        """As :func:`decode`, which reads frames of all codecs."""
        return decode(frame, limit)

    def decode_into(
        self,
        frame: Buffer,
        out: Tensor,
        *,
        add: bool = False,
        tensors: Tensors | None = None,
        near: Tensor | None = None,
    ) -> None:
        """As :func:`decode_into`, which reads frames of all codecs."""
        decode_into(frame, out, add=add, tensors=tensors, near=near)

    def _begin(self, state: State, device: torch.device) -> None:  # noqa: B027 (most keep nothing)
        """Put what is kept into a new state."""

    def _planned(self, state: State) -> Plan:
        if state.plan is None:
            tensors = state.tensors
            contents = Contents(tensors, self._plain(tensors))
            shapes = [tensors.shapes[number] for number in contents.encoded]
            longest = [self._most(count, shape) for count, shape in zip(contents.counts.tolist(), shapes, strict=True)]
            most = max(longest, default=0)
            begin = head(self.number, tensors, contents.plain, most, self.squeezed)
            total = len(begin) + len(longest) * width(most) + sum(longest) + contents.of_plain
            starts = np.array(tensors.starts, np.int64)[contents.encoded]
            state.plan = Plan(self, contents, bytes(begin), total, width(most), starts, contents.counts, shapes)
        elif state.plan.codec is not self and state.plan.codec != self:
            raise UsageError(f"a state that {state.plan.codec} has begun was given to {self}")
        return state.plan

    def _plain(self, tensors: Tensors) -> tuple[bool, ...]:
        """Which tensors stay as they are."""
        if not tensors.dtype.is_floating_point:
            raise UsageError(f"this codec encodes floating-point tensors, not {tensors.dtype}: 'none' takes any")
        return tensors.are_plain(self.small)

    @abc.abstractmethod
    def _most(self, count: int, shape: tuple[int, ...]) -> int:
        """Bytes that a tensor takes at most, and room that its encoder wants."""

    @abc.abstractmethod
    def _encode(
        self, x: Tensor, left: Tensor | None, state: State, plan: Plan, frame: Array, end: int, sizes: Array
    ) -> int:
        """Encode the plan's tensors into ``frame[end:]``; returns the new end.

        Args:
            sizes: are to be set to the bytes that each takes; 0: it is empty, or not finite.
        """

    @classmethod
    @abc.abstractmethod
    def _read(cls, opened: OpenedFrame, near: Sequence[Tensor] | None) -> Any:
        """Check all encoded tensors of a frame and return what :meth:`_write` needs of them.

        It is the one check between a peer's bytes and loops that look at no end, with and without ``near``.

        Args:
            near: values near each encoded tensor's, flat, float32.

        Raises:
            ProtocolError: one is malformed, or can be decoded near other values alone.
            TooFarError: the values are not near.
        """

    @classmethod
    @abc.abstractmethod
    def _write(cls, opened: OpenedFrame, read: Any, out: Tensor, starts: Array, add: bool) -> None:
        """Decode the encoded tensors, in order from ``starts`` on, into a float32 vector. Sizes of 0 are not its."""


def decode(frame: Buffer, limit: int = LIMIT) -> Tensor:
    """The tensor that a frame of any codec holds; where it holds several, the vector of all.

    Args:
        limit: bytes that it may have.

    Raises:
        ProtocolError: the frame is malformed, damaged, or would need more than ``limit``.
    """
    opened = open_frame(frame, limit)
    tensors = opened.contents.tensors
    read = _kind(opened)._read(opened, None)
    try:
        out = torch.empty(tensors.shapes[0] if tensors.single else (tensors.length,), dtype=tensors.dtype)
    except RuntimeError as error:  # no elements, and yet a dimension that torch has no number for
        raise ProtocolError(f"a codec's frame has a shape that torch refuses: {error}") from error
    _decode(opened, read, out.view(-1), np.array(tensors.starts, np.int64), False)
    return out


def decode_into(
    frame: Buffer, out: Tensor, *, add: bool = False, tensors: Tensors | None = None, near: Tensor | None = None
) -> None:
    """Decode a frame of any codec where its values belong. Nothing is changed if it cannot be.

    Args:
        out: of the shape of the tensor in the frame; or a vector.
        add: to what is there.
        tensors: of the vector: what the frame must hold, and where; None: side by side from its front, filling it.
        near: of the shape of ``out``, or that itself: values near those in the frame; of use to codecs that are
            decoded near such.

    Raises:
        ProtocolError: the frame is malformed, damaged, holds something else, or is of a codec that wants ``near``.
        TooFarError: the values in the frame are not near.
        UsageError: ``near`` has another shape, or ``out`` ends before its tensors.
    """
    read_into(frame, out, tensors=tensors, near=near)(add)


def read_into(
    frame: Buffer, out: Tensor, *, tensors: Tensors | None = None, near: Tensor | None = None
) -> Callable[[bool], None]:
    """The first half of :func:`decode_into`, with all that may fail; what is returned does the rest, told ``add``."""
    if near is not None and near.shape != out.shape:
        raise UsageError(f"values near {tuple(out.shape)} have its shape, not {tuple(near.shape)}")
    want = tensors or (Tensors.of(out) if out.dim() != 1 else None)
    if want is not None and (want.length > out.numel() or (tensors and out.dim() != 1)):
        raise UsageError(f"{_told(want)} do not lie in a tensor of {tuple(out.shape)}")

    def check(contents: Tensors) -> None:
        if want is None:
            fits = contents.length == len(out)
        else:
            fits = want.counts == contents.counts and (
                not contents.single or not want.single or contents.shapes == want.shapes
            )
        if not fits or not torch.can_cast(contents.dtype, out.dtype):
            raise ProtocolError(
                f"a codec's frame holds {_told(contents)}, {_told(want or Tensors.of(out))} is expected"
            )

    opened = open_frame(frame, max(out.numel(), 1) * 16, check)
    kind, starts = _kind(opened), np.array((want or opened.contents.tensors).starts, np.int64)
    values = None
    if near is not None:
        flat, encoded = near.detach().reshape(-1).float(), opened.contents.encoded
        places = zip(starts[encoded].tolist(), opened.contents.counts.tolist(), strict=True)
        values = [flat[start : start + count] for start, count in places]
    read = kind._read(opened, values)

    def write(add: bool) -> None:
        to = out.detach()
        whole = to.contiguous()
        _decode(opened, read, whole.view(-1), starts, add)
        if whole is not to:
            to.copy_(whole)

    return write


def encoded_bytes(frame: Buffer) -> tuple[int, int]:
    """Of a frame: values that are encoded, and bytes that these take (3LC, Table 2); the rest is told in shapes."""
    opened = open_frame(frame, 2**62)
    return int(opened.contents.counts.sum()), int(opened.offsets[-1] - opened.offsets[0])


def _vector(tensor: Tensor, tensors: Tensors) -> Tensor:
    whole = tensors.single and tuple(tensor.shape) == tensors.shapes[0]
    if tensor.dtype != tensors.dtype or not (whole or (tensor.dim() == 1 and len(tensor) >= tensors.length)):
        raise UsageError(f"{tensor.dtype} {tuple(tensor.shape)} was to be encoded, the state is for {_told(tensors)}")
    return tensor.detach().reshape(-1).contiguous()


def _check_rooms(out: Array | None, most: int, left: Tensor | None, tensors: Tensors) -> None:
    """Compiled loops write where they are told to, and look at no end."""
    if out is not None and not (out.dtype == np.uint8 and out.ndim == 1 and len(out) >= most):
        raise UsageError(f"a frame is made in at least {most} bytes, not in {len(out)} of {out.dtype}")
    if left is not None and not (left.dtype == torch.float32 and left.dim() == 1 and len(left) >= tensors.length):
        raise UsageError(f"an error is a float32 vector of {tensors.length}, not {left.dtype} {tuple(left.shape)}")


def _told(tensors: Tensors) -> str:
    dtype = str(tensors.dtype).removeprefix("torch.")
    if tensors.single:
        return f"{dtype} {tensors.shapes[0]}"
    return f"{len(tensors.shapes)} tensors of {sum(tensors.counts)} {dtype}"


def _put_plain(vector: Tensor, left: Tensor | None, tensors: Tensors, number: int, frame: Array, end: int) -> int:
    place = slice(tensors.starts[number], tensors.starts[number] + tensors.counts[number])
    values = vector[place]
    if left is not None and left[place].any():  # kept by a codec that encoded it
        wanted = values.double() + left[place]
        told = wanted.to(values.dtype)
        is_finite = told.isfinite()
        values = torch.where(is_finite, told, values)
        left[place] = torch.where(is_finite, (wanted - told.double()).float(), left[place])
    data = as_bytes(values)
    frame[end : end + len(data)] = data
    return end + len(data)


def _kind(opened: OpenedFrame) -> type[Codec]:
    kind = KINDS.get(opened.codec)
    if kind is None:
        raise ProtocolError(f"a frame is of codec {opened.codec}, which this peer does not know")
    return kind


def _decode(opened: OpenedFrame, read: Any, out: Tensor, starts: Array, add: bool) -> None:
    """Into a flat vector of any dtype that numbers can be converted to."""
    contents = opened.contents
    vector = out if out.dtype == torch.float32 else torch.zeros(len(out), dtype=torch.float32, device=out.device)
    if len(contents.encoded):
        kind = _kind(opened)
        kind._write(opened, read, vector, starts[contents.encoded], add and vector is out)
        for number in np.flatnonzero(np.diff(opened.offsets) == 0).tolist():
            start, count = int(starts[contents.encoded[number]]), int(contents.counts[number])
            vector[start : start + count] = float("nan")
        if vector is not out:
            for start, count in zip(starts[contents.encoded].tolist(), contents.counts.tolist(), strict=True):
                _put(vector[start : start + count], out[start : start + count], add)
    place = int(opened.offsets[-1])
    for number in contents.as_they_are:
        start, count = int(starts[number]), contents.tensors.counts[number]
        data = opened.body[place : place + count * contents.tensors.dtype.itemsize]
        place += len(data)
        if count:
            values = torch.from_numpy(data.copy()).view(contents.tensors.dtype)
            _put(values, out[start : start + count], add)


def _put(values: Tensor, to: Tensor, add: bool) -> None:
    to.add_(values.to(to.device)) if add else to.copy_(values)
