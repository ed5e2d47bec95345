"""What waits for what on a device: training's own work, and what is copied beside it.

A peer uses two lanes of its device. Training's lane is the stream on which the training thread works: whatever reads or
changes weights is put there, in its order. The side lane has copies between the device and the host, which other
threads wait for and training does not. A mark is a place in a lane: a lane, or the host, may be told to wait until all
that was put there before has been done.

On a CPU, and on devices of which nothing better is known, all is done when a call returns, and a mark says nothing.
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
"""A place in a lane, of the kind that its :class:`DeviceStreams` knows."""


class DeviceStreams(abc.ABC):
    """Puts work into the lanes of one device; any thread may.

    Attributes:
        on_host: whether the model lies in host memory, so that nothing has to be copied there.
        later: whether work may be done after the call that put it there has returned.
    """

    on_host: bool = False
    later: bool = False

    @abc.abstractmethod
    def begin(self) -> None:
        """The calling thread is the one that trains: where it works on the device is training's lane."""

    def room(self, like: Tensor) -> Tensor:
        """A new vector, to be kept: training's lane is done with what its memory held before."""
        return torch.empty_like(like)

    @abc.abstractmethod
    def train(self, work: Callable[[], object]) -> None:
        """Put ``work`` into training's lane."""

    @abc.abstractmethod
    def on_side_stream(self, work: Callable[[], object], after: Mark) -> None:
        """Put ``work`` into the side lane; it begins when what came before the mark is done."""

    @abc.abstractmethod
    def mark(self) -> Mark:
        """The end of training's lane as it is now."""

    @abc.abstractmethod
    def mark_side_stream(self) -> Mark:
        """The end of the side lane as it is now."""

    @abc.abstractmethod
    def wait(self, mark: Mark) -> None:
        """Keep the calling thread until what came before the mark is done."""

    @abc.abstractmethod
    def late(self, work: Callable[[], Tensor]) -> float:
        """Put ``work``, which gives one number, into training's lane; returns what the last call's gave, if it can.

        So that training needs not wait for its device: the last step's number is there by now, this one's is not.
        """

    @abc.abstractmethod
    def pin(self, buffer: HostBuffer) -> None:
        """Let the device copy from and to ``buffer`` without the processor, for the life of it."""


@final
class Synchronous(DeviceStreams):
    """All is done when a call returns."""

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
    """Work is done some time after it was put into its lane."""

    later = True

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers  # two in host memory, written in turn
        self._marks: list[Mark] = [None, None]
        self._turn = 0

    def late(self, work: Callable[[], Tensor]) -> float:
        """As above. The first call of all has nothing earlier to give and waits for its own."""
        turn, self._turn = self._turn, 1 - self._turn
        number = self._numbers[turn]
        self.train(lambda: number.copy_(work(), non_blocking=True))
        self._marks[turn] = self.mark()
        given = turn if self._marks[1 - turn] is None else 1 - turn
        self.wait(self._marks[given])
        return float(self._numbers[given])


@final
class Cuda(Asynchronous):
    """Streams of a CUDA device: training's is where the training thread works, the side lane is one of our own."""

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

    def room(self, like: Tensor) -> Tensor:
        with torch.cuda.stream(self._training):  # which memory that is freed goes back to
            return torch.empty_like(like)

    def mark(self) -> Mark:
        return self._training.record_event()

    def mark_side_stream(self) -> Mark:
        return self._side.record_event()

    def wait(self, mark: Mark) -> None:
        mark.synchronize()  # the interpreter's lock is free meanwhile

    def pin(self, buffer: HostBuffer) -> None:
        if not buffer.view.nbytes:
            return
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = torch.frombuffer(buffer.view, dtype=torch.uint8).data_ptr()
        if int(runtime.cudaHostRegister(address, buffer.view.nbytes, 0)) == 0:  # else copies take longer
            weakref.finalize(buffer, runtime.cudaHostUnregister, address).atexit = False


def streams_of(device: torch.device) -> DeviceStreams:
    """The lanes of a device."""
    return Cuda(device) if device.type == "cuda" else Synchronous(on_host=device.type == "cpu")
