"""Memory for models: taken once, kept warm, and shared with other processes by a descriptor where the system can."""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

PIECE = 2**20
"""Bytes checked, sent and copied at once, while they are in the processor's cache."""

HOT = 2**18
"""Bytes sent or received between two looks at them: of more, a part has left the cache by the time of the look."""

ByteObserver: TypeAlias = Callable[[memoryview], None]
"""Is told of bytes in order, a part at a time, while they are in the processor's cache."""

STAGED = 2**22
"""Bytes received before they are mixed. What is done around each such piece finds none of its own code and data in the
cache, and takes some 70 µs: with pieces of 1 MB a pull took a third longer, with 16 MB as long."""

if sys.platform == "linux":
    # A receiver that maps memory must not be killed by a sender that cuts it short,
    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    # and must not be able to write to it (F_SEAL_FUTURE_WRITE, Linux 5.1: what is mapped already stays writable).
    _NO_WRITERS = 0x10


class Memory:
    """A block of memory, zeros at first.

    Memory that a system hands out afresh is slow to write for the first time (2 GB/s was seen), so blocks are to be
    kept and used again.

    Args:
        nbytes: of the block.

    Attributes:
        view: its bytes, writable.
        descriptor: of a file of just these bytes, which stays as large as it is and to which nobody else can write;
            None where the system has no such thing (memfd).
    """

    def __init__(self, nbytes: int):
        self.descriptor: int | None = None
        size = max(1, nbytes)  # which a mapping has at least
        descriptor = _create(size)
        if descriptor is None:
            mapped = mmap.mmap(-1, size)
        else:
            weakref.finalize(self, os.close, descriptor)
            mapped = mmap.mmap(descriptor, size)
            _seal(descriptor)
            self.descriptor = descriptor
        self.view = memoryview(mapped)[:nbytes]  # the mapping goes with the last view of it


@dataclass
class Source:
    """A payload to send, to one or to many.

    Attributes:
        view: its bytes, contiguous; they must not change until the other side has them.
        descriptor: of a file of just these bytes, which another process on this machine may map; None: there is none.
        checksum: of these bytes, once they were sent the first time: to read a model again for each that asks for it
            would take a third of the time in which it is sent.
    """

    view: memoryview
    descriptor: int | None = None
    checksum: bytes | None = None


def copy(source: memoryview, to: memoryview) -> None:
    """Copy bytes, without the interpreter's lock; many at once go past the processor's cache, up to twice as fast."""
    np.copyto(np.frombuffer(to, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def _create(size: int) -> int | None:
    """A file in memory."""
    if sys.platform != "linux":
        return None
    descriptor = os.memfd_create("gossipx", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    return descriptor


def _seal(descriptor: int) -> None:
    if sys.platform == "linux":
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | _NO_WRITERS)
        except OSError:  # an older kernel
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)


def cannot_shrink(descriptor: int) -> bool:
    """Whether a file is sure to stay as large as it is, so that reading a mapping of it cannot fail.

    Raises:
        OSError: it is no file in memory.
    """
    if sys.platform != "linux":
        return False
    return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
