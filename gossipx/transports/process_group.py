"""Carriers by torch.distributed: gloo on the CPU, NCCL between GPUs. Imported only where one of them is chosen.

Each connection gets a process group of its own, of its two ends: rank 0 opened it and receives, rank 1 sends. Requests
on a connection come one after the other and transfers go one way, so that two peers that pull from each other never
wait for each other. Groups are made without ``init_process_group``: one that a user's script has is not touched.

What the two ends must know of each other to meet goes over the connection, authenticated as all that does. The groups
bring neither authentication nor encryption; a payload's digest goes over the connection, too.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from gossipx.buffers import typed
from gossipx.errors import GossipxError, NoCarrierError, PeerTimeoutError, PeerUnreachableError, UsageError
from gossipx.transports import Notes

Kind = Literal["gloo", "nccl"]

CHUNK = 4 * 2**20
"""Bytes in one message of a group."""
WINDOW = 3
"""Messages under way at a time: one that is worked on, and two for the way."""
# Tags of payloads, and of what never comes.
_MODEL, _NOTHING = 0, 1
# Seconds: the least and the most that a group is given to wait. Zero would mean its own default.
_WAIT = (1e-3, 86_400.0)
# Seconds between two looks whether a transfer between GPUs is done.
_LOOK = 1e-4
# Characters of a library's error that a message shows.
_SHOWN = 300


class ProcessGroups:
    """Builds process groups of two; :class:`gossipx.transports.Carriers`.

    Args:
        kind: what moves the bytes.
        device: where the model is; NCCL needs it to be a CUDA device.

    Raises:
        UsageError: this torch or this machine has no such thing.
    """

    def __init__(self, kind: Kind, device: torch.device):
        check(kind, device)
        self.kind = kind
        self._backend: _Backend = _Nccl(device) if kind == "nccl" else _Gloo()
        self._spare: list[_Staging] = []

    def build(self, receives: bool, notes: Notes, here: str, deadline: float) -> PairGroup:
        """One end of a group, while the other peer builds the other; see :class:`gossipx.transports.Carriers`."""
        store = _Store(notes)
        try:
            group = self._backend.build(store, 0 if receives else 1, here, deadline)
            pair = PairGroup(group, self._backend, self._spare, 1 if receives else 0)
            pair.try_out(receives, deadline)
        except Exception as error:
            if isinstance(store.failure, GossipxError):
                raise store.failure from error
            raise NoCarrierError(f"no {self.kind} group could be built: {_line(error)}") from error
        store.seal()
        return pair


def check(kind: Kind, device: torch.device | None) -> None:
    """Look whether models on ``device`` (None: some device) can be carried so.

    Raises:
        UsageError: they cannot.
    """
    if kind == "gloo" and not (dist.is_available() and dist.is_gloo_available()):
        raise UsageError("--transport gloo: this torch was built without it; use auto or tcp")
    if kind == "nccl" and not (dist.is_available() and dist.is_nccl_available()):
        raise UsageError("--transport nccl: this torch was built without it; use auto, tcp or gloo")
    if kind == "nccl" and not torch.cuda.is_available():
        raise UsageError("--transport nccl: this machine has no CUDA device; use auto, tcp or gloo")
    if kind == "nccl" and device is not None and device.type != "cuda":
        raise UsageError(
            f"--transport nccl moves models between CUDA devices, and the model is on '{device}':"
            " give --device cuda, or use auto, tcp or gloo"
        )


class PairGroup:
    """One end of a process group of two; :class:`gossipx.transports.Carrier`.

    Args:
        spare: staging that no group uses now, shared by all groups of a peer.
        other: rank of the other end.
    """

    def __init__(self, group: _Group, backend: _Backend, spare: list[_Staging], other: int):
        self._group, self._backend, self._spare, self._other = group, backend, spare, other
        self._lock = threading.Lock()
        self._aborted = False

    def try_out(self, receives: bool, deadline: float) -> None:
        """Move one byte, so that whatever is set up by a first use is, and works."""
        if receives:
            for _ in self.receive(1, deadline):
                pass
        else:
            for _ in self.send(memoryview(bytearray(1)), deadline):
                pass

    def send(self, view: memoryview, deadline: float) -> Iterator[memoryview]:
        """Send; see :class:`gossipx.transports.Carrier`."""
        staging = self._staging() if self._backend.copies else None
        under_way: deque[_Work] = deque()
        for number, start in enumerate(range(0, len(view), CHUNK)):
            if len(under_way) == WINDOW:
                self._wait(under_way.popleft(), deadline)
            part = view[start : start + CHUNK]
            with self._mapped(deadline):
                tensor = self._backend.outgoing(part, staging, number % WINDOW)
                under_way.append(self._group.send([tensor], self._other, _MODEL))
            yield part
        while under_way:
            self._wait(under_way.popleft(), deadline)
        if staging is not None:
            self._spare.append(staging)

    def receive(self, nbytes: int, deadline: float) -> Iterator[memoryview]:
        """Receive; see :class:`gossipx.transports.Carrier`."""
        staging = self._staging()
        sizes = [min(CHUNK, nbytes - start) for start in range(0, nbytes, CHUNK)]
        under_way: deque[_Work] = deque()

        def post(number: int) -> None:
            if number < len(sizes):
                with self._mapped(deadline):
                    tensor = staging.near[number % WINDOW][: sizes[number]]
                    under_way.append(self._group.recv([tensor], self._other, _MODEL))

        for number in range(WINDOW):
            post(number)
        for number, size in enumerate(sizes):
            self._wait(under_way.popleft(), deadline)
            with self._mapped(deadline):
                part = self._backend.incoming(staging, number % WINDOW, size)
            yield part
            post(number + WINDOW)
        # After a failure it is not used again: the group might still write to it.
        self._spare.append(staging)

    def abort(self) -> None:
        """End it; see :class:`gossipx.transports.Carrier`."""
        with self._lock:
            first, self._aborted = not self._aborted, True
        if first:
            with contextlib.suppress(RuntimeError):  # it has failed already
                self._backend.abort(self._group, self._other)

    def _staging(self) -> _Staging:
        try:
            return self._spare.pop()
        except IndexError:
            return self._backend.staging()

    def _wait(self, work: _Work, deadline: float) -> None:
        with self._mapped(deadline):
            self._backend.wait(work, deadline, self)

    @property
    def aborted(self) -> bool:
        """Whether it was ended here."""
        return self._aborted

    @contextlib.contextmanager
    def _mapped(self, deadline: float) -> Iterator[None]:
        """Errors of torch.distributed as ours."""
        if self._aborted:
            raise PeerUnreachableError("the process group was closed here")
        if time.monotonic() >= deadline:
            raise PeerTimeoutError("the process group did not keep up with the deadline")
        try:
            yield
        except RuntimeError as error:
            if self._aborted:
                raise PeerUnreachableError("the process group was closed here") from error
            if time.monotonic() >= deadline:
                raise PeerTimeoutError("the process group did not keep up with the deadline") from error
            raise PeerUnreachableError(f"lost the process group: {_line(error)}") from error


@dataclass(frozen=True)
class _Staging:
    """Room for the messages that are under way.

    Attributes:
        near: (WINDOW, CHUNK) uint8, where the group has its bytes.
        host: the same in host memory; ``near`` itself where that is the host's.
    """

    near: torch.Tensor
    host: torch.Tensor


class _Work(Protocol):
    """Of torch.distributed: a message under way."""

    def wait(self, timeout: timedelta, /) -> bool: ...

    def is_completed(self) -> bool: ...

    def is_success(self) -> bool: ...


class _Group(Protocol):
    """Of torch.distributed: a process group."""

    def send(self, tensors: list[torch.Tensor], other: int, tag: int, /) -> _Work: ...

    def recv(self, tensors: list[torch.Tensor], other: int, tag: int, /) -> _Work: ...

    def abort(self) -> None: ...


class _Backend(Protocol):
    """What gloo and NCCL do differently.

    Attributes:
        copies: whether what is sent is copied to staging first.
    """

    @property
    def copies(self) -> bool: ...

    def build(self, store: _Store, rank: int, here: str, deadline: float) -> _Group:
        """This end of a group of two."""

    def staging(self) -> _Staging:
        """New staging."""

    def outgoing(self, part: memoryview, staging: _Staging | None, slot: int) -> torch.Tensor:
        """``part`` as the group can send it."""

    def incoming(self, staging: _Staging, slot: int, size: int) -> memoryview:
        """What has come into a slot."""

    def wait(self, work: _Work, deadline: float, pair: PairGroup) -> None:
        """Until it is done; RuntimeError if it fails, or is not by the deadline."""

    def abort(self, group: _Group, other: int) -> None:
        """End a group at once, whoever waits for it."""


class _Gloo:
    """TCP between the addresses that the connection has; one thread of gloo's for all groups of an address."""

    copies = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._devices: dict[str, Any] = {}

    def build(self, store: _Store, rank: int, here: str, deadline: float) -> _Group:
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
        return cast(_Group, group)

    def staging(self) -> _Staging:
        """In host memory."""
        host = torch.zeros(WINDOW, CHUNK, dtype=torch.uint8)
        return _Staging(host, host)

    def outgoing(self, part: memoryview, staging: _Staging | None, slot: int) -> torch.Tensor:
        """From where it lies."""
        return typed(part, torch.uint8)

    def incoming(self, staging: _Staging, slot: int, size: int) -> memoryview:
        """Where it came."""
        return _bytes(staging.host[slot])[:size]

    def wait(self, work: _Work, deadline: float, pair: PairGroup) -> None:
        """Blocks without the interpreter's lock; after a time-out the group has ended."""
        work.wait(_left(deadline))

    def abort(self, group: _Group, other: int) -> None:
        """Gloo closes a group of which one operation timed out, which ends all others: so wait for what never comes."""
        never = torch.zeros(1, dtype=torch.uint8)
        group.recv([never], other, _NOTHING).wait(timedelta(seconds=_WAIT[0]))


