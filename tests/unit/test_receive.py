"""Receiving a model piece by piece: the result, the memory it is stored in, and the number of buffers used."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from arenas import model_of
from seeds import some
from torch import Tensor, nn

from gossipx.memory import STAGED_PIECE
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


def step(arena: ParameterArena, amount: float = 0.5) -> None:
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
        step(arena)
    way(bytes_of(other), incoming)
    wanted = expected(arena, base, theirs)
    assert same(incoming, wanted)
    rows = zip(arena.sections, wanted, strict=True)
    squared = sum(float(w[: s.trainable].double().square().sum()) for s, w in rows)
    assert incoming.norm() == pytest.approx(math.sqrt(squared), rel=1e-6)
    if reader is not None:
        assert all(torch.equal(one, two) for one, two in zip(reader.vectors, base, strict=True)), "others still read it"


def test_the_bases_memory_is_reused_after_a_step() -> None:
    arena, other = ParameterArena(Net(0)), ParameterArena(Net(1))
    base = arena.snapshot()
    place = base.vectors[0].data_ptr()
    incoming = Incoming(arena, base)
    step(arena)
    receive(bytes_of(other), incoming)
    assert incoming.buffer.vectors[0].data_ptr() == place


@pytest.mark.parametrize("pieces", [0, 1, 2, 4])
def test_a_step_during_receiving_moves_the_model_to_the_bases_memory(pieces: int) -> None:
    arena, other = ParameterArena(Net(0)), ParameterArena(Net(1))
    base, theirs, model = vectors_of(arena), vectors_of(other), bytes_of(other)
    held = arena.snapshot()
    place = held.vectors[0].data_ptr()
    incoming = Incoming(arena, held)
    done = receive(model, incoming, 0, pieces * STAGED_PIECE)
    if pieces:
        assert incoming.buffer.vectors[0].data_ptr() != place, (
            "the base is still the boundary, so others may acquire it"
        )
    step(arena)
    receive(model, incoming, done)
    assert incoming.buffer.vectors[0].data_ptr() == place
    assert same(incoming, expected(arena, base, theirs))


def test_a_reader_that_finishes_during_receiving_frees_a_buffer() -> None:
    arena, other = ParameterArena(Net(0)), ParameterArena(Net(1))
    base, theirs, model = vectors_of(arena), vectors_of(other), bytes_of(other)
    reader = arena.snapshot()
    incoming = Incoming(arena, arena.snapshot())
    step(arena)
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
        step(arena, 0.01)
        done = receive(model, incoming, 0, 2 * STAGED_PIECE)
        step(arena, 0.01)
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


def test_a_whole_model_is_received_unchanged() -> None:
    arena, other = ParameterArena(Net(0)), ParameterArena(Net(1))
    incoming = Incoming(arena, None, whole=True)
    snapshot = other.snapshot(whole=True)
    receive(snapshot.buffer.view, incoming)
    assert bytes(incoming.buffer.view) == bytes(snapshot.buffer.view)


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
    step(arena)
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
    step(arena)
    assert arena.pool._allocated == made == 3
    reader.release()
    incoming.release()
