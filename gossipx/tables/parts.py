"""The two sides of a table and its five storages, each of which you can replace alone.

Modularized Parameter Server, section 4.1 and Figure 4.1: a gradient goes from the gradient storage to a transmit
buffer, and over the network to a server storage. The table's values return to an apply buffer, and from there to the
worker storage. If a table is spread over several servers, each partition has its own transmit buffer, server storage,
apply buffer and server table.

To replace a part, inherit from it and override what differs. If you override ``encode`` on one side, override
``decode`` on the other. A partition may be empty, and all peers of a run need the same parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from gossipx.errors import ProtocolError
from gossipx.memory import copy
from gossipx.model.pool import typed
from gossipx.server.placement import Partition

Encoded = bytes | bytearray | memoryview
"""One partition as it is sent over the network."""


class Replaceable:
    """The base of all parts. A checkpoint holds the state that they keep between iterations, such as a residual."""

    def state_dict(self) -> object:
        """Return the state as tensors, numbers, text, and lists, tuples and dicts of them; None: no state."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Restore what :meth:`state_dict` returned; not called with None."""


class TransmitBuffer(Replaceable):
    """A worker's buffer for the gradient of one partition until it is sent.

    Args:
        data: its values, flat; initially zeros.

    Attributes:
        gathers: the last gradient was not sent, because the sync model's ``pushes`` returned False.
    """

    gathers = False

    def __init__(self, data: Tensor):
        self.data = data

    def add(self, gradient: Tensor) -> None:
        """Take an iteration's gradient, flat, in place of the one before; if that was not sent, add to it.

        A subclass may add a residual.
        """
        if self.gathers:
            self.data += gradient
        else:
            self.data.copy_(gradient)

    def encode(self) -> Encoded:
        """Return the bytes to send, valid until the next :meth:`add`. Called once per push, even if sent
        repeatedly.
        """
        return raw(self.data)

    def state_dict(self) -> object:
        return self.data if self.gathers else None

    def load_state_dict(self, state: Any) -> None:
        self.data.copy_(state)
        self.gathers = True


class GradientStorage(Replaceable):
    """A worker's storage that receives a table's gradients from autograd and splits them among its transmit buffers.

    Args:
        buffers: the transmit buffers of the table's partitions, in order; still empty in the constructor.
    """

    def __init__(self, buffers: Sequence[TransmitBuffer]):
        self.buffers = buffers

    def put(self, gradient: Tensor) -> None:
        """Store an iteration's gradient, in the table's shape and on its device."""
        start = 0
        flat = gradient.detach().reshape(-1)
        for buffer in self.buffers:
            stop = start + len(buffer.data)
            buffer.add(flat[start:stop])
            start = stop


class ServerStorage(Replaceable):
    """A server's values of one partition, and their encoding on the wire.

    Args:
        data: the values that workers receive, flat. The optimizer changes them in place. If the table is in 16 bits,
            the optimizer works on a float32 copy instead, which is rounded into ``data`` before :meth:`encode` is
            called.
    """

    def __init__(self, data: Tensor):
        self.data = data

    def decode(self, encoded: memoryview) -> Tensor:
        """Return the gradient that a worker sent, flat; it may share memory with ``encoded``.

        Raises:
            ProtocolError: it does not fit this partition.
        """
        return values_of(encoded, self.data)

    def encode(self) -> Encoded:
        """Return the current values as they are sent; the result must not change afterwards."""
        return bytes(raw(self.data))


class ApplyBuffer(Replaceable):
    """A worker's buffer for the values that a server sent of one partition, until they are applied.

    Args:
        data: its values, flat.
    """

    def __init__(self, data: Tensor):
        self.data = data

    def decode(self, encoded: memoryview) -> None:
        """Store the values that a server sent; raises as :meth:`ServerStorage.decode`."""
        self.data.copy_(values_of(encoded, self.data))


class WorkerStorage(Replaceable):
    """A worker's storage of a table as the model uses it.

    Args:
        parameter: in its own shape, on its own device.
    """

    def __init__(self, parameter: Tensor):
        self.parameter = parameter

    @torch.no_grad()
    def apply(self, buffers: Sequence[ApplyBuffer]) -> None:
        """Copy received values into the parameter, from the buffers of its partitions in order."""
        if not self.parameter.is_contiguous():
            self.parameter.copy_(torch.cat([buffer.data for buffer in buffers]).view(self.parameter.shape))
            return
        start, flat = 0, self.parameter.view(-1)
        for buffer in buffers:
            stop = start + len(buffer.data)
            flat[start:stop].copy_(buffer.data)
            start = stop


