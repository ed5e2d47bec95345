"""Properties of every codec."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from encoded import SPECS, normal
from seeds import some
from torch import Tensor

from gossipx import codecs
from gossipx.codecs import ErrorFeedback, Tensors, decode, decode_into
from gossipx.codecs.changes import checksum
from gossipx.errors import ProtocolError, UsageError

EXACT = {"none", "none+zlib"}

every = pytest.mark.parametrize("spec", SPECS)


def round_trip(spec: str, tensor: Tensor) -> Tensor:
    codec = codecs.parse(spec)
    frame, _ = codec.encode(tensor, codec.init(tensor))
    return decode(frame)


@every
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 0, 2), (16, 3, 3, 3), (5121,), (2, 10_000)])
def test_shape_and_dtype_come_back(spec: str, shape: tuple[int, ...]) -> None:
    tensor = normal(*shape)
    back = round_trip(spec, tensor)
    assert back.shape == tensor.shape
    assert back.dtype == tensor.dtype
    assert bool(back.isfinite().all())


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_decoded_to_what_they_were(spec: str, dtype: torch.dtype) -> None:
    tensor = normal(64, 9).to(dtype)
    back = round_trip(spec, tensor)
    assert back.dtype == dtype
    assert torch.allclose(back.float(), round_trip(spec, tensor.float()), rtol=0.01)


@every
def test_float64_beyond_float32_is_not_finite(spec: str) -> None:
    tensor = torch.tensor([1e300, 1.0], dtype=torch.float64)
    back = round_trip(spec, tensor)
    if spec in EXACT or "small" in spec:
        assert torch.equal(back, tensor)
    else:
        assert bool(back.isnan().all())


@pytest.mark.slow  # a minute, and 10 GiB
@pytest.mark.timeout(600)
def test_a_huge_tensor() -> None:
    """One tensor of a little more than 4 GiB, whose size exceeds 32 bits. One codec at a time."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if memory < 14 * 2**30:
        pytest.skip(f"it takes 14 GiB, of which {memory / 2**30:.0f} are free")
    tensor = torch.zeros(2**30 + 77)
    tensor[-1], tensor[2**29] = 1.0, -1.0
    for spec in ("int8", "3lc", "topk:sample=0.01"):
        codec = codecs.parse(spec)
        frame, _ = codec.encode(tensor, codec.init(tensor))
        with pytest.raises(ProtocolError, match="at most 1073741824 are allowed"):
            decode(frame)
        back = decode(frame, limit=2**33)
        kept = [float(back[place]) for place in (0, 2**29, -1)]
        assert kept == pytest.approx([0, -1, 1], abs=0.01)
        del frame, back


@every
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_what_has_no_order_or_no_digits_is_refused_by_all_that_lose_some(spec: str, dtype: torch.dtype) -> None:
    tensor = torch.ones(4, dtype=dtype)
    if spec in EXACT:
        assert torch.equal(round_trip(spec, tensor), tensor)
    else:
        with pytest.raises(UsageError, match="floating-point tensors"):
            codecs.parse(spec).init(tensor)


@every
@pytest.mark.parametrize("value", some([math.nan, math.inf, -math.inf], -math.inf))
def test_what_is_not_finite_comes_back_as_nan_and_leaves_the_error_as_it_was(spec: str, value: float) -> None:
    codec = codecs.parse(spec)
    tensors = Tensors.of(normal(50), normal(60))
    feedback = ErrorFeedback(codec)
    state = feedback.init(tensors)
    _, state = feedback.encode(normal(110), state)
    before = state.kept["error"].clone()
    bad = normal(110, seed=1)
    bad[17] = value
    frame, state = feedback.encode(bad, state)
    back = decode(frame)
    if spec in EXACT:
        assert torch.equal(back.nan_to_num(7.0), bad.nan_to_num(7.0))
    else:
        assert bool(back[:50].isnan().all())
        assert torch.equal(state.kept["error"][:50], before[:50])
    assert bool(back[50:].isfinite().all())  # the other tensor is unaffected


@every
def test_zeros_come_back_as_zeros(spec: str) -> None:
    tensor = torch.zeros(300)
    back = round_trip(spec, tensor)
    if spec == "signsgd:magnitude=1":
        assert bool((back.abs() == 1).all())
    else:
        assert torch.equal(back, tensor)


