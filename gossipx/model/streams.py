"""The work queues of a device: one stream for training, and a side stream for copies to and from host memory.

All work that reads or changes weights goes to the training stream, in order. Copies go to the side stream; other
threads wait for them and training does not. A mark is a position in a stream: another stream, or the host, can wait
until all work before it is complete.

On a CPU, and on devices that are not supported specially, work is complete when a call returns, and marks are empty.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from gossipx.model.buffers import HostBuffer

Mark: TypeAlias = Any
"""A position in a stream, of a type that depends on the :class:`DeviceStreams`."""


class DeviceStreams(abc.ABC):
    """Submits work to the streams of one device; thread-safe.

    Attributes:
        on_host: whether the model is in host memory, so that no copies are needed.
        later: whether work may be incomplete when the call that submitted it returns.
    """

    on_host: bool = False
    later: bool = False

    @abc.abstractmethod
    def begin(self) -> None:
        """Make the calling thread's current stream the training stream; called by the training thread."""

    def empty_like(self, like: Tensor) -> Tensor:
        """Return a new vector whose memory the training stream no longer uses otherwise."""
        return torch.empty_like(like)

    @abc.abstractmethod
    def train(self, work: Callable[[], object]) -> None:
        """Submit ``work`` to the training stream."""

    @abc.abstractmethod
    def on_side_stream(self, work: Callable[[], object], after: Mark) -> None:
        """Submit ``work`` to the side stream, to begin once the work before ``after`` is complete."""

    @abc.abstractmethod
    def mark(self) -> Mark:
        """Return the current end of the training stream."""

    @abc.abstractmethod
    def mark_side_stream(self) -> Mark:
        """Return the current end of the side stream."""

    @abc.abstractmethod
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

    @abc.abstractmethod
    def late(self, work: Callable[[], Tensor]) -> float:
        """Submit ``work``, which computes one number, to the training stream; return the previous number if possible.

        So training does not wait for its device: the previous number is complete by now, this one is not.
        """

    @abc.abstractmethod
    def pin(self, buffer: HostBuffer) -> None:
        """Page-lock ``buffer`` for its lifetime, so that the device can copy without the processor."""


@final
class Synchronous(DeviceStreams):
    """Streams whose work is complete when a call returns."""

    def __init__(self, on_host: bool):
        self.on_host = on_host

    def begin(self) -> None:
        pass

    def pin(self, buffer: HostBuffer) -> None:
        pass

    def train(self, work: Callable[[], object]) -> None:
        work()

    def on_side_stream(self, work: Callable[[], object], after: Mark) -> None:
        work()

    def mark(self) -> Mark:
        return None

    def mark_side_stream(self) -> Mark:
        return None

    def wait(self, mark: Mark) -> None:
        pass

    def late(self, work: Callable[[], Tensor]) -> float:
        return float(work())


class Asynchronous(DeviceStreams):
    """Streams whose work may be incomplete when a call returns."""

    later = True

    def __init__(self, numbers: Tensor) -> None:
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
    return Cuda(device) if device.type == "cuda" else Synchronous(on_host=device.type == "cpu")
