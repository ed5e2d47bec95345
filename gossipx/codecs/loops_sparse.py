"""Compiled loops of sparse codecs, which send few values and their indices; :mod:`gossipx.codecs.loops` explains their
arguments. Magnitudes are compared as the integers of their bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from gossipx.codecs.loops import Array, check_ends, loop, magnitude_of, part_of, peak, value_of, word_at

CHUNK = 4096
"""Values processed at a time, a multiple of 8: they and their accumulated errors fit the L1 cache."""
_COUNTED = 2**20  # values counted at a time by 32-bit counters
_STRIDE = 2**20  # first step of the search, an eighth of a binade
_INFINITY = np.int32(0x7F800000)
_GATHER = np.uint64(0x0102040810204080)
"""Multiplied by eight bytes of 0 or 1, it gathers their lowest bits in the highest byte, in order."""
_LOWEST = np.uint64(0x0101010101010101)
_DIAGONAL = np.uint64(0x8040201008040201)
_ALL_BUT_HIGHEST = np.uint64(0x7F7F7F7F7F7F7F7F)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 / φ: the fractional parts of multiples of 1 / φ are spread evenly over [0, 1)."""
_ONES = np.array([byte.bit_count() for byte in range(256)], np.int64)


@loop
def largest(
    x: Array,
    left: Array | None,
    starts: Array,
    counts: Array,
    many: Array,
    looked: Array,
    key: Any,
    room: Any,
    out: Array,
    end: int,
    sizes: Array,
) -> int:
    """Encode the largest values of each tensor, see :class:`gossipx.codecs.sparse.TopK`; return the new end.

    Args:
        many: per tensor, how many of the sampled values reach the threshold.
        looked: per tensor, how many values are sampled; if it is all of them, exactly ``many`` are sent.
        key: 64-bit seed of the sampling.
        room: work space from :func:`room_for`.
    """
    for number in range(len(starts)):
        start, count = starts[number], counts[number]
        highest = magnitude_of(peak(x, left, start, count))
        if not count or highest >= _INFINITY:
            continue
        if looked[number] < count:
            few = room[3][: looked[number]]
            _sample(x, left, start, count, np.uint64(key) + np.uint64(number), few)
            least, spare = _threshold(few, None, 0, len(few), many[number], highest)
            least, spare = max(least, np.int32(1)), count
        else:
            least, spare = _threshold(x, left, start, count, many[number], highest)
        begin = end
        end = _send(x, left, start, count, least, spare, room, out, end)
        sizes[number] = end - begin
    return end


@loop
def reaching(
    x: Array,
    left: Array | None,
    starts: Array,
    counts: Array,
    least: Any,
    room: Any,
    out: Array,
    end: int,
    sizes: Array,
) -> int:
    """Encode the values of each tensor with a magnitude of at least ``least`` (bits as int32); return the new end."""
    for number in range(len(starts)):
        start, count = starts[number], counts[number]
        if count and magnitude_of(peak(x, left, start, count)) < _INFINITY:
            begin = end
            end = _send(x, left, start, count, least, count, room, out, end)
            sizes[number] = end - begin
    return end


@loop
def _sample(x: Array, left: Array | None, start: int, count: int, key: Any, some: Array) -> None:
    """Fill ``some`` with one value from each of as many equal parts, at positions of a golden-ratio sequence."""
    first = (key ^ (key >> np.uint64(31))) * _GOLDEN
    first = (first ^ (first >> np.uint64(29))) * _GOLDEN
    step = count / len(some)
    for at in range(len(some)):
        drawn = first + np.uint64(at) * _GOLDEN
        part = np.float64(np.int64(drawn >> np.uint64(11))) * 2.0**-53
        place = int(np.int64((at + part) * step))
        some[at] = value_of(x, left, start + min(count - 1, place))


