"""Carriers over torch.distributed: gloo on the CPU, NCCL between GPUs. Imported only if one of them is chosen.

Each connection has its own process group of two: rank 0 opened the connection and receives, rank 1 sends. A connection
handles one request at a time and its group transfers in one direction only, so two peers that pull from each other
cannot deadlock. Groups are built without ``init_process_group``, so a user's default group is unaffected. A
:class:`Backend` says how gloo or NCCL builds a group and moves bytes to and from it.

The two ends find each other by keys and values sent over the connection, which is authenticated. The groups themselves
are neither authenticated nor encrypted; so the digest of each payload is sent over the connection, too.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from gossipx.errors import GossipxError, NoCarrierError, PeerTimeoutError, PeerUnreachableError, UsageError, printable
from gossipx.model.pool import typed
from gossipx.transports import KeyValueStore

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


class Backend(Protocol):
    """Operations that differ between gloo and NCCL.

    Attributes:
        copies: whether sent bytes are copied to staging buffers first.
    """

    @property
    def copies(self) -> bool: ...

    def build(self, store: Store, rank: int, here: str, deadline: float) -> dist.ProcessGroup:
        """Build this end of a group of two."""

    def staging(self) -> Staging:
        """Allocate staging buffers."""

    def outgoing(self, part: memoryview, staging: Staging | None, slot: int) -> torch.Tensor:
        """Return ``part`` as a tensor that the group can send."""

    def incoming(self, staging: Staging, slot: int, size: int) -> memoryview:
        """Return the received bytes of a slot, in host memory."""

    def wait(self, work: dist.Work, deadline: float, pair: PairGroup) -> None:
        """Wait until ``work`` is complete; RuntimeError if it fails, or is incomplete at the deadline."""

    def abort(self, group: dist.ProcessGroup, other: int) -> None:
        """Close a group at once; waiting calls raise."""


class Gloo:
    """gloo: TCP between the addresses of the connection. All groups of one local address share a gloo thread."""

    copies = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._devices: dict[str, Any] = {}

    def build(self, store: Store, rank: int, here: str, deadline: float) -> dist.ProcessGroup:
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
        return cast(dist.ProcessGroup, group)

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

    def wait(self, work: dist.Work, deadline: float, pair: PairGroup) -> None:
        """Block without holding the interpreter's lock; gloo closes the group if this times out."""
        pair.waiter.wait(work, deadline)

    def abort(self, group: dist.ProcessGroup, other: int) -> None:
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

    def build(self, store: Store, rank: int, here: str, deadline: float) -> dist.ProcessGroup:
        """Build this end of a group of two."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _left(deadline)
        with _environment(_NCCL_KEEPS_THE_PROCESS), torch.cuda.device(self._device):
            group: Any = dist.ProcessGroupNCCL(store, rank, 2, options)
        return cast(dist.ProcessGroup, group)

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

    def wait(self, work: dist.Work, deadline: float, pair: PairGroup) -> None:
        """Poll until ``work`` is complete: NCCL's own wait blocks a stream and takes no deadline."""
        while not work.is_completed():
            if pair.aborted or time.monotonic() >= deadline:
                raise RuntimeError("not done by the deadline")
            time.sleep(_POLL)
        if not work.is_success():
            raise RuntimeError("a transfer between GPUs has failed")

    def abort(self, group: dist.ProcessGroup, other: int) -> None:
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


Kind = Literal["gloo", "nccl"]

# Characters of a library's error message that are shown.
_SHOWN = 300


class ProcessGroups:
    """Builds process groups of two; a :class:`gossipx.transports.Carriers`.

    Args:
        kind: backend that transfers the bytes.
        device: device of the model; NCCL requires a CUDA device.

    Raises:
        UsageError: torch or this machine does not support the backend.
    """

    def __init__(self, kind: Kind, device: torch.device):
        check(kind, device)
        self.kind = kind
        self._backend: Backend = Nccl(device) if kind == "nccl" else Gloo()
        self._spare: list[Staging] = []

    def build(self, receives: bool, notes: KeyValueStore, here: str, deadline: float) -> PairGroup:
        """Build one end of a group, while the other peer builds the other; see :class:`gossipx.transports.Carriers`."""
        store = _Store(notes)
        try:
            with contextlib.ExitStack() as undo:
                group = self._backend.build(store, 0 if receives else 1, here, deadline)
                pair = PairGroup(group, self._backend, self._spare, 1 if receives else 0)
                undo.callback(pair.abort)
                pair.try_out(receives, deadline)
                undo.pop_all()
        except Exception as error:
            if isinstance(store.failure, GossipxError):
                raise store.failure from error
            raise NoCarrierError(f"no {self.kind} group could be built: {_line(error)}") from error
        store.seal()
        return pair


def check(kind: Kind, device: torch.device | None) -> None:
    """Check that models on ``device`` (None: on some device) can use this backend.

    Raises:
        UsageError: they cannot.
    """
    if kind == "gloo" and not (dist.is_available() and dist.is_gloo_available()):
        raise UsageError("--transport gloo: this torch was built without gloo; use auto or tcp")
    if kind == "nccl" and not (dist.is_available() and dist.is_nccl_available()):
        raise UsageError("--transport nccl: this torch was built without NCCL; use auto, tcp or gloo")
    if kind == "nccl" and not torch.cuda.is_available():
        raise UsageError("--transport nccl: this machine has no CUDA device; use auto, tcp or gloo")
    if kind == "nccl" and device is not None and device.type != "cuda":
        raise UsageError(
            f"--transport nccl moves models between CUDA devices, but the model is on '{device}':"
            " give --device cuda, or use auto, tcp or gloo"
        )


