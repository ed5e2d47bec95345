"""Payloads beside a connection: read from memory that both sides share, or carried another way that they build."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable

from gossipx.errors import NoCarrierError, ProtocolError
from gossipx.memory import cannot_shrink
from gossipx.wire import CarrierReply, Message, NoCarrierReply, Noted

# Blocks of another peer's memory that are kept mapped: as many as a peer has models in at a time; of small ones, which
# a server has for each bucket of tables, so many and so many bytes.
_MAPPED, _SMALL, _SMALL_BYTES = 4, 512, 2**28
# Of one side, for one carrier: gloo has three, NCCL one.
_MOST_NOTES = 64


class PeerMemory:
    """Memory of the other side of a connection, mapped once and kept while the connection lives."""

    def __init__(self) -> None:
        self._mapped: dict[tuple[int, int], mmap.mmap] = {}  # by its file

    def view(self, descriptor: int, nbytes: int) -> memoryview:
        """At least ``nbytes``, to be read: what is written there stays here alone. The descriptor is closed.

        Raises:
            ProtocolError: it is none of so much memory, or of memory that could be cut short.
        """
        try:
            status = os.fstat(descriptor)
            place = status.st_dev, status.st_ino
            if place not in self._mapped:
                if not stat.S_ISREG(status.st_mode) or status.st_size < nbytes or not cannot_shrink(descriptor):
                    raise ProtocolError(f"a descriptor of no memory of {nbytes} bytes that stays as it is")
                while self._crowded(status.st_size):
                    self._mapped.pop(next(iter(self._mapped)))
                # Private, so that nothing done here could reach the other side; writable, as torch warns of memory that
                # is not.
                self._mapped[place] = mmap.mmap(descriptor, status.st_size, flags=mmap.MAP_PRIVATE)
            elif len(self._mapped[place]) < nbytes:
                raise ProtocolError(f"memory of {len(self._mapped[place])} bytes for a payload of {nbytes}")
            return memoryview(self._mapped[place])
        except (OSError, ValueError) as error:
            raise ProtocolError(f"memory that cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)

    def _crowded(self, more: int) -> bool:
        """Whether no further block of so many bytes may be mapped before one is let go."""
        mapped = more + sum(map(len, self._mapped.values()))
        return len(self._mapped) >= (_SMALL if mapped <= _SMALL_BYTES else _MAPPED)


class LinkStore:
    """What both sides tell each other while they build a carrier; :class:`gossipx.transports.KeyValueStore`.

    Args:
        tell: sends a message to the other side.
        hear: waits for its next one.
    """

    def __init__(self, tell: Callable[[Message], None], hear: Callable[[], Message]):
        self._tell, self._hear = tell, hear
        self._known: dict[str, bytes] = {}
        self._built = False  # by the other side

    def set(self, key: str, value: bytes) -> None:
        """Tell the other side."""
        self._known[key] = value
        self._tell(Noted(key, value.hex()))

    def get(self, key: str) -> bytes:
        """What was told of ``key``; waits for it.

        Raises:
            NoCarrierError: the other side cannot build its end.
            ProtocolError: it talks about something else, or too much.
        """
        while key not in self._known:
            if self._built:
                raise ProtocolError("it has built its end and not told what the other needs")
            self._listen()
        return self._known[key]

    def end(self) -> None:
        """This side's end is built; waits until the other's is, and raises as :meth:`get`."""
        self._tell(CarrierReply())
        while not self._built:
            self._listen()

    def _listen(self) -> None:
        message = self._hear()
        if isinstance(message, NoCarrierReply):
            raise NoCarrierError(f"it says: {message.reason}")
        if isinstance(message, CarrierReply):
            self._built = True
        elif isinstance(message, Noted) and len(self._known) < _MOST_NOTES:
            self._known[message.key] = bytes.fromhex(message.value)
        else:
            raise ProtocolError(f"it sent {type(message).__name__} while a way beside the connection was built")
