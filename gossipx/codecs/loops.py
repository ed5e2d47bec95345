"""What the loops of codecs have in common: over float32 vectors in main memory, compiled by numba.

Each reads memory as seldom as it can. Compiling takes some seconds once a machine; the result is kept beside the file
of the loop, or in numba's cache folder where that cannot be written, until that file changes: whoever changes this one
touches those that import it, too. :mod:`gossipx.codecs.packing` does the same by torch, for tensors on a device.

Loops touch three slices at most: with more, LLVM gives up proving that they do not overlap, and nothing is vectorised.
A vector may have *parts* (``starts``, ``counts``), each a tensor with a scale of its own; what lies between them is not
looked at. ``left`` is the error kept for the vector, or None: with it, what is encoded is ``x + left``, and what was
left out is there afterwards. ``x`` is None where ``left`` holds all that is to be encoded.
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
"""Bytes of a processor's widest register."""
_MAGNITUDE = np.int32(0x7FFFFFFF)

loop = numba.njit(cache=True, nogil=True, error_model="numpy")


def value_of(x: Array | None, left: Array | None, at: int) -> Any:
    """What is to be encoded; numba chooses by what is None."""


@overload(value_of, strict=False)
def _(x: Any, left: Any, at: Any) -> Any:
    if isinstance(x, types.NoneType):
        return lambda x, left, at: left[np.uintp(at)]
    if isinstance(left, types.NoneType):
        return lambda x, left, at: x[np.uintp(at)]
    return lambda x, left, at: x[np.uintp(at)] + left[np.uintp(at)]


def part_of(vector: Array | None, begin: int, end: int) -> Any:
    """Of a vector that may be None."""


@overload(part_of, strict=False)
def _(vector: Any, begin: Any, end: Any) -> Any:
    if isinstance(vector, types.NoneType):
        return lambda vector, begin, end: None
    return lambda vector, begin, end: vector[begin:end]


@loop
def peak(x: Array | None, left: Array | None, start: int, count: int) -> Any:
    """max |x + left| over a part; Inf or NaN if any of them is not finite.

    Compared as integers, which order magnitudes as floats do and NaN above all.
    """
    highest = np.int32(0)
    for at in range(start, start + count):
        bits = magnitude_of(value_of(x, left, at))
        highest = bits if bits > highest else highest
    return np.int32(highest).view(np.float32)


@loop
def magnitude_of(value: Any) -> Any:
    """The bits of a magnitude: integers of 32 bits, which numba would widen, and half as many fit a register."""
    return np.int32(np.float32(value).view(np.int32) & _MAGNITUDE)


@loop
def check_ends(body: Array, offsets: Array, out: Array, starts: Array, counts: Array) -> None:
    """Refuse tensors that do not lie within the arrays: the loops look at no end.

    Raises:
        IndexError: one does not.
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
"""Called with a vector and a place in it: has its cache line fetched, to be altered, and does not wait for it."""


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
"""Called with a vector of bytes, a place in it and a byte: which of the 64 from there on are another, the first the
lowest bit. All 64 have to be there.
"""


def _lowest(context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.cttz(given[0], ir.IntType(1)(1))

    return types.int64(types.uint64), generate


lowest: Any = intrinsic(_lowest)
"""Called with 64 bits that are not all 0: the number of the lowest that is 1."""