class _Waiter:
    """Waits for a group's operations in a thread, so that :meth:`close` can end a wait that gloo does not end.

    If a group is closed, here or by a peer that dies, gloo wakes no call whose message is partly sent or received.
    """

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[tuple[dist.Work, float] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def wait(self, work: dist.Work, deadline: float) -> None:
        """Wait until ``work`` is complete; RuntimeError if it fails, is incomplete at the deadline, or on a close."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gossipx-gloo", daemon=True)
            self._thread.start()
        self._works.put((work, deadline))
        if (error := self._results.get()) is not None:
            raise error

    def close(self) -> None:
        """End a wait in another thread, and this object's own thread as soon as gloo lets it end."""
        self._works.put(None)
        self._results.put(RuntimeError("closed"))

    def _run(self) -> None:
        while (given := self._works.get()) is not None:
            error: Exception | None = None
            try:
                given[0].wait(_left(given[1]))
            except Exception as failed:
                error = failed
            del given  # else this thread may destroy the operation while the process exits, which aborts it
            self._results.put(error)


class PairGroup:
    """One end of a process group of two; a :class:`gossipx.transports.Carrier`.

    Args:
        spare: staging buffers not in use, shared by all groups of a peer.
        other: rank of the other end.

    Attributes:
        waiter: waits for a backend whose own waits :meth:`abort` cannot end.
    """

    def __init__(self, group: dist.ProcessGroup, backend: Backend, spare: list[Staging], other: int):
        self._group, self._backend, self._spare, self._other = group, backend, spare, other
        self.waiter = _Waiter()
        self._lock = threading.Lock()
        self._aborted = False

    def try_out(self, receives: bool, deadline: float) -> None:
        """Move one byte, which completes the group's lazy setup and shows that it works."""
        if receives:
            for _ in self.receive(1, deadline):
                pass
        else:
            for _ in self.send(memoryview(bytearray(1)), deadline):
                pass

    def send(
        self, view: memoryview, deadline: float, before_part: Callable[[memoryview], None] = lambda part: None
    ) -> Iterator[memoryview]:
        """Send; see :class:`gossipx.transports.Carrier`."""
        staging = self._staging() if self._backend.copies else None
        under_way: deque[dist.Work] = deque()
        for number, start in enumerate(range(0, len(view), CHUNK)):
            if len(under_way) == WINDOW:
                self._wait(under_way.popleft(), deadline)
            part = view[start : start + CHUNK]
            before_part(part)
            with self._mapped(deadline):
                tensor = self._backend.outgoing(part, staging, number % WINDOW)
                under_way.append(self._group.send([tensor], self._other, MODEL))
            yield part
        while under_way:
            self._wait(under_way.popleft(), deadline)
        if staging is not None:
            self._spare.append(staging)

    def receive(self, nbytes: int, deadline: float) -> Iterator[memoryview]:
        """Receive; see :class:`gossipx.transports.Carrier`."""
        staging = self._staging()
        sizes = [min(CHUNK, nbytes - start) for start in range(0, nbytes, CHUNK)]
        under_way: deque[dist.Work] = deque()

        def post(number: int) -> None:
            if number < len(sizes):
                with self._mapped(deadline):
                    tensor = staging.near[number % WINDOW][: sizes[number]]
                    under_way.append(self._group.recv([tensor], self._other, MODEL))

        for number in range(WINDOW):
            post(number)
        for number, size in enumerate(sizes):
            self._wait(under_way.popleft(), deadline)
            with self._mapped(deadline):
                part = self._backend.incoming(staging, number % WINDOW, size)
            yield part
            post(number + WINDOW)
        # After a failure the staging buffers are not reused: the group might still write to them.
        self._spare.append(staging)

    def abort(self) -> None:
        """Close the group; see :class:`gossipx.transports.Carrier`."""
        with self._lock:
            first, self._aborted = not self._aborted, True
        if first:
            with contextlib.suppress(RuntimeError):  # the group has failed already
                self._backend.abort(self._group, self._other)
            self.waiter.close()

    def _staging(self) -> Staging:
        try:
            return self._spare.pop()
        except IndexError:
            return self._backend.staging()

    def _wait(self, work: dist.Work, deadline: float) -> None:
        with self._mapped(deadline):
            self._backend.wait(work, deadline, self)

    @property
    def aborted(self) -> bool:
        """Whether this side has closed the group."""
        return self._aborted

    @contextlib.contextmanager
    def _mapped(self, deadline: float) -> Iterator[None]:
        """Convert errors of torch.distributed to those of a :class:`gossipx.transports.Carrier`."""
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


class _Store(Store):
    """The store by which the two ends of a group find each other: keys and values sent over their connection.

    Once the group is built, the store is sealed: background threads of torch still write to it, and these writes are
    dropped, because the connection then serves requests.

    Attributes:
        failure: the first error; torch may wrap it.
    """

    def __init__(self, notes: KeyValueStore):
        super().__init__()
        self._notes: KeyValueStore | None = notes
        self.failure: Exception | None = None

    def seal(self) -> None:
        """Drop all further writes, and refuse reads."""
        self._notes = None

    def set(self, key: str, value: Any) -> None:
        """Publish a value to the other end."""
        if self._notes is not None:
            with self._noting():
                self._notes.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Return the value of a key; waits for it."""
        if self._notes is None:
            raise RuntimeError("the group is built")
        with self._noting():
            return self._notes.get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys; the connection's deadline applies, not ``timeout``."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Return False: torch uses this to look for failures reported by the other end, which are not exchanged."""
        return False

    def has_extended_api(self) -> bool:
        """Return False: torch then gets keys one by one."""
        return False

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error
            raise


def _line(error: Exception) -> str:
    """Return the first line of a library's error, printable and short enough to send."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return printable(lines[0], _SHOWN)
