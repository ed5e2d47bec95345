"""Memory for the models of one module: buffers in host memory, vectors on the device, and copies between them.

A model is large and allocation is slow. So buffers are reference-counted (:class:`Snapshot`), and a buffer that is no
longer needed is reused for the next model.

A *boundary* is the model as an optimizer step left it. An *incoming model* is one that is being received
(:class:`gossipx.model.receive.Incoming`). Its *base* is the snapshot of this peer's model that is subtracted from it,
piece by piece, while it arrives. If nobody else reads the base, the differences overwrite it, and the incoming model
takes over its memory. If others read it, the incoming model starts in a second buffer and moves later.

A snapshot's memory is in use as long as it has holders. If the last boundary has readers, the next one needs other
memory. The waits in :class:`Pool` keep that from being newly allocated memory.

Each fragment of a model that is exchanged in fragments has a pool. They share their free memory, so that it is that of
the fragments under way, rather than of all.

A device has two work queues (:class:`DeviceStreams`): one stream for training, and a side stream for copies to and from
host memory. All work that reads or changes weights goes to the training stream, in order. Copies go to the side stream;
other threads wait for them and training does not. A mark is a position in a stream: another stream, or the host, can
wait until all work before it is complete. On a CPU, and on devices that are not supported specially, work is complete
when a call returns, and marks are empty.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar, final

import torch
from torch import Tensor

from gossipx.errors import LocalFaultError
from gossipx.memory import STAGED_PIECE, Memory, Source
from gossipx.model.layout import lengths
from gossipx.model.section import Section

Mark: TypeAlias = Any
"""A position in a stream, of a type that depends on the :class:`DeviceStreams`."""


class DeviceStreams:
    """Submits work to the streams of one device; thread-safe. Here all work is complete when the call returns.

    Args:
        on_host: whether the model is in host memory, so that no copies are needed.

    Attributes:
        later: whether work may be incomplete when the call that submitted it returns.
    """

    later: bool = False

    def __init__(self, on_host: bool):
        self.on_host = on_host

    def begin(self) -> None:
        """Make the calling thread's current stream the training stream; called by the training thread."""

    def empty_like(self, like: Tensor) -> Tensor:
        """Return a new vector whose memory the training stream no longer uses otherwise."""
        return torch.empty_like(like)

    def train(self, work: Callable[[], object]) -> None:
        """Submit ``work`` to the training stream."""
        work()

    def on_side_stream(self, work: Callable[[], object], after: Mark) -> None:
        """Submit ``work`` to the side stream, to begin once the work before ``after`` is complete."""
        work()

    def mark(self) -> Mark:
        """Return the current end of the training stream."""

    def mark_side_stream(self) -> Mark:
        """Return the current end of the side stream."""

    def wait(self, mark: Mark) -> None:
        """Block the calling thread until the work before the mark is complete."""

    def to_host(self, values: Tensor) -> Tensor:
        """Return values as the training stream leaves them, in host memory: themselves on a CPU, else a copy."""
        if self.on_host:
            return values
        there = torch.empty_like(values, device="cpu")
        self.train(lambda: there.copy_(values))
        self.wait(self.mark())
        return there

    def late(self, work: Callable[[], Tensor]) -> float:
        """Submit ``work``, which computes one number, to the training stream; return the previous number if possible.

        So training does not wait for its device: the previous number is complete by now, this one is not.
        """
        return float(work())

    def pin(self, buffer: HostBuffer) -> None:
        """Page-lock ``buffer`` for its lifetime, so that the device can copy without the processor."""


class Asynchronous(DeviceStreams):
    """Streams whose work may be incomplete when a call returns."""

    later = True

    def __init__(self, numbers: Tensor):
        super().__init__(on_host=False)
        self._numbers = numbers  # two in host memory, used in turn
        self._marks: list[Mark] = [None, None]
        self._turn = 0

    def late(self, work: Callable[[], Tensor]) -> float:
        """See :class:`DeviceStreams`. The first call has no previous number and waits for its own."""
        turn, self._turn = self._turn, 1 - self._turn
        number = self._numbers[turn]
        self.train(lambda: number.copy_(work(), non_blocking=True))
        self._marks[turn] = self.mark()
        given = turn if self._marks[1 - turn] is None else 1 - turn
        self.wait(self._marks[given])
        return float(self._numbers[given])


