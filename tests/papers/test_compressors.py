"""Codecs other than 3LC, compared with direct implementations of their papers.

QSGD (Alistarh et al., 2017), PowerSGD (Vogels et al., 2019), Deep Gradient Compression (Lin et al., 2018), 1-bit SGD
(Seide et al., 2014), signSGD (Bernstein et al., 2018), EF-signSGD (Karimireddy et al., 2019), Communication Efficient
LLM Pre-training with SparseLoCo (Sarfi, Thérien, Lidin, Belilovsky, 2025).
"""

from __future__ import annotations

import math

import pytest
import torch
from encoded import framed, normal
from torch import Tensor

from gossipx import codecs
from gossipx.codecs import ErrorFeedback, decode, encoded_bytes, packing

DRAWS = 1500


def decoded(spec: str, x: Tensor, many: int = 1) -> list[Tensor]:
    """Return the decoded values of ``frames`` frames of the same values."""
    codec = codecs.parse(spec)
    state, made = codec.init(x, seed=1), []
    for _ in range(many):
        frame, state = codec.encode(x, state)
        made.append(decode(frame))
    return made


@pytest.mark.parametrize(
    ("levels", "block"), [(4, 0), *(pytest.param(*given, marks=pytest.mark.slow) for given in [(1, 0), (7, 64)])]
)
def test_qsgd_rounds_to_a_level_by_chance(levels: int, block: int) -> None:
    """QSGD, Eq. 1 and Lemma 3.1: values are ‖v‖₂ · sgn(v_i) · ξ_i, unbiased, with the stated variance."""
    x = normal(128)
    made = torch.stack(decoded(f"qsgd:levels={levels},block={block}", x, DRAWS)).double()
    parts = x.double().view(-1, block or 128)
    norms = parts.norm(dim=1, keepdim=True).expand_as(parts).reshape(-1)
    steps = made.abs() / norms * levels
    assert torch.allclose(steps, steps.round(), atol=1e-4)
    exact = x.double().abs() / norms * levels
    low = exact.floor()
    assert bool(((steps.round() == low) | (steps.round() == low + 1)).all())
    assert bool(((made == 0) | (made.sign() == x.sign())).all())
    chance = exact - low
    spread = (chance * (1 - chance)).sqrt() * norms / levels / DRAWS**0.5
    assert bool(((made.mean(0) - x).abs() <= 5 * spread + 1e-5).all())
    variance = (made - x.double()).square().sum(1).mean()
    size = block or 128
    assert float(variance) <= min(size / levels**2, size**0.5 / levels) * float(x.double().square().sum())


def test_powersgd_goes_on_from_its_last_q() -> None:
    """PowerSGD, Algorithm 1: P ← M Q, orthonormal, Q ← Mᵀ P; and M ≈ P Qᵀ."""
    codec = codecs.parse("powersgd:rank=2")
    state = codec.init(normal(12, 5, 2))
    q = state.kept["q0"].clone()
    assert q.shape == (10, 2)
    for seed in range(3):
        m = normal(12, 5, 2, seed=seed)
        p = torch.linalg.qr(m.view(12, 10) @ q).Q
        q = m.view(12, 10).T @ p
        frame, state = codec.encode(m, state)
        assert torch.allclose(decode(frame), (p @ q.T).view(12, 5, 2), atol=1e-5)
        assert torch.allclose(state.kept["q0"], q, atol=1e-5)
    same = normal(12, 5, 2, seed=9)
    for _ in range(30):
        frame, state = codec.encode(same, state)
    u, s, v = torch.linalg.svd(same.view(12, 10), full_matrices=False)
    best = (u[:, :2] * s[:2]) @ v[:2]
    assert torch.allclose(
        decode(frame).view(12, 10), best, atol=0.05
    )  # power iteration converges to the best rank-2 matrix


