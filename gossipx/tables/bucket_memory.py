"""The memory of one bucket at a worker, and what takes its values in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gossipx.codecs import Tensors
from gossipx.codecs.base import read_into
from gossipx.codecs.changes import FULL, checksum
from gossipx.errors import ProtocolError
from gossipx.memory import Memory, Source, copy
from gossipx.model.buffers import typed
from gossipx.protocol.fields import Parts
from gossipx.protocol.messages import CarryingReply
from gossipx.protocol.server_messages import TablesReply
from gossipx.server.placement import Partition
from gossipx.tables.coding import PushEncoder
from gossipx.tables.parts import ApplyBuffer, TransmitBuffer
from gossipx.wire import Bytes, Sink

Settings = tuple[dict[str, float], ...]
"""The numbers in an optimizer's parameter groups."""


@dataclass
class BucketMemory:
    """The memory of one bucket: of what is sent, and of what is fetched."""

    partitions: list[Partition]
    transmit: Memory
    apply: Memory
    senders: list[TransmitBuffer]
    takers: list[ApplyBuffer]
    missing: set[int]  # tables whose gradient of this iteration is not there yet
    push_encoder: PushEncoder | None = None  # where pushes have a codec
    tensors: Tensors | None = None  # where pulls have one
    most: int = 0  # ... bytes of a change at most
    base: int = FULL  # ... checksum of what is in ``apply``
    is_new: bool = False  # the gradients that were whole last were not asked for yet
    encoded: tuple[Parts, Source] | None = None  # ... once they were
    settings: Settings = ()  # that go with them


class TablesSink:
    """Takes in one bucket; a :class:`gossipx.wire.SinkFactory`.

    Args:
        bucket_memory: of the bucket.
        is_raw: whether it comes as it lies in memory.
    """

    nbytes = 0

    def __init__(self, bucket_memory: BucketMemory, is_raw: bool):
        self._bucket_memory = bucket_memory
        self._raw = is_raw
        self._parts: Parts = ()
        self._content = memoryview(bytearray())

    def fit(self, reply: CarryingReply) -> Sink:
        """What takes in what ``reply`` brings.

        Raises:
            ProtocolError: it is not this bucket's.
        """
        taken = self._bucket_memory
        if not isinstance(reply, TablesReply) or [number for number, _ in reply.parts] != [*range(len(taken.takers))]:
            raise ProtocolError("it answered by tables that were not asked for")
        self._parts = reply.parts
        sizes = [taker.data.numel() * taker.data.element_size() for taker in taken.takers]
        check_sizes(reply.parts, sizes, self._raw)
        self._content = taken.apply.view if self._raw else memoryview(bytearray(sum(size for _, size in reply.parts)))
        return Bytes(self._content)

    def read(self) -> None:
        """It is whole; nothing is known of it until it is decoded."""

    def decode(self) -> None:
        """Make values of it."""
        start = 0
        for taker, (_, size) in zip(self._bucket_memory.takers, self._parts, strict=True):
            if not self._raw:
                taker.decode(self._content[start : start + size])
            start += size


class ChangeSink:
    """Takes in one bucket where pulls have a codec: its values, or their change; a :class:`gossipx.wire.SinkFactory`.

    Args:
        bucket_memory: of the bucket.
        tensors: in it.
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
        """What takes in what ``reply`` brings.

        Raises:
            ProtocolError: it is not this bucket's, or changes other values than those that are here.
        """
        if not isinstance(reply, TablesReply) or [number for number, _ in reply.parts] != [0]:
            raise ProtocolError("it answered by tables that were not asked for")
        size, nbytes = reply.parts[0][1], self._bucket_memory.apply.view.nbytes
        if size > self._bucket_memory.most if reply.base else size != nbytes:
            raise ProtocolError(f"{size} bytes for a bucket that has {nbytes}")
        if reply.base not in (FULL, self._bucket_memory.base):
            raise ProtocolError("it answered by a change of other values than those that are here")
        self._base = reply.base
        self._content = memoryview(bytearray(size))
        return Bytes(self._content)

    def read(self) -> None:
        """It is whole: see what it is, before anything counts on it.

        Raises:
            ProtocolError: it is malformed. The bucket is to be given as it is next.
        """
        if self._base == FULL:
            return
        try:
            self._add = read_into(self._content, self._values, tensors=self._tensors)
        except ProtocolError:
            self._bucket_memory.base = FULL
            raise

    def decode(self) -> None:
        """Make values of it, unless what it changes was changed meanwhile, by the same that came twice."""
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


class Whole:
    """Takes in a reply in one piece, in memory of its own; a :class:`gossipx.wire.SinkFactory`.

    Args:
        most: bytes that it may have.

    Attributes:
        content: its bytes, once they are here.
    """

    nbytes = 0
    misfit = "it answered by what was not asked for"

    def __init__(self, most: int):
        self._most = most
        self.content = memoryview(bytearray())

    def size(self, reply: CarryingReply) -> int | None:
        """Bytes that ``reply`` brings; None: it is of another kind."""
        raise NotImplementedError

    def fit(self, reply: CarryingReply) -> Sink:
        """What takes in what ``reply`` brings.

        Raises:
            ProtocolError: it is of another kind, or larger than it can be.
        """
        size = self.size(reply)
        if size is None or size > self._most:
            raise ProtocolError(self.misfit)
        self.content = memoryview(bytearray(size))
        return Bytes(self.content)


class EmptySink:
    """Takes in an answer without tables; a :class:`gossipx.wire.SinkFactory`."""

    nbytes = 0

    def fit(self, reply: CarryingReply) -> Sink:
        """Room for nothing."""
        return Bytes(memoryview(bytearray()))


LARGEST = 4
"""Times as many bytes as a partition has that one of its may be encoded to: what an encoder of a user's can need at
worst (an index and a value for each), and what another peer can make this one allocate."""


def check_sizes(parts: Parts, sizes: Sequence[int], is_raw: bool) -> None:
    """Refuse what is no bucket of partitions of so many bytes.

    Raises:
        ProtocolError: naming the first that does not fit.
    """
    for (number, size), own in zip(parts, sizes, strict=True):
        if size != own if is_raw else size > LARGEST * own + 64:
            raise ProtocolError(f"{size} bytes for partition {number}, which has {own}")