BEYOND = ("qsgd:levels=4,block=0", "powersgd", "stochastic3", "signsgd:magnitude")
"""Codecs whose result does not scale with the values: NaN, other random draws, or a fixed magnitude."""


@every
@pytest.mark.parametrize("factor", [2.0**-146, 2.0**-126, 2.0**-100, 2.0**100, 2.0**122])
def test_the_ends_of_the_range_of_numbers(spec: str, factor: float) -> None:
    """Values of any magnitude decode like those of another power of two, or to zero where float32 has few bits left."""
    tensor = normal(40, 30)
    back = round_trip(spec, tensor * factor)
    if factor < 2.0**-110:
        assert bool(back.isfinite().all())
    elif spec.startswith("fp16"):
        assert torch.equal(back, (tensor * factor).clamp(-65504, 65504).half().float())
    elif spec.startswith(BEYOND):
        assert bool(back.isfinite().all()) or bool(back.isnan().all())
    else:
        assert torch.allclose(back / factor, round_trip(spec, tensor), rtol=1e-5)


@every
def test_the_largest_and_the_smallest_numbers_leave_no_mark(spec: str) -> None:
    """The result is defined for all values, NaN where sums exceed float32; the next frame is unaffected."""
    feedback = ErrorFeedback(codecs.parse(spec))
    state = feedback.init(torch.zeros(2, 3))
    largest = torch.finfo(torch.float32).max
    for values in ([largest, 1.0, 0.0], [-largest, largest, 1.0], [1e-45, -1e-45, 0.0]):
        tensor = torch.tensor([values, values])
        frame, state = feedback.encode(tensor, state)
        decode(frame)
        assert bool(state.kept["error"].isfinite().all())
    state.kept["error"].zero_()
    tensor = normal(2, 3)
    frame, state = feedback.encode(tensor, state)
    assert bool(decode(frame).isfinite().all())


@every
def test_not_contiguous_is_as_a_copy_that_is(spec: str) -> None:
    tensor = normal(30, 40).T[::2]
    assert not tensor.is_contiguous()
    assert torch.equal(round_trip(spec, tensor), round_trip(spec, tensor.contiguous()))


@every
def test_decoding_into_adds_or_overwrites(spec: str) -> None:
    tensor = normal(30, 40)
    codec = codecs.parse(spec)
    frame, _ = codec.encode(tensor, codec.init(tensor))
    values = decode(frame)
    out = torch.full_like(tensor, 2.0)
    decode_into(frame, out, add=True)
    assert torch.allclose(out, values + 2)
    decode_into(frame, out)
    assert torch.equal(out, values)
    spread = torch.zeros(40, 30).T
    decode_into(frame, spread)
    assert torch.equal(spread, values)
    wide = torch.full((30, 40), 2.0, dtype=torch.float64)
    decode_into(frame, wide, add=True)
    assert torch.allclose(wide, values.double() + 2)


@every
def test_tensors_of_a_vector_are_encoded_as_each_alone(spec: str) -> None:
    """Each tensor has its own scale; gaps are ignored. Random codecs draw differently and are excluded."""
    one, two = normal(16, 27), normal(33) * 100
    tensors = Tensors(((16, 27), (33,), (0,)), torch.float32, (16, 512, 600))
    vector = torch.full((640,), 1e9)
    vector[16:448], vector[512:545] = one.view(-1), two
    codec = codecs.parse(spec)
    frame, _ = codec.encode(vector, codec.init(tensors))
    out = torch.full((640,), -1.0)
    decode_into(frame, out, tensors=tensors)
    assert bool((out[:16] == -1).all() & (out[448:512] == -1).all() & (out[545:] == -1).all())
    if codecs.describe(codec).partition(":")[0] not in ("stochastic3", "qsgd", "powersgd"):
        assert torch.equal(out[16:448], round_trip(spec, one).view(-1))
        assert torch.equal(out[512:545], round_trip(spec, two))


