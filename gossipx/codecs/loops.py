"""Compiled loops of the codecs ``3lc`` and ``int8``, and helpers for those of :mod:`gossipx.codecs.loops_sparse`.

They are numba functions over float32 vectors in host memory. For tensors on a GPU, :mod:`gossipx.codecs.packing` does
the same work with torch. Compiling takes some seconds, once per machine. Numba caches the compiled code next to the
source file, or in its cache folder if that directory is not writable, until the file changes. After a change of this
file, touch the one that imports it, because numba does not notice that its compiled code is outdated.

A loop accesses at most three slices: with more, LLVM cannot prove that they do not overlap, and does not vectorise.

The loops have these arguments in common:

- ``x``: the vector to encode. It may hold several tensors, each with its own scale.
- ``starts``, ``counts``: first index and number of elements of each tensor in the vector. Elements between two tensors
  are padding, which the loops skip.
- ``error``: the accumulated error for error feedback, a vector like ``x``. The loop encodes ``x + error``, then
  overwrites ``error`` with the new quantization error. None: no error feedback. If ``x`` is None, ``error`` already
  holds the sum.
- ``out``, ``end``: the output buffer, and the index of its first unused byte. An encoder returns the new ``end``.
- ``body``, ``offsets``: the bytes of a received frame; tensor i is encoded in ``body[offsets[i] : offsets[i + 1]]``.
- ``add``: whether decoded values are added to ``out``, or overwrite it.

Indices are cast to ``np.uintp`` so that numba generates no code for negative indices.

3LC divides the values of a tensor by a scale, rounds them to *trits* (−1, 0 or 1), and encodes the trits in two steps:

1. Packing. Trits are taken in *blocks* of up to ``BLOCK``. A block is cut into five *planes* of equal length, padded
   with zeros. Byte i packs the i-th trit of each plane as a base-3 number of five digits, from 0 to 242. Five zero
   trits are the byte ``ZEROS``.
2. Zero-run encoding. The *codes* 0 to 242 are packed bytes. A code c from 243 to 255 stands for c − 241 (2 to
   ``LONGEST``) consecutive bytes ``ZEROS``. A run may continue from one block into the next.

An encoded tensor consists of one or more *passes*; each further pass encodes the error that the passes before have
left. Its layout is: number of passes P (1 byte), sizes in bytes of the codes of all passes but the last (4 bytes each),
scales (P float32), codes of all passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from gossipx.codecs.packing import BLOCK, LONGEST, PLANE, ZEROS
from gossipx.errors import UsageError, how_to_install

try:
    import numba
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic, overload
except ImportError as error:
    raise UsageError(f"compiled codecs need numba ({error}): {how_to_install('codecs')}") from error

Array: TypeAlias = npt.NDArray[Any]
_Loop = TypeVar("_Loop", bound=Callable[..., Any])

ZERO, ONE = np.float32(0), np.float32(1)
REGISTER = 64
"""Bytes of the widest vector register."""
_MAGNITUDE = np.int32(0x7FFFFFFF)
"""Mask of all bits of a float32 but the sign."""

LOOPS: list[Any] = []
"""All compiled loops."""
log = logging.getLogger("gossipx")
_told: list[str] = []


def loop(function: _Loop) -> _Loop:
    """Decorate a compiled loop: it releases the GIL, and division by zero does not raise."""
    made: Any = numba.njit(nogil=True, error_model="numpy")(function)
    try:
        made.enable_caching()
    except RuntimeError as error:  # neither the package nor the home directory is writable
        _tell_uncached(str(error))
    else:
        save = made._cache.save_overload

        def save_if_possible(*args: Any) -> None:
            try:
                save(*args)
            except OSError as error:
                _tell_uncached(str(error))

        made._cache.save_overload = save_if_possible
    LOOPS.append(made)
    return cast(_Loop, made)


def _tell_uncached(why: str) -> None:
    """Log once that compiled loops cannot be cached."""
    if not _told:
        _told.append(why)
        log.warning("compiled codecs cannot be kept (%s), so each start compiles them: set NUMBA_CACHE_DIR", why)


def compilations() -> int:
    """Return how often this process has compiled a loop that it did not find in numba's cache."""
    return sum(sum(made.stats.cache_misses.values()) for made in LOOPS)


