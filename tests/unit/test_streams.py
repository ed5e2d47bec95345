"""The order of work on a device's streams, tested with a simulated device and, if there is one, on CUDA.

:class:`Lazy` simulates a device that delays work as long as possible, but not always: work is done when something waits
for it, or at random. Where the arena fails to order two pieces of work, some seed gives a wrong result.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from arenas import HalfNet, adopt, model_of
from seeds import some
from torch import Tensor

from gossipx.model.arena import ParameterArena
from gossipx.model.pool import Asynchronous, DeviceStreams, HostBuffer, Mark, Snapshot, streams_of
from gossipx.model.receive import Incoming

DEVICES = ["late", pytest.param("cuda", marks=pytest.mark.cuda)]


class Lazy(Asynchronous):
    """Streams whose work waits in queues.

    Attributes:
        hasty: probability that the next work of a stream is done before anything waits for it.
    """

    def __init__(self, seed: int):
        super().__init__(torch.zeros(2, dtype=torch.float64))
        self._coin = random.Random(seed)
        self.hasty = self._coin.choice([0.0, 0.1, 0.5])
        self._work: dict[str, list[Callable[[], object]]] = {"train": [], "side": []}
        self._done = {"train": 0, "side": 0}

    def begin(self) -> None:
        pass

    def pin(self, buffer: HostBuffer) -> None:
        pass

    def train(self, work: Callable[[], object]) -> None:
        self._work["train"].append(work)
        self._chance()

    def on_side_stream(self, work: Callable[[], object], after: Mark) -> None:
        self._work["side"].append(lambda: (after is None or self.wait(after), work()))
        self._chance()

    def mark(self) -> Mark:
        return "train", len(self._work["train"])

    def mark_side_stream(self) -> Mark:
        return "side", len(self._work["side"])

    def wait(self, mark: Mark) -> None:
        stream, end = mark
        while self._done[stream] < end:
            self._done[stream] += 1
            self._work[stream][self._done[stream] - 1]()

    def _chance(self) -> None:
        for stream in ("train", "side"):
            while self._done[stream] < len(self._work[stream]) and self._coin.random() < self.hasty:
                self.wait((stream, self._done[stream] + 1))


class Side:
    """A peer's arena and what it does with a model of another; the same on every device if all work is ordered.

    Attributes:
        deltas: of each step; a device that is late gives the delta of the step before.
    """

    def __init__(
        self, other: ParameterArena, dtype: torch.dtype, sampled: int | None, streams: DeviceStreams, device: str
    ):
        fragments = len(other.fragments)
        self.streams = streams
        self.arena = ParameterArena(HalfNet(0, dtype).to(device), sampled=sampled, streams=streams, fragments=fragments)
        self.part = self.arena.fragments[fragments // 2]
        self.model = bytes(other.snapshot(of=other.fragments[fragments // 2]).buffer.view)
        self.whole = model_of(other, whole=True)
        self.deltas: list[float] = []
        self.read: list[Snapshot] = []
        self.coming: Incoming | None = None
        self.done = 0  # bytes received of it
        self.captured: Snapshot | None = None

    def step(self, amount: float) -> None:
        self.arena.leave_boundary()
        rate = amount / 10
        for section in self.arena.sections:
            self.streams.train(lambda to=section.storage[: section.mixed]: to.mul_(1 - rate).add_(rate))
        self.deltas.append(self.arena.step_done())

    def ask(self, amount: float) -> None:
        self.read.append(self.arena.snapshot(whole=amount < 0.3))

    def give(self, _: float) -> tuple[int, bytes] | None:
        if not self.read:
            return None
        snapshot = self.read.pop(0)
        given = snapshot.step, bytes(snapshot.buffer.view)
        snapshot.release()
        return given

    def pull(self, _: float) -> None:
        if self.coming is None:
            self.coming = Incoming(self.arena, self.arena.snapshot(of=self.part), fragment=self.part.number)

    def half(self, _: float) -> None:
        if self.coming is not None and not self.done:
            self.done = len(self.model) // 16 * 8
            self.coming.take(0, memoryview(bytearray(self.model[: self.done])))

    def drop(self, amount: float) -> None:
        if self.coming is not None and amount < 0.5:
            self.coming.release()
            self.coming, self.done = None, 0

    def come(self, _: float) -> float:
        if self.coming is None:
            return 0.0
        self.coming.take(self.done, memoryview(bytearray(self.model[self.done :])))
        distance = self.coming.norm()
        self.part.commit(self.coming.buffer, 0.25)
        self.coming.release()
        self.coming, self.done = None, 0
        return round(distance, 3)

    def push(self, _: float) -> float:
        pushed = Incoming(self.arena, None, fragment=self.part.number)
        pushed.take(0, memoryview(bytearray(self.model)))
        assert math.isfinite(pushed.norm())
        distance = self.part.subtract(pushed.buffer)
        self.part.commit(pushed.buffer, 0.25)
        pushed.release()
        return round(distance, 3)

    def wave(self, _: float) -> None:
        if self.captured is None:
            self.captured = self.arena.snapshot(of=self.part)
            return
        received = self.part.pool.buffer()
        received.view[:] = self.model
        self.part.merge(received, self.captured.buffer, 1.0, 3.0)
        merged = self.part.snapshot_of(received, 0)
        self.part.apply_merged(merged, self.captured)
        merged.release()
        self.captured.release()
        self.captured = None

    def adopt(self, amount: float) -> bool:
        return amount < 0.3 and adopt(self.arena, self.whole, self.arena.step)


def storages(side: Side) -> list[Tensor]:
    side.streams.wait(side.streams.mark())
    return [section.storage.cpu().clone() for section in side.arena.sections]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], torch.float32))
@pytest.mark.parametrize("sampled", [None, 3])
@pytest.mark.parametrize("fragments", [1, 3])
def test_results_equal_those_of_a_synchronous_device(
    device: str, dtype: torch.dtype, sampled: int | None, fragments: int
):
    kinds = ("step", "step", "ask", "give", "pull", "half", "come", "drop", "push", "wave", "adopt")
    exact = {"rtol": 1e-2, "atol": 1e-2} if device == "cuda" else {"rtol": 0, "atol": 0}
    for seed in range(3 if device == "cuda" else 60):
        coin = random.Random(seed)
        late = Lazy(seed) if device == "late" else streams_of(torch.device("cuda"))
        other = ParameterArena(HalfNet(seed + 1, dtype), fragments=fragments)
        sides = [
            Side(other, dtype, sampled, DeviceStreams(on_host=True), "cpu"),
            Side(other, dtype, sampled, late, "cpu" if device == "late" else device),
        ]
        for _ in range(40):
            what, amount = coin.choice(kinds), coin.random()
            found = [getattr(side, what)(amount) for side in sides]
            if device == "late":
                assert found[0] == found[1], (seed, what)
        for one, two in zip(*map(storages, sides), strict=True):
            torch.testing.assert_close(two, one, **exact)
        at_once, later = (side.deltas for side in sides)
        rel = 5e-2 if device == "cuda" else 1e-3  # 16-bit weights may be rounded otherwise: percents of a short step
        assert later == pytest.approx([at_once[0], *at_once[:-1]] if at_once else [], rel=rel), "a step late"


def test_a_model_that_moves_to_the_bases_memory_is_uploaded_whole():
    """The part received before the base was free is still being uploaded from memory that is reused by then."""
    streams = Lazy(0)
    streams.hasty = 0.0
    model = model_of(ParameterArena(HalfNet(1, torch.float32)))
    half = len(model) // 16 * 8
    mixed = []
    plain, late = ParameterArena(HalfNet(0, torch.float32)), ParameterArena(HalfNet(0, torch.float32), streams=streams)
    for arena in (plain, late):
        arena.step_done()
        incoming = Incoming(arena, arena.snapshot())
        incoming.take(0, memoryview(bytearray(model[:half])))
        first, there = incoming.buffer, incoming.buffer.on_device
        arena.step_done()
        incoming.take(half, memoryview(bytearray(model[half:])))
        assert incoming.buffer is not first
        assert incoming.buffer.on_device is there
        assert first.on_device is None, "freed without its device copy"
        arena.pool.buffer().view[:] = bytes(len(model))
        incoming.norm()
        arena.exchanged.commit(incoming.buffer, 0.5)
        incoming.release()
        arena.pool.finish_uploads()
        streams.wait(streams.mark())
        mixed.append(torch.cat([section.storage for section in arena.sections]))
    assert torch.equal(*mixed)


@pytest.mark.parametrize("device", DEVICES)
def test_training_does_not_wait_for_copies_or_the_delta(device: str):
    """Neither for the measuring and copying of a step, nor for the upload and mixing of a model."""
    if device == "cuda":
        streams: DeviceStreams = streams_of(torch.device("cuda"))
        arena = ParameterArena(HalfNet(0, torch.float32).cuda(), streams=streams)
    else:
        streams = Lazy(0)
        streams.hasty = 0.0
        arena = ParameterArena(HalfNet(0, torch.float32), streams=streams)
    arena.step_done()
    incoming = Incoming(arena, arena.snapshot())
    model = model_of(ParameterArena(HalfNet(1, torch.float32)))
    incoming.take(0, memoryview(bytearray(model)))
    incoming.norm()
    arena.step_done()
    streams.wait(streams.mark())
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        slow = torch.ones(4000, 4000, device="cuda")
    try:
        for _ in range(20) if device == "cuda" else ():
            slow = slow @ slow  # keeps the stream busy for longer than it takes to submit what follows
        before = None if device == "cuda" else dict(streams._done)
        arena.exchanged.commit(incoming.buffer, 0.5)
        arena.step_done()  # reads the previous step's number, which is complete
        assert device == "late" or not streams.mark().query(), "the stream is still at work"
        assert before is None or streams._done == before
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    incoming.release()


@pytest.mark.cuda
def test_models_in_host_memory_are_pinned_once():
    arena = ParameterArena(HalfNet(0, torch.float32).cuda())
    buffer = arena.pool.buffer()
    assert all(vector.is_pinned() for vector in buffer.vectors if len(vector))
    arena.pool.free(buffer)
    assert arena.pool.buffer() is buffer
