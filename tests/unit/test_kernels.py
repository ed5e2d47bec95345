"""The passes over flat vectors: results against float64 arithmetic, memory use, and the sampled estimate."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from seeds import some
from torch import Tensor

from gossipx.model import kernels

HALVES = (torch.float16, torch.bfloat16)
REAL = (*HALVES, torch.float32, torch.float64)
DTYPES = (*REAL, torch.complex64, torch.complex128)
# Lengths around a block and around a piece of either size (elements of 4, 8 and 2 bytes), and very short ones.
LENGTHS = (0, 1, 2, 15, 16, 17, 1023, 1024, 1025, 32768, 65535, 65536, 65537, 131073)

dtypes = st.sampled_from(DTYPES)
lengths = st.one_of(st.sampled_from(LENGTHS), st.integers(0, 3000))
seeds = st.integers(0, 2**32 - 1)
scales = st.sampled_from([1e-3, 1.0, 30.0])


def normal(length: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    exact = torch.complex128 if dtype.is_complex else torch.float64
    return (scale * torch.randn(length, dtype=exact, generator=torch.Generator().manual_seed(seed))).to(dtype)


def exact(vector: Tensor) -> Tensor:
    return vector.to(torch.complex128 if vector.is_complex() else torch.float64)


def squared(vector: Tensor) -> float:
    """Return ‖vector‖₂² in float64, which torch sums pairwise."""
    parts = torch.view_as_real(exact(vector)) if vector.is_complex() else exact(vector)
    return float(parts.square().sum())


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def close(measured: float, expected: float, dtype: torch.dtype) -> bool:
    wide = dtype in (torch.float64, torch.complex128)
    return math.isclose(measured, expected, rel_tol=1e-13 if wide else 1e-6)


def on_device(function: Callable[..., Tensor]) -> Callable[..., float]:
    """Return the device variant of a function, for use with CPU tensors."""

    def call(*vectors: Tensor) -> float:
        result = function(*vectors)
        assert result.dtype == torch.float64 and result.dim() == 0 and result.device == vectors[0].device
        return float(result)

    return call


both = ["cpu", "device"]
advances = pytest.mark.parametrize("advance", [kernels.advance, on_device(kernels.advance_on_device)], ids=both)
differences = pytest.mark.parametrize(
    "difference", [kernels.difference, on_device(kernels.difference_on_device)], ids=both
)


# --- advance --------------------------------------------------------------------------------------------------------


@advances
@examples(60)
@given(length=lengths, dtype=dtypes, seed=seeds, scale=scales, in_place=st.booleans())
def test_advance_is_the_delta_of_equation_6_and_the_copy(
    advance: Callable[..., float], length: int, dtype: torch.dtype, seed: int, scale: float, in_place: bool
):
    x, before = normal(length, dtype, seed), normal(length, dtype, seed + 1, scale)
    unchanged, old = x.clone(), before.clone()
    after = before if in_place else torch.full_like(x, 7.0)
    expected = squared(exact(x) - exact(before))
    assert close(advance(x, before, after), expected, dtype)
    assert same_bits(after, unchanged) and same_bits(x, unchanged)
    assert in_place or same_bits(before, old)


@advances
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_small_step_of_large_weights_is_measured_exactly(advance: Callable[..., float], dtype: torch.dtype):
    """The difference is squared, rather than squares subtracted; 16-bit differences are not rounded to 16 bits."""
    before = normal(5000, dtype, 0)
    x = before.clone()
    x[17] *= 1 + 2 * torch.finfo(dtype).eps
    expected = squared(exact(x) - exact(before))
    assert 0 < expected < 1e-3
    assert close(advance(x, before, before.clone()), expected, dtype)
    after = before.clone()
    assert advance(x, before, after) > 0 and advance(x, after, after) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@advances
def test_equal_changes_do_not_accumulate_rounding_errors(advance: Callable[..., float], dtype: torch.dtype):
    """A plain float32 sum would be off by 1e-5 or more, because every addend rounds the same way."""
    before, x = torch.zeros(1_000_003, dtype=dtype), torch.full((1_000_003,), 0.1, dtype=dtype)
    expected = len(x) * float(x[0].double()) ** 2
    assert math.isclose(advance(x, before, before), expected, rel_tol=3e-7)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 1500, 69_999])
@advances
def test_values_that_are_not_finite_are_detected(
    advance: Callable[..., float], place: int, dtype: torch.dtype, value: float
):
    x, before = normal(70_000, dtype, 0), normal(70_000, dtype, 1)
    after = before.clone()
    x[place] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not math.isfinite(advance(x, before, after))
        assert same_bits(after, x)
        assert not math.isfinite(advance(x, after, after)), "Inf − Inf"
        assert not math.isfinite(advance(before, after, after)), "and on the way back"
        assert math.isfinite(advance(before, after, after))


# --- difference, norm -------------------------------------------------------------------------------------------------


@differences
@examples(60)
@given(length=lengths, dtype=dtypes, seed=seeds, into=st.sampled_from(["received", "base", "other"]))
def test_difference_is_written_and_measured(
    difference: Callable[..., float], length: int, dtype: torch.dtype, seed: int, into: str
):
    received, base = normal(length, dtype, seed), normal(length, dtype, seed + 1)
    kept = {"received": received.clone(), "base": base.clone()}
    out = {"received": received, "base": base, "other": torch.empty_like(base)}[into]
    expected = kept["received"] - kept["base"]
    measured = difference(received, base, out)
    assert same_bits(out, expected)
    assert close(measured, squared(expected), dtype)
    assert into == "received" or same_bits(received, kept["received"])
    assert into == "base" or same_bits(base, kept["base"])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@differences
def test_a_difference_that_is_not_finite_is_detected(
    difference: Callable[..., float], dtype: torch.dtype, value: float
):
    received, base = normal(300_000, dtype, 0), normal(300_000, dtype, 1)
    received[299_999] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not math.isfinite(difference(received, base, received))


def test_a_square_that_overflows_counts_as_not_finite():
    one, other = torch.full((3,), 1e25), torch.zeros(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.squared_norm(one) == math.inf
        assert kernels.advance(one, other, other) == math.inf


@examples(60)
@given(length=lengths, dtype=dtypes, seed=seeds)
def test_squared_norm(length: int, dtype: torch.dtype, seed: int):
    vector = normal(length, dtype, seed)
    unchanged = vector.clone()
    assert close(kernels.squared_norm(vector), squared(vector), dtype)
    assert same_bits(vector, unchanged)


# --- commit -----------------------------------------------------------------------------------------------------------


@examples(60)
@given(length=lengths, dtype=dtypes, seed=seeds, share=st.sampled_from([0.0, 0.25, 0.5, 1.0, 0.3]))
def test_commit_moves_weights_and_boundary_alike(length: int, dtype: torch.dtype, seed: int, share: float):
    x, change = normal(length, dtype, seed), normal(length, dtype, seed + 1)
    before, unchanged = exact(x).clone(), change.clone()
    boundary = torch.full_like(x, 7.0)
    kernels.commit(x, change, share, boundary)
    assert same_bits(boundary, x) and same_bits(change, unchanged)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(exact(x), before + share * exact(change), rtol=2 * eps, atol=4 * eps)


@examples(60)
@given(length=lengths | st.just(300_001), dtype=dtypes, seed=seeds)
def test_accumulate_adds_as_torch_does_in_the_wider_dtype(length: int, dtype: torch.dtype, seed: int):
    values = normal(length, dtype, seed)
    total = exact(normal(length, dtype, seed + 1))
    wanted = total + values
    kernels.accumulate(total, values)
    assert torch.equal(total, wanted)


@pytest.mark.parametrize("other", [torch.zeros(1), torch.zeros(4), torch.zeros(5, dtype=torch.float64)])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_vectors_that_do_not_match_are_refused(other: Tensor, place: int):
    """Otherwise one element would be broadcast, and another dtype converted, unnoticed."""
    vectors = [torch.zeros(5), torch.zeros(5), torch.zeros(5)]
    vectors[place] = other
    one, two, three = vectors
    passes: list[Callable[[], object]] = [
        lambda: kernels.advance(one, two, three),
        lambda: kernels.advance_on_device(one, two, three),
        lambda: kernels.difference(one, two, three),
        lambda: kernels.difference_on_device(one, two, three),
        lambda: kernels.commit(one, two, 0.5, three),
    ]
    for run in passes:
        with pytest.raises(ValueError, match="same length and dtype") as raised:
            run()
        assert "(5,)" in str(raised.value) and "\n" not in str(raised.value)
    matrix = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"float32 \(2, 3\)"):
        kernels.advance(matrix, matrix, matrix)


# --- the sample -------------------------------------------------------------------------------------------------------


def lines_of(change: Tensor, per_line: int) -> np.ndarray:
    """Return the squared norm of each whole cache line."""
    count = len(change) // per_line
    return change[: count * per_line].view(count, per_line).abs().square().sum(1).numpy()


@pytest.mark.parametrize("dtype", some(DTYPES, torch.float32, torch.bfloat16))
def test_the_sampled_estimate_is_unbiased_over_draws(dtype: torch.dtype):
    """The mean over draws is Δ² (Eq. 6), within 4.5 standard errors of the variance that the docstring states."""
    x = normal(8000, dtype, 0)
    step = normal(8000, dtype, 1, 1e-2) * torch.logspace(-1, 1, 8000, dtype=torch.float64).to(dtype)
    now = x + step
    lines = lines_of(exact(now) - exact(x), 64 // dtype.itemsize)
    runs = lines[: len(lines) // 16 * 16].reshape(-1, 16)
    deviation = math.sqrt(16**2 * runs.var(axis=1).sum())
    draws = 2000
    estimates = [kernels.Sampled(x, seed).advance(now) for seed in range(draws)]
    assert abs(np.mean(estimates) - squared(exact(now) - exact(x))) < 4.5 * deviation / math.sqrt(draws)
    assert np.std(estimates) == pytest.approx(deviation, rel=0.1), "the variance is as documented"


@given(length=st.integers(0, 3000), dtype=dtypes, seed=seeds)
def test_a_sample_weights_all_values_equally(length: int, dtype: torch.dtype, seed: int):
    """If all values change alike, every draw gives the exact delta, at any length."""
    x = torch.zeros(length, dtype=dtype)
    sampled = kernels.Sampled(x, seed)
    assert close(sampled.advance(x + 0.5), 0.25 * length, dtype)
    assert sampled.advance(x + 0.5) == 0.0


@given(length=st.integers(0, 3000), dtype=dtypes, seed=seeds, data=st.data())
def test_given_ranges_are_measured_whole(length: int, dtype: torch.dtype, seed: int, data: st.DataObject):
    """The whole change lies within the given ranges, so the result does not depend on the draw."""
    cuts = sorted(data.draw(st.lists(st.integers(0, length), min_size=4, max_size=4)))
    ranges = [(cuts[0], cuts[1]), (cuts[2], cuts[3])]
    x, now = torch.zeros(length, dtype=dtype), torch.zeros(length, dtype=dtype)
    for start, stop in ranges:
        now[start:stop] = normal(stop - start, dtype, seed)
    assert close(kernels.Sampled(x, seed, ranges).advance(now), squared(now), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_follows_its_vector(dtype: torch.dtype):
    """Each estimate covers the last step only, and no change before keep(). The sample has 2 pieces."""
    x = normal(1_200_000, dtype, 0)
    sampled, on_device = kernels.Sampled(x, 5, [(0, 900)]), kernels.Sampled(x, 5, [(0, 900)])
    for step in range(1, 4):
        x += 2.0**-step
        expected = 4.0**-step * len(x)
        rounding = 40 * torch.finfo(dtype).eps
        estimate = sampled.advance(x)
        assert estimate == pytest.approx(expected, rel=rounding)
        lazily = on_device.advance_on_device(x)
        assert lazily.dtype == torch.float64 and lazily.dim() == 0
        assert float(lazily) == pytest.approx(estimate, rel=1e-6)
        x += 3.0  # a mix
        sampled.keep(x)
        on_device.keep(x)
    assert sampled.advance(x) == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_detects_sampled_values_that_are_not_finite(dtype: torch.dtype):
    x = torch.zeros(40_000, dtype=dtype)
    sampled = kernels.Sampled(x, 0)
    x[16 * 64 // x.itemsize * 3 :][: 16 * 64 // x.itemsize] = math.inf  # a whole run
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not math.isfinite(sampled.advance(x))


def test_the_draw_depends_on_the_seed_only():
    x, now = normal(50_000, torch.float32, 0), normal(50_000, torch.float32, 1)
    estimates = [kernels.Sampled(x, seed).advance(now) for seed in (1, 1, 2)]
    assert estimates[0] == estimates[1] != estimates[2]


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of resident memory as Linux reports it")
def test_no_pass_takes_memory_in_proportion_to_the_model():
    """48 MiB vectors; after a round on short ones, the peak of resident memory grows by less than 4 MiB."""
    script = """
        import resource, torch
        from gossipx.model import kernels

        torch.set_num_threads(1)

        def passes(x, before, after, sampled):
            kernels.advance(x, before, after)
            kernels.advance(x, after, after)
            kernels.advance_on_device(x, before, after)
            kernels.difference(x, before, after)
            kernels.difference_on_device(x, before, after)
            kernels.commit(x, before, 0.5, after)
            kernels.squared_norm(x)
            sampled.advance(x)
            sampled.advance_on_device(x)
            sampled.keep(x)

        for dtype in (torch.float32, torch.bfloat16, torch.complex64):
            vectors = [torch.ones((48 << 20) // dtype.itemsize, dtype=dtype) for _ in range(3)]
            sampled = kernels.Sampled(vectors[0], 0)
            short = [vector[:600_000] for vector in vectors]
            passes(*short, kernels.Sampled(short[0], 0))
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            passes(*vectors, sampled)
            passes(*vectors, sampled)
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    grown = [int(line) for line in done.stdout.split()]
    assert len(grown) == 3 and max(grown) < 4096, f"KiB: {grown}"