def value_of(x: Array | None, error: Array | None, at: int) -> Any:
    """Return ``x[at] + error[at]``, the value to encode. An argument that is None is left out.

    Only compiled code may call this: the body is the overload below, which numba chooses by the types of the arguments.
    """


@overload(value_of, strict=False)
def _(x: Any, error: Any, at: Any) -> Any:
    if isinstance(x, types.NoneType):
        return lambda x, error, at: error[np.uintp(at)]
    if isinstance(error, types.NoneType):
        return lambda x, error, at: x[np.uintp(at)]
    return lambda x, error, at: x[np.uintp(at)] + error[np.uintp(at)]


def part_of(vector: Array | None, begin: int, end: int) -> Any:
    """Return ``vector[begin:end]``, or None if the vector is None. For compiled code only, as :func:`value_of`."""


@overload(part_of, strict=False)
def _(vector: Any, begin: Any, end: Any) -> Any:
    if isinstance(vector, types.NoneType):
        return lambda vector, begin, end: None
    return lambda vector, begin, end: vector[begin:end]


@loop
def peak(x: Array | None, error: Array | None, start: int, count: int) -> Any:
    """Return max |x + error| over one tensor; Inf or NaN if any value is not finite.

    The bits of the magnitudes are compared as integers, which has the same order and puts NaN above Inf.
    """
    highest = np.int32(0)
    for at in range(start, start + count):
        bits = magnitude_of(value_of(x, error, at))
        highest = bits if bits > highest else highest
    return np.int32(highest).view(np.float32)


@loop
def magnitude_of(value: Any) -> Any:
    """Return the bits of |value| as int32. Without the cast numba would widen them to int64, at half the speed."""
    return np.int32(np.float32(value).view(np.int32) & _MAGNITUDE)


@loop
def check_ends(body: Array, offsets: Array, out: Array, starts: Array, counts: Array) -> None:
    """Check that every tensor lies within ``body`` and ``out``, because the decoding loops do not check bounds.

    Raises:
        IndexError: a tensor lies outside.
    """
    for index in range(len(counts)):
        if not 0 <= offsets[index] <= offsets[index + 1] <= len(body):
            raise IndexError("a tensor's bytes lie outside its frame")
        if not (counts[index] >= 0 and 0 <= starts[index] <= len(out) - counts[index]):
            raise IndexError("a tensor's values lie outside the vector they are decoded into")


@loop
def word_at(body: Array, at: int) -> Any:
    """Return the little-endian 32-bit integer that begins at byte ``at``, as uint32."""
    bits = np.uint32(0)
    for byte in range(4):
        bits |= np.uint32(body[at + byte]) << np.uint32(8 * byte)
    return bits