def test_dgc_corrects_and_masks_momentum_clips_and_warms_up() -> None:
    """Deep Gradient Compression, Algorithm 4: u ← m u + g, v ← v + u; sent elements are cleared in both."""
    count, clip, momentum, warmup = 1000, 5.0, 0.9, 4
    codec = codecs.parse(f"dgc:ratio=0.001,momentum={momentum},clip={clip},warmup={warmup},sample=0")
    state = codec.init(normal(count))
    u, v = torch.zeros(count), torch.zeros(count)
    sent = []
    for step in range(8):
        gradient = normal(count, seed=step)
        u = momentum * u + gradient * min(1.0, clip / float(gradient.norm()))
        v = v + u
        frame, state = codec.encode(gradient, state)
        out = decode(frame)
        places = out != 0
        many = int(places.sum())
        assert torch.equal(places.nonzero().view(-1), v.abs().topk(many).indices.sort().values)
        assert torch.allclose(out[places], v[places], atol=1e-5)
        u, v = u.masked_fill(places, 0), v.masked_fill(places, 0)
        assert torch.allclose(state.kept["velocity"], u, atol=1e-5)
        assert torch.allclose(state.kept["gathered"], v, atol=1e-5)
        sent.append(many)
    assert sent == [250, 62, 16, 4, 1, 1, 1, 1]  # section 3.3: a sparsity of 75, 93.75, 98.4375, 99.6 and 99.9 %


def test_dgc_clips_large_gradients_to_the_norm_and_not_to_nothing() -> None:
    x = torch.full((100,), 1e20)
    assert float(decode(framed("dgc:clip=1,ratio=1,momentum=0", x)).norm()) == pytest.approx(1)


def test_dgc_leaves_out_what_would_come_to_infinity() -> None:
    codec = codecs.parse("dgc:ratio=0.25,momentum=0.9,sample=0")
    x = torch.linspace(0.5, 1, 8) * 1.5e38
    state = codec.init(x)
    told = []
    for _ in range(5):
        before = {name: vector.clone() for name, vector in state.kept.items()}
        frame, state = codec.encode(x, state)
        told.append(bool(decode(frame).isnan().all()))
        if told[-1]:
            assert all(torch.equal(vector, before[name]) for name, vector in state.kept.items())
    assert any(told) and not told[0]


@pytest.mark.parametrize(
    ("spec", "scale"), [("signsgd:magnitude=1", 1.0), ("signsgd:magnitude=0.25", 0.25), ("signsgd", None)]
)
def test_signs_are_of_one_magnitude(spec: str, scale: float | None) -> None:
    """signSGD, Algorithm 1; the default magnitude 0 means ‖x‖₁ / n."""
    x = normal(300)
    (out,) = decoded(spec, x)
    assert torch.allclose(out, x.sign() * (scale or float(x.abs().mean())))


def test_signs_in_error_feedback() -> None:
    """EF-signSGD, Algorithm 1: p = g + e, Δ = ‖p‖₁ / d · sign(p), e ← p − Δ."""
    feedback = ErrorFeedback(codecs.parse("efsignsgd"))
    state, e = feedback.init(normal(300)), torch.zeros(300)
    for seed in range(4):
        p = normal(300, seed=seed) + e
        frame, state = feedback.encode(normal(300, seed=seed), state)
        assert torch.allclose(decode(frame), p.abs().mean() * p.sign(), atol=1e-5)
        e = p - decode(frame)
        assert torch.allclose(state.kept["error"], e, atol=1e-5)


@pytest.mark.parametrize("wide", [1, 5, 8, 11, 16])
def test_torch_packs_as_numpy_does(wide: int) -> None:
    """Values packed on a device are unpacked in host memory, and vice versa."""
    for count in (1, 8, 13, 1000):
        numbers = (normal(count, seed=wide) * 1e6).long() & (2**wide - 1)
        packed = packing.pack_bits(numbers, wide)
        assert torch.equal(packing.pack_bits_on_device(numbers, wide), packed)
        assert torch.equal(packing.unpack_bits(packed, count, wide), numbers)
        assert torch.equal(packing.unpack_bits_on_device(packed, count, wide), numbers)


# --- SparseLoCo: topk2 -----------------------------------------------------------------------------


RATIO, CHUNK, DECAY = 0.02, 500, 0.9
SPEC = f"topk2:ratio={RATIO},chunk={CHUNK},decay={DECAY}"


