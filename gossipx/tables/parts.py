"""The two sides of a table and its five storages, each replaceable alone.

Modularized Parameter Server, section 4.1 and Figure 4.1: a gradient goes from the gradient storage to a transmit
buffer, over the network to a server storage, and the table's values come back to an apply buffer and from there into
the worker storage. Where a table lies on several servers each partition has a transmit buffer, a server storage, an
apply buffer and a server's table of its own.

To replace one, inherit from it and override what differs; whoever encodes in another way overrides ``decode`` on the
other side, too. A partition may be of no elements, and all peers of a run need the same parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from gossipx.errors import ProtocolError
from gossipx.memory import copy
from gossipx.model.buffers import typed
from gossipx.server.placement import Partition

Encoded = bytes | bytearray | memoryview
"""What goes over the network, of one partition."""


class Replaceable:
    """What all parts have in common: a checkpoint holds what they keep beyond an iteration, a residual say."""

    def state_dict(self) -> object:
        """Tensors, numbers, text, and lists, tuples and dicts of them; None: nothing."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Go on from what :meth:`state_dict` gave; not called with None."""


class TransmitBuffer(Replaceable):
    """On a worker: the gradient of one partition until it is sent.

    Args:
        data: its values, flat; zeros at first.
    """

    def __init__(self, data: Tensor):
        self.data = data

    def add(self, gradient: Tensor) -> None:
        """Take the gradient of an iteration, flat, in place of the last one's."""
        self.data.copy_(gradient)

    def encode(self) -> Encoded:
        """What is sent; good until the next :meth:`add`. Called once an iteration, however often it has to be sent."""
        return raw(self.data)


class GradientStorage(Replaceable):
    """On a worker: takes a table's gradients from autograd and hands them to its transmit buffers.

    Args:
        buffers: of the table's partitions, in order.
    """

    def __init__(self, buffers: Sequence[TransmitBuffer]):
        self.buffers = buffers

    def put(self, gradient: Tensor) -> None:
        """Take the gradient of an iteration, in the table's shape, on the table's device."""
        start = 0
        flat = gradient.detach().reshape(-1)
        for buffer in self.buffers:
            stop = start + len(buffer.data)
            buffer.add(flat[start:stop])
            start = stop


class ServerStorage(Replaceable):
    """On a server: the values of one partition, and how gradients and values are written on the wire.

    Args:
        data: its values, flat, as workers are given them; the optimizer changes them in place. Of a table in 16 bits
            they are rounded from those that it changes, before :meth:`encode` is called.
    """

    def __init__(self, data: Tensor):
        self.data = data

    def decode(self, encoded: memoryview) -> Tensor:
        """The gradient that a worker has sent, flat; it may lie in ``encoded``.

        Raises:
            ProtocolError: it is none of this partition.
        """
        return whole(encoded, self.data)

    def encode(self) -> Encoded:
        """What workers are given of the values as they are now; not changed afterwards."""
        return bytes(raw(self.data))


class ApplyBuffer(Replaceable):
    """On a worker: what a server has sent of one partition, until it is applied.

    Args:
        data: its values, flat.
    """

    def __init__(self, data: Tensor):
        self.data = data

    def decode(self, encoded: memoryview) -> None:
        """Take in what a server has sent; errors as those of :meth:`ServerStorage.decode`."""
        self.data.copy_(whole(encoded, self.data))


class WorkerStorage(Replaceable):
    """On a worker: a table as the model computes with it.

    Args:
        parameter: in its own shape, on its own device.
    """

    def __init__(self, parameter: Tensor):
        self.parameter = parameter

    @torch.no_grad()
    def apply(self, buffers: Sequence[ApplyBuffer]) -> None:
        """Take in what has come, from the buffers of its partitions in order."""
        if not self.parameter.is_contiguous():
            self.parameter.copy_(torch.cat([buffer.data for buffer in buffers]).view(self.parameter.shape))
            return
        start, flat = 0, self.parameter.view(-1)
        for buffer in buffers:
            stop = start + len(buffer.data)
            flat[start:stop].copy_(buffer.data)
            start = stop


