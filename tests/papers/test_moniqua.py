"""Moniqua (Lu and De Sa, 2020): values modulo a range, recovered near the receiver's own."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
import xxhash
from encoded import normal
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from gossipx import codecs
from gossipx.codecs import ErrorFeedback, Tensors, decode, decode_into, encoded_bytes, packing, rivals
from gossipx.codecs.rivals import Moniqua
from gossipx.errors import ProtocolError, TooFarError

FIXED = 13
"""Bytes of a tensor before its values: the bits, the level width and the hash."""
bits = st.integers(1, 16)
thetas = st.floats(1e-6, 1e3)
singles = st.floats(-1e4, 1e4, width=32)


def framed(codec: Moniqua, values: Tensor) -> memoryview:
    frame, _ = codec.encode(values, codec.init(values))
    return frame


def recovered(codec: Moniqua, values: Tensor, near: Tensor) -> Tensor:
    out = torch.full_like(values, math.nan)
    decode_into(framed(codec, values), out, near=near)
    return out


def level_of(codec: Moniqua, values: Tensor) -> float:
    """Return B / 2^bits as stored in a frame."""
    frame = bytes(framed(codec, values))
    body = frame[len(frame) - encoded_bytes(frame)[1] :]
    return float(np.frombuffer(body[1:5], "<f4")[0])


def check_bound(codec: Moniqua, x: float, y: float) -> None:
    """Check |x̂ − x| ≤ δB, up to float32 rounding (Lemma 2)."""
    values, near = torch.tensor([x]), torch.tensor([y])
    back = recovered(codec, values, near)
    level = level_of(codec, values)
    rounding = float(np.spacing(np.float32(max(abs(x), abs(float(back)))))) / 2
    off = abs(Fraction(float(back)) - Fraction(float(values)))
    assert off <= Fraction(level) / 2 + Fraction(rounding)
    assert off <= Fraction(level)


# --- the bound ------------------------------------------------------------------------------------------------------


@given(bits, thetas, singles, st.floats(-1, 1))
@example(1, 0.5, 0.0, 1.0)
@example(16, 0.1, 1e4, -1.0)
@example(1, 1e-6, 9999.0, 1.0)
def test_what_is_less_than_theta_away_is_recovered_to_half_a_level(
    wide: int, theta: float, y: float, way: float
) -> None:
    """Lemma 2 for distances up to the largest float32 below theta."""
    codec = Moniqua(wide, theta)
    near = np.float32(y)
    x = np.float32(y + way * theta)
    while abs(Fraction(float(x)) - Fraction(float(near))) >= Fraction(theta):
        x = np.nextafter(x, near)
    check_bound(codec, float(x), float(near))


@given(bits, thetas, st.integers(-40, 40), st.sampled_from([0.0, 0.25, 0.5]), st.floats(-0.999, 0.999))
def test_multiples_of_the_range_and_ties_of_levels(
    wide: int, theta: float, turns: int, part: float, way: float
) -> None:
    """x at a multiple of B, or half or a quarter of a level above it, where (x / B) mod 1 wraps around."""
    codec = Moniqua(wide, theta)
    level = level_of(codec, torch.zeros(1))
    x = float(np.float32((turns * 2**wide + part) * level))
    y = float(np.float32(x + way * theta))
    assume(abs(x - y) < theta)
    check_bound(codec, x, y)
    check_bound(codec, y, x)


def test_a_level_is_that_of_the_paper() -> None:
    """B = 2 theta / (1 − 2 δ) and δ = 2^−(bits + 1), plus a millionth for rounding."""
    for wide in range(1, 17):
        delta = 2.0 ** -(wide + 1)
        of_the_paper = 2 * 0.1 / (1 - 2 * delta) / 2**wide
        level = level_of(Moniqua(wide, 0.1), torch.zeros(3))
        assert of_the_paper < level < of_the_paper * (1 + 1e-6)


def test_the_bound_is_reached() -> None:
    """Some of many values have an error of nearly half a level, so the bound is tight."""
    codec = Moniqua(4, 0.1)
    values = normal(5000)
    off = recovered(codec, values, values) - values
    level = level_of(codec, values)
    assert 0.49 * level < float(off.max()) <= 0.5001 * level
    assert -0.5001 * level <= float(off.min()) < -0.49 * level


@given(st.integers(2, 16), st.floats(0.01, 10), st.integers(0, 1000))
def test_levels_are_those_of_the_paper_by_hand(wide: int, theta: float, seed: int) -> None:
    """The result equals x̂ = ((q B − y) mod B) + y in exact fractions, with mod into [−B/2, B/2) (Algorithm 1)."""
    codec = Moniqua(wide, theta)
    values = normal(20, seed=seed)
    near = values + 0.99 * theta * (2 * torch.rand(20, generator=torch.Generator().manual_seed(seed)) - 1)
    assume(bool(((values - near).double().abs() < theta).all()))
    level = Fraction(level_of(codec, values))
    span = level * 2**wide
    for x, y, back in zip(values.tolist(), near.tolist(), recovered(codec, values, near).tolist(), strict=True):
        q = Fraction(round(Fraction(x) / level) % 2**wide, 2**wide)
        by_hand = (q * span - Fraction(y) + span / 2) % span - span / 2 + Fraction(y)
        assert back == float(np.float32(float(by_hand)))


# --- too far --------------------------------------------------------------------------------------------------------


@given(bits, thetas, singles, st.floats(1.0, 100.0), st.booleans(), st.integers(0, 29))
def test_one_value_beyond_half_the_range_is_caught(
    wide: int, theta: float, y: float, times: float, up: bool, place: int
) -> None:
    """Beyond theta plus half a level, the rounding of x, no value within B/2 of y is the right one."""
    codec = Moniqua(wide, theta)
    near = torch.full((30,), y)
    values = near.clone()
    level = level_of(codec, values)
    far = times * level * 2**wide / 2 + level
    values[place] += far if up else -far
    assume(abs(float(values[place].double() - near[place].double())) > level * (2**wide + 1.001) / 2)
    out = torch.ones(30)
    with pytest.raises(TooFarError, match=r"moniqua's theta of .* give a larger theta, and more than \d+ bits"):
        decode_into(framed(codec, values), out, near=near)
    assert bool((out == 1).all())


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e38])
def test_nothing_is_near_what_has_no_whole_number_of_levels(value: float) -> None:
    """Values too large for exact integers are refused regardless of the hash."""
    here = torch.tensor([value])
    levels = rivals._nearest(torch.tensor([0]), here.double(), 8)
    body = struct.pack("<BfQ8s", 8, 1.0, xxhash.xxh3_64_intdigest(levels.numpy().tobytes()), bytes(8))
    with pytest.raises(TooFarError):
        Moniqua._values_near(np.frombuffer(body, np.uint8), (1,), here)


def test_the_theta_that_is_told_is_the_one_that_was_given() -> None:
    with pytest.raises(TooFarError, match=r"theta of 0\.25:.* more than 6 bits"):
        recovered(Moniqua(6, 0.25), torch.zeros(3), torch.full((3,), 3.0))


def test_whole_ranges_away_all_bits_are_the_same_and_the_hash_is_not() -> None:
    """Only the hash detects these errors."""
    codec = Moniqua(8, 0.1)
    values = normal(40)
    level = level_of(codec, values)
    moved = (values / level).round() * level
    beyond = moved + 256 * level
    one, other = bytes(framed(codec, moved)), bytes(framed(codec, beyond))
    assert one[-40:] == other[-40:]
    assert one[-48:-40] != other[-48:-40]
    with pytest.raises(TooFarError):
        recovered(codec, beyond, moved)


# --- frames ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", range(1, 17))
@pytest.mark.parametrize("count", [1, 7, 8, 4096])
def test_a_value_takes_its_bits_and_no_more(wide: int, count: int) -> None:
    frame = framed(Moniqua(wide), normal(count))
    assert encoded_bytes(frame)[1] == FIXED + -(-count // 8) * wide
    if count == 4096:
        assert len(frame) == 14 + 1 + 2 + 2 + FIXED + wide * count // 8  # header, shape, table


def test_what_a_frame_has() -> None:
    """Values computed by hand: theta 1.5 and 2 bits give levels of width 1 and a range of 4."""
    codec = Moniqua(2, 1.5)
    frame = bytes(framed(codec, torch.tensor([0.0, 1.2, -1.2, 5.9, -7.0])))
    body = frame[-FIXED - 2 :]
    assert body[0] == 2
    assert np.frombuffer(body[1:5], "<f4")[0] == pytest.approx(1.0, rel=1e-6)
    assert int.from_bytes(body[5:13], "little") == xxhash.xxh3_64_intdigest(
        np.array([0, 1, -1, 6, -7], "<i8").tobytes()
    )
    assert list(body[13:]) == [0b10110, 0b01100]  # 0, 1, 3, 2, 1: their lower bits, then their higher


@pytest.mark.parametrize(
    ("place", "data", "told"),
    [
        (0, b"\0", "0 bits"),
        (0, b"\x11", "17 bits"),
        (0, b"\7", "do not take"),
        (1, b"\0\0\0\0", "level width of 0.0"),
        (1, b"\0\0\x80\xbf", "level width of -1.0"),
        (1, b"\0\0\xc0\x7f", "level width of nan"),
        (1, b"\0\0\x80\x7f", "level width of inf"),
        (13, b"", "do not take"),
        (4, b"", "ends before its values"),
    ],
)
def test_malformed_tensors_are_refused(place: int, data: bytes, told: str) -> None:
    values = normal(16)
    frame = bytes(framed(Moniqua(8), values))
    body = frame[-FIXED - 16 :]
    body = body[:place] + data + body[place + len(data) :] if data else body[:place]
    with pytest.raises(ProtocolError, match=told) as caught:
        Moniqua._values_near(np.frombuffer(body, np.uint8), (16,), values)
    assert not isinstance(caught.value, TooFarError)


def test_nothing_is_drawn_kept_or_fed_back() -> None:
    codec = codecs.parse("moniqua")
    values = normal(300)
    state = codec.init(values, seed=1)
    first, state = codec.encode(values, state)
    second, state = codec.encode(values, state)
    assert bytes(first) == bytes(second) == bytes(framed(Moniqua(), values))
    assert not state.kept and not codec.feedback and codec.alone and not codec.gradients_only


@pytest.mark.parametrize("wide", [1, 5, 8, 11, 16])
def test_torch_packs_as_numpy_does(wide: int) -> None:
    """Values packed on a device are unpacked in host memory, and vice versa."""
    for count in (1, 8, 13, 1000):
        numbers = (normal(count, seed=wide) * 1e6).long() & (2**wide - 1)
        packed = packing.pack_bits(numbers, wide)
        assert torch.equal(packing.pack_bits_on_device(numbers, wide), packed)
        assert torch.equal(packing.unpack_bits(packed, count, wide), numbers)
        assert torch.equal(packing.unpack_bits_on_device(packed, count, wide), numbers)


# --- tensors of all kinds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [1, 8, 16])
@pytest.mark.parametrize("values", [torch.zeros(100), torch.zeros(0), torch.zeros(3, 0), torch.zeros(()), normal(1)])
def test_zeros_and_few_values(wide: int, values: Tensor) -> None:
    codec = Moniqua(wide, 0.05)
    back = recovered(codec, values, values + 0.03)
    assert back.shape == values.shape
    assert torch.allclose(back, values, atol=level_of(codec, torch.zeros(1)) / 2)
    if not values.any():
        assert torch.equal(back, values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    """Errors are at most half a level plus the rounding of the dtype."""
    codec = Moniqua(8, 0.1)
    values = normal(500).to(dtype)
    near = (values.double() + 0.08 * normal(500, seed=1).clamp(-1, 1)).to(dtype)
    back = recovered(codec, values, near)
    assert back.dtype == dtype
    rounding = values.double().abs() * min(torch.finfo(dtype).eps, 1.0)
    assert bool(((back.double() - values.double()).abs() <= 0.5001 * 0.2 / 255 + rounding + 1e-7).all())


def test_near_values_that_are_not_contiguous() -> None:
    codec = Moniqua(8, 0.1)
    values = normal(20, 30)
    near = (values + 0.05).T.contiguous().T
    assert not near.is_contiguous()
    assert torch.equal(recovered(codec, values, near), recovered(codec, values, values + 0.05))


def test_more_values_than_are_worked_on_at_a_time() -> None:
    """The hash covers all chunks, so a wrap in the last one is detected."""
    codec = Moniqua(8, 0.1)
    values = normal(2 * rivals._CHUNK + 5)
    near = values + 0.05
    assert float((recovered(codec, values, near) - values).abs().max()) < 0.0004
    near[-1] += 1
    with pytest.raises(TooFarError):
        recovered(codec, values, near)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_what_has_no_whole_number_of_levels_is_nan_in_its_tensor_alone(value: float) -> None:
    codec = Moniqua(8, 0.1)
    vector = normal(80)
    vector[7] = value
    tensors = Tensors.of(vector[:30], vector[30:])
    frame, _ = codec.encode(vector, codec.init(tensors))
    out = torch.zeros(80)
    decode_into(frame, out, tensors=tensors, near=vector)
    assert bool(out[:30].isnan().all())
    assert float((out[30:] - vector[30:]).abs().max()) < 0.0005
    if math.isnan(value):  # a frame without any encoded tensor needs no reference values
        frame, _ = codec.encode(vector[:30].clone(), codec.init(vector[:30]))
        assert bool(decode(frame).isnan().all())


def test_the_largest_float32_does_not_become_infinite() -> None:
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([largest, -largest])
    codec = Moniqua(1, 1.1e38)
    back = recovered(codec, values, values)
    assert bool(back.isfinite().all())
    assert float((back.double() - values.double()).abs().max()) <= level_of(codec, values) / 2


def test_error_feedback_keeps_what_a_frame_leaves_out() -> None:
    feedback = ErrorFeedback(Moniqua(4, 0.5))
    values = normal(200)
    frame, state = feedback.encode(values, feedback.init(values))
    out = torch.zeros(200)
    decode_into(frame, out, near=values + 0.2)
    assert torch.equal(state.kept["error"], values - out)


# --- consensus ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wide", "theta"), [(8, 0.5), (4, 0.5), (2, 0.5)])
def test_workers_that_average_come_to_the_mean(wide: int, theta: float) -> None:
    """Algorithm 1 without gradients, on a ring: x_i += gamma sum (x̂_j − x̂_i), with x̂_i from the same codec.

    A worker's own x̂_i is as biased as the copies of its neighbours, so the mean stays unchanged.
    """
    codec, count, gamma = Moniqua(wide, theta), 5, 0.25
    models = 3 + (theta / 2) * (2 * torch.rand(count, 200, generator=torch.Generator().manual_seed(3)) - 1)
    mean, apart = models.mean(0), float((models - models.mean(0)).abs().max())
    for _ in range(60):
        frames = [framed(codec, model) for model in models]
        moved = models.clone()
        for worker, model in enumerate(models):
            own = torch.empty(200)
            decode_into(frames[worker], own, near=model)
            for other in ((worker - 1) % count, (worker + 1) % count):
                theirs = torch.empty(200)
                decode_into(frames[other], theirs, near=model)
                moved[worker] += gamma * (theirs - own)
        models = moved
    level = level_of(codec, models[0])
    assert float((models.mean(0) - mean).abs().max()) < 1e-5
    assert float((models - mean).abs().max()) < min(2 * level, apart)
