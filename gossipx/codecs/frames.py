"""Frames: what a codec makes of tensors, self-describing, checked, and never unpickled or evaluated.

    "gx" | version | codec | dtype | flags | checksum (4) | size of the shapes (4) | shapes | body

All numbers are little-endian, those of the shapes are varints (seven bits a byte, lowest first). The shapes are those
of one tensor, or the lengths of several that lie in one vector; after them, where some tensors are *plain* (their
values as they are) and others are not, a bit for each. The body has for each encoded tensor the bytes that it takes (as
wide as the flags say), then these, then the values of plain tensors. A tensor that takes no byte though it has values
is one that was not finite: it decodes to NaN.

The body may be squeezed by zlib or zstd; the shapes then end in its size before.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from gossipx.errors import ProtocolError, UsageError

Array: TypeAlias = npt.NDArray[Any]
Buffer: TypeAlias = "bytes | bytearray | memoryview | Array"

MAGIC, VERSION = b"gx", 1
_FIXED = struct.Struct("<2sBBBBII")
HEAD = _FIXED.size
"""Bytes before the shapes."""
_CHECKSUM = 6
"""Where the checksum lies, four bytes that it does not cover."""

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
MAX_DIMENSIONS = 64
MAX_TENSORS = 2**16
LIMIT = 2**30
"""Bytes of tensors that a frame may decode to where nothing else is said: 1 GiB."""

_SHORT = 2048
"""Bytes of shapes up to which these are kept: a few MB for all that are."""
_ONE, _MIXED, _PLAIN = 1, 2, 4  # flags: one tensor with its shape; some are plain; all are
_WIDTHS = (2, 4, 8)  # flags 8 and 16: number of the table's width
SQUEEZERS = ("", "zlib", "zstd")  # flags 32 and 64: number of what squeezed the body
# Each at its fastest: on packed trits, zstd's level 9 takes 20 times as long and saves another 2 %.
_LEVEL = 1


@dataclass(frozen=True)
class Tensors:
    """The tensors that a flat vector holds.

    Attributes:
        shapes: of each.
        dtype: of the vector.
        starts: where each begins in the vector, in elements; ascending. What lies between them belongs to none.
        plain: whether each is to be left as it is, as those of normalisation layers are; none by default.
        single: it is one tensor, whose frame has its shape; otherwise frames have lengths alone.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    starts: tuple[int, ...]
    plain: tuple[bool, ...] = ()
    single: bool = False

    @classmethod
    def of(cls, *tensors: torch.Tensor, plain: Sequence[bool] = ()) -> Tensors:
        """Those of one tensor, or of several of one dtype that lie side by side in a vector."""
        if len({tensor.dtype for tensor in tensors}) != 1:
            raise UsageError("a frame holds tensors of one dtype, and at least one")
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        starts = (0, *accumulate(map(prod, shapes[:-1])))
        return cls(shapes, tensors[0].dtype, starts, tuple(plain), len(tensors) == 1)

    def __post_init__(self) -> None:
        if len(self.starts) != len(self.shapes) or len(self.plain) not in (0, len(self.shapes)):
            raise ValueError("shapes, starts and plain are of one length")
        ends = [start + count for start, count in zip(self.starts, self.counts, strict=True)]
        if any(end > start for end, start in zip([0, *ends], self.starts, strict=False)):
            raise ValueError("tensors lie behind each other")

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Elements of each."""
        return tuple(map(prod, self.shapes))

    @cached_property
    def length(self) -> int:
        """Elements that the vector has at least."""
        return self.starts[-1] + self.counts[-1] if self.starts else 0

    @cached_property
    def nbytes(self) -> int:
        """Of all of them as they are."""
        return sum(self.counts) * self.dtype.itemsize

    def are_plain(self, small: int) -> tuple[bool, ...]:
        """Which are left as they are where those of fewer than ``small`` elements are."""
        if not small:
            return (False,) * len(self.shapes)
        plain = self.plain or (False,) * len(self.shapes)
        return tuple(told or count < small for told, count in zip(plain, self.counts, strict=True))


@dataclass(frozen=True)
class Contents:
    """What a frame holds.

    Attributes:
        tensors: where they begin is as if they lay side by side.
        plain: which of them are plain.
    """

    tensors: Tensors
    plain: tuple[bool, ...]

    @cached_property
    def encoded(self) -> Array:
        """Numbers of the tensors that are encoded."""
        return np.flatnonzero(~np.array(self.plain, bool))

    @cached_property
    def as_they_are(self) -> tuple[int, ...]:
        """Numbers of the plain ones."""
        return tuple(np.flatnonzero(np.array(self.plain, bool)).tolist())

    @cached_property
    def counts(self) -> Array:
        """Elements of the encoded ones."""
        return np.array(self.tensors.counts, np.int64)[self.encoded]

    @cached_property
    def of_plain(self) -> int:
        """Bytes of the plain ones."""
        return sum(self.tensors.counts[number] for number in self.as_they_are) * self.tensors.dtype.itemsize


@dataclass(frozen=True)
class OpenedFrame:
    """A frame that has been checked as far as it can be without its codec.

    Attributes:
        codec: number of it.
        contents: what is in it.
        offsets: where the bytes of each encoded tensor begin in ``body``, and where the last ends.
        body: its bytes.
    """

    codec: int
    contents: Contents
    offsets: Array
    body: Array


def head(codec: int, tensors: Tensors, plain: tuple[bool, ...], most: int, squeezed: str) -> bytearray:
    """A frame up to its body, without its checksum.

    Args:
        most: bytes that one encoded tensor may take.
        squeezed: by what the body will be.
    """
    if tensors.dtype not in DTYPES:
        raise UsageError(f"no frame holds {tensors.dtype}")
    if len(tensors.shapes) > MAX_TENSORS:
        raise UsageError(f"a frame holds at most {MAX_TENSORS} tensors, not {len(tensors.shapes)}")
    shapes = bytearray()
    flags = 8 * _width(most) + 32 * SQUEEZERS.index(squeezed)
    if tensors.single:
        flags |= _ONE
        for number in (len(tensors.shapes[0]), *tensors.shapes[0]):
            _put(number, shapes)
    else:
        for number in (len(tensors.counts), *tensors.counts):
            _put(number, shapes)
    if plain and all(plain):
        flags |= _PLAIN
    elif any(plain):
        flags |= _MIXED
        shapes += np.packbits(plain, bitorder="little").tobytes()
    dtype = DTYPES.index(tensors.dtype)
    return bytearray(_FIXED.pack(MAGIC, VERSION, codec, dtype, flags, 0, len(shapes))) + shapes


def width(most: int) -> int:
    """Bytes of each number in the table of a body, of whose tensors one may take ``most`` bytes."""
    return _WIDTHS[_width(most)]


def seal(frame: Array) -> None:
    """Put the checksum into a frame that is whole."""
    struct.pack_into("<I", frame.data, _CHECKSUM, _checksum(frame))


def squeeze(by: str, frame: Array, begin: int) -> Array:
    """The frame with its body squeezed, and no larger than before by more than a few bytes."""
    shapes = bytearray(frame[:begin])
    _put(len(frame) - begin, shapes)
    struct.pack_into("<I", shapes, _CHECKSUM + 4, len(shapes) - HEAD)
    body = frame[begin:].data
    packed = zlib.compress(body, _LEVEL) if by == "zlib" else zstandard().ZstdCompressor(level=_LEVEL).compress(body)
    return np.frombuffer(shapes + packed, np.uint8).copy()


def zstandard() -> Any:
    """The package of that name.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import zstandard as package
    except ImportError as error:
        raise UsageError("+zstd needs the package zstandard: pip install 'gossipx[zstd]', or use +zlib") from error
    return package


