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
