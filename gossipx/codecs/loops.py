"""Helpers that the codecs' compiled loops share: numba functions over float32 vectors in host memory.

Compiling takes some seconds, once per machine. Numba caches the compiled code next to the source file, or in its cache
folder if that directory is not writable, until the file changes. After a change of this file, touch the files that
import it, because numba does not notice that their compiled code is outdated. For tensors on a GPU,
:mod:`gossipx.codecs.packing` does the same work with torch.

A loop accesses at most three slices: with more, LLVM cannot prove that they do not overlap, and does not vectorise.

The loops in :mod:`gossipx.codecs.loops_ternary` and its siblings have these arguments in common:

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
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

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
