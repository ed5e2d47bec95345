"""Frames: the self-describing, checksummed byte format of encoded tensors. Nothing in them is unpickled or evaluated.

    "gx" | version | codec | dtype | flags | checksum (4) | size of the shapes (4) | shapes | body

All numbers are little-endian; those in the shapes are varints (seven bits per byte, lowest first). The shapes are the
dimensions of one tensor, or the lengths of several tensors in one vector. If some tensors are *plain* (sent unencoded)
and others are not, a bit mask of the plain ones follows. The body is a table with the size in bytes of each encoded
tensor (number width in the flags), then the encoded tensors, then the values of the plain ones. A size of 0 for a
tensor with elements means that it was not finite; it decodes to NaN.

The body may be compressed by zlib or zstd; its uncompressed size is then the last number of the shapes.
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

from gossipx.errors import ProtocolError, UsageError, how_to_install

Array: TypeAlias = npt.NDArray[Any]
Buffer: TypeAlias = "bytes | bytearray | memoryview | Array"

MAGIC, VERSION = b"gx", 1
_FIXED = struct.Struct("<2sBBBBII")
HEAD = _FIXED.size
"""Bytes before the shapes."""
_CHECKSUM = 6
"""Offset of the checksum, which covers all other bytes of the frame."""

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
"""Default limit of the decoded size in bytes: 1 GiB."""

_SHORT = 2048
"""Longest shapes, in bytes, whose parsed form is cached; the whole cache then takes a few MB."""
_ONE, _MIXED, _PLAIN = 1, 2, 4  # flags: one tensor with its shape; some are plain; all are
_WIDTHS = (2, 4, 8)  # flags 8 and 16: index of the table's number width in bytes
# Flags 32 and 64: index of the compressor by which the body is squeezed, ``+zlib`` or ``+zstd`` in a codec's spec.
SQUEEZERS = ("", "zlib", "zstd")
# The fastest level of each: on packed trits, zstd's level 9 takes 20 times as long and saves another 2 %.
_LEVEL = 1


@dataclass(frozen=True)
class Tensors:
    """The layout of the tensors in a flat vector.

    Attributes:
        shapes: shape of each tensor.
        dtype: of the vector.
        starts: index of each tensor's first element in the vector, ascending. There may be gaps between tensors.
        plain: whether each tensor prefers to be sent unencoded, such as those of normalisation layers; empty: none.
        single: a single tensor whose frame states its shape; other frames state lengths only.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    starts: tuple[int, ...]
    plain: tuple[bool, ...] = ()
    single: bool = False

    @classmethod
    def of(cls, *tensors: torch.Tensor, plain: Sequence[bool] = ()) -> Tensors:
        """Return the layout of one tensor, or of several of one dtype side by side in a vector."""
        if len({tensor.dtype for tensor in tensors}) != 1:
            raise UsageError("a frame holds at least one tensor, and all have the same dtype")
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        starts = (0, *accumulate(map(prod, shapes[:-1])))
        return cls(shapes, tensors[0].dtype, starts, tuple(plain), len(tensors) == 1)

    def __post_init__(self) -> None:
        if len(self.starts) != len(self.shapes) or len(self.plain) not in (0, len(self.shapes)):
            raise ValueError("shapes, starts and plain must have the same length")
        ends = [start + count for start, count in zip(self.starts, self.counts, strict=True)]
        if any(end > start for end, start in zip([0, *ends], self.starts, strict=False)):
            raise ValueError("starts must ascend, and tensors must not overlap")

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of elements of each tensor."""
        return tuple(map(prod, self.shapes))

    @cached_property
    def length(self) -> int:
        """Least number of elements of the vector."""
        return self.starts[-1] + self.counts[-1] if self.starts else 0

    @cached_property
    def nbytes(self) -> int:
        """Size of all tensors in bytes, unencoded."""
        return sum(self.counts) * self.dtype.itemsize

    def are_plain(self, small: int) -> tuple[bool, ...]:
        """Return for each tensor whether it is sent unencoded.

        Args:
            small: tensors of fewer elements are, and those in ``plain``; 0: all are encoded.
        """
        if not small:
            return (False,) * len(self.shapes)
        plain = self.plain or (False,) * len(self.shapes)
        return tuple(is_plain or count < small for is_plain, count in zip(plain, self.counts, strict=True))


@dataclass(frozen=True)
class Contents:
    """The tensors in a frame.

    Attributes:
        tensors: their layout, side by side without gaps.
        plain: whether each is sent unencoded.
    """

    tensors: Tensors
    plain: tuple[bool, ...]

    @cached_property
    def encoded(self) -> Array:
        """Indices of the encoded tensors."""
        return np.flatnonzero(~np.array(self.plain, bool))

    @cached_property
    def plain_indices(self) -> tuple[int, ...]:
        """Indices of the plain tensors."""
        return tuple(np.flatnonzero(np.array(self.plain, bool)).tolist())

    @cached_property
    def counts(self) -> Array:
        """Number of elements of each encoded tensor."""
        return np.array(self.tensors.counts, np.int64)[self.encoded]

    @cached_property
    def plain_bytes(self) -> int:
        """Size of all plain tensors in bytes."""
        return sum(self.tensors.counts[index] for index in self.plain_indices) * self.tensors.dtype.itemsize


@dataclass(frozen=True)
class OpenedFrame:
    """A frame whose header, checksum, shapes and sizes have been checked; the encoded tensors have not.

    Attributes:
        codec: number of the codec.
        contents: the tensors in it.
        offsets: offset in ``body`` of each encoded tensor, and the end of the last one.
        body: its bytes, uncompressed.
    """

    codec: int
    contents: Contents
    offsets: Array
    body: Array


def head(codec: int, tensors: Tensors, plain: tuple[bool, ...], max_bytes: int, squeezed: str) -> bytearray:
    """Return the header and shapes of a frame, with a checksum of 0.

    Args:
        max_bytes: upper bound for the size of one encoded tensor.
        squeezed: compressor of the body, one of :data:`SQUEEZERS`.
    """
    if tensors.dtype not in DTYPES:
        raise UsageError(f"a frame cannot hold tensors of {tensors.dtype}")
    if len(tensors.shapes) > MAX_TENSORS:
        raise UsageError(f"a frame holds at most {MAX_TENSORS} tensors, not {len(tensors.shapes)}")
    shapes = bytearray()
    flags = 8 * _width_index(max_bytes) + 32 * SQUEEZERS.index(squeezed)
    if tensors.single:
        flags |= _ONE
        for number in (len(tensors.shapes[0]), *tensors.shapes[0]):
            _put_varint(number, shapes)
    else:
        for number in (len(tensors.counts), *tensors.counts):
            _put_varint(number, shapes)
    if plain and all(plain):
        flags |= _PLAIN
    elif any(plain):
        flags |= _MIXED
        shapes += np.packbits(plain, bitorder="little").tobytes()
    dtype = DTYPES.index(tensors.dtype)
    return bytearray(_FIXED.pack(MAGIC, VERSION, codec, dtype, flags, 0, len(shapes))) + shapes


def width(max_bytes: int) -> int:
    """Return the bytes per number in the table of sizes, if no encoded tensor takes more than ``max_bytes``."""
    return _WIDTHS[_width_index(max_bytes)]


def seal(frame: Array) -> None:
    """Write the checksum into a complete frame."""
    struct.pack_into("<I", frame.data, _CHECKSUM, _checksum(frame))


def squeeze(by: str, frame: Array, begin: int) -> Array:
    """Return the frame with its body, which begins at ``begin``, compressed by ``by``."""
    shapes = bytearray(frame[:begin])
    _put_varint(len(frame) - begin, shapes)
    struct.pack_into("<I", shapes, _CHECKSUM + 4, len(shapes) - HEAD)
    body = frame[begin:].data
    packed = zlib.compress(body, _LEVEL) if by == "zlib" else zstandard().ZstdCompressor(level=_LEVEL).compress(body)
    return np.frombuffer(shapes + packed, np.uint8).copy()


def zstandard() -> Any:
    """Import and return the package ``zstandard``.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import zstandard as package
    except ImportError as error:
        raise UsageError(f"+zstd needs the package zstandard: {how_to_install('zstd')}, or use +zlib") from error
    return package


