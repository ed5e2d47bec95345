"""Compiled loops of sparse codecs, which send few values and their indices; :mod:`gossipx.codecs.loops` explains their
arguments. Magnitudes are compared as the integers of their bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from gossipx.codecs.loops import Array, check_ends, loop, magnitude_of, part_of, peak, value_of, word_at

CHUNK = 4096
"""Values processed at a time, a multiple of 8: they and their accumulated errors fit the L1 cache."""
_COUNT_CHUNK = 2**20  # values counted at a time by 32-bit counters
_FIRST_STEP = 2**20  # first step of the search, an eighth of a binade
_INFINITY = np.int32(0x7F800000)
_GATHER = np.uint64(0x0102040810204080)
"""Multiplied by eight bytes of 0 or 1, it gathers their lowest bits in the highest byte, in order."""
_LOWEST_BITS = np.uint64(0x0101010101010101)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 / φ: the fractional parts of multiples of 1 / φ are spread evenly over [0, 1)."""


@loop
def largest(
    x: Array,
    error: Array | None,
    starts: Array,
    counts: Array,
    wanted: Array,
    sampled: Array,
    key: Any,
    workspace: Any,
    out: Array,
    end: int,
    sizes: Array,
) -> int:
    """Encode the largest values of each tensor, see :class:`gossipx.codecs.sparse.TopK`; return the new end.

    Args:
        wanted: per tensor, how many of the sampled values should reach the threshold.
        sampled: per tensor, how many values are sampled; if it is all of them, exactly ``wanted`` are sent.
        key: 64-bit seed of the sampling.
        workspace: work space from :func:`allocate_workspace`.
    """
    for index in range(len(starts)):
        start, count = starts[index], counts[index]
        highest = magnitude_of(peak(x, error, start, count))
        if not count or highest >= _INFINITY:
            continue
        if sampled[index] < count:
            sample = workspace[3][: sampled[index]]
            _sample(x, error, start, count, np.uint64(key) + np.uint64(index), sample)
            threshold, ties = _threshold(sample, None, 0, len(sample), wanted[index], highest)
            threshold, ties = max(threshold, np.int32(1)), count
        else:
            threshold, ties = _threshold(x, error, start, count, wanted[index], highest)
        begin = end
        end = _send(x, error, start, count, threshold, ties, workspace, out, end)
        sizes[index] = end - begin
    return end


@loop
def _sample(x: Array, error: Array | None, start: int, count: int, key: Any, sample: Array) -> None:
    """Fill ``sample`` with one value from each of as many equal parts, at positions of a golden-ratio sequence."""
    first = (key ^ (key >> np.uint64(31))) * _GOLDEN
    first = (first ^ (first >> np.uint64(29))) * _GOLDEN
    step = count / len(sample)
    for at in range(len(sample)):
        drawn = first + np.uint64(at) * _GOLDEN
        part = np.float64(np.int64(drawn >> np.uint64(11))) * 2.0**-53
        place = int(np.int64((at + part) * step))
        sample[at] = value_of(x, error, start + min(count - 1, place))


@loop
def _threshold(x: Array, error: Array | None, start: int, count: int, wanted: int, highest: Any) -> tuple[Any, int]:
    """Find the threshold (bits as int32) that selects ``wanted`` values, and how many of those equal to it are sent.

    The search counts the values above a candidate: downwards from ``highest`` in doubling steps, then by bisection.
    """
    low, high, above, step = np.int32(0), np.int32(highest + 1), 0, _FIRST_STEP
    while high - low > 1:
        half = np.int32((np.int64(low) + np.int64(high)) >> 1)
        middle = half if low else np.int32(max(np.int64(half), np.int64(high) - step))
        step *= 2
        reached = 0
        for first in range(start, start + count, _COUNT_CHUNK):
            last = min(first + _COUNT_CHUNK, start + count)
            reached += int(_count_reaching(part_of(x, first, last), part_of(error, first, last), middle))
        if reached == wanted:
            return middle, count
        if reached > wanted:
            low = middle
        else:
            high, above = middle, reached
    return low, wanted - above


@loop
def _count_reaching(x: Array, error: Array | None, threshold: Any) -> Any:
    reached = np.int32(0)
    for at in range(len(x)):
        reached += np.int32(magnitude_of(value_of(x, error, at)) >= threshold)
    return reached


