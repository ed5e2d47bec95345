"""The worker's memory of one bucket, and the sinks that receive replies into it.

A bucket is a group of table partitions that travels in one message. A sink checks the header of a reply, provides the
buffer that the payload is received into, and decodes it afterwards.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gossipx.codecs import Tensors
from gossipx.codecs.base import read_into
from gossipx.codecs.changes import FULL, checksum
from gossipx.errors import ProtocolError
from gossipx.memory import Memory, Source, copy
from gossipx.model.pool import typed
from gossipx.protocol.fields import Parts, Setting
from gossipx.protocol.messages import CarryingReply
from gossipx.protocol.server_messages import TablesReply
from gossipx.server.placement import Partition
from gossipx.tables.coding import PushEncoder
from gossipx.tables.parts import ApplyBuffer, TransmitBuffer
from gossipx.wire import Bytes, Sink

Settings = tuple[dict[str, Setting], ...]
"""The numeric hyperparameters of an optimizer's parameter groups, one dict per group."""


@dataclass
class BucketMemory:
    """One bucket's send and receive memory, with the buffers that lie in it.

    Attributes:
        missing: tables that have not yet produced this iteration's gradient.
        push_encoder: encodes pushes; None without a push codec.
        tensors: the shapes that the pull codec sees; None without a pull codec.
        max_bytes: the largest size of an encoded change, in bytes.
        base: the checksum of the values in ``apply``; FULL: no server has sent any.
        is_new: the latest complete gradients have not been encoded yet.
        encoded: the latest gradients as they are sent; None: not encoded yet.
        settings: the optimizer's hyperparameters when these gradients were computed.
    """

    partitions: list[Partition]
    transmit: Memory
    apply: Memory
    senders: list[TransmitBuffer]
    receivers: list[ApplyBuffer]
    missing: set[int]
    push_encoder: PushEncoder | None = None
    tensors: Tensors | None = None
    max_bytes: int = 0
    base: int = FULL
    is_new: bool = False
    encoded: tuple[Parts, Source] | None = None
    settings: Settings = ()


class TablesSink:
    """Receives one bucket without a pull codec; a :class:`gossipx.wire.SinkFactory`.

    Args:
        bucket_memory: the bucket's memory.
        is_raw: whether the payload is the values' memory layout, so that nothing has to be decoded.
    """

    nbytes = 0

    def __init__(self, bucket_memory: BucketMemory, is_raw: bool):
        self._bucket_memory = bucket_memory
        self._raw = is_raw
        self._parts: Parts = ()
        self._content = memoryview(bytearray())

    def fit(self, reply: CarryingReply) -> Sink:
        """Check the header and return the sink for its payload.

        Raises:
            ProtocolError: the reply is not for this bucket, or a size does not fit.
        """
        bucket_memory = self._bucket_memory
        if not isinstance(reply, TablesReply) or [number for number, _ in reply.parts] != [
            *range(len(bucket_memory.receivers))
        ]:
            raise ProtocolError("the reply holds tables that were not requested")
        self._parts = reply.parts
        sizes = [receiver.data.numel() * receiver.data.element_size() for receiver in bucket_memory.receivers]
        check_sizes(reply.parts, sizes, self._raw)
        self._content = (
            bucket_memory.apply.view if self._raw else memoryview(bytearray(sum(size for _, size in reply.parts)))
        )
        return Bytes(self._content)

    def read(self) -> None:
        """Accept the received payload; it is checked when it is decoded."""

    def decode(self) -> None:
        """Decode the payload into the apply buffers."""
        start = 0
        for receiver, (_, size) in zip(self._bucket_memory.receivers, self._parts, strict=True):
            if not self._raw:
                receiver.decode(self._content[start : start + size])
            start += size


