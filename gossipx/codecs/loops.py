"""Shared parts of the compiled loops of codecs: numba functions over float32 vectors in host memory.

Compiling takes some seconds, once per machine. Numba caches the result next to the source file of the loop, or in its
cache folder if that is not writable, until that file changes. After a change of this file, touch the files that import
it, since their caches do not depend on it. :mod:`gossipx.codecs.packing` does the same work by torch, for tensors on a
device.

Loops access three slices at most: with more, LLVM cannot prove that they do not overlap, and does not vectorise. A
vector may consist of several tensors (``starts``, ``counts``), each with its own scale; gaps between them are ignored.
``left`` is the accumulated error of the vector or None: the loop encodes ``x + left`` and overwrites ``left`` with the
new error. ``x`` is None if ``left`` already holds the sum.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

Array: TypeAlias = npt.NDArray[Any]

ZERO, ONE = np.float32(0), np.float32(1)
REGISTER = 64
"""Bytes of the widest vector register."""
_MAGNITUDE = np.int32(0x7FFFFFFF)

loop = numba.njit(cache=True, nogil=True, error_model="numpy")


def value_of(x: Array | None, left: Array | None, at: int) -> Any:
    """Return the value to encode: ``x + left`` at an index. Either may be None, which is resolved at compile time."""


@overload(value_of, strict=False)
def _(x: Any, left: Any, at: Any) -> Any:
    if isinstance(x, types.NoneType):
        return lambda x, left, at: left[np.uintp(at)]
    if isinstance(left, types.NoneType):
        return lambda x, left, at: x[np.uintp(at)]
    return lambda x, left, at: x[np.uintp(at)] + left[np.uintp(at)]


def part_of(vector: Array | None, begin: int, end: int) -> Any:
    """Return a slice of a vector, or None for None."""


@overload(part_of, strict=False)
def _(vector: Any, begin: Any, end: Any) -> Any:
    if isinstance(vector, types.NoneType):
        return lambda vector, begin, end: None
    return lambda vector, begin, end: vector[begin:end]


@loop
def peak(x: Array | None, left: Array | None, start: int, count: int) -> Any:
    """Return max |x + left| over one tensor; Inf or NaN if any value is not finite.

    Bits are compared as integers: these order magnitudes as floats do, with NaN above Inf.
    """
    highest = np.int32(0)
    for at in range(start, start + count):
        bits = magnitude_of(value_of(x, left, at))
        highest = bits if bits > highest else highest
    return np.int32(highest).view(np.float32)


@loop
def magnitude_of(value: Any) -> Any:
    """Return the bits of |value| as int32; numba would widen to int64, of which half as many fit a register."""
    return np.int32(np.float32(value).view(np.int32) & _MAGNITUDE)


@loop
def check_ends(body: Array, offsets: Array, out: Array, starts: Array, counts: Array) -> None:
    """Check that all tensors lie within the arrays, since the loops do not check bounds.

    Raises:
        IndexError: a tensor does not.
    """
    for number in range(len(counts)):
        if not 0 <= offsets[number] <= offsets[number + 1] <= len(body):
            raise IndexError("a tensor's bytes lie outside its frame")
        if not (counts[number] >= 0 and 0 <= starts[number] <= len(out) - counts[number]):
            raise IndexError("a tensor's values lie outside the vector they are decoded into")


@loop
def word_at(body: Array, at: int) -> Any:
    bits = np.uint32(0)
    for byte in range(4):
        bits |= np.uint32(body[at + byte]) << np.uint32(8 * byte)
    return bits


def _prefetch(context: Any, vector: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        data = context.make_array(vector)(context, builder, given[0]).data
        place = builder.bitcast(builder.gep(data, [given[1]]), cgutils.voidptr_t)
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
        told = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
        builder.call(told, [place, number(1), number(3), number(1)])  # a write, into the nearest cache, of data
        return context.get_dummy_value()

    return types.void(vector, at), generate


prefetch: Any = intrinsic(_prefetch)
"""``prefetch(vector, at)`` starts to fetch the cache line of an element for writing, and does not wait."""


def _unlike(context: Any, vector: Any, at: Any, byte: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        data = context.make_array(vector)(context, builder, given[0]).data
        kind, place = ir.VectorType(ir.IntType(8), REGISTER), ir.IntType(32)
        read = builder.load(builder.bitcast(builder.gep(data, [given[1]]), kind.as_pointer()), align=1)
        one = builder.insert_element(ir.Constant(kind, ir.Undefined), given[2], place(0))
        same = ir.Constant(ir.VectorType(place, REGISTER), [0] * REGISTER)
        everywhere = builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), same)
        return builder.bitcast(builder.icmp_unsigned("!=", read, everywhere), ir.IntType(REGISTER))

    return types.uint64(vector, at, types.uint8), generate


unlike: Any = intrinsic(_unlike)
"""``unlike(vector, at, byte)`` returns a mask of those of the 64 bytes from ``at`` on that differ from ``byte``. The
first byte is the lowest bit. The vector must have 64 bytes there.
"""


def _lowest(context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.cttz(given[0], ir.IntType(1)(1))

    return types.int64(types.uint64), generate


lowest: Any = intrinsic(_lowest)
"""``lowest(bits)`` returns the index of the lowest set bit of 64, which must not all be 0."""