@loop
def allocate_workspace(counts: Array, sampled: Array) -> tuple[Array, Array, Array, Array]:
    """Allocate work space: the marks of a chunk, the non-empty groups of eight marks, indices of values (as many as may
    be sent as packed indices, and one chunk more), and the sampled values of tensors that are not read in full.
    """
    max_packed = 0
    for count in counts:
        max_packed = max(max_packed, _max_packed(count))
    max_sampled = 0
    for index in range(len(counts)):
        if sampled[index] < counts[index]:
            max_sampled = max(max_sampled, sampled[index])
    places = np.empty(max_packed + CHUNK + 8, np.int64)
    return np.zeros(CHUNK + 8, np.uint8), np.empty(CHUNK // 8 + 1, np.int32), places, np.empty(max_sampled, np.float32)


@loop
def _max_packed(count: int) -> int:
    """Return the largest number of values of a tensor that are sent with packed indices rather than a bit mask."""
    return (count + 7) // index_bits(count)


@loop
def index_bits(count: int) -> int:
    """Return the bits of an index below ``count``, at least one."""
    bits = 1
    while count > 1 << bits:
        bits += 1
    return bits


@loop
def _has_packed_indices(sent: int, count: int) -> bool:
    """Return whether positions are sent as packed indices: these then take fewer bytes than a bit mask."""
    return (sent + 7) // 8 * index_bits(count) < (count + 7) // 8


@loop
def _send(
    x: Array,
    error: Array | None,
    start: int,
    count: int,
    threshold: Any,
    ties: int,
    workspace: Any,
    out: Array,
    end: int,
) -> int:
    """Encode the values of one tensor above ``threshold``, and the first ``ties`` that equal it; return the new end.

    Values are written behind a bit mask of their positions, and moved if packed indices turn out shorter.
    """
    marks, nonempty, places, _ = workspace
    where, sent = end + 8, 0
    values = where + (count + 7) // 8
    for first in range(0, count, CHUNK):
        size = min(CHUNK, count - first)
        begin = start + first
        part, errors = part_of(x, begin, begin + size), part_of(error, begin, begin + size)
        _mark(part, errors, threshold, marks[:size])
        marks[size : size + 7] = 0
        if ties < count:
            ties = _unmark(part, errors, threshold, ties, marks[:size])
        free = sent if sent <= len(places) - CHUNK - 8 else 0  # overwrite indices that are too many to be packed
        words = marks[: (size + 7) // 8 * 8].view(np.uint64)
        listed = _list_marked(marks, words, nonempty, first, places[free:], out, where + first // 8)
        _write_values(x, error, start, places[free : free + listed], out, values + 4 * sent)
        sent += listed
    for byte in range(8):
        out[end + byte] = (sent >> 8 * byte) & 255
    if _has_packed_indices(sent, count):
        width = index_bits(count)
        _pack_indices(places, sent, width, out, where)
        moved = where + (sent + 7) // 8 * width
        for at in range(4 * sent):
            out[np.uintp(moved + at)] = out[np.uintp(values + at)]
        values = moved
    return values + 4 * sent


@loop
def _mark(x: Array, error: Array | None, threshold: Any, marks: Array) -> None:
    """Mark the values to send, and set ``error`` to the sum of value and error."""
    for at in range(len(marks)):
        value = value_of(x, error, at)
        if error is not None:
            error[at] = value
        marks[at] = np.uint8(magnitude_of(value) >= threshold)


@loop
def _unmark(x: Array, error: Array | None, threshold: Any, ties: int, marks: Array) -> int:
    """Unmark all values equal to ``threshold`` but the first ``ties``; return how many of these remain."""
    for at in range(len(marks)):
        if marks[at]:
            value = value_of(x, None, at) if error is None else value_of(None, error, at)
            if magnitude_of(value) == threshold:
                marks[at] = np.uint8(ties > 0)
                ties -= int(ties > 0)
    return ties


@loop
def _list_marked(marks: Array, words: Array, nonempty: Array, first: int, places: Array, out: Array, where: int) -> int:
    """Write the positions of marks as a bit mask to ``out`` and as indices to ``places``; return their number.

    Groups of eight with any mark are listed first, without a branch, which would often be mispredicted.
    """
    for group in range(len(words)):
        out[np.uintp(where + group)] = np.uint8((words[np.uintp(group)] * _GATHER) >> np.uint64(56))
    found = 0
    for group in range(len(words)):
        nonempty[np.uintp(found)] = group
        found += int(words[np.uintp(group)] != 0)
    listed = 0
    for nth in range(found):
        begin = 8 * int(np.int64(nonempty[np.uintp(nth)]))
        for at in range(begin, begin + 8):
            places[np.uintp(listed)] = first + at
            listed += int(np.int64(marks[np.uintp(at)]))
    return listed


@loop
def _write_values(x: Array, error: Array | None, start: int, places: Array, out: Array, to: int) -> None:
    """Write the values at ``places`` to ``out``, and set their errors to zero."""
    for nth in range(len(places)):
        at = start + places[np.uintp(nth)]
        value = value_of(x, None, at) if error is None else value_of(None, error, at)
        if error is not None:
            error[np.uintp(at)] = np.float32(0)
        bits = np.float32(value).view(np.int32)
        for byte in range(4):
            out[np.uintp(to + 4 * nth + byte)] = np.uint8((bits >> 8 * byte) & 255)


@loop
def _pack_indices(places: Array, sent: int, width: int, out: Array, where: int) -> None:
    """Pack indices in the layout of :func:`gossipx.codecs.packing.pack_bits`, eight at a time in a 64-bit word."""
    groups = (sent + 7) // 8
    places[sent : groups * 8] = 0
    for group in range(groups):
        for low in range(0, width, 8):
            word = np.uint64(0)
            for each in range(8):
                byte = np.uint64(places[np.uintp(group * 8 + each)] >> low) & np.uint64(255)
                word |= byte << np.uint64(8 * each)
            for bit in range(low, min(low + 8, width)):
                bits = (word >> np.uint64(bit - low)) & _LOWEST_BITS
                out[np.uintp(where + bit * groups + group)] = np.uint8((bits * _GATHER) >> np.uint64(56))


@loop
def _places_of(body: Array, begin: int, stop: int, count: int, places: Array) -> int:
    """List the indices of a tensor's values in ``places``; return their number, or −1 if the tensor is malformed.

    Args:
        places: holds at least as many indices as four-byte values fit into the tensor's bytes.
    """
    if stop - begin < 8:
        return -1
    number = np.uint64(word_at(body, begin + 4)) << np.uint64(32) | np.uint64(word_at(body, begin))
    sent = int(np.int64(number))
    if not 0 <= sent <= count:  # 2^63 and more are negative
        return -1
    where, groups, listed, before = begin + 8, (sent + 7) // 8, 0, -1
    is_packed = _has_packed_indices(sent, count)
    if stop != where + (groups * index_bits(count) if is_packed else (count + 7) // 8) + 4 * sent:
        return -1
    if is_packed:
        for nth in range(sent):
            place = 0
            for bit in range(index_bits(count)):
                place |= int(np.int64(body[np.uintp(where + bit * groups + nth // 8)] >> nth % 8 & 1)) << bit
            if not before < place < count:
                return -1
            places[nth] = before = place
        return sent
    for at in range((count + 7) // 8):
        byte = np.int64(body[np.uintp(where + at)])
        if byte:
            for each in range(8):
                if byte >> each & 1:
                    if listed == sent or 8 * at + each >= count:
                        return -1
                    places[listed] = 8 * at + each
                    listed += 1
    return sent if listed == sent else -1


@loop
def _most_values(offsets: Array) -> int:
    """Return how many four-byte values fit into the bytes of the largest tensor."""
    most = 0
    for index in range(len(offsets) - 1):
        most = max(most, (offsets[index + 1] - offsets[index]) // 4)
    return most


@loop
def sparse_fits(body: Array, offsets: Array, counts: Array) -> int:
    """Return the index of the first malformed tensor, or −1 if all are well-formed or take no bytes."""
    places = np.empty(_most_values(offsets), np.int64)
    for index in range(len(counts)):
        begin, stop = offsets[index], offsets[index + 1]
        if begin == stop:
            continue
        sent = _places_of(body, begin, stop, counts[index], places)
        if sent < 0:
            return index
        for at in range(stop - 4 * sent, stop, 4):
            if np.int32(word_at(body, at)) & _INFINITY == _INFINITY:
                return index
    return -1


@loop
def sparse_into(body: Array, offsets: Array, counts: Array, out: Array, starts: Array, add: bool) -> None:
    """Decode tensors that :func:`sparse_fits` has checked, each to its entry of ``starts``."""
    check_ends(body, offsets, out, starts, counts)
    places = np.empty(_most_values(offsets), np.int64)
    for index in range(len(counts)):
        begin, stop, count = offsets[index], offsets[index + 1], counts[index]
        if begin == stop:
            continue
        sent = _places_of(body, begin, stop, count, places)
        if sent < 0:
            raise IndexError("a tensor's values lie outside its frame or its vector")
        to = out[starts[index] : starts[index] + count]
        if not add:
            to[:] = np.float32(0)
        for nth in range(sent):
            to[np.uintp(places[nth])] += np.int32(word_at(body, stop - 4 * (sent - nth))).view(np.float32)