@final
class Cuda(Asynchronous):
    """CUDA streams: the training thread's current stream, and a side stream of this object."""

    def __init__(self, device: torch.device):
        super().__init__(torch.zeros(2, dtype=torch.float64).pin_memory())
        self._device = device
        self._training = torch.cuda.current_stream(device)
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        before, self._training = self._training, torch.cuda.current_stream(self._device)
        if self._training != before:
            self._training.wait_stream(before)

    def train(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._training):
            work()

    def on_side_stream(self, work: Callable[[], object], after: Mark) -> None:
        with torch.cuda.stream(self._side):
            self._side.wait_event(after)
            work()

    def empty_like(self, like: Tensor) -> Tensor:
        with torch.cuda.stream(self._training):  # the allocator then returns the memory to this stream
            return torch.empty_like(like)

    def mark(self) -> Mark:
        return self._training.record_event()

    def mark_side_stream(self) -> Mark:
        return self._side.record_event()

    def wait(self, mark: Mark) -> None:
        mark.synchronize()  # releases the interpreter's lock

    def pin(self, buffer: HostBuffer) -> None:
        if not buffer.view.nbytes:
            return
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = torch.frombuffer(buffer.view, dtype=torch.uint8).data_ptr()
        if int(runtime.cudaHostRegister(address, buffer.view.nbytes, 0)) == 0:  # on failure copies are only slower
            weakref.finalize(buffer, runtime.cudaHostUnregister, address).atexit = False


def streams_of(device: torch.device) -> DeviceStreams:
    """Return the work queues of a device."""
    return Cuda(device) if device.type == "cuda" else DeviceStreams(on_host=device.type == "cpu")


class HostBuffer:
    """A buffer for one model in host memory, as raw bytes and as one flat vector per section (dtype).

    Args:
        lengths: dtype and number of elements of each section.
        whole: whether it is sized for the whole model, or for the part that retrievals exchange.
        fragment: number of the fragment that it holds; 0: all of that model.

    Attributes:
        view: the bytes, writable, for the wire.
        descriptor: file descriptor of the same memory, for sharing it; None if not supported.
        vectors: the elements of each section.
        on_device: the same on the module's device, once uploaded for mixing.
    """

    def __init__(self, lengths: Sequence[tuple[torch.dtype, int]], whole: bool, fragment: int = 0):
        self.whole = whole
        self._memory = Memory(sum(length * dtype.itemsize for dtype, length in lengths))
        self.view = self._memory.view
        self.descriptor = self._memory.descriptor
        self.on_device: list[torch.Tensor] | None = None
        self.lay_out(lengths, fragment)

    def lay_out(self, lengths: Sequence[tuple[torch.dtype, int]], fragment: int) -> None:
        """Use the memory for a fragment of the same size, given by the lengths of its sections."""
        self.fragment = fragment
        sizes = [length * dtype.itemsize for dtype, length in lengths]
        ends = itertools.accumulate(sizes)  # multiples of ALIGNMENT, so every section is aligned for its dtype
        self.vectors = [
            typed(self.view[end - size : end], dtype)
            for end, size, (dtype, _) in zip(ends, sizes, lengths, strict=True)
        ]


