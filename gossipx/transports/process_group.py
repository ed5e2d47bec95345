"""Carriers by torch.distributed: gloo on the CPU, NCCL between GPUs. Imported only where one of them is chosen.

Each connection gets a process group of its own, of its two ends: rank 0 opened it and receives, rank 1 sends. Requests
on a connection come one after the other and transfers go one way, so that two peers that pull from each other never
wait for each other. Groups are made without ``init_process_group``: one that a user's script has is not touched.

What the two ends must know of each other to meet goes over the connection, authenticated as all that does. The groups
bring neither authentication nor encryption; a payload's digest goes over the connection, too.
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

from gossipx.errors import GossipxError, NoCarrierError, PeerTimeoutError, PeerUnreachableError, UsageError
from gossipx.transports import KeyValueStore
from gossipx.transports.backends import CHUNK, MODEL, WINDOW, Backend, Gloo, Group, Nccl, Staging, Work

Kind = Literal["gloo", "nccl"]

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
        self._backend: Backend = Nccl(device) if kind == "nccl" else Gloo()
        self._spare: list[Staging] = []

    def build(self, receives: bool, notes: KeyValueStore, here: str, deadline: float) -> PairGroup:
        """One end of a group, while the other peer builds the other; see :class:`gossipx.transports.Carriers`."""
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

    def __init__(self, group: Group, backend: Backend, spare: list[Staging], other: int):
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
        # After a failure it is not used again: the group might still write to it.
        self._spare.append(staging)

    def abort(self) -> None:
        """End it; see :class:`gossipx.transports.Carrier`."""
        with self._lock:
            first, self._aborted = not self._aborted, True
        if first:
            with contextlib.suppress(RuntimeError):  # it has failed already
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


class _Store(Store):
    """What torch.distributed takes the two ends of a group together by: keys and values, over their connection.

    Once the group is built it is sealed, and what threads of torch's still say goes nowhere: the connection is used by
    others then.

    Attributes:
        failure: the first error; torch may wrap it.
    """

    def __init__(self, notes: KeyValueStore):
        super().__init__()
        self._notes: KeyValueStore | None = notes
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


def _line(error: Exception) -> str:
    """An error of a library in one line that can be sent."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return "".join(char for char in lines[0] if char.isprintable())[:_SHOWN]
