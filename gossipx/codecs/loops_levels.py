"""Compiled loops of the 8-bit codec ``int8``; :mod:`gossipx.codecs.loops` explains their arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

from gossipx.codecs.loops import ONE, ZERO, Array, check_ends, loop, part_of, peak, value_of, word_at

_ROUNDING = np.float32(1.5 * 2**23)
"""Adding and subtracting it rounds a small float32 to an integer, half to even."""
LARGEST_STEP = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))
"""Largest scale of 8-bit levels: 127 times as much is still finite in float32."""


@loop
def levels(
    x: Array, left: Array | None, starts: Array, counts: Array, block: int, out: Array, end: int, sizes: Array
) -> int:
    """Encode tensors in the layout of :class:`gossipx.codecs.levels.Int8` and return the new end of ``out``."""
    for number in range(len(starts)):
        start, count = starts[number], counts[number]
        one = block if block else max(1, count)
        blocks = (count + one - 1) // one
        for byte in range(4):
            out[end + byte] = (block >> 8 * byte) & 255
        begin, end = end + 4, end + 4 + 4 * blocks + count
        for each in range(blocks):
            first = start + each * one
            length = min(one, start + count - first)
            highest = peak(x, left, first, length)
            if not np.isfinite(highest):
                end = begin - 4
                break
            scale = min(highest / np.float32(127), LARGEST_STEP)
            bits = np.float32(scale).view(np.int32)
            for byte in range(4):
                out[begin + 4 * each + byte] = (bits >> 8 * byte) & 255
        if end < begin or not count:
            end = begin - 4
            continue
        for each in range(blocks):
            first = start + each * one
            length = min(one, start + count - first)
            scale = np.int32(word_at(out, begin + 4 * each)).view(np.float32)
            place = begin + 4 * blocks + each * one
            slots = out[place : place + length]
            _levels(part_of(x, first, first + length), part_of(left, first, first + length), scale, slots)
        sizes[number] = end - begin + 4
    return end


@loop
def _levels(x: Array | None, left: Array | None, scale: Any, out: Array) -> None:
    inverse = ONE / scale
    if not np.isfinite(inverse):  # all values below 2^-121: the inverse of the scale overflows
        scale = inverse = ZERO
    for at in range(len(out)):
        value = value_of(x, left, at)
        level = (value * inverse + _ROUNDING) - _ROUNDING
        if left is not None:
            left[at] = value - scale * level
        out[at] = np.uint8(np.int32(level))


@loop
def levels_fit(body: Array, offsets: Array, counts: Array) -> int:
    """Return the index of the first malformed tensor, or −1 if all are well-formed or take no bytes."""
    for number in range(len(counts)):
        begin, size = offsets[number], offsets[number + 1] - offsets[number]
        if not size:
            continue
        if size < 4:
            return number
        block = np.int64(np.uint32(word_at(body, begin)))
        one = block if block else max(1, counts[number])
        blocks = (counts[number] + one - 1) // one
        if size != 4 + 4 * blocks + counts[number]:
            return number
        for each in range(blocks):
            if not np.isfinite(np.int32(word_at(body, begin + 4 + 4 * each)).view(np.float32)):
                return number
    return -1


@loop
def levels_into(body: Array, offsets: Array, counts: Array, out: Array, starts: Array, add: bool) -> None:
    """Decode tensors that :func:`levels_fit` has checked, each to its entry of ``starts``."""
    check_ends(body, offsets, out, starts, counts)
    for number in range(len(counts)):
        begin, start, count = offsets[number], starts[number], counts[number]
        if begin == offsets[number + 1]:
            continue
        block = np.int64(np.uint32(word_at(body, begin)))
        one = block if block else max(1, count)
        blocks = (count + one - 1) // one
        for each in range(blocks):
            first = start + each * one
            length = min(one, start + count - first)
            scale = np.int32(word_at(body, begin + 4 + 4 * each)).view(np.float32)
            place = begin + 4 + 4 * blocks + each * one
            _from_levels(body[place : place + length], scale, out[first : first + length], add)


@loop
def _from_levels(levels: Array, scale: Any, out: Array, add: bool) -> None:
    if add:
        for at in range(len(out)):
            out[at] += scale * np.float32((np.int32(levels[at]) ^ np.int32(128)) - np.int32(128))
    else:
        for at in range(len(out)):
            out[at] = scale * np.float32((np.int32(levels[at]) ^ np.int32(128)) - np.int32(128))