@pytest.mark.parametrize("spec", [*SPECS, "dgc:clip=1e300", "dgc:clip=1e+20+zlib"])
def test_spec_reads_as_it_was_given(spec: str) -> None:
    codec = codecs.parse(spec)
    assert codecs.parse(codecs.describe(codec)) == codec


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not codecs.parse(spec).gradients_only])
def test_error_feedback_loses_nothing(spec: str) -> None:
    """The sum of all inputs equals all outputs plus the accumulated error (3LC, section 3.1, steps 1, a, b).

    A codec with ``decay`` first forgets that part of the error (SparseLoCo, Algorithm 1).
    """
    codec = codecs.parse(spec)
    feedback, decay = ErrorFeedback(codec), getattr(codec, "decay", 1.0)
    state = feedback.init(normal(20, 30))
    total, out = torch.zeros(20, 30), torch.zeros(20, 30)
    for seed in range(6):
        tensor = normal(20, 30, seed=seed)
        total += tensor - (1 - decay) * state.kept["error"].view(20, 30)
        frame, state = feedback.encode(tensor, state)
        decode_into(frame, out, add=True)
    assert torch.allclose(out + state.kept["error"].view(20, 30), total, atol=1e-4)


TRACKING = [spec for spec in SPECS if not codecs.parse(spec).gradients_only and "magnitude" not in spec]


@pytest.mark.parametrize("spec", TRACKING)
def test_in_error_feedback_what_is_left_out_never_grows_and_is_made_good(spec: str) -> None:
    """‖x − Q(x)‖ ≤ ‖x‖, which error feedback and references require (CHOCO-SGD, Assumption 1)."""
    codec = dataclasses.replace(codecs.parse(spec), feedback=True)
    left = whole = normal(24, 40)
    state = codec.init(left)
    for _ in range(60):
        frame, state = codec.encode(left, state)
        rest = left - decode(frame)
        assert float(rest.norm()) <= 1.0001 * float(left.norm())
        left = rest
    assert float(left.norm()) < 0.3 * float(whole.norm())


@every
def test_no_frame_is_longer_than_told(spec: str) -> None:
    codec = codecs.parse(spec)
    for tensor in (normal(1), normal(3000), normal(3000).sign(), torch.full((3000,), 5.0)):
        state = codec.init(tensor)
        most = codec.most(state)
        buffer = np.full(most + 100, 170, np.uint8)
        for _ in range(3):
            frame, state = codec.encode(tensor, state, buffer)
            assert codec.squeezed or len(frame) <= most
            assert bool((buffer[most:] == 170).all())


@pytest.mark.parametrize("spec", some(["onebit+zlib", "onebit+zstd", "int8+zlib"], "int8+zlib"))
def test_what_does_not_squeeze_is_within_the_longest_that_another_may_send(spec: str) -> None:
    tensor = torch.rand(2**25, generator=torch.Generator().manual_seed(0)) - 0.5
    codec = codecs.parse(spec)
    frame, _ = codec.encode(tensor, state := codec.init(tensor))
    assert len(frame) <= codec.longest(Tensors.of(tensor))
    assert codec.most(state) < codec.longest(Tensors.of(tensor.view(2**20, 32)))


def test_a_state_is_of_the_codec_that_began_it() -> None:
    """Otherwise a frame would be written with the header and the buffer size of another codec."""
    tensor = normal(1000)
    state = codecs.parse("int8").init(tensor)
    for spec in ("int8:block=64", "3lc", "int8+zlib"):
        with pytest.raises(UsageError, match=r"the state was made by Int8.*, it cannot be used with"):
            codecs.parse(spec).encode(tensor, state)
    codecs.parse("int8").encode(tensor, state)


@every
def test_nothing_is_written_beyond_what_was_given(spec: str) -> None:
    """Buffers are checked, since compiled loops do not check bounds."""
    codec, tensor = codecs.parse(spec), normal(1000)
    state = codec.init(tensor)
    for out in (np.zeros(codec.most(state) - 1, np.uint8), np.zeros(codec.most(state), np.float32)):
        with pytest.raises(UsageError, match="out must have at least"):
            codec.encode(tensor, state, out)
    for left in (torch.zeros(999), torch.zeros(1000, dtype=torch.float64), torch.zeros(10, 100)):
        with pytest.raises(UsageError, match=r"left must be float32 \[1000\]"):
            codec.encode(tensor, state, left=left)
    frame, state = codec.encode(tensor, state)
    with pytest.raises(UsageError, match="do not fit into a tensor of"):
        decode_into(frame, torch.zeros(300), tensors=Tensors.of(tensor))


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_is_of_no_account(spec: str, dtype: torch.dtype) -> None:
    tensor = normal(30, 40)

    def made() -> tuple[bytes, Tensor]:
        codec = codecs.parse(spec)
        frame, _ = codec.encode(tensor, codec.init(tensor))
        return bytes(frame), decode(frame)

    before = made()
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        after = made()
    finally:
        torch.set_default_dtype(usual)
    assert before[0] == after[0] and torch.equal(before[1], after[1])


