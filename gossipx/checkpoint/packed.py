"""Nested state as bytes that another process can read; nothing in it is ever unpickled."""

from __future__ import annotations

import json
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load

from gossipx.checkpoint import files
from gossipx.checkpoint.plain import Part, pack, unpack

LENGTH = 8
"""Bytes of the number that stands first: how long the plain data is that follows; the tensors come last."""


def to_bytes(tree: object) -> bytes:
    """Nested state as bytes; errors as those of :func:`~gossipx.checkpoint.plain.pack`."""
    part = pack(tree)
    state = files.plain(part.state)
    return b"".join([len(state).to_bytes(LENGTH, "little"), state, *files.safetensors(part.tensors)])


def from_bytes(packed: memoryview) -> Any:
    """What :func:`to_bytes` was given, with tensors in host memory.

    Raises:
        ValueError: it is none of its.
    """
    end = LENGTH + int.from_bytes(packed[:LENGTH], "little")
    try:
        return unpack(Part(load(bytes(packed[end:])), json.loads(bytes(packed[LENGTH:end]))))
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"it cannot be read: {error}") from error
