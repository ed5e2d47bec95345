"""Payloads beside a connection: read from memory that both sides share, or carried another way that they build."""

from __future__ import annotations

import mmap
import os
import stat

from gossipx.errors import NoCarrierError, ProtocolError
from gossipx.memory import cannot_shrink
from gossipx.wire import CarrierReply, Message, NoCarrierReply, Noted

# Blocks of another peer's memory that are kept mapped: as many as a peer has models in at a time.
_MAPPED = 4
# Of one side, for one carrier: gloo has three, NCCL one.
_MOST_NOTES = 64


class TheirMemory:
    """Memory of the other side of a connection, mapped once and kept while the connection lives."""

    def __init__(self) -> None:
        self._mapped: dict[tuple[int, int], mmap.mmap] = {}  # by its file

    def view(self, descriptor: int, nbytes: int) -> memoryview:
        """At least ``nbytes`` that may only be read; the descriptor is closed.

        Raises:
            ProtocolError: it is none of so much memory, or of memory that could be cut short.
        """
        try:
            status = os.fstat(descriptor)
            place = status.st_dev, status.st_ino
            if place not in self._mapped:
                if not stat.S_ISREG(status.st_mode) or status.st_size < nbytes or not cannot_shrink(descriptor):
                    raise ProtocolError(f"a descriptor of no memory of {nbytes} bytes that stays as it is")
                if len(self._mapped) >= _MAPPED:
                    self._mapped.pop(next(iter(self._mapped)))
                # Private, so that nothing done here could reach the other side.
                self._mapped[place] = mmap.mmap(descriptor, status.st_size, flags=mmap.MAP_PRIVATE)
            elif len(self._mapped[place]) < nbytes:
                raise ProtocolError(f"memory of {len(self._mapped[place])} bytes for a payload of {nbytes}")
            return memoryview(self._mapped[place])
        except (OSError, ValueError) as error:
            raise ProtocolError(f"memory that cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)


class Notebook:
    """What both sides have told while they build a carrier, whatever carries the messages."""

    def __init__(self) -> None:
        self.known: dict[str, bytes] = {}
        self.built = False  # by the other side

    def heard(self, message: Message) -> None:
        """The other side's next message.

        Raises:
            NoCarrierError: it cannot build its end.
            ProtocolError: it is about something else.
        """
        if isinstance(message, NoCarrierReply):
            raise NoCarrierError(f"it says: {message.reason}")
        if self.built or not isinstance(message, Noted | CarrierReply) or len(self.known) >= _MOST_NOTES:
            raise ProtocolError(f"it sent {type(message).__name__} while a way beside the connection was built")
        if isinstance(message, Noted):
            self.known[message.key] = bytes.fromhex(message.value)
        else:
            self.built = True