def unpack_numbers(layout: str, data: Array, place: int = 0) -> tuple[Any, ...]:
    """Unpack numbers from a tensor's bytes at ``place``, in a layout of :mod:`struct`.

    Raises:
        ProtocolError: there are too few bytes.
    """
    if len(data) < place + struct.calcsize(layout):
        raise ProtocolError("a tensor of a codec's frame ends before its values")
    return struct.unpack_from(layout, data.data, place)


def open_frame(
    frame: Buffer, limit: int = LIMIT, check: Callable[[Tensors], None] = lambda tensors: None
) -> OpenedFrame:
    """Check all parts of a frame that do not depend on its codec.

    Args:
        limit: most bytes that its tensors may decode to. This function allocates less than nine times the larger of
            ``limit`` and the frame's size, plus a few MB: a copy of the shapes, and up to 8 bytes per element of a body
            that it decompresses.
        check: raises ProtocolError if the frame does not hold the expected tensors.

    Raises:
        ProtocolError: the frame is malformed or damaged, has another version, or decodes to more than ``limit``.
    """
    data = np.frombuffer(frame, np.uint8)
    if len(data) < HEAD:
        raise ProtocolError(f"a codec's frame of {len(data)} bytes ends before its header")
    magic, version, codec, dtype, flags, checksum, size = _FIXED.unpack_from(data.data)
    if magic != MAGIC:
        raise ProtocolError("not a codec's frame: it has another magic number")
    if version != VERSION:
        raise ProtocolError(f"a codec's frame has version {version}, this peer reads version {VERSION}")
    if size > len(data) - HEAD:
        raise ProtocolError(f"a codec's frame of {len(data)} bytes ends before its shapes")
    if checksum != _checksum(data):
        raise ProtocolError("a codec's frame does not match its checksum")
    described = _described if size <= _SHORT else _described.__wrapped__
    contents, squeezed = described(bytes(data[HEAD : HEAD + size]), dtype, flags)
    if contents.tensors.nbytes > limit:
        raise ProtocolError(f"a codec's frame decodes to {contents.tensors.nbytes} bytes, at most {limit} are allowed")
    check(contents.tensors)
    data.flags.writeable = False  # the codecs' loops are compiled by numba, for read-only arrays only
    body = data[HEAD + size :]
    if squeezed is not None:
        body = _unsqueezed(body, SQUEEZERS[flags >> 5 & 3], squeezed, contents.tensors)
    return OpenedFrame(codec, contents, _table(body, contents, _WIDTHS[flags >> 3 & 3]), body)