def _emit_prefetch(context: Any, vector: Any, at: Any) -> Any:
    """Generate LLVM code for :data:`prefetch`, which numba has no function for."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(vector)(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), cgutils.voidptr_t)
        integer = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [place.type, integer, integer, integer])
        function = builder.module.declare_intrinsic("llvm.prefetch", [place.type], function_type)
        builder.call(function, [place, integer(1), integer(3), integer(1)])  # for a write, into the L1 cache, of data
        return context.get_dummy_value()

    return types.void(vector, at), generate


prefetch: Any = intrinsic(_emit_prefetch)
"""``prefetch(vector, at)`` starts to load the cache line of ``vector[at]`` for a later write, without waiting."""


def _emit_mismatches(context: Any, vector: Any, at: Any, byte: Any) -> Any:
    """Generate LLVM code for :data:`mismatches`: one vector comparison instead of a loop over bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(vector)(context, builder, arguments[0]).data
        register, integer = ir.VectorType(ir.IntType(8), REGISTER), ir.IntType(32)
        read = builder.load(builder.bitcast(builder.gep(data, [arguments[1]]), register.as_pointer()), align=1)
        undefined = ir.Constant(register, ir.Undefined)
        first = builder.insert_element(undefined, arguments[2], integer(0))
        zeros = ir.Constant(ir.VectorType(integer, REGISTER), [0] * REGISTER)
        repeated = builder.shuffle_vector(first, undefined, zeros)
        return builder.bitcast(builder.icmp_unsigned("!=", read, repeated), ir.IntType(REGISTER))

    return types.uint64(vector, at, types.uint8), generate


mismatches: Any = intrinsic(_emit_mismatches)
"""``mismatches(vector, at, byte)`` compares ``vector[at : at + 64]`` with ``byte`` and returns a 64-bit mask: bit i is
set if ``vector[at + i] != byte``. The vector must have at least ``at + 64`` bytes.
"""