class ClientTable(Replaceable):
    """A worker's side of one table: its storages and buffers.

    Args:
        parameter: in its own shape, on its own device; its memory must not move.
        storages: the classes to make them with.

    Attributes:
        senders: the transmit buffers of its partitions, in order; filled by the table store.
        takers: the apply buffers of its partitions, in order; filled by the table store.
    """

    def __init__(self, parameter: Tensor, storages: Storages):
        self.parameter = parameter
        self.senders: list[TransmitBuffer] = []
        self.takers: list[ApplyBuffer] = []
        self.gradient: GradientStorage = storages.gradient(self.senders)
        self.worker: WorkerStorage = storages.worker(parameter)

    def update(self, gradient: Tensor) -> None:
        """Store an iteration's gradient, in the table's shape and on its device; zeros if there was none."""
        self.gradient.put(gradient)

    def apply(self) -> None:
        """Apply received values; called when all have arrived and the table is about to be used."""
        self.worker.apply(self.takers)


class ServerTable(Replaceable):
    """A server's side of one partition of a table.

    Args:
        partition: which elements of which table.
        data: the values that workers receive, flat.
        storages: the classes to make its storage with.
    """

    def __init__(self, partition: Partition, data: Tensor, storages: Storages):
        self.partition = partition
        self.storage: ServerStorage = storages.server(data)

    def update(self, encoded: memoryview) -> Tensor:
        """Return the gradient that a worker sent, flat; the optimizer applies it later.

        Raises as :meth:`ServerStorage.decode`.
        """
        return self.storage.decode(encoded)

    def get(self) -> Encoded:
        """Return the values as they are sent; see :meth:`ServerStorage.encode`."""
        return self.storage.encode()


@dataclass(frozen=True)
class Storages:
    """The classes that tables are built from."""

    client_table: type[ClientTable] = field(default=ClientTable)
    server_table: type[ServerTable] = field(default=ServerTable)
    gradient: type[GradientStorage] = field(default=GradientStorage)
    transmit: type[TransmitBuffer] = field(default=TransmitBuffer)
    server: type[ServerStorage] = field(default=ServerStorage)
    apply: type[ApplyBuffer] = field(default=ApplyBuffer)
    worker: type[WorkerStorage] = field(default=WorkerStorage)

    @property
    def raw_pushes(self) -> bool:
        """Whether gradients are sent in their memory layout."""
        sends = self.transmit.encode is TransmitBuffer.encode
        takes = self.server.decode is ServerStorage.decode and self.server_table.update is ServerTable.update
        return sends and takes

    @property
    def raw_pulls(self) -> bool:
        """Whether values are sent in their memory layout."""
        gives = self.server.encode is ServerStorage.encode and self.server_table.get is ServerTable.get
        return gives and self.apply.decode is ApplyBuffer.decode

    def describe(self) -> str:
        """Return the custom classes in one line, for messages and comparison; empty if all are built in."""
        own = [(one.name, getattr(self, one.name)) for one in fields(self)]
        return ", ".join(f"{name} {kind.__qualname__}" for name, kind in own if kind.__module__ != __name__)


def states_of(parts: Sequence[Replaceable]) -> list[object]:
    """Return the state of each part, in order."""
    return [part.state_dict() for part in parts]


def load_states(parts: Sequence[Replaceable], states: Sequence[object]) -> None:
    """Restore the state of each part; ValueError if the number of parts differs."""
    for part, state in zip(parts, states, strict=True):
        if state is not None:
            part.load_state_dict(state)


def raw(values: Tensor) -> memoryview:
    """Return a writable view of the bytes of a flat tensor in host memory."""
    return memoryview(values.view(torch.uint8).numpy().data) if values.numel() else memoryview(bytearray())


def values_of(encoded: memoryview, like: Tensor) -> Tensor:
    """Return ``encoded`` as a flat, writable tensor like ``like``; ProtocolError if its size differs."""
    if encoded.nbytes != like.numel() * like.element_size():
        raise ProtocolError(f"{encoded.nbytes} bytes for a partition of {like.numel() * like.element_size()}")
    if encoded.readonly:
        writable = memoryview(bytearray(encoded.nbytes))
        copy(encoded, writable)
        encoded = writable
    return typed(encoded, like.dtype)