def numbers(layout: str, data: Array, place: int = 0) -> tuple[Any, ...]:
    """Numbers in a tensor's bytes, in a layout of :mod:`struct`.

    Raises:
        ProtocolError: there are fewer bytes.
    """
    if len(data) < place + struct.calcsize(layout):
        raise ProtocolError("a tensor of a codec's frame ends before its values")
    return struct.unpack_from(layout, data.data, place)


def open_frame(
    frame: Buffer, limit: int = LIMIT, check: Callable[[Tensors], None] = lambda contents: None
) -> OpenedFrame:
    """Check a frame as far as it can be without its codec.

    Args:
        limit: bytes of tensors that it may decode to. What is allocated here is less than nine times as many, or as
            the frame has, and a few MB.
        check: raises ProtocolError where these are not the tensors that the frame is to hold.

    Raises:
        ProtocolError: it is malformed, damaged, of another version, or decodes to more than ``limit``.
    """
    data = np.frombuffer(frame, np.uint8)
    if len(data) < HEAD:
        raise ProtocolError(f"a codec's frame of {len(data)} bytes ends before its header")
    magic, version, codec, dtype, flags, checksum, size = _FIXED.unpack_from(data.data)
    if magic != MAGIC:
        raise ProtocolError("what should be a codec's frame is none")
    if version != VERSION:
        raise ProtocolError(f"a codec's frame has version {version}, this peer reads version {VERSION}")
    if size > len(data) - HEAD:
        raise ProtocolError(f"a codec's frame of {len(data)} bytes ends before its shapes")
    if checksum != _checksum(data):
        raise ProtocolError("a codec's frame does not match its checksum")
    described = _described if size <= _SHORT else _described.__wrapped__
    contents, squeezed = described(bytes(data[HEAD : HEAD + size]), dtype, flags)
    if contents.tensors.nbytes > limit:
        raise ProtocolError(f"a codec's frame decodes to {contents.tensors.nbytes} bytes, at most {limit} are expected")
    check(contents.tensors)
    data.flags.writeable = False  # whatever it lies in: loops are compiled for this kind of array alone
    body = data[HEAD + size :]
    if squeezed is not None:
        body = _unsqueezed(body, SQUEEZERS[flags >> 5 & 3], squeezed, contents.tensors)
    return OpenedFrame(codec, contents, _table(body, contents, _WIDTHS[flags >> 3 & 3]), body)


