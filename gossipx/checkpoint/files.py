"""Files of a checkpoint: hashed while they are written, and flushed to the disk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch
import xxhash
from torch import Tensor

from gossipx.checkpoint.plain import DTYPES

HASH = "xxh3_128"
"""A fast hash that detects damage by disks and copies; it does not protect against deliberate changes."""
PIECE = 1 << 20
"""Bytes hashed and written at a time."""


class Measured(TypedDict):
    """Size and hash of a file, as in a manifest."""

    bytes: int
    xxh3_128: str


def write(path: Path, pieces: Iterable[bytes | memoryview]) -> Measured:
    """Write a new file, and wait until it is on the disk.

    Returns:
        Its size and hash, for the manifest.

    Raises:
        OSError: the file cannot be written completely.
    """
    digest, size = xxhash.xxh3_128(), 0
    with path.open("xb") as file:
        for piece in pieces:
            view = memoryview(piece)
            for start in range(0, len(view), PIECE):
                part = view[start : start + PIECE]
                digest.update(part)
                size += file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def measure(path: Path) -> Measured:
    """Return the size and hash of an existing file.

    Raises:
        OSError: the file is missing or cannot be read.
    """
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
            size += len(piece)
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def sync(directory: Path) -> None:
    """Wait until new, renamed and removed entries of ``directory`` are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def safetensors(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield tensors in host memory as the bytes of a safetensors file: header length, header, values.

    The library's own writer cannot hash what it writes, and does not report the system's error.
    """
    # Sorted by element size, largest first, so that each tensor starts at a multiple of its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header, end = {}, 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        if tensor.nbytes:
            yield tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def plain(state: Any) -> bytes:
    """Encode plain data as JSON.

    Raises:
        TypeError: JSON cannot represent it.
    """
    return json.dumps(state).encode()
