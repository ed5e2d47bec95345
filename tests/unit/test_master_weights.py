"""Models trained in 16 bits, whose float32 masters are measured, exchanged and mixed."""

from __future__ import annotations

import math

import pytest
import torch
from arenas import HalfNet, adopt, mix, model_of
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from torch import Tensor, nn

from gossipx.model import kernels
from gossipx.model.arena import ParameterArena

HALVES = (torch.bfloat16, torch.float16)
dtypes = st.sampled_from(HALVES)


def made(seed: int, dtype: torch.dtype, sampled: int | None = None) -> ParameterArena:
    return ParameterArena(HalfNet(seed, dtype), sampled=sampled)


def place_of(arena: ParameterArena) -> int:
    """Return which section has the 16-bit values."""
    (place,) = (place for place, section in enumerate(arena.sections) if section.storage.itemsize == 2)
    return place


def halves(arena: ParameterArena) -> tuple[Tensor, Tensor]:
    """Return the module's 16-bit values and their masters."""
    section = arena.sections[place_of(arena)]
    return section.storage[: section.trainable], section.values[: section.trainable]


def rounded(arena: ParameterArena) -> bool:
    """Return whether the module's values are the rounded masters."""
    return all(torch.equal(s.storage[: s.mixed], s.values[: s.mixed].to(s.storage.dtype)) for s in arena.sections)


@pytest.mark.parametrize("dtype", HALVES)
def test_masters_are_exchanged_and_the_manifest_says_so(dtype: torch.dtype):
    arena = made(0, dtype)
    lines = dict(line.split(" ", 1) for line in arena.manifest)
    name = str(dtype).removeprefix("torch.")
    assert lines["body.weight"] == f"{name} as float32 33x40 strides 40x1 trainable"
    assert lines["head.weight"] == "float32 4x33 strides 33x1 trainable"
    assert arena.nbytes() == 4 * sum(section.mixed for section in arena.sections)
    others = {made(0, other).digest for other in (torch.float32, *HALVES) if other != dtype}
    assert len(others) == 2 and arena.digest not in others


def test_models_of_other_dtypes_are_their_own_masters():
    for dtype in (torch.float32, torch.float64):
        assert all(section.values is section.storage for section in made(0, dtype).sections)
    frozen = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).bfloat16().requires_grad_(False))
    arena = ParameterArena(frozen)
    assert all(section.values is section.storage for section in arena.sections), "no 16-bit value is trained"


@pytest.mark.parametrize("sampled", [None, 0])
@pytest.mark.parametrize("dtype", HALVES)
def test_small_mixes_add_up(dtype: torch.dtype, sampled: int | None):
    """Mixing a thousandth of the distance 1,000 times covers 1 − 0.999^1000 = 63 % of it; less if each mix is
    rounded."""
    arena, there = made(0, dtype, sampled), made(1, dtype)
    model = model_of(there)
    now, _ = halves(arena)
    begin, end = now.float(), halves(there)[1].clone()
    alone = begin.to(dtype)
    for _ in range(1000):
        assert math.isfinite(mix(arena, model, 0.001))
        alone.add_(end.to(dtype) - alone, alpha=0.001)
    share = 1 - (1 - 0.001) ** 1000
    wanted = begin + share * (end - begin)
    ulp = wanted.abs() * 2.0 ** (-8 if dtype == torch.bfloat16 else -11) + 1e-6
    assert bool(((now.float() - wanted).abs() <= ulp).all()) and rounded(arena)
    lost, left = float((alone - wanted).norm()), float((now - wanted).norm())
    assert lost > 20 * left, "else masters would not be needed"


