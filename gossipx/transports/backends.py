"""The gloo and NCCL backends of process groups: how each builds a group of two and moves bytes to and from it.

Only :mod:`gossipx.transports.process_group` imports this module. It uses both backends through :class:`Backend`.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from gossipx.model.pool import typed

CHUNK = 4 * 2**20
"""Bytes per message of a group."""
WINDOW = 3
"""Messages in flight: one that is being processed, and two in transit."""
# Tags of payload messages, and of a message that is never sent.
MODEL, _NOTHING = 0, 1
# Seconds: the least and the greatest timeout given to a group. Zero would select the group's own default.
_WAIT = (1e-3, 86_400.0)
# Seconds between two checks whether a transfer between GPUs is complete.
_POLL = 1e-4


@dataclass(frozen=True)
class Staging:
    """Buffers for the messages in flight.

    Attributes:
        near: (WINDOW, CHUNK) uint8, in the memory that the group sends from and receives into.
        host: the same in host memory; identical to ``near`` if that is host memory.
    """

    near: torch.Tensor
    host: torch.Tensor


class Work(Protocol):
    """A message in flight; the interface of torch.distributed."""

    def wait(self, timeout: timedelta, /) -> bool: ...

    def is_completed(self) -> bool: ...

    def is_success(self) -> bool: ...


class Group(Protocol):
    """A process group; the interface of torch.distributed."""

    def send(self, tensors: list[torch.Tensor], other: int, tag: int, /) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], other: int, tag: int, /) -> Work: ...

    def abort(self) -> None: ...


class Pair(Protocol):
    """The end of a group that waits for a message: :class:`gossipx.transports.process_group.PairGroup`."""

    @property
    def aborted(self) -> bool:
        """Whether this side has aborted the group."""


class Backend(Protocol):
    """Operations that differ between gloo and NCCL.

    Attributes:
        copies: whether sent bytes are copied to staging buffers first.
    """

    @property
    def copies(self) -> bool: ...

    def build(self, store: Store, rank: int, here: str, deadline: float) -> Group:
        """Build this end of a group of two."""

    def staging(self) -> Staging:
        """Allocate staging buffers."""

    def outgoing(self, part: memoryview, staging: Staging | None, slot: int) -> torch.Tensor:
        """Return ``part`` as a tensor that the group can send."""

    def incoming(self, staging: Staging, slot: int, size: int) -> memoryview:
        """Return the received bytes of a slot, in host memory."""

    def wait(self, work: Work, deadline: float, pair: Pair) -> None:
        """Wait until ``work`` is complete; RuntimeError if it fails, or is incomplete at the deadline."""

    def abort(self, group: Group, other: int) -> None:
        """Close a group at once; waiting calls raise."""


class Gloo:
    """gloo: TCP between the addresses of the connection. All groups of one local address share a gloo thread."""

    copies = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._devices: dict[str, Any] = {}

    def build(self, store: Store, rank: int, here: str, deadline: float) -> Group:
        """Build this end of a group of two."""
        with self._lock:
            if here not in self._devices:
                self._devices[here] = dist.ProcessGroupGloo.create_device(hostname=here)
            device = self._devices[here]
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in most stubs
        options._devices = [device]
        options._threads = 0  # these threads serve collectives only
        options._timeout = _left(deadline)
        group: Any = dist.ProcessGroupGloo(store, rank, 2, options)
        return cast(Group, group)

    def staging(self) -> Staging:
        """Allocate staging buffers in host memory."""
        host = torch.zeros(WINDOW, CHUNK, dtype=torch.uint8)
        return Staging(host, host)

    def outgoing(self, part: memoryview, staging: Staging | None, slot: int) -> torch.Tensor:
        """Return ``part`` in place: no copy is needed."""
        return typed(part, torch.uint8)

    def incoming(self, staging: Staging, slot: int, size: int) -> memoryview:
        """Return the slot in place: no copy is needed."""
        return _bytes(staging.host[slot])[:size]

    def wait(self, work: Work, deadline: float, pair: Pair) -> None:
        """Block without holding the interpreter's lock; gloo closes the group if this times out."""
        work.wait(_left(deadline))

    def abort(self, group: Group, other: int) -> None:
        """Close the group by a receive that times out, since gloo closes a group on any timeout."""
        never = torch.zeros(1, dtype=torch.uint8)
        group.recv([never], other, _NOTHING).wait(timedelta(seconds=_WAIT[0]))


class Nccl:
    """NCCL: between CUDA devices, on a stream of its own.

    Args:
        device: CUDA device of this peer's model.
    """

    copies = True

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def build(self, store: Store, rank: int, here: str, deadline: float) -> Group:
        """Build this end of a group of two."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _left(deadline)
        with _environment(_NCCL_KEEPS_THE_PROCESS), torch.cuda.device(self._device):
            group: Any = dist.ProcessGroupNCCL(store, rank, 2, options)
        return cast(Group, group)

    def staging(self) -> Staging:
        """Allocate staging buffers on the device and in pinned host memory."""
        near = torch.zeros(WINDOW, CHUNK, dtype=torch.uint8, device=self._device)
        return Staging(near, torch.zeros(WINDOW, CHUNK, dtype=torch.uint8, pin_memory=True))

    def outgoing(self, part: memoryview, staging: Staging | None, slot: int) -> torch.Tensor:
        """Copy ``part`` to the device through the pinned buffer."""
        assert staging is not None
        host, near = staging.host[slot][: len(part)], staging.near[slot][: len(part)]
        host.copy_(typed(part, torch.uint8))
        with torch.cuda.stream(self._stream):
            near.copy_(host, non_blocking=True)
        self._stream.synchronize()
        return near

    def incoming(self, staging: Staging, slot: int, size: int) -> memoryview:
        """Copy the slot to the pinned buffer."""
        with torch.cuda.stream(self._stream):
            staging.host[slot][:size].copy_(staging.near[slot][:size], non_blocking=True)
        self._stream.synchronize()
        return _bytes(staging.host[slot])[:size]

    def wait(self, work: Work, deadline: float, pair: Pair) -> None:
        """Poll until ``work`` is complete: NCCL's own wait blocks a stream and takes no deadline."""
        while not work.is_completed():
            if pair.aborted or time.monotonic() >= deadline:
                raise RuntimeError("not done by the deadline")
            time.sleep(_POLL)
        if not work.is_success():
            raise RuntimeError("a transfer between GPUs has failed")

    def abort(self, group: Group, other: int) -> None:
        """Close the group; NCCL supports this directly."""
        group.abort()


# By default NCCL's watchdog kills the whole process when a transfer fails, as it does when the other peer dies.
_NCCL_KEEPS_THE_PROCESS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_changing_environment = threading.Lock()


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the duration of the block."""
    with _changing_environment:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _bytes(row: torch.Tensor) -> memoryview:
    content: Any = row.numpy()
    return memoryview(content)


def _left(deadline: float) -> timedelta:
    left = math.ceil(1000 * (deadline - time.monotonic()))  # gloo takes whole milliseconds: round up
    return timedelta(seconds=min(max(left / 1000, _WAIT[0]), _WAIT[1]))