def _width(most: int) -> int:
    return next(number for number, wide in enumerate(_WIDTHS) if most < 2 ** (8 * wide))


def _checksum(frame: Array) -> int:
    look = xxhash.xxh3_64(frame[:_CHECKSUM].data)
    look.update(frame[_CHECKSUM + 4 :].data)
    return look.intdigest() & 0xFFFFFFFF


@lru_cache(maxsize=256)  # each link's frames have the same shapes
def _described(shapes: bytes, dtype: int, flags: int) -> tuple[Contents, int | None]:
    """What a frame holds, and the size before of a body that was squeezed."""
    squeezer = flags >> 5 & 3
    if dtype >= len(DTYPES) or flags >> 3 & 3 >= len(_WIDTHS) or squeezer >= len(SQUEEZERS) or flags & 128:
        raise ProtocolError("a codec's frame has a dtype or flags that this version does not know")
    (many,), place = _taken(shapes, 0, 1)
    most = MAX_DIMENSIONS if flags & _ONE else MAX_TENSORS
    if many > most:
        raise ProtocolError(f"a codec's frame has {many} shapes, at most {most} are allowed")
    sizes, place = _taken(shapes, place, many)
    if flags & _ONE:
        tensors = Tensors((tuple(sizes),), DTYPES[dtype], (0,), single=True)
    else:
        starts = (0, *accumulate(sizes[:-1])) if sizes else ()
        tensors = Tensors(tuple((size,) for size in sizes), DTYPES[dtype], starts)
    count = len(tensors.shapes)
    plain = (bool(flags & _PLAIN),) * count
    if flags & _MIXED:
        bits = np.frombuffer(shapes, np.uint8)[place : place + -(-count // 8)]
        if flags & _PLAIN or len(bits) * 8 < count:
            raise ProtocolError("a codec's frame does not tell which of its tensors are plain")
        plain = tuple(bool(bit) for bit in np.unpackbits(bits, bitorder="little")[:count])
        place += len(bits)
    if not all(plain) and not tensors.dtype.is_floating_point:
        raise ProtocolError(f"a codec's frame has encoded values of {tensors.dtype}, of which no codec makes any")
    squeezed: int | None = None
    if squeezer:
        (squeezed,), place = _taken(shapes, place, 1)
    if place != len(shapes):
        raise ProtocolError("a codec's frame has more shapes than it tells")
    return Contents(tensors, plain), squeezed


def _unsqueezed(body: Array, by: str, size: int, tensors: Tensors) -> Array:
    """The body as it was before; no more is taken out of it than its tensors can need."""
    most = 8 * sum(tensors.counts) + 64 * len(tensors.shapes) + 1024  # no codec comes near
    if size > most:
        raise ProtocolError(f"a codec's frame was squeezed from {size} bytes, its tensors take less than {most}")
    try:
        if by == "zlib":
            look = zlib.decompressobj()
            plain = look.decompress(body.data, size + 1)
            whole = look.eof and not look.unused_data
        else:
            package = zstandard()
            told = package.get_frame_parameters(body).content_size
            if told != size:
                raise ProtocolError(f"a codec's frame was squeezed from {told} bytes and tells {size}")
            plain = package.ZstdDecompressor().decompress(body, max_output_size=size, allow_extra_data=False)
            whole = True
    except (zlib.error, MemoryError, UsageError) as error:
        raise ProtocolError(f"a codec's frame cannot be unsqueezed: {error}") from error
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        raise ProtocolError(f"a codec's frame cannot be unsqueezed: {error}") from error
    if not whole or len(plain) != size:
        raise ProtocolError("a codec's frame cannot be unsqueezed: its body has another size than it tells")
    return np.frombuffer(plain, np.uint8)


def _table(body: Array, contents: Contents, wide: int) -> Array:
    """Where each encoded tensor's bytes begin in the body, and where the last one's end."""
    first = len(contents.encoded) * wide
    if len(body) < first:
        raise ProtocolError("a codec's frame ends before the table of its tensors")
    sizes = body[:first].copy().view(f"<u{wide}")
    if len(sizes) and sizes.max() > len(body):
        raise ProtocolError("a codec's frame ends before its tensors")
    if np.any(sizes[contents.counts == 0]):
        raise ProtocolError("a codec's frame has bytes for a tensor without elements")
    offsets = np.full(len(sizes) + 1, first, np.int64)
    offsets[1:] += np.cumsum(sizes, dtype=np.int64)
    if offsets[-1] + contents.of_plain != len(body):
        raise ProtocolError(
            f"a codec's frame has a body of {len(body)} bytes, its tensors {offsets[-1] + contents.of_plain}"
        )
    return offsets


def _put(number: int, to: bytearray) -> None:
    while number > 127:
        to.append(number & 127 | 128)
        number >>= 7
    to.append(number)


def _taken(data: bytes, place: int, count: int) -> tuple[list[int], int]:
    """``count`` varints from ``place`` on, each below 2^63, and where they end."""
    taken = []
    for _ in range(count):
        number = shift = 0
        while True:
            if place >= len(data) or shift > 56:
                raise ProtocolError("a codec's frame has a shape that is cut off, or beyond 2^63")
            byte = data[place]
            place += 1
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        taken.append(number)
    return taken, place