@pytest.mark.parametrize("sampled", [None, 0])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_wave_leaves_what_was_merged_and_own_steps_are_kept(dtype: torch.dtype, sampled: int | None):
    arena, other = made(0, dtype, sampled), made(1, dtype)
    captured, mean = arena.snapshot(), arena.pool.buffer()
    mean.view[:] = model_of(other)
    now, master = halves(arena)
    now.add_(0.25)
    arena.step_done()
    moved = halves(arena)[1].clone() if sampled is None else None
    arena.exchanged.apply_merged(arena.exchanged.snapshot_of(mean, 0), captured)
    step = 0.25 if moved is None else moved - captured.vectors[place_of(arena)][: len(moved)]
    torch.testing.assert_close(master, halves(other)[1] + step, rtol=0, atol=0.01)
    assert rounded(arena)


@pytest.mark.parametrize("sampled", [None, 0])
@pytest.mark.parametrize("dtype", HALVES)
def test_optimizer_steps_update_masters_and_are_never_altered(dtype: torch.dtype, sampled: int | None):
    arena, other = made(0, dtype, sampled), made(1, dtype)
    now, master = halves(arena)
    generator = torch.Generator().manual_seed(0)
    for number in range(30):
        mix(arena, model_of(other), 0.01)
        fine = master.clone()
        now.add_(torch.randn(len(now), generator=generator).to(dtype), alpha=10.0 ** -(number % 4))
        after = now.clone()
        delta = arena.step_done()
        assert torch.equal(now, after)
        model_of(arena)
        assert rounded(arena)
        if sampled is None:
            assert delta == pytest.approx(float((master - fine).double().norm()), rel=1e-4)


def test_rounding_remainders_are_kept_without_a_step():
    arena = made(0, torch.bfloat16)
    mix(arena, model_of(made(1, torch.bfloat16)), 0.01)
    now, master = halves(arena)
    fine = master.clone()
    assert not torch.equal(fine, now.float())
    assert arena.step_done() == 0 and torch.equal(master, fine)


@examples(200)
@given(dtype=dtypes, seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-6, 1e-3, 1.0, 100.0]))
def test_masters_follow_the_modules_values(dtype: torch.dtype, seed: int, scale: float):
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(300, generator=generator)
    old, left = master.to(dtype), master - master.to(dtype).float()
    new = (old.float() + scale * torch.randn(300, generator=generator)).to(dtype)
    kernels.follow(new, master)
    assert torch.equal(master.to(dtype), new)
    wide = new.float()
    carried = (master - wide - left).abs() <= 1e-6 * wide.abs()
    assert bool((carried | (master == wide)).all())
    assert bool(carried[wide.abs() >= 2 * old.float().abs()].all()), "larger values round it away"


def test_values_that_are_not_finite_are_followed_too():
    master = torch.tensor([1.0, math.inf, math.nan, 70_000.0, 2.0])
    now = torch.tensor([math.nan, 3.0, 4.0, 5.0, math.inf]).bfloat16()
    kernels.follow(now, master)
    torch.testing.assert_close(master, now.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("sampled", [None, 0])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_whole_model_is_adopted_with_its_masters(dtype: torch.dtype, sampled: int | None):
    one, two = made(0, dtype, sampled), made(1, dtype)
    mix(two, model_of(made(2, dtype)), 0.3)
    assert adopt(one, model_of(two, whole=True), 7) and one.step == 7
    for ours, theirs in zip(one.sections, two.sections, strict=True):
        assert torch.equal(ours.storage, theirs.storage)
        assert torch.equal(ours.values[: ours.mixed], theirs.values[: ours.mixed])
    assert model_of(one) == model_of(two)


@pytest.mark.parametrize("sampled", [None, 0])
def test_a_model_requested_before_a_step_is_mixed_after_it(sampled: int | None):
    arena, other = made(0, torch.bfloat16, sampled), made(1, torch.bfloat16)
    begin, base = halves(arena)[0].clone(), arena.snapshot()
    halves(arena)[0].add_(0.5)
    moved = halves(arena)[0].clone()
    arena.step_done()
    mix(arena, model_of(other), 0.25, base)
    wanted = moved.float() + 0.25 * (halves(other)[1] - begin.float())
    torch.testing.assert_close(halves(arena)[1], wanted)
    assert rounded(arena)
