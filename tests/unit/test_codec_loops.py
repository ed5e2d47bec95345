"""Compiled loops on real gradients: they select and lay out values exactly as torch does."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
import torch
from encoded import normal
from gradients import MODELS, recorded
from numba.core import caching

from gossipx import codecs
from gossipx.codecs import ErrorFeedback, Tensors, decode, decode_into, encoded_bytes, loops
from gossipx.codecs.base import PerTensor
from gossipx.codecs.sparse import DGC, TopK

COUNTS = [1, 2, 7, 8, 9, 0, 64, 1025, 4096, 4097, 20_000]


def bits(spec: str, model: str) -> float:
    """Return the payload per value over all steps, with error feedback, and check that nothing is lost."""
    tensors, steps = recorded(model)
    feedback = ErrorFeedback(codecs.parse(spec))
    state, out, size = feedback.init(tensors), torch.zeros(tensors.length), 0
    for step in steps:
        frame, state = feedback.encode(step, state)
        decode_into(frame, out, add=True)
        size += encoded_bytes(frame)[1]
    assert torch.allclose(out + state.kept["error"], steps.sum(0), atol=1e-5)
    return 8 * size / steps.numel()


@pytest.mark.parametrize("model", MODELS)
def test_real_gradients_take_fewer_bits_the_higher_the_sparsity(model: str) -> None:
    """3LC, Table 2: below 1.6 bits, and fewer with every sparsity. Scales are included."""
    each = [bits(f"3lc:sparsity={sparsity}", model) for sparsity in (1.0, 1.5, 1.75, 1.9)]
    assert 1.6 > each[0] > each[1] > each[2] > each[3] > 1.6 / 70
    assert 8 < bits("int8", model) < 8.1


@pytest.mark.parametrize("model", MODELS)
def test_a_sampled_threshold_sends_about_as_many_of_real_gradients(model: str) -> None:
    tensors, steps = recorded(model)
    codec = codecs.parse("topk:ratio=0.05,sample=0.01")
    sent = []
    for seed in range(10):
        for step in steps:
            frame, _ = codec.encode(step, codec.init(tensors, seed))
            sent.append(int(decode(frame).count_nonzero()) / tensors.length)
    assert 0.04 < np.mean(sent) < 0.06


@pytest.mark.parametrize("codec", [TopK(0.3), TopK(0.01), TopK(0.001), TopK(1.0)])
@pytest.mark.parametrize("fed", [False, True])
def test_frames_are_those_of_torch(codec: TopK, fed: bool) -> None:
    """Bit masks and packed indices, tensors of odd lengths, with and without an error."""
    x, left = normal(sum(COUNTS)), normal(sum(COUNTS), seed=1)
    wanted = x + left if fed else x
    tensors = Tensors.of(*x.split(COUNTS))
    frame, _ = codec.encode(x, codec.init(tensors), left=left if fed else None)
    state = codec.init(tensors)
    assert state.plan is not None
    by_torch, sizes = np.zeros(codec.most(state), np.uint8), np.zeros(len(COUNTS), np.int64)
    end = PerTensor._encode(codec, wanted, None, state, state.plan, by_torch, 0, sizes)
    assert bytes(frame)[-end:] == by_torch[:end].tobytes()
    out = decode(frame)
    if fed:
        assert torch.equal(out + left, wanted)
        assert not bool((out.bool() & left.bool()).any())
    for begin, size, values in zip(np.cumsum(sizes) - sizes, sizes, out.split(COUNTS), strict=True):
        if size:
            data = by_torch[begin : begin + size]
            assert torch.equal(codec._values(data, (), len(values), torch.device("cpu")), values)


def test_of_equal_values_just_as_many_are_sent_as_the_ratio_says() -> None:
    x = torch.cat((torch.full((5000,), -2.0), torch.full((5,), 3.0), torch.ones(5000)))
    codec = codecs.parse("topk:ratio=0.1")
    left = torch.zeros_like(x)
    frame, _ = codec.encode(x, codec.init(x), left=left)
    out = decode(frame)
    assert int(out.count_nonzero()) == 1000
    assert bool((out[5000:5005] == 3).all())
    assert bool((out[:995] == -2).all())
    assert torch.equal(out + left, x)


def test_another_seed_samples_other_values() -> None:
    x = normal(200_000)
    codec = codecs.parse("topk:ratio=0.01,sample=0.005")
    many = {int(decode(codec.encode(x, codec.init(x, seed))[0]).count_nonzero()) for seed in range(8)}
    assert len(many) > 4
    state = codec.init(x)
    first, state = codec.encode(x, state)
    many = {len(first)}
    for _ in range(7):
        frame, state = codec.encode(x, state)
        many.add(len(frame))
    assert len(many) > 4


def test_adding_touches_what_was_sent_alone() -> None:
    """Frames of codecs without a compiled encoder are decoded alike."""
    x = normal(30_000)
    for codec in (TopK(0.01), TopK(0.2), DGC(0.01)):
        frame, _ = codec.encode(x, codec.init(x))
        out = torch.full_like(x, -0.0)  # adding zero would change the sign
        decode_into(frame, out, add=True)
        assert bool(out[~decode(frame).bool()].signbit().all())


@pytest.mark.fault(57)
@pytest.mark.parametrize("fault", ["no directory", "full disk"])
def test_loops_work_where_they_cannot_be_cached(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    monkeypatch.setattr(loops, "_told", [])
    if fault == "no directory":
        monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    else:
        monkeypatch.setattr(caching.IndexDataCacheFile, "save", raises)

    def doubled(x: float) -> float:
        return 2 * x

    for _ in range(2):
        assert loops.loop(doubled)(21.0) == 42.0
    assert len(loops.LOOPS) > 2
    del loops.LOOPS[-2:]
    assert caplog.text.count("compiled codecs cannot be kept") == 1


def raises(*given: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
