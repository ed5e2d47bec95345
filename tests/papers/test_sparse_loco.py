"""Sarfi, Thérien, Lidin, Belilovsky, Communication Efficient LLM Pre-training with SparseLoCo (2025): ``topk2``."""

from __future__ import annotations

import math

import pytest
import torch
from encoded import normal
from torch import Tensor

from gossipx import codecs
from gossipx.codecs import ErrorFeedback, decode, encoded_bytes

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
    codec = codecs.parse("topk2")
    frame, _ = codec.encode(x, codec.init(x))
    chosen = 100 * 82
    bits = 8 * (encoded_bytes(frame)[1] - 13 - 4 * 100) / chosen - 2
    entropy = math.log2(math.comb(4096, 82)) / 82
    assert entropy < bits < 1.04 * entropy
    assert 8 * len(frame) < 9.7 * chosen


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3, 1.0])
def test_indices_come_back_whatever_share_is_sent(ratio: float) -> None:
    x = normal(10_000).exp() * normal(10_000, seed=1).sign()
    codec = codecs.parse(f"topk2:ratio={ratio},chunk=1000")
    out = decode(codec.encode(x, codec.init(x))[0])
    rows = x.view(10, 1000)
    kept = torch.zeros_like(rows, dtype=torch.bool)
    kept.scatter_(1, rows.abs().topk(round(1000 * ratio)).indices, True)
    assert torch.equal(out != 0, kept.view(-1))
    assert torch.equal(out[out != 0].sign(), x[out != 0].sign())
