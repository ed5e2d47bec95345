"""Snapshots with a sampled delta: boundaries are copied only on request."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from arenas import mix
from torch import nn

from gossipx.errors import LocalFaultError
from gossipx.model import pool
from gossipx.model.arena import ParameterArena


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(300, 40), nn.BatchNorm1d(40), nn.Linear(40, 30).double())


def made(seed: int = 0, sampled: int | None = 0) -> ParameterArena:
    arena = ParameterArena(net(seed), sampled=sampled)
    arena.leave_boundary()
    return arena


def change(arena: ParameterArena, amount: float = 0.5) -> None:
    for section in arena.sections:
        section.storage[: section.trainable].add_(amount)


def step(arena: ParameterArena, amount: float = 0.5) -> float:
    change(arena, amount)
    delta = arena.step_done()
    arena.leave_boundary()
    return delta


def model_of(arena: ParameterArena, whole: bool = False) -> bytes:
    """Return the model as it is now, at a boundary or within a step."""
    sections = arena.whole if whole else arena.sections
    ends = [len(s.storage) if whole else s.mixed for s in sections]
    return b"".join(s.values[:end].numpy().tobytes() for s, end in zip(sections, ends, strict=True))


@pytest.mark.parametrize("whole", [False, True])
def test_at_a_boundary_a_copy_is_made_at_once_and_shared(whole: bool):
    arena = made()
    change(arena)
    arena.step_done()
    one, two = arena.snapshot(whole), arena.snapshot(whole)
    assert one is two and one.settled and one.step == 1
    model = bytes(one.buffer.view)
    assert model == model_of(arena, whole)
    arena.leave_boundary()
    three = arena.snapshot(whole)
    assert three is one, "the boundary has been copied: later requests in the same step share it"
    step(arena)
    assert bytes(one.buffer.view) == model, "a referenced snapshot does not change"
    assert arena.snapshot(whole) is not one


def test_a_snapshot_of_nothing_knows_its_step():
    empty = pool.Snapshot(made().pool)
    empty.fill([], None, step=3)
    assert (empty.step, empty.vectors) == (3, [])


@pytest.mark.parametrize("whole", [False, True])
def test_within_a_step_a_snapshot_waits_for_the_next_boundary(whole: bool):
    arena = made()
    promised = arena.snapshot(whole)
    assert arena.snapshot(whole) is promised and not promised.settled
    told: list[bool] = []
    promised.when_settled(lambda: told.append(promised.settled))
    found: list[tuple[int, bytes]] = []
    reader = threading.Thread(target=lambda: found.append((promised.step, bytes(promised.buffer.view))))
    reader.start()
    change(arena)
    assert (told, found) == ([], [])
    arena.step_done()
    reader.join(10)
    assert told == [True] and found == [(1, model_of(arena, whole))]
    promised.when_settled(lambda: told.append(True))
    assert len(told) == 2, "called at once for a settled snapshot"


def test_nothing_is_copied_without_a_request():
    arena = made()

    def refuse(*_: object) -> None:
        raise AssertionError("a copy")

    arena.exchanged.fill = refuse  # type: ignore[method-assign]
    for _ in range(3):
        step(arena)
    arena.snapshot()
    with pytest.raises(AssertionError, match="a copy"):
        step(arena)


def test_snapshots_fail_after_the_last_boundary():
    arena = made()
    waiting = arena.snapshot()
    told: list[int] = []
    waiting.when_settled(lambda: told.append(1))
    arena.end_training()
    assert told == [1]
    for snapshot in (waiting, arena.snapshot(), arena.snapshot(whole=True)):
        with pytest.raises(LocalFaultError, match="ended"):
            _ = snapshot.buffer
        snapshot.release()


def test_waiting_for_a_boundary_has_a_timeout(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "PATIENCE", 0.0)
    with pytest.raises(LocalFaultError, match="the step takes longer"):
        _ = made().snapshot().vectors


@pytest.mark.parametrize("sampled", [None, 0])
def test_a_snapshot_is_never_torn_while_another_thread_steps(sampled: int | None):
    """At a boundary all values are one constant, including BatchNorm's buffers; within a step they are mixed."""
    module = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
    arena = ParameterArena(module, sampled=sampled)
    tensors = [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]

    def fill(value: float) -> None:
        with torch.no_grad():
            for tensor in tensors:
                tensor.fill_(value)

    fill(0.5)
    arena.set_boundary(0)
    enough = threading.Event()

    def steps() -> None:
        while not enough.is_set():
            arena.leave_boundary()
            fill(arena.step + 1.5)
            arena.step_done()
        arena.end_training()

    thread = threading.Thread(target=steps)
    thread.start()
    seen = set()
    try:
        for number in range(200):
            snapshot = arena.snapshot(whole=number % 2 == 0)
            present = set(snapshot.buffer.vectors[0].unique().tolist()) - {0.0}  # 0: the padding between tensors
            assert present == {snapshot.step + 0.5}
            seen.add(snapshot.step)
            snapshot.release()
    finally:
        enough.set()
        thread.join(10)
    assert len(seen) > 3


def test_memory_is_reused():
    arena = made()
    places = set()
    for _ in range(20):
        snapshot = arena.snapshot()
        step(arena)
        places.add(snapshot.vectors[0].data_ptr())
        snapshot.release()
    assert len(places) <= 2


@pytest.mark.parametrize("how", ["commit", "wave"])
def test_mixing_is_the_same_with_and_without_a_boundary(how: str):
    models = []
    for sampled in (None, 0):
        arena, other = made(0, sampled), made(1, None)
        change(arena)
        arena.step_done()
        if how == "commit":
            mix(arena, bytes(other.snapshot().buffer.view), 0.25)
        else:
            captured, mean = arena.snapshot(), arena.pool.buffer()
            mean.view[:] = other.snapshot().buffer.view
            step(arena, 0.125)
            arena.exchanged.apply_merged(arena.exchanged.snapshot_of(mean, 3), captured)
        models.append((model_of(arena), bytes(arena.snapshot().buffer.view)))
    assert models[0] == models[1] and models[1][0] == models[1][1]


def test_the_sampled_delta_is_of_the_step_only():
    """Eq. 6: x_{t−1} is taken after any mixing. If a step changes all values alike, every sample gives the same
    delta."""
    arena, exact = made(0), made(0, None)
    for amount in (0.5, 0.25):
        measured, wanted = step(arena, amount), step(exact, amount)
        padding = math.sqrt(sum(s.trainable for s in arena.sections)) * amount
        assert measured == pytest.approx(wanted, rel=1e-4) and wanted == pytest.approx(padding, rel=1e-4)
        arena.step_done()
        mix(arena, model_of(made(1)), 0.5)
        exact.sections[0].storage.copy_(arena.sections[0].storage)
        exact.sections[1].storage.copy_(arena.sections[1].storage)
        exact.set_boundary(exact.step)


def test_replaced_weights_do_not_count_as_a_step():
    arena = made()
    change(arena, 100.0)
    arena.set_boundary(5)
    arena.leave_boundary()
    assert step(arena) == pytest.approx(step(made(0)), rel=1e-3) and arena.step == 6