class _Nccl:
    """Between CUDA devices, by a stream of its own.

    Args:
        device: of this peer.
    """

    copies = True

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def build(self, store: _Store, rank: int, here: str, deadline: float) -> _Group:
        """This end of a group of two."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _left(deadline)
        with _environment(_NCCL_KEEPS_THE_PROCESS), torch.cuda.device(self._device):
            group: Any = dist.ProcessGroupNCCL(store, rank, 2, options)
        return cast(_Group, group)

    def staging(self) -> _Staging:
        """On the device, with its copy in pinned memory."""
        near = torch.zeros(WINDOW, CHUNK, dtype=torch.uint8, device=self._device)
        return _Staging(near, torch.zeros(WINDOW, CHUNK, dtype=torch.uint8, pin_memory=True))

    def outgoing(self, part: memoryview, staging: _Staging | None, slot: int) -> torch.Tensor:
        """By way of the pinned copy."""
        assert staging is not None
        host, near = staging.host[slot][: len(part)], staging.near[slot][: len(part)]
        host.copy_(typed(part, torch.uint8))
        with torch.cuda.stream(self._stream):
            near.copy_(host, non_blocking=True)
        self._stream.synchronize()
        return near

    def incoming(self, staging: _Staging, slot: int, size: int) -> memoryview:
        """Copied to the host."""
        with torch.cuda.stream(self._stream):
            staging.host[slot][:size].copy_(staging.near[slot][:size], non_blocking=True)
        self._stream.synchronize()
        return _bytes(staging.host[slot])[:size]

    def wait(self, work: _Work, deadline: float, pair: PairGroup) -> None:
        """Looks at it again and again: NCCL's own wait is one of a stream, and knows no deadline."""
        while not work.is_completed():
            if pair.aborted or time.monotonic() >= deadline:
                raise RuntimeError("not done by the deadline")
            time.sleep(_LOOK)
        if not work.is_success():
            raise RuntimeError("a transfer between GPUs has failed")

    def abort(self, group: _Group, other: int) -> None:
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