def sent(e: Tensor) -> Tensor:
    """Return Q(top-k of each chunk): ± the mean of the smaller or of the larger magnitudes, cut to bfloat16."""
    out = torch.zeros_like(e)
    for start in range(0, len(e), CHUNK):
        chunk = e[start : start + CHUNK]
        places = chunk.abs().topk(max(1, round(RATIO * len(chunk)))).indices
        magnitudes = chunk[places].abs().double()
        high = magnitudes >= magnitudes.mean()
        for some in (high, ~high):
            if some.any():
                level = (magnitudes[some].mean().float().view(torch.int32) & ~0xFFFF).view(torch.float32)
                out[start + places[some]] = level * chunk[places[some]].sign()
    return out


def test_the_accumulated_error_decays_and_each_chunk_sends_its_largest() -> None:
    """Algorithm 1: e ← β e + Δ, Δ̂ = Q(Top-k(e)), e ← e − Δ̂; chunks of very different scale, the last one short."""
    count = 3 * CHUNK + 130
    scale = torch.tensor([1.0, 1e-3, 50.0, 1.0]).repeat_interleave(CHUNK)[:count]
    feedback = ErrorFeedback(codecs.parse(SPEC))
    state, e = feedback.init(torch.zeros(count)), torch.zeros(count)
    for step in range(8):
        change = normal(count, seed=step) * scale
        e = DECAY * e + change
        frame, state = feedback.encode(change, state)
        assert torch.equal(decode(frame), sent(e))
        assert decode(frame).count_nonzero() == 3 * 10 + 3
        e = e - sent(e)
        assert torch.allclose(state.kept["error"], e, rtol=1e-5, atol=1e-7)


def test_a_difference_from_a_reference_does_not_decay() -> None:
    """There the difference holds what earlier frames left out, and the codec keeps no error."""
    codec, whole = codecs.parse(SPEC), normal(400)
    state, reference = codec.init(whole), torch.zeros(400)
    for _ in range(120):
        frame, state = codec.encode(whole - reference, state)
        reference += decode(frame)
    assert float((whole - reference).norm()) < 0.02 * float(whole.norm())


def test_an_index_takes_little_more_than_its_entropy() -> None:
    """An index below 4096 takes 12 bits; the choice of 82 of 4096 values holds log2 C(4096, 82) / 82 = 7.02 each."""
    x = normal(100 * 4096)
    frame = framed("topk2", x)
    chosen = 100 * 82
    bits = 8 * (encoded_bytes(frame)[1] - 13 - 4 * 100) / chosen - 2
    entropy = math.log2(math.comb(4096, 82)) / 82
    assert entropy < bits < 1.04 * entropy
    assert 8 * len(frame) < 9.7 * chosen


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3, 1.0])
def test_indices_come_back_whatever_share_is_sent(ratio: float) -> None:
    x = normal(10_000).exp() * normal(10_000, seed=1).sign()
    out = decode(framed(f"topk2:ratio={ratio},chunk=1000", x))
    rows = x.view(10, 1000)
    kept = torch.zeros_like(rows, dtype=torch.bool)
    kept.scatter_(1, rows.abs().topk(round(1000 * ratio)).indices, True)
    assert torch.equal(out != 0, kept.view(-1))
    assert torch.equal(out[out != 0].sign(), x[out != 0].sign())


# --- Lloyd, "Least squares quantization in PCM" (1982) -------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "levels", "error"), [(1, [0.798], 0.3634), (2, [0.4528, 1.510], 0.1175), (3, [], 0.0345)]
)
def test_lloyd_has_the_least_error_of_normal_values(bits: int, levels: list[float], error: float) -> None:
    """Max, "Quantizing for minimum distortion" (1960), Table I: magnitudes and error for 2, 4 and 8 levels."""
    x = normal(200_000)
    (made,) = decoded(f"lloyd:bits={bits}", x)
    found = made.abs().unique()
    assert len(found) == 1 << bits - 1
    assert found[: len(levels)].tolist() == pytest.approx(levels, abs=0.01)
    assert float((x - made).square().mean()) == pytest.approx(error, rel=0.02)
    assert all(float(x[made.abs() == level].abs().mean()) == pytest.approx(float(level), rel=1e-4) for level in found)