def typed(view: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor over the bytes of ``view``, which must be writable."""
    return torch.frombuffer(view, dtype=dtype) if view.nbytes else torch.empty(0, dtype=dtype)


Retrieval = TypeVar("Retrieval")

PATIENCE = 30.0
"""Seconds that a thread waits for a pending snapshot: as long as the default peer timeout."""


class Snapshot:
    """A model as it was at one step boundary; shared, and unchanged while it has references.

    A snapshot that is requested in the middle of a step is pending: it is filled at the next boundary.
    """

    def __init__(self, owner: Pool):
        self.holders = 1
        self._owner = owner
        self._vectors: list[Tensor] | None = None
        self._buffer: HostBuffer | None = None
        self._source: Source | None = None
        self._step = 0
        self._written: Mark = None
        self._settled = threading.Event()
        self._callbacks: list[Callable[[], None]] = []

    def fill(self, vectors: list[Tensor], buffer: HostBuffer | None, step: int, written: Mark = None) -> None:
        """Set the content: the model after ``step`` iterations. The memory is released with the snapshot.

        Args:
            vectors: the elements of each section, on the module's device.
            buffer: their host buffer, if the device is the host.
            written: mark of the last write to ``vectors``.
        """
        self._vectors, self._buffer, self._step, self._written = vectors, buffer, step, written
        self._source = None
        self._settled.set()

    def refill(self, step: int, written: Mark) -> None:
        """Record that the vectors now contain the model after ``step`` iterations."""
        self._step, self._written, self._source = step, written, None
        if self._buffer is not None and self._buffer.vectors is not self._vectors:  # an outdated copy
            self._owner.free(self._buffer)
            self._buffer = None

    def fail(self) -> None:
        """Mark the snapshot as failed, because no further boundary follows."""
        self._settled.set()

    @property
    def settled(self) -> bool:
        """Whether it is filled or has failed, so that nothing blocks."""
        return self._settled.is_set()

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once it is filled or has failed: now, or on the thread that calls :meth:`notify`."""
        with self._owner.lock:
            if not self._settled.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def notify(self) -> None:
        """Run the callbacks; the caller holds no locks."""
        with self._owner.lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    @property
    def vectors(self) -> list[Tensor]:
        """The elements of each section, on the module's device.

        Raises:
            LocalFaultError: the snapshot is pending, and no step boundary followed in time.
        """
        return self._wait()

    @property
    def step(self) -> int:
        """Iterations that the model has done; errors as :attr:`vectors`."""
        self._wait()
        return self._step

    @property
    def buffer(self) -> HostBuffer:
        """The bytes in host memory: the vectors themselves on a CPU, else a copy made on first use."""
        vectors = self._wait()
        with self._owner.copying:
            if self._buffer is None:
                self._buffer = self._owner.on_host(vectors, self._written)
            return self._buffer

    def _wait(self) -> list[Tensor]:
        """Wait until the snapshot is filled; return its vectors. Errors as :attr:`vectors`."""
        if not self._settled.wait(PATIENCE):
            raise LocalFaultError(f"a model is sent at a step boundary, and the step takes longer than {PATIENCE:g} s")
        if self._vectors is None:
            raise LocalFaultError("a model is sent at a step boundary, and training has ended before the next one")
        return self._vectors

    @property
    def source(self) -> Source:
        """The same bytes as a source for the wire, shared by all sends of this version."""
        buffer = self.buffer
        with self._owner.lock:
            if self._source is None:
                self._source = Source(buffer.view, buffer.descriptor)
            return self._source

    def hold(self) -> Snapshot:
        """Acquire another reference, to be released separately."""
        with self._owner.lock:
            self.holders += 1
        return self

    def release(self) -> None:
        """Release a reference; the last release frees the memory for reuse."""
        with self._owner.lock:
            self.holders -= 1
            if self.holders == 0 and self._vectors is not None:
                self._owner.reuse(self._vectors, self._buffer)


@dataclass
class CapturedModel(Generic[Retrieval]):
    """A model captured for an exchange; owns references to ``base`` and ``now``.

    Attributes:
        base: the model as it was captured.
        now: the result of merging other models into it.
        retrievals: the merged models, in order.
    """

    base: Snapshot
    now: Snapshot = field(init=False)
    retrievals: list[Retrieval] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now = self.base.hold()

    def release(self) -> None:
        """Release both references."""
        self.base.release()
        self.now.release()


COPY_SECONDS = 1.0
"""Maximum seconds of a wait for memory, several times as long as a copy of the largest models."""


class Pool:
    """Allocates and reuses memory for models; owns that of snapshots.

    Args:
        sections: sections of the module, or of a fragment of it.
        streams: work queues of its device.
        fragment: number of the fragment; 0: the whole model.
        lock: guards reference counts; None: a new one.
        free: unused buffers, shared with other fragments of the same size; None: a list of its own.
        whole: all sections of the module, for whole models; none for a fragment.

    Attributes:
        lock: guards reference counts.
        copying: guards copies from the device to host memory.
        has_more: whether a whole model, for a joining peer, is larger than the part that exchanges transfer.
        now: the last boundary, if it was copied; a further reference to it may be requested at any time.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        streams: DeviceStreams,
        fragment: int = 0,
        lock: threading.RLock | None = None,
        free: list[HostBuffer] | None = None,
        whole: Sequence[Section] = (),
    ):
        self.lock = lock or threading.RLock()
        self.copying = threading.Lock()
        self._whole = lengths(whole, whole=True)
        self.has_more = bool(whole) and self._whole != lengths(sections, whole=False)
        self.now: Snapshot | None = None
        self._sections = sections
        self._streams = streams
        self._fragment = fragment
        self._free: list[HostBuffer] = [] if free is None else free
        self._allocated = 0  # number of buffers, including free ones
        self._copying = 0  # number of incoming models that are copying their base, to release it
        self._shared_bases: list[Snapshot] = []  # bases that others read: their incoming models are in a second buffer
        self._given_back = threading.Condition(self.lock)
        self._free_vectors: list[tuple[list[Tensor], Mark]] = []
        self._free_staging: list[memoryview] = []

    # --- allocation ---------------------------------------------------------------------------------

    def buffer(self, whole: bool = False) -> HostBuffer:
        """Return a free or new buffer for a model; the caller gives it back with :meth:`free`."""
        if whole and self.has_more:
            return HostBuffer(self._whole, whole=True)  # needed once per run: not reused
        with self.lock:
            if self._free:
                free = self._free.pop()
                if free.fragment != self._fragment:
                    free.lay_out(lengths(self._sections, whole=False), self._fragment)
                return free
            self._allocated += 1
            made = HostBuffer(lengths(self._sections, whole=False), whole=False, fragment=self._fragment)
            self._streams.pin(made)
            return made

    def free(self, buffer: HostBuffer) -> None:
        """Take back a buffer from :meth:`buffer`."""
        with self.lock:
            if buffer.on_device is not None:
                self._free_device(buffer.on_device)
                buffer.on_device = None
            if not buffer.whole:
                self._free.append(buffer)

    def _free_device(self, vectors: list[Tensor]) -> None:
        """Keep unused vectors for reuse; those of a fragment return to torch, which reuses them for other fragments."""
        if not self._fragment:
            self._free_vectors.append((vectors, self._streams.mark()))

    def close(self) -> None:
        """Drop all free memory, and the last boundary: it refers to this pool, and so would keep both alive."""
        with self.lock:
            self.now = None
            for free in (self._free, self._free_vectors, self._free_staging):
                free.clear()

    def staging(self) -> memoryview:
        """Return memory for one piece of an incoming model; the caller gives it back with :meth:`free_staging`."""
        with self.lock:
            return self._free_staging.pop() if self._free_staging else memoryview(bytearray(STAGED_PIECE))

    def free_staging(self, staging: memoryview) -> None:
        """Take back memory from :meth:`staging`."""
        with self.lock:
            self._free_staging.append(staging)

    def boundary_memory(self) -> tuple[list[Tensor], HostBuffer | None]:
        """Return unused vectors on the device for one boundary; on a CPU also the host buffer that they lie in."""
        if self._streams.on_host:
            buffer = self.buffer()
            return buffer.vectors, buffer
        return self._vectors_on_device()[0], None

    def _vectors_on_device(self) -> tuple[list[Tensor], Mark]:
        """Return unused vectors, and a mark of their last use on the training stream, for other streams to await."""
        with self.lock:
            if self._free_vectors:
                return self._free_vectors.pop()
        made = [self._streams.empty_like(section.values[: section.mixed]) for section in self._sections]
        return made, self._streams.mark()

    # --- snapshots ----------------------------------------------------------------------------------

    def reuse(self, vectors: list[Tensor], buffer: HostBuffer | None) -> None:
        """Take back the memory of a snapshot that has no holders any more."""
        if buffer is not None:
            self.free(buffer)
        if buffer is None or buffer.vectors is not vectors:
            with self.lock:
                self._free_device(vectors)

    def take_over(self, snapshot: Snapshot) -> HostBuffer | None:
        """Take the memory of a snapshot and return it. None: others hold the snapshot, or it is the last boundary."""
        buffer = snapshot.buffer
        with self.lock:
            if snapshot is self.now or snapshot.holders > 1:
                return None
            snapshot.holders = 0
            if buffer.vectors is not snapshot.vectors:
                self._free_device(snapshot.vectors)
            return buffer

    def is_needed_for_boundary(self, base: Snapshot) -> bool:
        """Return whether the next boundary would have to allocate memory if an incoming model kept its ``base``.

        The next boundary overwrites the last one, unless that has readers. So it lacks memory if ``base`` is the last
        boundary, and at least two buffers are in use.
        """
        with self.lock:
            return base is self.now and self._allocated - len(self._free) >= 2

    @contextlib.contextmanager
    def copying_base(self) -> Iterator[None]:
        """Return a context in which an incoming model copies its base and then releases it.

        A boundary that would need more memory waits until the context ends: see :meth:`wait_for_bases`.
        """
        with self.lock:
            self._copying += 1
        try:
            yield
        finally:
            with self.lock:
                self._copying -= 1
                self._given_back.notify_all()

    def begin_second_buffer(self, base: Snapshot) -> None:
        """Record that an incoming model starts in a second buffer, because others read its ``base``."""
        with self.lock:
            self._shared_bases.append(base)

    def end_second_buffer(self, base: Snapshot) -> None:
        """Record that the incoming model has moved to the memory of ``base``, or that receiving it has ended."""
        with self.lock:
            self._shared_bases = [other for other in self._shared_bases if other is not base]
            self._given_back.notify_all()

    def wait_for_buffers(self) -> None:
        """Wait while an incoming model is about to free its second buffer; called before a snapshot is handed out.

        This is so once nobody else reads its base: with the next piece, it moves to the base's memory. If a snapshot
        were handed out before, the next boundary would have to allocate memory.
        """
        with self.lock:
            self._given_back.wait_for(lambda: all(base.holders > 1 for base in self._shared_bases), COPY_SECONDS)

    def wait_for_bases(self) -> None:
        """Wait until no incoming model is copying its base (:meth:`copying_base`); the caller holds :attr:`lock`."""
        self._given_back.wait_for(lambda: not self._copying, COPY_SECONDS)

    # --- between the device and host memory -----------------------------------------------------------

    def on_host(self, vectors: list[Tensor], written: Mark) -> HostBuffer:
        """Copy vectors from the device to host memory; blocks the calling thread, but not the training stream.

        Args:
            written: mark of the last write to ``vectors``.
        """
        buffer = self.buffer()
        rows = list(zip(buffer.vectors, vectors, strict=True))
        self._streams.on_side_stream(
            lambda: [ours.copy_(theirs, non_blocking=self._streams.later) for ours, theirs in rows], written
        )
        self._streams.wait(self._streams.mark_side_stream())
        return buffer

    def upload_piece(self, buffer: HostBuffer, section: int, piece: slice) -> None:
        """Start to copy a piece of an incoming model to the module's device, while the rest is still being received.

        The piece in host memory must not change until :meth:`finish_uploads` returns.
        """
        if self._streams.on_host:
            return
        after = self._streams.mark_side_stream()
        if buffer.on_device is None:
            buffer.on_device, after = self._vectors_on_device()
        there, here = buffer.on_device[section][piece], buffer.vectors[section][piece]
        self._streams.on_side_stream(lambda: there.copy_(here, non_blocking=self._streams.later), after)

    def finish_uploads(self) -> None:
        """Wait until all copies of :meth:`upload_piece` are complete."""
        self._streams.wait(self._streams.mark_side_stream())

    def upload(self, buffer: HostBuffer) -> list[Tensor]:
        """Return a received model's vectors on the module's device; copy them there first, unless that was done."""
        if self._streams.on_host:
            return buffer.vectors
        if buffer.on_device is None:
            for section in range(len(buffer.vectors)):
                self.upload_piece(buffer, section, slice(None))
            self.finish_uploads()
        assert buffer.on_device is not None, "a model has a section"
        return buffer.on_device