def _emit_lowest_bit(context: Any, bits: Any) -> Any:
    """Generate LLVM code for :data:`lowest_bit`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.IntType(1)(1))

    return types.int64(types.uint64), generate


lowest_bit: Any = intrinsic(_emit_lowest_bit)
"""``lowest_bit(bits)`` returns the index of the lowest set bit of a 64-bit integer, which must not be 0."""


# --- 3lc ----------------------------------------------------------------------------------------------------------

_DENSE = 0.4
"""Codes per packed byte above which decoding writes every value, plane by plane; below, only the non-zero ones."""
_HALF, _THIRD = np.float32(0.5), np.float32(1 / 3)
_RUN_CODES = np.array([0, ZEROS, *range(243, 256)], np.uint8)
"""By length of a run of zero bytes, up to ``LONGEST``: its code. The entry for length 0 is a placeholder."""
_TRITS = np.array([[code // 3**place % 3 - 1 if code < 243 else 0 for place in (4, 3, 2, 1, 0)] for code in range(256)])
_TRITS = _TRITS.astype(np.float32)
"""By code: its five trits, one per plane; zeros for the code of a run."""
_NONZERO_COUNTS = np.count_nonzero(_TRITS, axis=1)
"""By code: number of its non-zero trits. The next two tables list the planes of these trits, and their signs."""
_NONZERO_PLANES = np.argsort(_TRITS == 0, axis=1, kind="stable")
_NONZERO_SIGNS = np.take_along_axis(_TRITS, _NONZERO_PLANES, axis=1)
_BYTES = np.array([code if code < 243 else ZEROS for code in range(256)], np.float32)
"""By code: the packed byte that it stands for, or the byte that its run repeats."""
_LENGTHS = np.array([1 if code < 243 else code - 241 for code in range(256)], np.int64)
"""By code: the number of packed bytes that it stands for."""


@loop
def _quantize(x: Array | None, error: Array | None, scale: Any, half: Any, trits: Array) -> None:
    """Quantize a slice to trits: 1 above ``half``, −1 below −``half``, else 0; store the errors in ``error``.

    Args:
        half: half of ``scale``.
    """
    for at in range(len(trits)):
        value = value_of(x, error, at)
        trit = np.copysign(ONE if abs(value) > half else ZERO, value)
        if error is not None:
            error[at] = value - scale * trit
        trits[at] = np.int8(trit)


@loop
def _pack(trits: Array, size: int, packed: Array) -> None:
    """Pack the five planes of a block into ``packed``, one trit of each plane per byte.

    Args:
        size: length of a plane. Whole registers are written, so ``packed`` must be longer by up to ``REGISTER`` − 1.
    """
    for first in range(0, size, REGISTER):
        for at in range(first, first + REGISTER):
            five = np.int64(trits[np.uintp(at)])
            for plane in range(1, 5):
                five = five * 3 + trits[np.uintp(at + plane * size)]
            packed[np.uintp(at)] = np.uint8(five + ZEROS)


@loop
def _append(packed: Array, size: int, out: Array, end: int, zeros: int) -> tuple[int, int]:
    """Zero-run encode the ``size`` packed bytes of a block.

    Bytes other than ``ZEROS`` are found one register at a time, because a branch per byte is often mispredicted.

    Args:
        zeros: length of the run of zero bytes with which the previous block ended, not yet written.

    Returns:
        The new end of ``out``, and the length of the run with which this block ends, not yet written.
    """
    done = -zeros
    for first in range(0, size, REGISTER):
        nonzero = mismatches(packed, np.uintp(first), np.uint8(ZEROS))
        if size - first < REGISTER:
            nonzero &= (np.uint64(1) << np.uint64(size - first)) - np.uint64(1)
        while nonzero:
            place = first + lowest_bit(nonzero)
            end = _run(place - done, out, end)
            out[np.uintp(end)] = packed[np.uintp(place)]
            end += 1
            done = place + 1
            nonzero &= nonzero - np.uint64(1)
    return end, size - done


@loop
def _run(zeros: int, out: Array, end: int) -> int:
    """Write the codes of a run of ``zeros`` zero bytes, which may be empty; return the new end."""
    while zeros > LONGEST:
        out[np.uintp(end)] = 255
        end += 1
        zeros -= LONGEST
    out[np.uintp(end)] = _RUN_CODES[np.uintp(zeros)]  # overwritten by the next byte if zeros == 0
    return end + int(zeros > 0)


@loop
def ternary(x: Array | None, error: Array | None, start: int, count: int, scale: Any, out: Array, end: int) -> int:
    """Quantize one tensor and write the codes of one pass (3LC, section 3); return the new end of ``out``.

    Args:
        out: must have one byte per five values, and one more, after ``end``.
    """
    return _ternary(x, error, start, count, scale, out, end, _allocate_workspace())


@loop
def _allocate_workspace() -> tuple[Array, Array]:
    """Allocate work space for the trits and packed bytes of a block.

    Done once per vector: compared with encoding a small tensor, an allocation is slow.
    """
    return np.empty(BLOCK + REGISTER, np.int8), np.empty(PLANE, np.uint8)


@loop
def _ternary(
    x: Array | None, error: Array | None, start: int, count: int, scale: Any, out: Array, end: int, workspace: Any
) -> int:
    """Encode one tensor as :func:`ternary` does, in a ``workspace`` of :func:`_allocate_workspace`."""
    half = scale * _HALF
    # An odd subnormal has no exact half. Round down: a float32 is above the true half if and only if it is above this.
    if half + half != scale:
        half = np.int32(np.float32(scale).view(np.int32) >> 1).view(np.float32)
    trits, packed = workspace
    zeros = 0
    for begin in range(start, start + count, BLOCK):
        stop = min(begin + BLOCK, start + count)
        size = stop - begin
        plane_size = (size + 4) // 5
        _quantize(part_of(x, begin, stop), part_of(error, begin, stop), scale, half, trits[:size])
        trits[size : 5 * plane_size] = 0
        _pack(trits, plane_size, packed)
        end, zeros = _append(packed, plane_size, out, end, zeros)
    return _run(zeros, out, end)


@loop
def ternary_fits(codes: Array, begin: int, stop: int, count: int) -> bool:
    """Return whether ``codes[begin:stop]`` encode exactly ``count`` trits, and the padding after them is zero."""
    length = 0
    for at in range(begin, stop):
        code = np.int64(codes[np.uintp(at)])
        length += 1 if code < 243 else int(code) - 241
    last = count - 1 - (count - 1) % BLOCK if count else 0  # where the last block begins
    plane_size = (count - last + 4) // 5
    if length != last // 5 + plane_size:
        return False
    place, at = plane_size, stop
    while place > max(0, plane_size - 4):  # at most four trits of padding
        at -= 1
        place -= _LENGTHS[codes[at]]
        for plane in range(5):
            if codes[at] < 243 and plane * plane_size + place >= count - last and _TRITS[codes[at], plane]:
                return False
    return True


@loop
def ternary_into(
    codes: Array, begin: int, stop: int, scale: Any, out: Array, start: int, count: int, add: bool
) -> None:
    """Decode a tensor that :func:`ternary_fits` has checked: ``out = scale * trits``, or ``out += scale * trits``."""
    if (stop - begin) * 5 > count * _DENSE:
        _dense_into(codes, begin, stop, scale, out, start, count, add)
    else:
        _sparse_into(codes, begin, stop, scale, out, start, count, add)


@loop
def _sparse_into(
    codes: Array, begin: int, stop: int, scale: Any, out: Array, start: int, count: int, add: bool
) -> None:
    """Decode a tensor with few non-zero values by writing only these.

    The non-zero values of each block are listed first. If they are added, their cache lines are prefetched at that
    time: they are so far apart that otherwise each access would wait for memory.
    """
    places, signs = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.float32)
    at, place = begin, 0
    for first in range(start, start + count, BLOCK):
        size = min(BLOCK, start + count - first)
        plane_size = (size + 4) // 5
        listed = 0
        while place < plane_size and at < stop:
            code = codes[np.uintp(at)]
            if code < 243 and code != ZEROS:
                for nth in range(_NONZERO_COUNTS[code]):
                    where = first + place + _NONZERO_PLANES[code, nth] * plane_size
                    places[np.uintp(listed)] = where
                    signs[np.uintp(listed)] = _NONZERO_SIGNS[code, nth]
                    if add:
                        prefetch(out, np.uintp(where))
                    listed += 1
            place += _LENGTHS[code]
            at += 1
        place -= plane_size
        if not add:
            out[first : first + size] = ZERO
        for index in range(listed):
            out[np.uintp(places[np.uintp(index)])] += scale * signs[np.uintp(index)]


@loop
def _dense_into(codes: Array, begin: int, stop: int, scale: Any, out: Array, start: int, count: int, add: bool) -> None:
    """Decode a tensor with many non-zero values, block by block.

    Expand the codes of a block to packed bytes, then unpack these plane by plane. Packed bytes are stored as float32,
    in which :func:`_unpack` divides them.
    """
    packed = np.empty(PLANE + LONGEST, np.float32)
    at, place = begin, 0
    for first in range(start, start + count, BLOCK):
        size = min(BLOCK, start + count - first)
        plane_size = (size + 4) // 5
        packed[:] = np.float32(ZEROS)
        while place < plane_size and at < stop:
            code = codes[np.uintp(at)]
            packed[np.uintp(place)] = _BYTES[code]
            place += _LENGTHS[code]
            at += 1
        place -= plane_size
        for plane in range(4, -1, -1):
            from_, to = min(size, plane * plane_size), min(size, (plane + 1) * plane_size)
            _unpack(packed[: to - from_], scale, out[first + from_ : first + to], add)
            for byte in range(to - from_, plane_size):  # bytes whose trit of this plane is padding: only remove it
                packed[byte] = np.float32(np.int32(packed[byte] * _THIRD))


@loop
def _unpack(packed: Array, scale: Any, out: Array, add: bool) -> None:
    """Decode one plane: remove the lowest trit from each packed byte and write it, times the scale, to ``out``.

    The quotient by 3 is truncated from a float32 product, which is exact enough for all bytes up to 242.
    """
    if add:
        for at in range(len(packed)):
            rest = np.float32(np.int32(packed[at] * _THIRD))
            out[at] += scale * (packed[at] - np.float32(3) * rest - ONE)
            packed[at] = rest
    else:
        for at in range(len(packed)):
            rest = np.float32(np.int32(packed[at] * _THIRD))
            out[at] = scale * (packed[at] - np.float32(3) * rest - ONE)
            packed[at] = rest


@loop
def three_lc(
    x: Array, error: Array | None, starts: Array, counts: Array, sparsity: Any, out: Array, end: int, sizes: Array
) -> int:
    """Encode all tensors of a vector, each in a single pass; return the new end of ``out``.

    Args:
        sparsity: factor of the scale, at least 1; a larger one turns more values to zero.
        sizes: output: the encoded size of each tensor; 0 for a tensor that is empty or has no finite scale.
    """
    workspace = _allocate_workspace()
    for index in range(len(starts)):
        scale = peak(x, error, starts[index], counts[index]) * sparsity
        if not counts[index] or not np.isfinite(scale):
            continue
        begin = end
        out[end] = 1
        bits = np.float32(scale).view(np.int32)
        for byte in range(4):
            out[end + 1 + byte] = (bits >> 8 * byte) & 255
        end = _ternary(x, error, starts[index], counts[index], scale, out, end + 5, workspace)
        sizes[index] = end - begin
    return end


@loop
def _passes(body: Array, begin: int) -> tuple[int, int, int, int]:
    """Return the number of passes of the tensor at ``begin``, and the offsets of their sizes, scales and codes."""
    passes = int(body[begin])
    scales = begin + 1 + 4 * (passes - 1)
    return passes, begin + 1, scales, scales + 4 * passes


@loop
def three_lc_fits(body: Array, offsets: Array, counts: Array) -> int:
    """Return the index of the first malformed tensor, or −1. A tensor of 0 bytes is valid: it had no encoding."""
    for index in range(len(counts)):
        begin, stop = offsets[index], offsets[index + 1]
        if begin == stop:
            continue
        passes, sizes, scales, at = _passes(body, begin)
        if not passes or at > stop:
            return index
        for nth in range(passes):
            until = _end_of_pass(body, sizes, nth, passes, at, stop)
            if until > stop or not np.isfinite(np.int32(word_at(body, scales + 4 * nth)).view(np.float32)):
                return index
            if not ternary_fits(body, at, until, counts[index]):
                return index
            at = until
    return -1


@loop
def _end_of_pass(body: Array, sizes: int, nth: int, passes: int, at: int, stop: int) -> int:
    """Return the end of the codes of pass ``nth``, from 0, which begin at ``at``; the last pass ends at ``stop``."""
    return stop if nth == passes - 1 else at + int(np.uint32(word_at(body, sizes + 4 * nth)))


@loop
def three_lc_into(body: Array, offsets: Array, counts: Array, out: Array, starts: Array, add: bool) -> None:
    """Decode tensors that :func:`three_lc_fits` has checked into ``out``, each from its index in ``starts`` on."""
    check_ends(body, offsets, out, starts, counts)
    for index in range(len(counts)):
        begin, stop = offsets[index], offsets[index + 1]
        if begin == stop:
            continue
        passes, sizes, scales, at = _passes(body, begin)
        for nth in range(passes):
            until = _end_of_pass(body, sizes, nth, passes, at, stop)
            scale = np.int32(word_at(body, scales + 4 * nth)).view(np.float32)
            ternary_into(body, at, until, scale, out, starts[index], counts[index], add or nth > 0)
            at = until


# --- int8 ---------------------------------------------------------------------------------------------------------

_ROUNDING = np.float32(1.5 * 2**23)
"""Adding and subtracting it rounds a small float32 to an integer, half to even."""
LARGEST_STEP = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))
"""Largest scale of 8-bit levels: 127 times as much is still finite in float32."""


@loop
def levels(
    x: Array, error: Array | None, starts: Array, counts: Array, block: int, out: Array, end: int, sizes: Array
) -> int:
    """Encode tensors in the layout of :class:`gossipx.codecs.levels.Int8` and return the new end of ``out``."""
    for index in range(len(starts)):
        start, count = starts[index], counts[index]
        block_size = block if block else max(1, count)
        blocks = (count + block_size - 1) // block_size
        for byte in range(4):
            out[end + byte] = (block >> 8 * byte) & 255
        begin, end = end + 4, end + 4 + 4 * blocks + count
        for nth in range(blocks):
            first = start + nth * block_size
            length = min(block_size, start + count - first)
            highest = peak(x, error, first, length)
            if not np.isfinite(highest):
                end = begin - 4
                break
            scale = min(highest / np.float32(127), LARGEST_STEP)
            bits = np.float32(scale).view(np.int32)
            for byte in range(4):
                out[begin + 4 * nth + byte] = (bits >> 8 * byte) & 255
        if end < begin or not count:
            end = begin - 4
            continue
        for nth in range(blocks):
            first = start + nth * block_size
            length = min(block_size, start + count - first)
            scale = np.int32(word_at(out, begin + 4 * nth)).view(np.float32)
            place = begin + 4 * blocks + nth * block_size
            slots = out[place : place + length]
            _levels(part_of(x, first, first + length), part_of(error, first, first + length), scale, slots)
        sizes[index] = end - begin + 4
    return end


@loop
def _levels(x: Array | None, error: Array | None, scale: Any, out: Array) -> None:
    inverse = ONE / scale
    if not np.isfinite(inverse):  # all values below 2^-121: the inverse of the scale overflows
        scale = inverse = ZERO
    for at in range(len(out)):
        value = value_of(x, error, at)
        level = (value * inverse + _ROUNDING) - _ROUNDING
        if error is not None:
            error[at] = value - scale * level
        out[at] = np.uint8(np.int32(level))


@loop
def levels_fit(body: Array, offsets: Array, counts: Array) -> int:
    """Return the index of the first malformed tensor, or −1 if all are well-formed or take no bytes."""
    for index in range(len(counts)):
        begin, size = offsets[index], offsets[index + 1] - offsets[index]
        if not size:
            continue
        if size < 4:
            return index
        block = np.int64(np.uint32(word_at(body, begin)))
        block_size = block if block else max(1, counts[index])
        blocks = (counts[index] + block_size - 1) // block_size
        if size != 4 + 4 * blocks + counts[index]:
            return index
        for nth in range(blocks):
            if not np.isfinite(np.int32(word_at(body, begin + 4 + 4 * nth)).view(np.float32)):
                return index
    return -1


@loop
def levels_into(body: Array, offsets: Array, counts: Array, out: Array, starts: Array, add: bool) -> None:
    """Decode tensors that :func:`levels_fit` has checked, each to its entry of ``starts``."""
    check_ends(body, offsets, out, starts, counts)
    for index in range(len(counts)):
        begin, start, count = offsets[index], starts[index], counts[index]
        if begin == offsets[index + 1]:
            continue
        block = np.int64(np.uint32(word_at(body, begin)))
        block_size = block if block else max(1, count)
        blocks = (count + block_size - 1) // block_size
        for nth in range(blocks):
            first = start + nth * block_size
            length = min(block_size, start + count - first)
            scale = np.int32(word_at(body, begin + 4 + 4 * nth)).view(np.float32)
            place = begin + 4 + 4 * blocks + nth * block_size
            _from_levels(body[place : place + length], scale, out[first : first + length], add)


@loop
def _from_levels(levels: Array, scale: Any, out: Array, add: bool) -> None:
    if add:
        for at in range(len(out)):
            out[at] += scale * np.float32((np.int32(levels[at]) ^ np.int32(128)) - np.int32(128))
    else:
        for at in range(len(out)):
            out[at] = scale * np.float32((np.int32(levels[at]) ^ np.int32(128)) - np.int32(128))
