"""3LC (anonymous, 2018), section by section, and test vectors for any implementation of 3LC."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoded import framed, normal
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipx import codecs
from gossipx.codecs import ErrorFeedback, decode, encoded_bytes, packing
from gossipx.codecs.levels import Int8
from gossipx.codecs.ternary import compress, decompress, pass_on_device
from gossipx.errors import ProtocolError, UsageError

CASES = json.loads((Path(__file__).parent / "threelc_vectors.json").read_text())["cases"]
LENGTHS = [0, 1, 4, 5, 6, 24, 25, 26, 71, 5119, 5120, 5121, 5124, 10_240, 12_345]


def values_of(case: dict[str, object], key: str) -> np.ndarray:
    if key in case:
        return np.array(case[key], np.float32)
    values = np.zeros(case["length"], np.float32)
    for place, value in case[f"sparse_{key}"].items():
        values[int(place)] = value
    return values


def by_hand(values: np.ndarray, sparsity: float) -> tuple[np.float32, list[int], bytes, bytes]:
    """Return the scale, the trits, and their bytes before and after zero-run encoding: direct and slow."""
    scale = np.float32(np.abs(values).max(initial=0)) * np.float32(sparsity)
    trits = [int(np.rint(value / scale)) if scale else 0 for value in values]
    packed = bytearray()
    for first in range(0, len(trits), 5120):
        block = trits[first : first + 5120]
        block += [0] * (-len(block) % 5)
        planes = [block[start : start + len(block) // 5] for start in range(0, len(block), len(block) // 5)]
        packed += bytes(
            sum((trit + 1) * 3**power for trit, power in zip(five, (4, 3, 2, 1, 0), strict=True))
            for five in zip(*planes, strict=True)
        )
    return scale, trits, bytes(packed), bytes(shortened(packed))


def shortened(packed: bytearray) -> Iterator[int]:
    for byte, group in itertools.groupby(packed):
        length = len(list(group))
        while byte == 121 and length > 1:
            yield 243 + min(length, 14) - 2
            length -= min(length, 14)
        yield from [byte] * length


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_vectors(case: dict[str, object]) -> None:
    values = values_of(case, "values")
    scale, data = compress(torch.from_numpy(values), case["sparsity"])
    assert np.float32(scale) == np.float32(case["scale"])
    assert data.hex() == case["encoded_hex"]
    back = decompress(scale, data, len(values))
    assert np.array_equal(back.numpy(), np.float32(scale) * values_of(case, "trits"))
    if "packed_hex" in case:
        packed = packing.pack_trits(torch.from_numpy(values_of(case, "trits")))
        assert packed.numpy().tobytes().hex() == case["packed_hex"]


@given(st.lists(st.floats(-1, 1, width=32) | st.just(0.0), max_size=200), st.floats(1, 1.99))
@settings(deadline=None)
def test_compress_is_what_the_papers_steps_give(values: list[float], sparsity: float) -> None:
    scale, _, _, data = by_hand(np.array(values, np.float32), sparsity)
    assert compress(torch.tensor(values, dtype=torch.float32), sparsity) == (scale, data)


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("sparsity", [1.0, 1.75, 1.99])
def test_long_tensors_and_odd_lengths(count: int, sparsity: float) -> None:
    values = normal(count).numpy()
    scale, trits, packed, data = by_hand(values, sparsity)
    assert compress(values, sparsity) == (scale, data)
    assert decompress(float(scale), data, count).tolist() == [float(scale * np.float32(trit)) for trit in trits]
    assert decompress(float(scale), packed, count).tolist() == [float(scale * np.float32(trit)) for trit in trits]


@pytest.mark.parametrize("count", LENGTHS[1:])
@pytest.mark.parametrize("sparsity", [1.0, 1.75])
def test_a_device_makes_the_same_bytes(count: int, sparsity: float) -> None:
    """Encode by the torch code for GPUs, here on the CPU."""
    values = normal(count)
    left = values.clone()
    scale, codes = pass_on_device(left, sparsity)
    assert (scale, codes.tobytes()) == compress(values, sparsity)
    assert torch.equal(left, values - decompress(scale, codes.tobytes(), count))
    packed = packing.lengthen_runs(torch.from_numpy(codes), packing.trit_bytes(count))
    assert torch.equal(packing.unpack_trits(packed, count) * scale, decompress(scale, codes.tobytes(), count))


@pytest.mark.parametrize("block", [0, 7, 64])
def test_a_device_makes_the_same_levels(block: int) -> None:
    values = normal(1000)
    codec, left, error = Int8(block), normal(1000, seed=1), normal(1000, seed=1)
    frame, _ = codec.encode(values, codec.init(values), left=left)
    data = codec.on_device(values, error)
    assert bytes(frame)[-len(data) :] == data.tobytes()
    assert torch.allclose(left, error, atol=1e-6)


@given(st.integers(1, 400), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_any_cut_of_runs_decodes(count: int, seed: int) -> None:
    """Section 3.3: an encoder that works on parts may split runs at their ends."""
    draws = np.random.default_rng(seed)
    values = np.where(draws.random(count) < 0.02, draws.standard_normal(count), 0).astype(np.float32)
    scale, trits, packed, _ = by_hand(values, 1.0)
    cut, zeros = bytearray(), 0
    for byte in [*packed, None]:
        if byte == 121 and zeros < 14 and draws.random() < 0.8:
            zeros += 1
            continue
        if zeros:
            cut.append(121 if zeros == 1 else 243 + zeros - 2)
        zeros = int(byte == 121)
        if byte is not None and byte != 121:
            cut.append(byte)
    if zeros:
        cut.append(121)
    assert decompress(float(scale), bytes(cut), count).tolist() == [float(scale * np.float32(trit)) for trit in trits]


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (b"", 1),
        (b"\xca", 6),  # too few
        (b"\xca\x79", 5),  # too many
        (b"\xff", 66),  # 70 trits, where 66 take 14 bytes with padding
        (b"\xff", 71),
        (b"\xf3", 5),  # a run past the end
        (b"\xcb", 1),  # padding that is not zero
        (b"\x00", 3),
        (b"\xff", -1),
        (b"\xff" * 10, 2**62),
    ],
)
def test_bytes_that_are_no_such_trits_are_refused(data: bytes, count: int) -> None:
    if (data, count) == (b"\xff", 66):
        assert len(decompress(1.0, data, count)) == 66
        return
    with pytest.raises(ProtocolError, match="trits"):
        decompress(1.0, data, count)


@pytest.mark.fault(43)
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, 1e300])
def test_trits_without_a_finite_scale_are_refused(scale: float) -> None:
    """They were decoded to NaN."""
    with pytest.raises(ProtocolError, match="not a finite float32 number"):
        decompress(scale, b"\xca", 5)


@pytest.mark.parametrize(
    ("scale", "data", "n"), [("a", b"\xca", 5), (1.0, 5, 25), (1.0, b"\xca", "a"), (1.0, b"\xca", 5.0)]
)
def test_arguments_of_another_type_are_refused(scale: Any, data: Any, n: Any) -> None:
    """A number of bytes was decoded as that many bytes of value 0."""
    with pytest.raises(UsageError, match="takes a number, bytes and an integer"):
        decompress(scale, data, n)


@pytest.mark.parametrize("values", [torch.tensor([1 + 2j]), np.array([1 + 2j]), torch.ones(3).to_sparse()])
def test_only_dense_tensors_of_real_numbers_are_encoded(values: Any) -> None:
    """The imaginary parts were dropped."""
    with pytest.raises(UsageError, match="encodes dense tensors of real numbers, not torch"):
        compress(values, 1.0)


@pytest.mark.parametrize("sparsity", [0.99, 2.0, -1.0, float("nan")])
def test_sparsity_is_from_1_to_below_2(sparsity: float) -> None:
    with pytest.raises(UsageError, match="at least 1 and below 2"):
        compress(normal(5), sparsity)
    with pytest.raises(UsageError, match="at least 1 and below 2"):
        codecs.parse(f"3lc:sparsity={sparsity}")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.0e38])
def test_what_has_no_scale_cannot_be_quantized(value: float) -> None:
    with pytest.raises(UsageError, match="NaN or Inf, or whose scale overflows"):
        compress(torch.tensor([1.0, value]), 1.75)


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=300),
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=300, max_size=300),
    st.floats(1, 1.99),
)
@settings(deadline=None)
def test_error_feedback_is_exact(values: list[float], errors: list[float], sparsity: float) -> None:
    """Section 3.1: errors are at most m/2; input + error before = output + error after, exactly."""
    feedback = ErrorFeedback(codecs.parse(f"3lc:sparsity={sparsity}"))
    x = torch.tensor(values, dtype=torch.float32)
    state = feedback.init(x)
    state.kept["error"] = torch.tensor(errors[: len(values)], dtype=torch.float32)
    wanted = x + state.kept["error"]
    frame, state = feedback.encode(x, state)
    out, left = decode(frame), state.kept["error"]
    assert torch.equal(out + left, wanted)
    assert torch.equal(wanted - out, left)
    scale = float(np.float32(wanted.abs().max()) * np.float32(sparsity))
    assert float((wanted - out).abs().max()) <= scale / 2


def test_smallest_numbers_of_all() -> None:
    """The scale of the smallest subnormals has no exact half; the trits are still round(x / m)."""
    step = 2.0**-149
    for most, value in itertools.product(range(1, 8), range(8)):
        if value <= most:
            x = torch.tensor([most * step, value * step])
            scale, data = compress(x, 1.0)
            assert decompress(scale, data, 2)[1] == scale * round(value / most)


def test_a_byte_holds_five_trits_and_a_run_up_to_fourteen_bytes() -> None:
    """Sections 3.2 and 3.3: 1.6 bits per value without zero-run encoding; 280 times less than float32 for zeros."""
    dense = torch.ones(5120)
    assert len(compress(dense, 1.0)[1]) * 8 / len(dense) == 1.6
    zeros = torch.zeros(5 * 14 * 100)
    assert len(zeros) * 4 / len(compress(zeros, 1.0)[1]) == 280


@pytest.mark.parametrize("sparsity", [1.0, 1.75, 1.99])
@pytest.mark.parametrize("residual", [0.3, 0.1, 0.01])
def test_residual_is_the_norm_that_passes_leave_at_most(residual: float, sparsity: float) -> None:
    x = torch.cat((normal(5000), normal(700) * 100))
    frame = framed(f"3lc:sparsity={sparsity},residual={residual}", x)
    assert float((x - decode(frame)).norm()) <= residual * float(x.norm()) * 1.0001
    assert len(framed("3lc", x)) < len(frame) < 4 * len(x)


def test_stochastic_is_unbiased_and_of_16_bits_a_ten() -> None:
    """Section 4.2: its expectation is the input; base-3⁵ without zero-run encoding."""
    x = normal(500)
    codec = codecs.parse("stochastic3")
    state, total = codec.init(x, seed=1), torch.zeros(500, dtype=torch.float64)
    for _ in range(1500):
        frame, state = codec.encode(x, state)
        total += decode(frame)
    peak = float(x.abs().max())
    spread = (x.abs() * (peak - x.abs())).sqrt() / 1500**0.5  # standard error of a value that is ±peak at random
    assert bool(((total / 1500 - x).abs() <= 5 * spread + 1e-6).all())
    assert encoded_bytes(frame) == (500, 4 + 100)


def test_stochastic_in_error_feedback_has_the_magnitude_of_least_squared_error() -> None:
    """With feedback the magnitude is the mean of the sent values, which minimizes the squared error."""
    x = normal(500)
    out = decode(framed("stochastic3:feedback=true", x))
    sent = out != 0
    assert torch.allclose(out[sent].abs(), x[sent].abs().mean())
    for factor in (0.99, 1.01):
        assert float((x - out).norm()) < float((x - factor * out).norm())


def test_eight_bit_ints_are_255_levels() -> None:
    """Section 4.2: [−127, 127], −128 is not used."""
    x = normal(10_000)
    out = decode(framed("int8", x))
    levels = (out / (x.abs().max() / 127)).round().int()
    assert int(levels.abs().max()) == 127
    assert float((out - x).abs().max()) <= float(x.abs().max()) / 127 / 2 * 1.00001


def test_one_bit_is_the_pair_of_least_squared_error() -> None:
    """Section 3.1: the means of the values from zero on, and of those below."""
    x = normal(999)
    out = decode(framed("onebit", x))
    assert torch.allclose(out, torch.where(x >= 0, x[x >= 0].mean(), x[x < 0].mean()))
    error = float((out - x).square().sum())
    for above, below in ((1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99)):
        other = torch.where(x >= 0, out * above, out * below)
        assert float((other - x).square().sum()) > error


def test_sparsification_sends_the_largest_and_a_bit_for_each_value_or_fewer() -> None:
    """Section 4.2: 5 % of the values, and a bitmap; packed numbers where these are smaller."""
    x = normal(10_000)
    for ratio, where in ((0.05, min(10_000 // 8, 500 * 14 // 8 + 14)), (0.3, 10_000 // 8), (0.001, 2 * 14)):
        frame = framed(f"topk:ratio={ratio}", x)
        many = round(ratio * len(x))
        out = decode(frame)
        kept = x.abs().topk(many).indices
        assert torch.equal(out[kept], x[kept])
        assert int(out.count_nonzero()) == many
        assert encoded_bytes(frame)[1] <= 8 + where + 4 * many
    out = decode(framed("topk:ratio=0.05,sample=0.1", x))
    assert 0.025 < int(out.count_nonzero()) / len(x) < 0.1
    assert float(x[out == 0].abs().max()) <= float(out[out != 0].abs().min())


def test_local_steps_send_every_kth_sum() -> None:
    """Section 4.2: unsent changes accumulate, and are sent with the next frame."""
    feedback = ErrorFeedback(codecs.parse("localsteps:k=3"))
    state = feedback.init(normal(10))
    for round_ in range(2):
        for step in range(3):
            frame, state = feedback.encode(normal(10, seed=round_ * 3 + step), state)
            assert bool(decode(frame).any()) == (step == 2)
        assert torch.allclose(decode(frame), sum(normal(10, seed=round_ * 3 + step) for step in range(3)))
