"""Models that come and go: receiving piece by piece, the memory it takes, and snapshots of a sampled delta."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from arenas import mix, model_of
from seeds import some
from torch import Tensor, nn

from gossipx.errors import LocalFaultError
from gossipx.memory import STAGED_PIECE
from gossipx.model import pool
from gossipx.model.arena import ParameterArena
from gossipx.model.pool import Snapshot
from gossipx.model.receive import Incoming
from gossipx.wire import Sink
from gossipx.wire.pieces import gather


class Net(nn.Module):
    """Sections of two dtypes, the larger one of several pieces, with buffers after the trained values."""

    def __init__(self, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.wide = nn.Parameter(torch.randn(2_800_001, generator=generator))
        self.deep = nn.Parameter(torch.randn(1_200_000, generator=generator, dtype=torch.float64))
        self.register_buffer("mean", torch.randn(1_000, generator=generator))


def vectors_of(arena: ParameterArena) -> list[Tensor]:
    snapshot = arena.snapshot()
    copies = [vector.clone() for vector in snapshot.vectors]
    snapshot.release()
    return copies


def bytes_of(arena: ParameterArena) -> memoryview:
    return memoryview(bytearray(model_of(arena)))


def receive(view: memoryview, sink: Sink, start: int = 0, stop: int | None = None) -> int:
    """Receive as a connection does: into the memory that the sink provides."""
    stop = sink.nbytes if stop is None else min(stop, sink.nbytes)
    while start < stop:
        buffer = sink.buffer_at(start)
        buffer[:] = view[start : start + len(buffer)]
        sink.filled(start)
        start += len(buffer)
    return start


def advance(arena: ParameterArena, amount: float = 0.5) -> None:
    with torch.no_grad():
        for section in arena.sections:
            section.storage[: section.trainable].add_(amount)
    arena.step_done()


def expected(arena: ParameterArena, base: list[Tensor], theirs: list[Tensor]) -> list[Tensor]:
    """Return x_j − base for trained values, and x_j for the others."""
    rows = zip(arena.sections, base, theirs, strict=True)
    return [torch.cat([t[: s.trainable] - b[: s.trainable], t[s.trainable :]]) for s, b, t in rows]


def same(incoming: Incoming, wanted: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(incoming.buffer.vectors, wanted, strict=True))


def in_parts(size: int) -> Callable[[memoryview, Sink], None]:
    """Receive as from a carrier: in parts unrelated to pieces, each invalid once the next one arrives."""

    def way(view: memoryview, sink: Sink) -> None:
        seen = bytearray()
        buffer = memoryview(bytearray(size))

        def parts() -> Iterator[memoryview]:
            for start in range(0, len(view), size):
                part = view[start : start + size]
                buffer[: len(part)] = part
                yield buffer[: len(part)]

        gather(parts(), sink, seen.extend)
        assert seen == view, "observed completely and in order"

    return way


@pytest.mark.parametrize(
    "way", [receive, in_parts(800), in_parts(STAGED_PIECE // 3 // 8 * 8), in_parts(4 * STAGED_PIECE)]
)
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("shared", some([False, True], True))
def test_the_base_is_subtracted_from_an_incoming_model(way, stepped: bool, shared: bool) -> None:
    arena, other = ParameterArena(Net(0)), ParameterArena(Net(1))
    base, theirs = vectors_of(arena), vectors_of(other)
    reader = arena.snapshot() if shared else None
    incoming = Incoming(arena, arena.snapshot())
    if stepped:
        advance(arena)
    way(bytes_of(other), incoming)
    wanted = expected(arena, base, theirs)
    assert same(incoming, wanted)
    rows = zip(arena.sections, wanted, strict=True)
    squared = sum(float(w[: s.trainable].double().square().sum()) for s, w in rows)
    assert incoming.norm() == pytest.approx(math.sqrt(squared), rel=1e-6)
    if reader is not None:
        assert all(torch.equal(one, two) for one, two in zip(reader.vectors, base, strict=True)), "others still read it"


@pytest.mark.parametrize("pieces", [0, 1, 2, 4])
def test_a_step_during_receiving_moves_the_model_to_the_bases_memory(pieces: int) -> None:
    arena, other = ParameterArena(Net(0)), ParameterArena(Net(1))
    base, theirs, model = vectors_of(arena), vectors_of(other), bytes_of(other)
    held = arena.snapshot()
    place = held.vectors[0].data_ptr()
    incoming = Incoming(arena, held)
    done = receive(model, incoming, 0, pieces * STAGED_PIECE)
    if pieces:
        assert incoming.buffer.vectors[0].data_ptr() != place, "others may still acquire the base, the boundary"
    advance(arena)
    receive(model, incoming, done)
    assert incoming.buffer.vectors[0].data_ptr() == place
    assert same(incoming, expected(arena, base, theirs))


def test_a_reader_that_finishes_during_receiving_frees_a_buffer() -> None:
    arena, other = ParameterArena(Net(0)), ParameterArena(Net(1))
    base, theirs, model = vectors_of(arena), vectors_of(other), bytes_of(other)
    reader = arena.snapshot()
    incoming = Incoming(arena, arena.snapshot())
    advance(arena)
    done = receive(model, incoming, 0, STAGED_PIECE)
    assert all(torch.equal(one, two) for one, two in zip(reader.vectors, base, strict=True))
    place = reader.vectors[0].data_ptr()
    reader.release()
    receive(model, incoming, done)
    assert incoming.buffer.vectors[0].data_ptr() == place
    assert same(incoming, expected(arena, base, theirs))


def test_memory_stays_at_the_model_two_boundaries_and_one_buffer() -> None:
    """A peer that always pulls and always serves uses four models: its own, the boundary, one to send, one to
    receive."""
    arena, other = ParameterArena(Net(0)), ParameterArena(Net(1))
    model = bytes_of(other)
    places: set[int] = set()
    reader: Snapshot | None = None
    for number in range(40):
        incoming = Incoming(arena, arena.snapshot())
        if reader is None:
            reader = arena.snapshot()
        advance(arena, 0.01)
        done = receive(model, incoming, 0, 2 * STAGED_PIECE)
        advance(arena, 0.01)
        receive(model, incoming, done)
        arena.exchanged.commit(incoming.buffer, 0.5)
        now = arena.snapshot()
        places |= {v.vectors[0].data_ptr() for v in (now, reader)} | {incoming.buffer.vectors[0].data_ptr()}
        now.release()
        incoming.release()
        if number % 3 == 2:
            reader.release()
            reader = None
    assert len(places) <= 4


@pytest.mark.fault(76)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_constant_that_is_not_finite_is_equal_to_itself(value: float) -> None:
    nets = Net(0), Net(1)
    for net in nets:
        with torch.no_grad():
            net.mean[-1] = value
    own, other = map(ParameterArena, nets)
    incoming = Incoming(own, own.snapshot())
    receive(bytes_of(other), incoming)
    assert math.isfinite(incoming.norm())
    own.exchanged.commit(incoming.buffer, 0.5)
    assert str(float(nets[0].mean[-1])) == str(value) and bool(nets[0].mean[:-1].isfinite().all())


def test_a_base_that_others_read_is_copied_where_memory_is_short():
    """Beside the weights there are the boundary, an older snapshot being sent, and the incoming model, but no
    fourth."""
    module, other = Net(1), ParameterArena(Net(2))
    arena = ParameterArena(module)
    given = arena.snapshot()
    arena.step_done()
    base = arena.snapshot()
    incoming = Incoming(arena, base.hold())
    incoming.take(0, bytes_of(other))
    assert base.holders == 2, "released: the boundary and this test hold references"
    for difference, theirs, own in zip(incoming.buffer.vectors, other.snapshot().vectors, base.vectors, strict=True):
        cut = next(section.trainable for section in arena.sections if len(section.storage) >= len(own))
        assert torch.equal(difference[:cut], theirs[:cut] - own[:cut])
    given.release()
    base.release()
    incoming.release()


def test_a_boundary_waits_for_a_copy_rather_than_allocate():
    arena = ParameterArena(Net(1))
    given = arena.snapshot()
    arena.step_done()
    base = arena.snapshot()
    began, made = threading.Event(), arena.pool._allocated

    def copy() -> None:
        with arena.pool.copying_base():
            began.set()
            stepping.wait(0.2)  # the boundary is reached now, and waits
            base.release()

    stepping = threading.Event()
    copier = threading.Thread(target=copy)
    copier.start()
    began.wait(10)
    arena.step_done()
    copier.join()
    assert arena.pool._allocated == made
    given.release()


def test_handing_out_the_boundary_waits_for_a_buffer_about_to_become_free():
    """Its base was being read, so it has a second buffer; sending the boundary would make the next one a fourth
    model."""
    arena, model = ParameterArena(Net(1)), bytes_of(ParameterArena(Net(2)))
    base = arena.snapshot()
    read, incoming = base.hold(), Incoming(arena, base)
    done = receive(model, incoming, 0, STAGED_PIECE)
    advance(arena)
    read.release()
    made, given = arena.pool._allocated, threading.Event()

    def give() -> None:
        arena.pool.wait_for_buffers()
        given.set()

    sender = threading.Thread(target=give)
    sender.start()
    assert not given.wait(0.05)
    receive(model, incoming, done)
    assert given.wait(10)
    sender.join()
    reader = arena.snapshot()
    advance(arena)
    assert arena.pool._allocated == made == 3
    reader.release()
    incoming.release()


# --- snapshots with a sampled delta: boundaries are copied only on request --------------------------


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


def bytes_now(arena: ParameterArena, whole: bool = False) -> bytes:
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
    assert model == bytes_now(arena, whole)
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
    assert told == [True] and found == [(1, bytes_now(arena, whole))]
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
            mix(arena, model_of(other), 0.25)
        else:
            captured, mean = arena.snapshot(), arena.pool.buffer()
            mean.view[:] = other.snapshot().buffer.view
            step(arena, 0.125)
            arena.exchanged.apply_merged(arena.exchanged.snapshot_of(mean, 3), captured)
        models.append((bytes_now(arena), bytes(arena.snapshot().buffer.view)))
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
        mix(arena, bytes_now(made(1)), 0.5)
        exact.sections[0].storage.copy_(arena.sections[0].storage)
        exact.sections[1].storage.copy_(arena.sections[1].storage)
        exact.set_boundary(exact.step)


def test_replaced_weights_do_not_count_as_a_step():
    arena = made()
    change(arena, 100.0)
    arena.set_boundary(5)
    arena.leave_boundary()
    assert step(arena) == pytest.approx(step(made(0)), rel=1e-3) and arena.step == 6