def _width_index(max_bytes: int) -> int:
    return next(index for index, width in enumerate(_WIDTHS) if max_bytes < 2 ** (8 * width))


def _checksum(frame: Array) -> int:
    digest = xxhash.xxh3_64(frame[:_CHECKSUM].data)
    digest.update(frame[_CHECKSUM + 4 :].data)
    return digest.intdigest() & 0xFFFFFFFF


@lru_cache(maxsize=256)  # all frames of a link have the same shapes
def _described(shapes: bytes, dtype: int, flags: int) -> tuple[Contents, int | None]:
    """Parse the shapes; return the tensors and, if the body is compressed, its uncompressed size."""
    squeezer = flags >> 5 & 3
    if dtype >= len(DTYPES) or flags >> 3 & 3 >= len(_WIDTHS) or squeezer >= len(SQUEEZERS) or flags & 128:
        raise ProtocolError("a codec's frame has a dtype or flags that this version does not know")
    (count,), place = _varints(shapes, 0, 1)
    limit = MAX_DIMENSIONS if flags & _ONE else MAX_TENSORS
    if count > limit:
        raise ProtocolError(f"a codec's frame has {count} shapes, at most {limit} are allowed")
    sizes, place = _varints(shapes, place, count)
    if flags & _ONE:
        tensors = Tensors((tuple(sizes),), DTYPES[dtype], (0,), single=True)
    else:
        starts = (0, *accumulate(sizes[:-1])) if sizes else ()
        tensors = Tensors(tuple((size,) for size in sizes), DTYPES[dtype], starts)
    tensor_count = len(tensors.shapes)
    plain = (bool(flags & _PLAIN),) * tensor_count
    if flags & _MIXED:
        bits = np.frombuffer(shapes, np.uint8)[place : place + -(-tensor_count // 8)]
        if flags & _PLAIN or len(bits) * 8 < tensor_count:
            raise ProtocolError("a codec's frame lacks the bit mask of its plain tensors")
        plain = tuple(bool(bit) for bit in np.unpackbits(bits, bitorder="little")[:tensor_count])
        place += len(bits)
    if not all(plain) and not tensors.dtype.is_floating_point:
        raise ProtocolError(f"a codec's frame has encoded values of {tensors.dtype}, which no codec encodes")
    squeezed: int | None = None
    if squeezer:
        (squeezed,), place = _varints(shapes, place, 1)
    if place != len(shapes):
        raise ProtocolError("a codec's frame has more shapes than it declares")
    return Contents(tensors, plain), squeezed


def _unsqueezed(body: Array, by: str, size: int, tensors: Tensors) -> Array:
    """Decompress the body, and bound its size by what its tensors can need."""
    limit = 8 * sum(tensors.counts) + 64 * len(tensors.shapes) + 1024  # far more than any codec takes
    if size > limit:
        raise ProtocolError(f"a codec's frame decompresses to {size} bytes, its tensors take less than {limit}")
    try:
        if by == "zlib":
            decompressor = zlib.decompressobj()
            plain = decompressor.decompress(body.data, size + 1)
            whole = decompressor.eof and not decompressor.unused_data
        else:
            package = zstandard()
            actual = package.get_frame_parameters(body).content_size
            if actual != size:
                raise ProtocolError(f"a codec's frame decompresses to {actual} bytes, and declares {size}")
            plain = package.ZstdDecompressor().decompress(body, max_output_size=size, allow_extra_data=False)
            whole = True
    except (zlib.error, MemoryError, UsageError) as error:
        raise ProtocolError(f"a codec's frame cannot be decompressed: {error}") from error
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        raise ProtocolError(f"a codec's frame cannot be decompressed: {error}") from error
    if not whole or len(plain) != size:
        raise ProtocolError("a codec's frame cannot be decompressed: its body has another size than declared")
    return np.frombuffer(plain, np.uint8)


def _table(body: Array, contents: Contents, width: int) -> Array:
    """Return the offset of each encoded tensor in the body, and the end of the last one."""
    first = len(contents.encoded) * width
    if len(body) < first:
        raise ProtocolError("a codec's frame ends before the table of its tensors")
    sizes = body[:first].copy().view(f"<u{width}")
    if len(sizes) and sizes.max() > len(body):
        raise ProtocolError("a codec's frame ends before its tensors")
    if np.any(sizes[contents.counts == 0]):
        raise ProtocolError("a codec's frame has bytes for a tensor without elements")
    offsets = np.full(len(sizes) + 1, first, np.int64)
    offsets[1:] += np.cumsum(sizes, dtype=np.int64)
    if offsets[-1] + contents.plain_bytes != len(body):
        raise ProtocolError(
            f"a codec's frame has a body of {len(body)} bytes, its tensors take {offsets[-1] + contents.plain_bytes}"
        )
    return offsets


def _put_varint(number: int, to: bytearray) -> None:
    while number > 127:
        to.append(number & 127 | 128)
        number >>= 7
    to.append(number)


def _varints(data: bytes, place: int, count: int) -> tuple[list[int], int]:
    """Return ``count`` varints from ``place`` on, each below 2^63, and the offset behind them."""
    found = []
    for _ in range(count):
        number = shift = 0
        while True:
            if place >= len(data) or shift > 56:
                raise ProtocolError("a codec's frame has a shape that is truncated, or beyond 2^63")
            byte = data[place]
            place += 1
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        found.append(number)
    return found, place
