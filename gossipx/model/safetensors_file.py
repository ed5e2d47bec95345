"""A model's tensors as a safetensors file, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch
import xxhash
from torch import Tensor, nn

from gossipx.errors import GossipxError
from gossipx.memory import PIECE
from gossipx.model.layout import plain_name

TORCH: Mapping[str, str] = {"format": "pt"}
"""Metadata that Hugging Face's tools require to recognise a torch model."""
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Supported dtypes, with their names in the safetensors format."""


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's tensors by names that are equal for plain and compiled modules."""
    state = module.state_dict().items()
    return {plain_name(name): tensor for name, tensor in state if isinstance(tensor, Tensor)}


def write(target: Path, tensors: Mapping[str, Tensor], knob: str, metadata: Mapping[str, str] = TORCH) -> None:
    """Write tensors to a file; if that fails, an existing file stays.

    Args:
        target: the file, in an existing directory.
        tensors: tensors by name.
        knob: what the user can change if writing fails, for the message.
        metadata: metadata of the file.

    Raises:
        GossipxError: the file cannot be written.
    """
    unfinished = target.with_name(f".{target.name}.tmp")
    try:
        unfinished.unlink(missing_ok=True)
        host = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        write_durably(unfinished, safetensors_of(host, metadata))
        unfinished.replace(target)
    except (OSError, KeyError) as error:  # a KeyError names a dtype that the format lacks
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise GossipxError(f"{target}: it cannot be written ({error}); make room, or {knob}") from error


class StoredFile(TypedDict):
    """Size and hash of a file, as a manifest has them."""

    bytes: int
    xxh3_128: str


def write_durably(path: Path, pieces: Iterable[bytes | memoryview]) -> StoredFile:
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


def safetensors_of(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield tensors in host memory as the bytes of a safetensors file: header length, header, values.

    The library's own writer cannot hash what it writes, does not report the system's error, and orders metadata at
    random, so that equal models would not be equal bytes.
    """
    # Sorted by element size, largest first, so that each tensor starts at a multiple of its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        if tensor.nbytes:
            yield tensor.contiguous().view(-1).view(torch.uint8).numpy().data