class _Store(Store):
    """What torch.distributed takes the two ends of a group together by: keys and values, over their connection.

    Once the group is built it is sealed, and what threads of torch's still say goes nowhere: the connection is used by
    others then.

    Attributes:
        failure: the first error; torch may wrap it.
    """

    def __init__(self, notes: Notes):
        super().__init__()
        self._notes: Notes | None = notes
        self.failure: Exception | None = None

    def seal(self) -> None:
        """No more."""
        self._notes = None

    def set(self, key: str, value: Any) -> None:
        """Tell the other end."""
        if self._notes is not None:
            with self._noting():
                self._notes.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a key."""
        if self._notes is None:
            raise RuntimeError("the group is built")
        with self._noting():
            return self._notes.get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys; as long as the connection does."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there: torch asks so for signs of failure, which are not exchanged."""
        return False

    def has_extended_api(self) -> bool:
        """Several keys at once are got one by one."""
        return False

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error
            raise


def _bytes(row: torch.Tensor) -> memoryview:
    content: Any = row.numpy()
    return memoryview(content)


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=min(max(deadline - time.monotonic(), _WAIT[0]), _WAIT[1]))


def _line(error: Exception) -> str:
    """An error of a library in one line that can be sent."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return "".join(char for char in lines[0] if char.isprintable())[:_SHOWN]
