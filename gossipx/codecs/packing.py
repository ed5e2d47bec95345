"""Bit packing, and packing and zero-run encoding of trits (the values −1, 0 and 1), by torch on any device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossipx.errors import ProtocolError

PLANE = 1024
BLOCK = 5 * PLANE
"""Trits of a block, in five planes: a byte packs one trit of each plane (3LC, section 3.2)."""
ZEROS = 121
"""The byte that packs five zero trits."""
LONGEST = 14
"""Longest run of such bytes that one code, 255, encodes (3LC, section 3.3)."""


def as_bytes(values: Tensor) -> npt.NDArray[Any]:
    """Return a tensor's values as bytes in host memory."""
    flat: npt.NDArray[Any] = values.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return flat


def bits_bytes(count: int, width: int) -> int:
    """Return the bytes that ``count`` packed numbers of ``width`` bits take."""
    return -(-count // 8) * width


def pack_bits(numbers: Tensor, width: int) -> Tensor:
    """Pack numbers below 2^width as bit planes: the lowest bits of all numbers, eight per byte, then the next bits.

    Args:
        numbers: flat, integers.
    """
    if not numbers.is_cpu:
        return pack_bits_on_device(numbers, width)
    few = numbers.numpy().astype(_unsigned(width))  # numpy is faster than torch in host memory
    planes = [np.packbits(few & few.dtype.type(1 << bit) != 0, bitorder="little") for bit in range(width)]
    return torch.from_numpy(np.concatenate(planes))


def pack_bits_on_device(numbers: Tensor, width: int) -> Tensor:
    """Pack numbers as :func:`pack_bits` does, by torch on any device."""
    eights = -(-len(numbers) // 8)
    padded = torch.zeros(eights * 8, dtype=torch.int64, device=numbers.device)
    padded[: len(numbers)] = numbers
    weights = torch.tensor([1 << place for place in range(8)], device=numbers.device)
    planes = [((padded >> bit & 1).view(eights, 8) * weights).sum(1) for bit in range(width)]
    return torch.cat(planes).to(torch.uint8)


def unpack_bits(packed: Tensor, count: int, width: int) -> Tensor:
    """Unpack what :func:`pack_bits` packed, as int64.

    Raises:
        ProtocolError: the number of bytes does not match.
    """
    if len(packed) != bits_bytes(count, width):
        raise ProtocolError(f"{count} numbers of {width} bits do not take {len(packed)} bytes")
    if not packed.is_cpu:
        return unpack_bits_on_device(packed, count, width)
    planes = packed.numpy().reshape(width, -1)
    few = np.zeros(count, _unsigned(width))
    for bit in range(width):
        few |= np.unpackbits(planes[bit], count=count, bitorder="little").astype(few.dtype) << few.dtype.type(bit)
    return torch.from_numpy(few.astype(np.int64))


def unpack_bits_on_device(packed: Tensor, count: int, width: int) -> Tensor:
    """Unpack numbers as :func:`unpack_bits` does, by torch on any device."""
    eights = -(-count // 8)
    numbers = torch.zeros(eights * 8, dtype=torch.int64, device=packed.device)
    places = torch.arange(8, device=packed.device)
    for bit in range(width):
        plane = packed[bit * eights : (bit + 1) * eights].to(torch.int64)
        numbers |= (plane[:, None] >> places & 1).view(-1) << bit
    return numbers[:count]


def pack_gaps(places: Tensor, count: int) -> tuple[int, Tensor, Tensor]:
    """Pack ascending indices of ``count`` values by the gaps between them, in a Rice code.

    Returns:
        The width w of the code, the low w bits of each gap, and the rest of each gap in unary: that many 0 bits and a
        1 bit.
    """
    gaps, many = places.diff(prepend=places.new_full((1,), -1)) - 1, len(places)
    widest = (count // many).bit_length()  # a Rice code is shortest with a width near log2 of the mean gap
    width = min(range(max(1, widest - 2), widest + 1), key=lambda width: width * many + int((gaps >> width).sum()))
    ends = ((gaps >> width) + 1).cumsum(0) - 1
    marks = torch.zeros(int(ends[-1]) + 1, dtype=torch.int64, device=places.device)
    marks[ends] = 1
    return width, pack_bits(gaps & (1 << width) - 1, width), pack_bits(marks, 1)


def unpack_gaps(low: Tensor, unary: Tensor, many: int, width: int) -> Tensor:
    """Unpack the ``many`` indices that :func:`pack_gaps` packed.

    Raises:
        ProtocolError: the unary numbers are more, or fewer, or have bytes after the last.
    """
    marks = unpack_bits(unary, 8 * len(unary), 1).nonzero().view(-1)
    if len(marks) != many or (many and int(marks[-1]) // 8 != len(unary) - 1):
        raise ProtocolError("a tensor of a codec's frame has another number of indices")
    rests = marks.diff(prepend=marks.new_full((1,), -1)) - 1
    return ((rests << width | unpack_bits(low, many, width)) + 1).cumsum(0) - 1


def trit_bytes(count: int) -> int:
    """Return the bytes that ``count`` trits take, five per byte."""
    return -(-count // 5)


def pack_trits(trits: Tensor) -> Tensor:
    """Pack trits, five per byte, block by block and plane by plane (3LC, section 3.2, steps 1 to 5).

    Args:
        trits: flat, of any signed dtype.
    """
    whole = len(trits) // BLOCK * BLOCK
    packed = [_pack_planes(trits[:whole].view(-1, 5, PLANE)).view(-1)]
    if whole < len(trits):
        plane = trit_bytes(len(trits) - whole)
        padded = torch.zeros(plane * 5, dtype=trits.dtype, device=trits.device)
        padded[: len(trits) - whole] = trits[whole:]
        packed.append(_pack_planes(padded.view(1, 5, plane)).view(-1))
    return torch.cat(packed)


def unpack_trits(packed: Tensor, count: int) -> Tensor:
    """Unpack what :func:`pack_trits` packed, as int8.

    Raises:
        ProtocolError: the number of bytes does not match, a byte is above 242, or the padding is not zero.
    """
    if len(packed) != trit_bytes(count) or bool((packed > 242).any()):
        raise ProtocolError(f"{len(packed)} bytes do not encode {count} trits")
    whole = count // BLOCK * BLOCK
    trits = _unpack_planes(packed[: whole // 5].view(-1, PLANE)).view(-1)
    if whole == count:
        return trits
    last = _unpack_planes(packed[whole // 5 :].view(1, -1)).view(-1)
    if bool(last[count - whole :].any()):
        raise ProtocolError("the padding of trits is not zero")
    return torch.cat((trits, last[: count - whole]))


def shorten_runs(packed: Tensor) -> Tensor:
    """Zero-run encode: 2 to 14 bytes of zero trits become one byte from 243 on (3LC, section 3.3)."""
    places = torch.arange(len(packed), device=packed.device)
    zero = packed == ZEROS
    before = torch.cummax(torch.where(zero, -1, places), 0).values if len(packed) else places
    length = torch.where(zero, (places - before - 1) % LONGEST + 1, 0)
    ends = torch.ones_like(zero)
    ends[:-1] = ~zero[1:]
    kept = ~zero | ends | (length == LONGEST)
    codes = torch.where(length > 1, length + 241, packed)
    return codes[kept].to(torch.uint8)


def lengthen_runs(codes: Tensor, size: int) -> Tensor:
    """Decode zero-run encoded bytes; runs may be split in other ways than :func:`shorten_runs` splits them.

    Raises:
        ProtocolError: they do not decode to ``size`` bytes.
    """
    stretch = torch.where(codes < 243, 1, codes.to(torch.int64) - 241)
    if int(stretch.sum()) != size:
        raise ProtocolError(f"{len(codes)} bytes do not decode to {size} bytes of trits")
    return torch.repeat_interleave(torch.where(codes < 243, codes, ZEROS).to(torch.uint8), stretch)


def _pack_planes(trits: Tensor) -> Tensor:
    weights = torch.tensor([81, 27, 9, 3, 1], dtype=torch.int16, device=trits.device)
    return ((trits.to(torch.int16) * weights[:, None]).sum(1) + ZEROS).to(torch.uint8)


def _unpack_planes(packed: Tensor) -> Tensor:
    weights = torch.tensor([81, 27, 9, 3, 1], dtype=torch.int16, device=packed.device)
    return (packed[:, None].to(torch.int16) // weights[:, None] % 3 - 1).to(torch.int8)


def _unsigned(width: int) -> npt.DTypeLike:
    return np.uint8 if width <= 8 else np.uint16 if width <= 16 else np.uint64