@loop
def _threshold(x: Array, left: Array | None, start: int, count: int, many: int, highest: Any) -> tuple[Any, int]:
    """Find the threshold (bits as int32) that selects ``many`` values, and how many of those equal to it may be sent.

    The search counts the values above a candidate: downwards from ``highest`` in doubling steps, then by bisection.
    """
    low, high, above, stride = np.int32(0), np.int32(highest + 1), 0, _STRIDE
    while high - low > 1:
        half = np.int32((np.int64(low) + np.int64(high)) >> 1)
        middle = half if low else np.int32(max(np.int64(half), np.int64(high) - stride))
        stride *= 2
        reached = 0
        for first in range(start, start + count, _COUNTED):
            last = min(first + _COUNTED, start + count)
            reached += int(_reached(part_of(x, first, last), part_of(left, first, last), middle))
        if reached == many:
            return middle, count
        if reached > many:
            low = middle
        else:
            high, above = middle, reached
    return low, many - above


@loop
def _reached(x: Array, left: Array | None, least: Any) -> Any:
    reached = np.int32(0)
    for at in range(len(x)):
        reached += np.int32(magnitude_of(value_of(x, left, at)) >= least)
    return reached


@loop
def room_for(counts: Array, looked: Array) -> tuple[Array, Array, Array, Array]:
    """Allocate work space: the marks of a chunk, the non-empty groups of eight marks, indices of values (as many as may
    be sent as packed indices, and one chunk more), and the sampled values of tensors that are not read whole.
    """
    most = 0
    for count in counts:
        most = max(most, _told(count))
    few = 0
    for number in range(len(counts)):
        if looked[number] < counts[number]:
            few = max(few, looked[number])
    places = np.empty(most + CHUNK + 8, np.int64)
    return np.zeros(CHUNK + 8, np.uint8), np.empty(CHUNK // 8 + 1, np.int32), places, np.empty(few, np.float32)


@loop
def _told(count: int) -> int:
    """Return the most values of a tensor that are ever sent with packed indices rather than a bit mask."""
    return (count + 7) // wide_of(count)


@loop
def wide_of(count: int) -> int:
    """Return the bits of an index below ``count``, at least one."""
    wide = 1
    while count > 1 << wide:
        wide += 1
    return wide


@loop
def _as_numbers(many: int, count: int) -> bool:
    return (many + 7) // 8 * wide_of(count) < (count + 7) // 8


@loop
def _send(
    x: Array, left: Array | None, start: int, count: int, least: Any, spare: int, room: Any, out: Array, end: int
) -> int:
    """Encode the values of one tensor above ``least``, and the first ``spare`` that equal it; return the new end.

    Values are written behind a bit mask of their positions, and moved if packed indices turn out shorter.
    """
    marks, filled, places, _ = room
    where, many = end + 8, 0
    values = where + (count + 7) // 8
    for first in range(0, count, CHUNK):
        size = min(CHUNK, count - first)
        begin = start + first
        now, kept = part_of(x, begin, begin + size), part_of(left, begin, begin + size)
        _mark(now, kept, least, marks[:size])
        marks[size : size + 7] = 0
        if spare < count:
            spare = _unmark(now, kept, least, spare, marks[:size])
        told = many if many <= len(places) - CHUNK - 8 else 0
        eights = marks[: (size + 7) // 8 * 8].view(np.uint64)
        listed = _list(marks, eights, filled, first, places[told:], out, where + first // 8)
        _take(x, left, start, places[told : told + listed], out, values + 4 * many)
        many += listed
    for byte in range(8):
        out[end + byte] = (many >> 8 * byte) & 255
    if _as_numbers(many, count):
        wide = wide_of(count)
        _put_numbers(places, many, wide, out, where)
        moved = where + (many + 7) // 8 * wide
        for at in range(4 * many):
            out[np.uintp(moved + at)] = out[np.uintp(values + at)]
        values = moved
    return values + 4 * many


@loop
def _mark(x: Array, left: Array | None, least: Any, marks: Array) -> None:
    """Mark the values to send, and set ``left`` to the sum of value and error."""
    for at in range(len(marks)):
        value = value_of(x, left, at)
        if left is not None:
            left[at] = value
        marks[at] = np.uint8(magnitude_of(value) >= least)


@loop
def _unmark(x: Array, left: Array | None, least: Any, spare: int, marks: Array) -> int:
    """Unmark all values equal to ``least`` but the first ``spare``; return how many of these remain."""
    for at in range(len(marks)):
        if marks[at] and magnitude_of(value_of(x, None, at) if left is None else value_of(None, left, at)) == least:
            marks[at] = np.uint8(spare > 0)
            spare -= int(spare > 0)
    return spare


@loop
def _list(marks: Array, eights: Array, filled: Array, first: int, places: Array, out: Array, where: int) -> int:
    """Write the positions of marks as a bit mask to ``out`` and as indices to ``places``; return their number.

    Groups of eight with any mark are listed first, without a branch, which would often be mispredicted.
    """
    for eight in range(len(eights)):
        out[np.uintp(where + eight)] = np.uint8((eights[np.uintp(eight)] * _GATHER) >> np.uint64(56))
    some = 0
    for eight in range(len(eights)):
        filled[np.uintp(some)] = eight
        some += int(eights[np.uintp(eight)] != 0)
    listed = 0
    for number in range(some):
        begin = 8 * int(np.int64(filled[np.uintp(number)]))
        for at in range(begin, begin + 8):
            places[np.uintp(listed)] = first + at
            listed += int(np.int64(marks[np.uintp(at)]))
    return listed


@loop
def _take(x: Array, left: Array | None, start: int, places: Array, out: Array, to: int) -> None:
    """Write the values at ``places`` to ``out``, and set their errors to zero."""
    for number in range(len(places)):
        at = start + places[np.uintp(number)]
        value = value_of(x, None, at) if left is None else value_of(None, left, at)
        if left is not None:
            left[np.uintp(at)] = np.float32(0)
        bits = np.float32(value).view(np.int32)
        for byte in range(4):
            out[np.uintp(to + 4 * number + byte)] = np.uint8((bits >> 8 * byte) & 255)


@loop
def _put_numbers(places: Array, many: int, wide: int, out: Array, where: int) -> None:
    """Pack indices in the layout of :func:`gossipx.codecs.packing.pack_bits`, eight at a time in a 64-bit word."""
    eights = (many + 7) // 8
    places[many : eights * 8] = 0
    for eight in range(eights):
        for low in range(0, wide, 8):
            word = np.uint64(0)
            for each in range(8):
                byte = np.uint64(places[np.uintp(eight * 8 + each)] >> low) & np.uint64(255)
                word |= byte << np.uint64(8 * each)
            for bit in range(low, min(low + 8, wide)):
                bits = (word >> np.uint64(bit - low)) & _LOWEST
                out[np.uintp(where + bit * eights + eight)] = np.uint8((bits * _GATHER) >> np.uint64(56))


@loop
def _get_numbers(body: Array, where: int, many: int, wide: int, places: Array) -> None:
    eights = (many + 7) // 8
    places[: eights * 8] = 0
    for eight in range(eights):
        for low in range(0, wide, 8):
            word = np.uint64(0)
            for bit in range(low, min(low + 8, wide)):
                spread = np.uint64(body[np.uintp(where + bit * eights + eight)]) * _LOWEST & _DIAGONAL
                word |= (((spread + _ALL_BUT_HIGHEST) >> np.uint64(7)) & _LOWEST) << np.uint64(bit - low)
            for each in range(8):
                byte = np.int64((word >> np.uint64(8 * each)) & np.uint64(255))
                places[np.uintp(eight * 8 + each)] |= byte << low


@loop
def sparse_fits(body: Array, offsets: Array, counts: Array) -> int:
    """Return the index of the first malformed tensor, or −1 if all are well-formed or take no bytes."""
    places = np.empty(_most_told(offsets, counts), np.int64)
    for number in range(len(counts)):
        begin, stop, count = offsets[number], offsets[number + 1], counts[number]
        if begin == stop:
            continue
        many = _many(body, begin, stop)
        if not 0 <= many <= count:
            return number
        numbered = _as_numbers(many, count)
        values = begin + 8 + ((many + 7) // 8 * wide_of(count) if numbered else (count + 7) // 8)
        if stop != values + 4 * many:
            return number
        if numbered:
            _get_numbers(body, begin + 8, many, wide_of(count), places)
        if not (_ascend(places[:many], count) if numbered else _has(body[begin + 8 : values], count, many)):
            return number
        for at in range(values, stop, 4):
            if np.int32(word_at(body, at)) & _INFINITY == _INFINITY:
                return number
    return -1


@loop
def _most_told(offsets: Array, counts: Array) -> int:
    """Return the most packed indices of any tensor, plus padding; bounded by the bytes that arrived."""
    most = 0
    for number in range(len(counts)):
        most = max(most, min(_told(counts[number]), (offsets[number + 1] - offsets[number]) // 4))
    return most + 16


@loop
def _many(body: Array, begin: int, stop: int) -> int:
    """Return the number of values that a tensor declares; negative if it is too short or declares 2^63 or more."""
    if stop - begin < 8:
        return -1
    many = np.uint64(word_at(body, begin + 4)) << np.uint64(32) | np.uint64(word_at(body, begin))
    return int(np.int64(many))


@loop
def _ascend(places: Array, count: int) -> bool:
    before = -1
    for place in places:
        if not before < place < count:
            return False
        before = place
    return True


@loop
def _has(bits: Array, count: int, many: int) -> bool:
    """Return whether exactly ``many`` bits are set, and no padding bit."""
    ones = 0
    for byte in bits:
        ones += _ONES[byte]
    return ones == many and (count % 8 == 0 or bits[-1] >> (count % 8) == 0)


@loop
def sparse_into(body: Array, offsets: Array, counts: Array, out: Array, starts: Array, add: bool) -> None:
    """Decode tensors that :func:`sparse_fits` has checked, each to its entry of ``starts``."""
    check_ends(body, offsets, out, starts, counts)
    places = np.empty(_most_told(offsets, counts) + CHUNK, np.int64)
    for number in range(len(counts)):
        begin, stop, count = offsets[number], offsets[number + 1], counts[number]
        if begin == stop:
            continue
        to = out[starts[number] : starts[number] + count]
        if not add:
            to[:] = np.float32(0)
        many = _many(body, begin, stop)
        values = stop - 4 * many
        if _as_numbers(many, count):
            _get_numbers(body, begin + 8, many, wide_of(count), places)
            _put(body, values, places[:many], to)
            continue
        _put_marked(body, begin + 8, values, places, to)


@loop
def _put_marked(body: Array, where: int, values: int, places: Array, out: Array) -> None:
    """Add values, in order, to the positions in a bit mask that lies between ``where`` and the values."""
    end = values
    for first in range(where, end, CHUNK // 8):
        listed = _set_bits(body[first : min(first + CHUNK // 8, end)], (first - where) * 8, places)
        _put(body, values, places[:listed], out)
        values += 4 * listed


@loop
def _set_bits(bits: Array, first: int, places: Array) -> int:
    listed = 0
    for at in range(len(bits)):
        byte = np.int64(bits[np.uintp(at)])
        if byte:
            for each in range(8):
                places[np.uintp(listed)] = first + at * 8 + each
                listed += int((byte >> each) & 1)
    return listed


@loop
def _put(body: Array, values: int, places: Array, out: Array) -> None:
    highest = -1
    for place in places:
        highest = max(highest, place)
    if highest >= len(out) or values + 4 * len(places) > len(body):
        raise IndexError("a tensor's values lie outside its frame or its vector")
    for number in range(len(places)):
        value = np.int32(word_at(body, values + 4 * number)).view(np.float32)
        out[np.uintp(places[np.uintp(number)])] += value
