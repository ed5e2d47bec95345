"""The files of a checkpoint: written through to the disk, and hashed as they are written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from gossipx.checkpoint.plain import DTYPES

HASH = "xxh3_128"
"""It is there to notice what disks and copies damage, at memory speed; it is no protection from whoever means harm."""
PIECE = 1 << 20
"""Bytes that are hashed and written at a time."""


def write(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file, and wait until the disk has it.

    Returns:
        Its size and hash, for the manifest.

    Raises:
        OSError: it cannot be written whole.
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
    return {"bytes": size, HASH: digest.hexdigest()}


def look(path: Path) -> dict[str, Any]:
    """The size and the hash of a file as it is now.

    Raises:
        OSError: it is not there, or cannot be read.
    """
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
            size += len(piece)
    return {"bytes": size, HASH: digest.hexdigest()}


def sync(directory: Path) -> None:
    """Wait until the disk has what was made, renamed or removed in ``directory``."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def safetensors(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Tensors in host memory as the bytes of a safetensors file: the length of a header, the header, all values.

    The library's own writer gives no way to hash what it writes, and neither says which error of the system it met.
    """
    # Large elements first: each tensor begins at a multiple of its element's size.
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
    """Plain data as JSON.

    Raises:
        TypeError: it is none, by the json module's words.
    """
    return json.dumps(state).encode()
