"""Fragments of a model: each exchange changes one, and all of them together do what one exchange of the model does."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch
from arenas import Net, average, model_of, train
from torch import Tensor, nn

from gossipx import outer
from gossipx.errors import UsageError
from gossipx.model.arena import ParameterArena
from gossipx.model.receive import DriftReference, Incoming
from gossipx.model.section import ALIGNMENT

COUNT = 5
GAMMA = 0.6


def made(
    seed: int,
    dtype: torch.dtype = torch.float32,
    rule: str = "none",
    fragments: int = COUNT,
    sampled: int | None = None,
) -> tuple[Net, ParameterArena]:
    module = Net(seed)
    if dtype != torch.float32:
        module.to(dtype)
    arena = ParameterArena(module, fragments=fragments, sampled=sampled)
    if (parsed := outer.outer_from(rule)) is not None:
        arena.use_outer(parsed)
    return module, arena


def pull(arena: ParameterArena, theirs: ParameterArena, numbers: Iterable[int], share: float = 0.5) -> list[float]:
    """Pull fragments as a driver does, all of them from the same boundary; return the distances."""
    taken, distances = [], []
    for number in numbers:
        base, sent = arena.snapshot(of=arena.fragment(number)), theirs.snapshot(of=theirs.fragment(number))
        own, incoming = base.hold(), Incoming(arena, base, fragment=number)
        incoming.take(0, sent.buffer.view)
        sent.release()
        distances.append(incoming.norm())
        taken.append((incoming, own))
    for incoming, own in taken:
        incoming.fragment.commit(incoming.buffer, share, own)
        own.release()
        incoming.release()
    return distances


def exchanged(arena: ParameterArena) -> list[Tensor]:
    return [section.values[: section.mixed].clone() for section in arena.sections]


def stored(arena: ParameterArena) -> list[Tensor]:
    return [section.storage.clone() for section in arena.sections]


EVERY = range(1, COUNT + 1)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.mark.parametrize("count", [2, 3, 7, 20])
@dtypes
def test_fragments_cover_the_model_and_are_nearly_equal(count: int, dtype: torch.dtype) -> None:
    _, arena = made(0, dtype, fragments=count)
    sizes = [fragment.nbytes for fragment in arena.fragments]
    assert sum(sizes) == arena.nbytes()
    assert max(sizes) - min(sizes) <= ALIGNMENT and not any(size % ALIGNMENT for size in sizes)
    for number, section in enumerate(arena.sections):
        ranges = [fragment.ranges[number] for fragment in arena.fragments]
        assert [ranges[0].start, *(own.stop for own in ranges)] == [*(own.start for own in ranges), section.mixed]
    assert sum(part.trainable for one in arena.fragments for part in one.sections) == arena.parameters
    for fragment in arena.fragments:
        for whole, part in zip(arena.sections, fragment.sections, strict=True):
            assert (part.values is part.storage) == (whole.values is whole.storage), "masters where the model has them"


@pytest.mark.parametrize("sampled", [None, 3], ids=["exact", "sampled"])
@pytest.mark.parametrize("number", EVERY)
@dtypes
def test_a_commit_changes_its_fragment_alone(dtype: torch.dtype, number: int, sampled: int | None) -> None:
    """Values, masters and buffers outside of it stay, bit by bit; within, x ← x + ½ (x_j − x)."""
    _, arena = made(0, dtype, sampled=sampled)
    _, theirs = made(1, dtype)
    before, wanted = exchanged(arena), exchanged(theirs)
    pull(arena, theirs, [number])
    for own, first, now, other in zip(arena.fragment(number).ranges, before, exchanged(arena), wanted, strict=True):
        torch.testing.assert_close(now[own], (0.5 * (first + other))[own])
        assert torch.equal(now[: own.start], first[: own.start]) and torch.equal(now[own.stop :], first[own.stop :])
    for section in arena.sections:
        assert torch.equal(section.storage[: section.mixed], section.values[: section.mixed].to(section.storage.dtype))
    assert model_of(arena) == b"".join(vector.numpy().tobytes() for vector in exchanged(arena)), "the next boundary"


@pytest.mark.parametrize("rule", ["none", f"momentum:{GAMMA}"])
@dtypes
def test_all_fragments_together_are_the_model(dtype: torch.dtype, rule: str) -> None:
    """Pulled from one model, they leave what one pull of it leaves, bit by bit, with momentum across two rounds."""
    (module, parts), (other, whole), (_, theirs) = made(0, dtype, rule), made(0, dtype, rule, 1), made(1, dtype)
    for _ in range(2):
        parted, (distance,) = pull(parts, theirs, EVERY, 0.25), pull(whole, theirs, [0], 0.25)
        assert math.hypot(*parted) == pytest.approx(distance, rel=1e-6)
        assert all(map(torch.equal, stored(parts), stored(whole)))
        assert all(map(torch.equal, exchanged(parts), exchanged(whole)))
        for one, arena in ((module, parts), (other, whole)):
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.mul_(1.25)
            arena.set_boundary(arena.step + 1)


@pytest.mark.parametrize("rule", ["none", f"momentum:{GAMMA}"])
@dtypes
def test_a_round_of_waves_is_a_wave_of_the_model(dtype: torch.dtype, rule: str) -> None:
    (_, parts), (_, whole), (_, theirs) = made(0, dtype, rule), made(0, dtype, rule, 1), made(1, dtype)
    average(parts, theirs, EVERY)
    average(whole, theirs, [0])
    assert all(map(torch.equal, exchanged(parts), exchanged(whole)))


@pytest.mark.parametrize("sampled", [None, 3], ids=["exact", "sampled"])
def test_the_rest_of_the_boundary_is_kept_while_others_read_the_last(sampled: int | None) -> None:
    """The new boundary lies in other memory then, which has the whole model."""
    _, arena = made(0, sampled=sampled)
    _, theirs = made(1)
    reader = arena.snapshot()
    last = bytes(reader.buffer.view)
    pull(arena, theirs, [3])
    assert bytes(reader.buffer.view) == last
    reader.release()
    assert model_of(arena) == b"".join(vector.numpy().tobytes() for vector in exchanged(arena)) != last


@pytest.mark.parametrize("sampled", [None, 3], ids=["exact", "sampled"])
def test_a_fragment_is_of_a_step_boundary(sampled: int | None) -> None:
    """Within a step it is the last boundary where that is kept, and otherwise the next; never a half-finished step."""
    module, arena = made(0, sampled=sampled)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    boundaries = [exchanged(arena)]
    arena.leave_boundary()
    train(module, optimizer)
    found = arena.snapshot(of=arena.fragment(2))
    assert found.settled == (sampled is None)
    arena.step_done()
    boundaries.append(exchanged(arena))
    wanted = boundaries[found.step]
    assert found.step == (0 if sampled is None else 1)
    assert all(map(torch.equal, found.vectors, arena.fragment(2).vectors_of(wanted)))
    found.release()


def test_memory_is_that_of_the_fragments_under_way() -> None:
    """After rounds of pulls there are the boundary and two buffers for fragments, whichever fragments they are."""
    module = nn.Linear(64, 64)
    arena, theirs = (ParameterArena(nn.Linear(64, 64) if one else module, fragments=4) for one in (0, 1))
    for _ in range(3):
        for number in range(1, 5):
            pull(arena, theirs, [number])
            with torch.no_grad():
                module.weight.add_(1.0)
            arena.step_done()
    made_buffers = [arena.pool._allocated, sum(fragment.pool._allocated for fragment in arena.fragments)]
    assert made_buffers[0] == 1, "the last boundary"
    sizes = len({fragment.nbytes for fragment in arena.fragments})
    assert made_buffers[1] <= 2 * sizes
    assert all(fragment.pool.buffer().fragment == fragment.number for fragment in arena.fragments)


def test_drift_counts_from_the_last_exchange_of_each_fragment() -> None:
    """‖x_t − x_r‖₂, where an exchange moves its fragment of x_r alone."""
    module = nn.Linear(16 * COUNT, 1, bias=False)
    arena = ParameterArena(module, fragments=COUNT)
    theirs = ParameterArena(nn.Linear(16 * COUNT, 1, bias=False), fragments=COUNT)
    reference = DriftReference(arena)
    reference.set()

    def step() -> None:
        with torch.no_grad():
            module.weight.add_(1.0)
        arena.step_done()

    step()
    assert reference.distance() == pytest.approx(math.sqrt(16 * COUNT))
    base, sent = arena.snapshot(of=arena.fragment(2)), theirs.snapshot(of=theirs.fragment(2))
    own, incoming = base.hold(), Incoming(arena, base, fragment=2)
    incoming.take(0, sent.buffer.view)
    incoming.norm()
    assert reference.distance(own.buffer) == pytest.approx(math.sqrt(16 * (COUNT - 1)))
    reference.commit(incoming.buffer, 0.5, own)
    assert reference.distance() == pytest.approx(math.sqrt(16 * (COUNT - 1)), rel=1e-5)
    step()
    assert reference.distance() == pytest.approx(math.sqrt(16 * (4 * (COUNT - 1) + 1)), rel=1e-5)


def test_the_distance_of_a_fragment_estimates_that_of_the_model() -> None:
    """√K times as large for one of K equal fragments (Adaptive Communication, Eq. 8 is over whole models)."""
    arena = ParameterArena(nn.Linear(16 * 4, 1, bias=False), fragments=4)
    assert arena.fragment(3).distance_of_model(3.0) == pytest.approx(6.0)
    assert arena.exchanged.distance_of_model(3.0) == 3.0
    buffers = ParameterArena(nn.Sequential(nn.Linear(16, 1, bias=False), nn.BatchNorm1d(16)), fragments=5)
    assert buffers.fragment(5).distance_of_model(3.0) is None, "it consists of buffers"


def test_more_fragments_than_cache_lines_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^--fragments 5 is too many for this model: give at most 4$"):
        ParameterArena(nn.Linear(64, 1, bias=False), fragments=5)