def test_frames_decode_to_the_same_bits_on_another_processor(tmp_path: Path) -> None:
    """Both ends identify references by checksums of decoded values, so decoding must be exact on every processor."""
    tensor = normal(130, 70)
    here = []
    for number, spec in enumerate(SPECS):
        codec = codecs.parse(spec)
        frame, _ = codec.encode(tensor, codec.init(tensor))
        (tmp_path / str(number)).write_bytes(frame)
        here.append(str(checksum(decode(frame).view(-1))))
    program = """
import sys, pathlib
from gossipx.codecs import decode
from gossipx.codecs.changes import checksum
for number in range(int(sys.argv[2])):
    print(checksum(decode((pathlib.Path(sys.argv[1]) / str(number)).read_bytes()).view(-1)))
"""
    plain = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}  # only instructions that all processors have
    command = [sys.executable, "-c", program, str(tmp_path), str(len(SPECS))]
    there = subprocess.run(command, env=os.environ | plain, capture_output=True, text=True, timeout=120, check=True)
    told = there.stdout.split()
    assert [spec for spec, one, other in zip(SPECS, here, told, strict=True) if one != other] == []


@every
def test_what_a_state_keeps_is_all_that_a_checkpoint_needs(spec: str) -> None:
    """Frames are of the codec, its state and the input alone."""
    feedback = ErrorFeedback(codecs.parse(spec))
    state = feedback.init(normal(40, 30), seed=5)
    for seed in range(3):
        _, state = feedback.encode(normal(40, 30, seed=seed), state)
    kept, frames = {name: vector.clone() for name, vector in state.kept.items()}, state.frames
    expected, _ = feedback.encode(normal(40, 30, seed=9), state)

    resumed = feedback.init(normal(40, 30), seed=5)
    resumed.kept, resumed.frames = kept, frames
    frame, _ = feedback.encode(normal(40, 30, seed=9), resumed)
    assert bytes(frame) == bytes(expected)


@every
def test_a_frame_of_another_shape_is_refused_and_nothing_changed(spec: str) -> None:
    tensor = normal(30, 40)
    codec = codecs.parse(spec)
    state = codec.init(tensor)
    frame, state = codec.encode(tensor, state)
    out = torch.ones(30, 41)
    with pytest.raises(ProtocolError, match=", expected "):
        decode_into(frame, out)
    assert bool((out == 1).all())
    with pytest.raises(ProtocolError, match="at most 100 are allowed"):
        decode(frame, limit=100)
    with pytest.raises(UsageError, match="the state is for float32"):
        codec.encode(normal(30, 41), state)
    with pytest.raises(UsageError, match="the state is for float32"):
        codec.encode(tensor.double(), state)


@pytest.mark.cuda
@every
def test_tensors_on_a_device_are_encoded_and_decoded_there(spec: str) -> None:
    """Devices give the results of host memory, except for random draws and the rounding of sums in another order."""
    tensor = normal(60, 100)
    feedback = ErrorFeedback(codecs.parse(spec))
    there, here = tensor.cuda(), tensor.clone()
    state, other_state = feedback.init(there), feedback.init(here)
    for _ in range(3):
        frame, state = feedback.encode(there, state)
        other, other_state = feedback.encode(here, other_state)
        out = torch.ones_like(there)
        decode_into(frame, out, add=True)
        assert torch.allclose(out.cpu(), decode(frame) + 1, atol=1e-6)
        assert state.kept["error"].is_cuda
        drawn = ("stochastic3", "qsgd", "powersgd", "dgc", "topk:ratio=0.05,sample")
        if not spec.startswith(drawn):
            assert torch.allclose(decode(frame), decode(other), atol=1e-5)
