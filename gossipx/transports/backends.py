"""gloo and NCCL, as far as they differ: how a group is built, and how bytes come to it and from it.

Imported by :mod:`gossipx.transports.process_group` alone, which uses either the same way.
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

from gossipx.model.buffers import typed

CHUNK = 4 * 2**20
"""Bytes in one message of a group."""
WINDOW = 3
"""Messages under way at a time: one that is worked on, and two for the way."""
# Tags of payloads, and of what never comes.
MODEL, _NOTHING = 0, 1
# Seconds: the least and the most that a group is given to wait. Zero would mean its own default.
_WAIT = (1e-3, 86_400.0)
# Seconds between two looks whether a transfer between GPUs is done.
_LOOK = 1e-4


@dataclass(frozen=True)
class Staging:
    """Room for the messages that are under way.

    Attributes:
        near: (WINDOW, CHUNK) uint8, where the group has its bytes.
        host: the same in host memory; ``near`` itself where that is the host's.
    """

    near: torch.Tensor
    host: torch.Tensor


class Work(Protocol):
    """Of torch.distributed: a message under way."""

    def wait(self, timeout: timedelta, /) -> bool: ...

    def is_completed(self) -> bool: ...

    def is_success(self) -> bool: ...


class Group(Protocol):
    """Of torch.distributed: a process group."""

    def send(self, tensors: list[torch.Tensor], other: int, tag: int, /) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], other: int, tag: int, /) -> Work: ...

    def abort(self) -> None: ...


class Pair(Protocol):
    """One end of a group, which waits for a message; :class:`gossipx.transports.process_group.PairGroup`."""

    @property
    def aborted(self) -> bool:
        """Whether it was ended here."""


class Backend(Protocol):
    """What gloo and NCCL do differently.

    Attributes:
        copies: whether what is sent is copied to staging first.
    """

    @property
    def copies(self) -> bool: ...

    def build(self, store: Store, rank: int, here: str, deadline: float) -> Group:
        """This end of a group of two."""

    def staging(self) -> Staging:
        """New staging."""

    def outgoing(self, part: memoryview, staging: Staging | None, slot: int) -> torch.Tensor:
        """``part`` as the group can send it."""

    def incoming(self, staging: Staging, slot: int, size: int) -> memoryview:
        """What has come into a slot."""

    def wait(self, work: Work, deadline: float, pair: Pair) -> None:
        """Until it is done; RuntimeError if it fails, or is not by the deadline."""

    def abort(self, group: Group, other: int) -> None:
        """End a group at once, whoever waits for it."""


class Gloo:
    """TCP between the addresses that the connection has; one thread of gloo's for all groups of an address."""

    copies = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._devices: dict[str, Any] = {}

    def build(self, store: Store, rank: int, here: str, deadline: float) -> Group:
        """This end of a group of two."""
        with self._lock:
            if here not in self._devices:
                self._devices[here] = dist.ProcessGroupGloo.create_device(hostname=here)
            device = self._devices[here]
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # all versions have it, few declare it
        options._devices = [device]
        options._threads = 0  # they are for collectives
        options._timeout = _left(deadline)
        group: Any = dist.ProcessGroupGloo(store, rank, 2, options)
        return cast(Group, group)

    def staging(self) -> Staging:
        """In host memory."""
        host = torch.zeros(WINDOW, CHUNK, dtype=torch.uint8)
        return Staging(host, host)

    def outgoing(self, part: memoryview, staging: Staging | None, slot: int) -> torch.Tensor:
        """From where it lies."""
        return typed(part, torch.uint8)

    def incoming(self, staging: Staging, slot: int, size: int) -> memoryview:
        """Where it came."""
        return _bytes(staging.host[slot])[:size]

    def wait(self, work: Work, deadline: float, pair: Pair) -> None:
        """Blocks without the interpreter's lock; after a time-out the group has ended."""
        work.wait(_left(deadline))

    def abort(self, group: Group, other: int) -> None:
        """Gloo closes a group of which one operation timed out, which ends all others: so wait for what never comes."""
        never = torch.zeros(1, dtype=torch.uint8)
        group.recv([never], other, _NOTHING).wait(timedelta(seconds=_WAIT[0]))


class Nccl:
    """Between CUDA devices, by a stream of its own.

    Args:
        device: of this peer.
    """

    copies = True

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def build(self, store: Store, rank: int, here: str, deadline: float) -> Group:
        """This end of a group of two."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _left(deadline)
        with _environment(_NCCL_KEEPS_THE_PROCESS), torch.cuda.device(self._device):
            group: Any = dist.ProcessGroupNCCL(store, rank, 2, options)
        return cast(Group, group)

    def staging(self) -> Staging:
        """On the device, with its copy in pinned memory."""
        near = torch.zeros(WINDOW, CHUNK, dtype=torch.uint8, device=self._device)
        return Staging(near, torch.zeros(WINDOW, CHUNK, dtype=torch.uint8, pin_memory=True))

    def outgoing(self, part: memoryview, staging: Staging | None, slot: int) -> torch.Tensor:
        """By way of the pinned copy."""
        assert staging is not None
        host, near = staging.host[slot][: len(part)], staging.near[slot][: len(part)]
        host.copy_(typed(part, torch.uint8))
        with torch.cuda.stream(self._stream):
            near.copy_(host, non_blocking=True)
        self._stream.synchronize()
        return near

    def incoming(self, staging: Staging, slot: int, size: int) -> memoryview:
        """Copied to the host."""
        with torch.cuda.stream(self._stream):
            staging.host[slot][:size].copy_(staging.near[slot][:size], non_blocking=True)
        self._stream.synchronize()
        return _bytes(staging.host[slot])[:size]

    def wait(self, work: Work, deadline: float, pair: Pair) -> None:
        """Looks at it again and again: NCCL's own wait is one of a stream, and knows no deadline."""
        while not work.is_completed():
            if pair.aborted or time.monotonic() >= deadline:
                raise RuntimeError("not done by the deadline")
            time.sleep(_LOOK)
        if not work.is_success():
            raise RuntimeError("a transfer between GPUs has failed")

    def abort(self, group: Group, other: int) -> None:
        """NCCL can be told to."""
        group.abort()


# By default NCCL's watchdog ends the whole process when a transfer fails, as it does when the other peer dies.
_NCCL_KEEPS_THE_PROCESS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_changing_environment = threading.Lock()


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Environment variables that hold for a while."""
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
    left = math.ceil(1000 * (deadline - time.monotonic()))  # gloo takes whole milliseconds: none too early
    return timedelta(seconds=min(max(left / 1000, _WAIT[0]), _WAIT[1]))
