"""Carriers over torch.distributed: gloo on the CPU, NCCL between GPUs. Imported only if one of them is chosen.

Each connection has its own process group of two: rank 0 opened the connection and receives, rank 1 sends. A connection
handles one request at a time and its group transfers in one direction only, so two peers that pull from each other
cannot deadlock. Groups are built without ``init_process_group``, so a user's default group is unaffected.

The two ends find each other by keys and values sent over the connection, which is authenticated. The groups themselves
are neither authenticated nor encrypted; so the digest of each payload is sent over the connection, too.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from gossipx.errors import GossipxError, NoCarrierError, PeerTimeoutError, PeerUnreachableError, UsageError, printable
from gossipx.transports import KeyValueStore
from gossipx.transports.backends import CHUNK, MODEL, WINDOW, Backend, Gloo, Group, Nccl, Staging, Work

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


class PairGroup:
    """One end of a process group of two; a :class:`gossipx.transports.Carrier`.

    Args:
        spare: staging buffers not in use, shared by all groups of a peer.
        other: rank of the other end.
    """

    def __init__(self, group: Group, backend: Backend, spare: list[Staging], other: int):
        self._group, self._backend, self._spare, self._other = group, backend, spare, other
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
        self, view: memoryview, deadline: float, turn: Callable[[memoryview], None] = lambda part: None
    ) -> Iterator[memoryview]:
        """Send; see :class:`gossipx.transports.Carrier`."""
        staging = self._staging() if self._backend.copies else None
        under_way: deque[Work] = deque()
        for number, start in enumerate(range(0, len(view), CHUNK)):
            if len(under_way) == WINDOW:
                self._wait(under_way.popleft(), deadline)
            part = view[start : start + CHUNK]
            turn(part)
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
        under_way: deque[Work] = deque()

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

    def _staging(self) -> Staging:
        try:
            return self._spare.pop()
        except IndexError:
            return self._backend.staging()

    def _wait(self, work: Work, deadline: float) -> None:
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
