"""Frames as bytes."""

from __future__ import annotations

from collections.abc import Iterable

from gossipx.wire import frames


def joined(frame: Iterable[frames.Part]) -> bytes:
    """All bytes of what :func:`gossipx.wire.frames.encode` gave, each part looked at before the next is asked for."""
    data = b""
    for buffers, look in frame:
        part = b"".join(bytes(buffer) for buffer in buffers)
        if look is not None:
            look(memoryview(part))
        data += part
    return data
