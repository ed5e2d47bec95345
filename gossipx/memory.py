"""Memory blocks for models: allocated once, reused, and on Linux shared with other processes by a file descriptor.

Their bytes are sent, received and compared in pieces, whose sizes are defined here too.
"""

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
"""Bytes that are checked, sent and copied at a time, while they are in the processor's cache."""

OBSERVED_PIECE = 2**18
"""Bytes sent or received between two calls of a :data:`ByteObserver`; more would not stay in the cache until then."""

ByteObserver: TypeAlias = Callable[[memoryview], None]
"""Callback for the bytes of a payload, called for each part in order while it is in the processor's cache."""

STAGED_PIECE = 2**22
"""Bytes of a model that are received before the base is subtracted from them. The work around each such piece starts
with a cold cache and takes about 70 µs: with 1 MB at a time, pulls took a third longer; with 16 MB, as long as now."""

if sys.platform == "linux":
    # A sender that truncates the file would kill a receiver that maps it.
    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    # The receiver must not write to it (F_SEAL_FUTURE_WRITE, Linux 5.1: existing mappings stay writable).
    _NO_WRITERS = 0x10


class Memory:
    """A block of memory, initially zero.

    The first write to newly allocated memory is slow (2 GB/s measured), so callers should reuse blocks.

    Args:
        nbytes: size of the block.

    Attributes:
        view: its bytes, writable.
        descriptor: of a file (memfd) with exactly these bytes, of fixed size, which no other process can write to; None
            if the system has no memfd.
    """

    def __init__(self, nbytes: int):
        self.descriptor: int | None = None
        size = max(1, nbytes)  # mmap refuses empty mappings
        descriptor = _create(size)
        if descriptor is None:
            mapped = mmap.mmap(-1, size)
        else:
            weakref.finalize(self, os.close, descriptor)
            mapped = mmap.mmap(descriptor, size)
            _seal(descriptor)
            self.descriptor = descriptor
        self.view = memoryview(mapped)[:nbytes]  # the mapping is freed with its last view


@dataclass
class Source:
    """A payload to send to one or more peers.

    Attributes:
        view: its bytes, contiguous; they must not change until the receiver has them.
        descriptor: of a file with exactly these bytes, which another process on this machine may map; None: no file.
        checksum: of these bytes, cached by the first send, as computing it takes a third of the time of sending; None:
            not sent yet.
    """

    view: memoryview
    descriptor: int | None = None
    checksum: bytes | None = None


def copy(source: memoryview, to: memoryview) -> None:
    """Copy bytes without holding the GIL; large copies bypass the processor's cache and are up to twice as fast."""
    np.copyto(np.frombuffer(to, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def _create(size: int) -> int | None:
    """Create an anonymous file in memory; return None if the system has no memfd."""
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
    """Return whether a file is sealed against truncation, so that reading a mapping of it cannot fail.

    Raises:
        OSError: it is not a memfd.
    """
    if sys.platform != "linux":
        return False
    return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
