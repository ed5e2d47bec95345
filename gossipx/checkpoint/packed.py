"""Nested state encoded as bytes for another process, without pickle."""

from __future__ import annotations

import json
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load

from gossipx.checkpoint import files
from gossipx.checkpoint.plain import Part, pack, unpack
from gossipx.errors import MALFORMED

LENGTH = 8
"""Bytes of the leading length of the plain data, which follows; the tensors come last."""


def to_bytes(tree: object) -> bytes:
    """Encode nested state; errors as those of :func:`~gossipx.checkpoint.plain.pack`."""
    part = pack(tree)
    state = files.plain(part.state)
    return b"".join([len(state).to_bytes(LENGTH, "little"), state, *files.safetensors(part.tensors)])


def from_bytes(packed: memoryview) -> Any:
    """Decode the output of :func:`to_bytes`, with tensors in host memory.

    Raises:
        ValueError: the bytes are not such output.
    """
    end = LENGTH + int.from_bytes(packed[:LENGTH], "little")
    try:
        return unpack(Part(load(bytes(packed[end:])), json.loads(bytes(packed[LENGTH:end]))))
    except (SafetensorError, *MALFORMED) as error:
        raise ValueError(f"it cannot be read: {error}") from error