class ClientTable(Replaceable):
    """On a worker: one table, with its memory and its buffers.

    Args:
        parameter: in its own shape, on its own device; its memory does not move.
        storages: the classes to make them with.
    """

    def __init__(self, parameter: Tensor, storages: Storages):
        self.parameter = parameter
        self.senders: list[TransmitBuffer] = []  # of its partitions, in order
        self.takers: list[ApplyBuffer] = []
        self.gradient: GradientStorage = storages.gradient(self.senders)
        self.worker: WorkerStorage = storages.worker(parameter)

    def update(self, gradient: Tensor) -> None:
        """Take the gradient of an iteration, in the table's shape, on its device; zeros where the loop made none."""
        self.gradient.put(gradient)

    def apply(self) -> None:
        """What servers have sent is here, and the table is about to be used."""
        self.worker.apply(self.takers)


class ServerTable(Replaceable):
    """On a server: one partition of a table.

    Args:
        partition: which elements of which table.
        data: its values, flat, as workers are given them.
        storages: the classes to make its storage with.
    """

    def __init__(self, partition: Partition, data: Tensor, storages: Storages):
        self.partition = partition
        self.storage: ServerStorage = storages.server(data)

    def update(self, encoded: memoryview) -> Tensor:
        """The gradient that a worker has sent, flat; errors as those of :meth:`ServerStorage.decode`."""
        return self.storage.decode(encoded)

    def get(self) -> Encoded:
        """What workers are given; see :meth:`ServerStorage.encode`."""
        return self.storage.encode()


@dataclass(frozen=True)
class Storages:
    """The classes that tables are made with."""

    client_table: type[ClientTable] = field(default=ClientTable)
    server_table: type[ServerTable] = field(default=ServerTable)
    gradient: type[GradientStorage] = field(default=GradientStorage)
    transmit: type[TransmitBuffer] = field(default=TransmitBuffer)
    server: type[ServerStorage] = field(default=ServerStorage)
    apply: type[ApplyBuffer] = field(default=ApplyBuffer)
    worker: type[WorkerStorage] = field(default=WorkerStorage)

    @property
    def raw_pushes(self) -> bool:
        """Whether gradients are sent as they lie in memory."""
        sends = self.transmit.encode is TransmitBuffer.encode
        takes = self.server.decode is ServerStorage.decode and self.server_table.update is ServerTable.update
        return sends and takes

    @property
    def raw_pulls(self) -> bool:
        """Whether values are."""
        gives = self.server.encode is ServerStorage.encode and self.server_table.get is ServerTable.get
        return gives and self.apply.decode is ApplyBuffer.decode

    def describe(self) -> str:
        """Those that are not gossipx's own, for people and to compare; empty if all are."""
        own = [(one.name, getattr(self, one.name)) for one in fields(self)]
        return ", ".join(f"{name} {kind.__qualname__}" for name, kind in own if kind.__module__ != __name__)


def states_of(parts: Sequence[Replaceable]) -> list[object]:
    """What each keeps, in order."""
    return [part.state_dict() for part in parts]


def load_states(parts: Sequence[Replaceable], states: Sequence[object]) -> None:
    """Have each go on from what it kept; ValueError if these are other parts."""
    for part, state in zip(parts, states, strict=True):
        if state is not None:
            part.load_state_dict(state)


def raw(values: Tensor) -> memoryview:
    """The bytes of a flat tensor in host memory, writable."""
    return memoryview(values.view(torch.uint8).numpy().data) if values.numel() else memoryview(bytearray())


def whole(encoded: memoryview, like: Tensor) -> Tensor:
    """``encoded`` as a flat tensor of as many values of the same dtype as ``like``; ProtocolError if it is not that."""
    if encoded.nbytes != like.numel() * like.element_size():
        raise ProtocolError(f"{encoded.nbytes} bytes for a partition of {like.numel() * like.element_size()}")
    if encoded.readonly:
        writable = memoryview(bytearray(encoded.nbytes))
        copy(encoded, writable)
        encoded = writable
    return typed(encoded, like.dtype)
