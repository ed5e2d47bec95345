"""Memory shared with other processes: it cannot be resized, and others cannot write to it."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys

import pytest

from gossipx.memory import Memory, cannot_shrink
from gossipx.transports.shared_memory import PeerMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has memory with a descriptor")


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_other_processes_see_writes(size: int) -> None:
    memory = Memory(size)
    memory.view[:] = os.urandom(size)
    assert memory.descriptor is not None
    assert os.pread(memory.descriptor, 10_000, 0)[:size] == bytes(memory.view)
    assert len(memory.view) == size


def test_it_can_neither_shrink_nor_be_written_by_others() -> None:
    memory = Memory(5000)
    assert memory.descriptor is not None
    assert cannot_shrink(memory.descriptor)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, 10)
    with pytest.raises(PermissionError):
        os.pwrite(memory.descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(memory.descriptor, 5000)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    assert not cannot_shrink(loose)
    os.close(loose)


def test_writes_to_a_private_view_do_not_reach_the_owner() -> None:
    memory = Memory(5000)
    assert memory.descriptor is not None
    view = PeerMemory().view(os.dup(memory.descriptor), 5000)
    view[:4] = b"mine"
    assert bytes(memory.view) == bytes(5000)


def test_the_descriptor_is_closed_with_the_object_and_the_bytes_freed_with_the_last_view() -> None:
    memory = Memory(5000)
    view, descriptor = memory.view, memory.descriptor
    assert descriptor is not None
    inode = os.fstat(descriptor).st_ino
    del memory
    view[:] = bytes(5000)
    with contextlib.suppress(OSError):
        assert os.fstat(descriptor).st_ino != inode  # the number may have been reused for another file