class ChangeSink:
    """Receives one bucket with a pull codec, as values or as a change of them; a :class:`gossipx.wire.SinkFactory`.

    Args:
        bucket_memory: the bucket's memory.
        tensors: the shapes of the tensors in it.
    """

    nbytes = 0

    def __init__(self, bucket_memory: BucketMemory, tensors: Tensors):
        self._bucket_memory = bucket_memory
        self._tensors = tensors
        self._values = typed(bucket_memory.apply.view, tensors.dtype)
        self._base = FULL
        self._content = memoryview(bytearray())
        self._add: Callable[[bool], None] | None = None

    def fit(self, reply: CarryingReply) -> Sink:
        """Check the header and return the sink for its payload.

        Raises:
            ProtocolError: the reply is not for this bucket, a size does not fit, or its base is not the values held
                here.
        """
        if not isinstance(reply, TablesReply) or [number for number, _ in reply.parts] != [0]:
            raise ProtocolError("the reply holds tables that were not requested")
        size, nbytes = reply.parts[0][1], self._bucket_memory.apply.view.nbytes
        if size > self._bucket_memory.max_bytes if reply.base else size != nbytes:
            raise ProtocolError(f"{size} bytes for a bucket of {nbytes}")
        if reply.base not in (FULL, self._bucket_memory.base):
            raise ProtocolError("the reply is a change of values that this peer does not have")
        self._base = reply.base
        self._content = memoryview(bytearray(size))
        return Bytes(self._content)

    def read(self) -> None:
        """Parse a received change before anything relies on it.

        Raises:
            ProtocolError: it is malformed. The next pull then requests the full values.
        """
        if self._base == FULL:
            return
        try:
            self._add = read_into(self._content, self._values, tensors=self._tensors)
        except ProtocolError:
            self._bucket_memory.base = FULL
            raise

    def decode(self) -> None:
        """Apply the payload to the values, unless they have changed since the request, as a duplicate reply would find
        them.
        """
        if self._base not in (FULL, self._bucket_memory.base):
            return
        if self._base == FULL:
            copy(self._content, self._bucket_memory.apply.view)
        else:
            if self._add is None:
                self.read()
            assert self._add is not None
            self._add(True)
        self._bucket_memory.base = checksum(self._values)


class Whole(abc.ABC):
    """Receives a reply's payload into one newly allocated buffer; a :class:`gossipx.wire.SinkFactory`.

    Args:
        max_bytes: the largest accepted size in bytes.

    Attributes:
        content: the received bytes.
        misfit: the error message for a reply of another type or size.
    """

    nbytes = 0
    misfit = "the reply is of another type than requested"

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self.content = memoryview(bytearray())

    @abc.abstractmethod
    def size(self, reply: CarryingReply) -> int | None:
        """Return the payload's size in bytes, or None if the reply is of another type."""

    def fit(self, reply: CarryingReply) -> Sink:
        """Check the header and return the sink for its payload.

        Raises:
            ProtocolError: the reply is of another type, or too large.
        """
        size = self.size(reply)
        if size is None or size > self._max_bytes:
            raise ProtocolError(self.misfit)
        self.content = memoryview(bytearray(size))
        return Bytes(self.content)


class EmptySink:
    """Receives a reply without payload; a :class:`gossipx.wire.SinkFactory`."""

    nbytes = 0

    def fit(self, reply: CarryingReply) -> Sink:
        """Return an empty sink."""
        return Bytes(memoryview(bytearray()))


LARGEST = 4
"""The largest size of an encoded partition, as a multiple of its raw size. It covers a custom encoder's worst case (an
index and a value per element) and limits what a peer can make this one allocate.
"""


def check_sizes(parts: Parts, sizes: Sequence[int], is_raw: bool) -> None:
    """Check the sizes of received partitions against the expected ``sizes`` in bytes.

    Raises:
        ProtocolError: naming the first that does not fit.
    """
    for (number, size), expected in zip(parts, sizes, strict=True):
        if size != expected if is_raw else size > LARGEST * expected + 64:
            raise ProtocolError(f"{size} bytes for partition {number} of {expected} bytes")
