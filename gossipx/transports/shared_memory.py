"""Support for payloads outside the stream of a connection.

:class:`PeerMemory` maps memory that another peer on this machine shares. :class:`LinkStore` exchanges the values that
both sides need to build a carrier (gloo, NCCL).
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable

from gossipx.errors import NoCarrierError, ProtocolError
from gossipx.memory import cannot_shrink
from gossipx.wire import CarrierReply, Message, NoCarrierReply, SetNote

# Blocks of another peer's memory that stay mapped. While all of them together have at most _SMALL_BYTES, _SMALL blocks
# are kept, because a server has a small one per bucket of tables. Above that size _MAPPED are kept, the number of
# models that a peer has in use at once.
_MAPPED, _SMALL, _SMALL_BYTES = 4, 512, 2**28
# Limit on values from one side for one carrier: gloo sends three, NCCL one.
_MOST_NOTES = 64


class PeerMemory:
    """Shared memory of the remote side of a connection: mapped once, and cached while the connection lives."""

    def __init__(self) -> None:
        self._mapped: dict[tuple[int, int], mmap.mmap] = {}  # by device and inode, oldest first

    def view(self, descriptor: int, nbytes: int) -> memoryview:
        """Map at least ``nbytes`` of a descriptor, and close the descriptor. Writes to the view stay local.

        Raises:
            ProtocolError: the memory is smaller than that, or could be truncated later.
        """
        try:
            status = os.fstat(descriptor)
            place = status.st_dev, status.st_ino
            if place not in self._mapped:
                if not stat.S_ISREG(status.st_mode) or status.st_size < nbytes or not cannot_shrink(descriptor):
                    raise ProtocolError(f"its descriptor is not {nbytes} bytes of memory sealed against truncation")
                while self._crowded(status.st_size):
                    self._mapped.pop(next(iter(self._mapped)))  # unmapped when its last view is gone
                # Private, so that nothing written here reaches the other side; writable, because torch warns about
                # read-only buffers.
                self._mapped[place] = mmap.mmap(descriptor, status.st_size, flags=mmap.MAP_PRIVATE)
            elif len(self._mapped[place]) < nbytes:
                raise ProtocolError(f"its shared memory of {len(self._mapped[place])} bytes is too small for {nbytes}")
            return memoryview(self._mapped[place])
        except (OSError, ValueError) as error:
            raise ProtocolError(f"its shared memory cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)

    def _crowded(self, more: int) -> bool:
        """Return whether a block must be unmapped before another one of ``more`` bytes is mapped."""
        mapped = more + sum(map(len, self._mapped.values()))
        return len(self._mapped) >= (_SMALL if mapped <= _SMALL_BYTES else _MAPPED)


class LinkStore:
    """Keys and values exchanged while a carrier is built; a :class:`gossipx.transports.KeyValueStore`.

    Args:
        tell: sends a message to the other side.
        hear: waits for the next message from it.
    """

    def __init__(self, tell: Callable[[Message], None], hear: Callable[[], Message]):
        self._tell, self._hear = tell, hear
        self._known: dict[str, bytes] = {}
        self._built = False  # whether the other side has built its end

    def set(self, key: str, value: bytes) -> None:
        """Publish a value to the other side."""
        self._known[key] = value
        self._tell(SetNote(key, value.hex()))

    def get(self, key: str) -> bytes:
        """Return the value of ``key``; waits for it.

        Raises:
            NoCarrierError: the other side cannot build its end.
            ProtocolError: the other side sent another message, or too many values.
        """
        while key not in self._known:
            if self._built:
                raise ProtocolError(f"it built its end of the carrier without sending '{key}'")
            self._listen()
        return self._known[key]

    def end(self) -> None:
        """Report that this end is built, and wait until the other one is; errors as :meth:`get`."""
        self._tell(CarrierReply())
        while not self._built:
            self._listen()

    def _listen(self) -> None:
        message = self._hear()
        if isinstance(message, NoCarrierReply):
            raise NoCarrierError(f"it says: {message.reason}")
        if isinstance(message, CarrierReply):
            self._built = True
        elif isinstance(message, SetNote) and len(self._known) < _MOST_NOTES:
            self._known[message.key] = bytes.fromhex(message.value)
        else:
            raise ProtocolError(f"it sent {type(message).__name__} while a carrier was being built")
