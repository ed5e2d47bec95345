"""The division of a payload that arrives in parts into the pieces that its sink takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gossipx.memory import copy
from gossipx.wire import Sink


def gather(parts: Iterable[memoryview], sink: Sink, look: Callable[[memoryview], None]) -> None:
    """Pass all bytes of a payload that arrives in parts to ``sink``.

    Args:
        parts: the bytes in order; each part is consumed before the next one is requested.
        look: called with all bytes in order, before the sink gets them.
    """
    start = had = 0  # start of the piece; how much of it is in its buffer
    buffer = memoryview(b"")
    for part in parts:
        done = 0
        while done < len(part):
            if not had:
                buffer = sink.buffer_at(start)
            view = part[done : done + len(buffer) - had]
            look(view)
            done += len(view)
            if len(view) == len(buffer):
                sink.take(start, view)
            else:  # the piece spans two parts
                copy(view, buffer[had : had + len(view)])
                had += len(view)
                if had < len(buffer):
                    continue
                sink.filled(start)
            start, had = start + len(buffer), 0
