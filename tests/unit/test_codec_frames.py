"""Codecs: the contents of frames, that malformed ones do no harm, custom codecs, and specs."""

from __future__ import annotations

import errno
import os
import random
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar, final

import numpy as np
import pytest
import torch
import xxhash
from drawn_frames import mutated_bytes
from encoded import MODELS, SPECS, normal, recorded
from numba.core import caching
from torch import Tensor

from gossipx import codecs
from gossipx.codecs import ErrorFeedback, PerTensor, State, Tensors, decode, decode_into, frames, loops, loops_sparse
from gossipx.codecs.sparse import DGC, TopK
from gossipx.errors import ProtocolError, UsageError
from gossipx.specs import plugins

LIMIT = 2**20
LOOPS = (loops, loops_sparse)
GUARDED = np.ones(2 * 4096 + 200, np.float32)
INTACT = GUARDED.tobytes()
OUT = torch.from_numpy(GUARDED)[4096:-4096]
"""The memory that frames are decoded into; the values around it must not change."""
EXPECTED = (None, Tensors(((30,), (40,)), torch.float32, (10, 50)))
"""Layouts of a vector of that length: one that fills it, and two tensors with gaps; both kinds are encoded below."""


def a_frame(spec: str, *counts: int, seed: int = 0) -> bytes:
    codec = codecs.parse(spec)
    tensors = [normal(count, seed=seed + place) for place, count in enumerate(counts)]
    state = codec.init(Tensors.of(*tensors), seed)
    frame, _ = codec.encode(torch.cat(tensors) if len(tensors) > 1 else tensors[0], state)
    return bytes(frame)


def sealed(frame: bytes | bytearray) -> bytes:
    """Return the frame with a valid checksum, so that the checks behind the checksum are reached."""
    body = bytearray(frame)
    if len(body) >= frames.HEAD:
        digest = xxhash.xxh3_64(bytes(body[:6]) + bytes(body[10:])).intdigest()
        struct.pack_into("<I", body, 6, digest & 0xFFFFFFFF)
    return bytes(body)


def survives(frame: bytes) -> bool:
    """Return whether a frame decodes, within the limit. Decoding into a vector adds to it, or leaves it unchanged."""
    for expected in EXPECTED:
        try:
            decode_into(frame, OUT, add=True, tensors=expected)
        except ProtocolError:
            pass
        else:
            OUT.fill_(1)
        assert GUARDED.tobytes() == INTACT
    try:
        values = decode(frame, LIMIT)
    except ProtocolError:
        return False
    assert values.nbytes <= LIMIT
    return True


def mutated(frame: bytes, draws: random.Random) -> bytes:
    body = bytearray(mutated_bytes(frame, draws))
    if draws.random() < 0.2 and len(body) > 4:
        body[4] = draws.randrange(len(frames.DTYPES))
    return sealed(body)


@pytest.mark.fault(43)
def test_a_bitmap_with_bits_behind_the_last_value_is_refused() -> None:
    """Fault 43: seven padding bits were set, which marked values past the vector's end."""
    frame = bytearray(a_frame("topk:ratio=0.5", 5121))
    guarded = torch.ones(4096 + 5121 + 4096)
    out = guarded[4096:-4096]
    opened = frames.open_frame(bytes(frame))
    last = len(frame) - len(opened.body) + int(opened.offsets[0]) + 8 + (5121 + 7) // 8 - 1
    frame[last] |= 0xFE
    with pytest.raises(ProtocolError, match="is not a sparse tensor of its size"):
        decode_into(sealed(frame), out)
    assert bool((guarded == 1).all())


@pytest.mark.fault(43)
def test_loops_refuse_tensors_outside_their_arrays() -> None:
    """Fault 43: the loops refuse a tensor that the check before them missed."""
    written = np.zeros(64, np.uint8)
    body, out = written.view(), np.zeros(8, np.float32)
    body.flags.writeable = False  # as it is for frames: other arrays would be compiled for anew
    for loop in (loops.levels_into, loops_sparse.sparse_into, loops.three_lc_into):
        for offsets, start in (([0, 65], 0), ([0, 9], 1), ([0, 9], -1), ([9, 0], 0)):
            with pytest.raises(IndexError, match="lie outside"):
                loop(body, np.array(offsets), np.array([8]), out, np.array([start]), False)
    written[0], written[8:10] = 4, (0b111, 0b10000000)  # 4 of 10 values, the last at index 15
    ends, counts, starts = np.array([0, 26]), np.array([10]), np.array([0])
    with pytest.raises(IndexError, match="lie outside"):
        loops_sparse.sparse_into(body, ends, counts, np.zeros(10, np.float32), starts, False)


SMALL = ((1,), (9,), (70,), (200,), (30, 40), (12, 0, 5))
LONG = ((5121,), (20_000,), (6000, 9, 4100))
"""Sizes around the ends of the loops' chunks."""


def fuzz(many: int, seed: int, of: Sequence[tuple[int, ...]] = SMALL) -> int:
    """Return how many of ``many`` mutated frames of all codecs still decode.

    Args:
        of: the tensors that a frame holds.
    """
    draws = random.Random(seed)
    whole = [a_frame(spec, *counts) for spec in SPECS for counts in of]
    return sum(survives(mutated(draws.choice(whole), draws)) for _ in range(many))


@pytest.mark.fault(13, 14, 23, 43)
def test_frames_survive_being_damaged_on_purpose() -> None:
    decoded = fuzz(25_000, seed=0)
    assert 0 < decoded < 12_500  # some mutations are valid frames, most are not


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.fault(43)
def test_loops_stay_within_their_arrays(tmp_path: Path) -> None:
    """Loops compiled with bounds checks, which they do not have otherwise."""
    looked = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    code = "import test_codec_frames as here; print(here.fuzz(20_000, 0, here.LONG + here.SMALL))"
    env = os.environ | looked | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_every_bit_is_covered_by_the_checksum() -> None:
    frame = a_frame("3lc", 40)
    for bit in range(len(frame) * 8):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            decode(damaged)
    for size in range(len(frame)):
        with pytest.raises(ProtocolError):
            decode(frame[:size])


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 0x50, "not a codec's frame"),
        (2, 2, "has version 2, this peer reads version 1"),
        (3, 8, "is of an earlier version: codec 'natural' has been retired: use int8 or qsgd"),
        (3, 250, "has codec number 250, which this peer does not know"),
        (4, 99, "a dtype or flags that this version does not know"),
        (5, 0x80, "a dtype or flags that this version does not know"),
        (10, 255, "ends before its shapes"),
    ],
)
def test_what_a_header_has_wrong_is_told(place: int, value: int, message: str) -> None:
    frame = bytearray(a_frame("3lc", 40))
    frame[place] = value
    with pytest.raises(ProtocolError, match=message):
        decode(sealed(frame))


@pytest.mark.parametrize("by", ["zlib", "zstd"])
def test_a_bomb_is_not_unpacked(by: str) -> None:
    """Fault 24: the size of a small compressed body is limited before it is decompressed."""
    bomb = bytes(2**28)
    whole = bytearray(a_frame(f"3lc+{by}", 40))
    (size,) = struct.unpack_from("<I", whole, 10)
    shapes = whole[14 : 14 + size]
    packed = zlib.compress(bomb) if by == "zlib" else frames.zstandard().ZstdCompressor().compress(bomb)
    with pytest.raises(ProtocolError, match=r"another size than declared|decompresses to"):
        decode(sealed(whole[:14] + shapes + packed))
    honest = shapes[:-1] + b"\x80\x80\x80\x80\x01"
    struct.pack_into("<I", whole, 10, len(honest))
    with pytest.raises(ProtocolError, match="its tensors take less than"):
        decode(sealed(whole[:14] + honest + packed))


def shapes(numbers: list[int]) -> bytes:
    """Return numbers as varints."""
    made = bytearray()
    for number in numbers:
        frames._put_varint(number, made)
    return bytes(made)


def of_shapes(told: bytes, body: bytes, codec: int = 0, dtype: int = 0, flags: int = 0) -> bytes:
    return sealed(struct.pack("<2sBBBBII", b"gx", 1, codec, dtype, flags, 0, len(told)) + told + body)


ZLIB, PLAIN = 32, 4
MANY = shapes([2**16] + [0] * 2**16)
DAMAGING = {
    "many tensors, one after the other": lambda: [
        of_shapes(shapes([2**16, *([1] * (2**16 - 1)), number]), b"", flags=PLAIN) for number in (5, 11)
    ],
    "empty tensors, a squeezed body": lambda: [
        of_shapes(MANY + shapes([2**26]), zlib.compress(bytes(2**26)), codec=3, flags=ZLIB)
    ],
    "far more values than expected, squeezed": lambda: [
        of_shapes(shapes([1, 2**24, 2**27]), zlib.compress(bytes(2**27)), codec=3, dtype=6, flags=ZLIB | 1)
    ],
    "drawn values, none of which is there": lambda: [
        of_shapes(shapes([1, 2**22]), struct.pack("<HQI", 12, 1, 2**32 - 1), codec=14, flags=1)
    ],
}


@pytest.mark.parametrize("name", DAMAGING)
def test_what_a_refused_frame_takes_is_bounded_by_what_was_expected(name: str) -> None:
    """Fault 24: allocations are below nine times the limit or the frame's size, plus a few MB for its shapes."""
    limit = 2**24
    for made in DAMAGING[name]():
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolError):
                decode(made, limit)
            with pytest.raises(ProtocolError):
                decode_into(made, torch.zeros(2**20))
            left, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 9 * limit
        assert left < 2**20


def compiled() -> int:
    """Return the number of compiled variants of all loops."""
    loops = [loop for module in LOOPS for loop in vars(module).values()]
    return sum(len(loop.signatures) for loop in loops if hasattr(loop, "signatures"))


@pytest.mark.parametrize("spec", ["3lc", "int8", "topk"])
def test_loops_are_compiled_once_whatever_a_frame_lies_in(spec: str) -> None:
    """The warm-up decodes its own frames; frames from other peers lie in another kind of memory."""
    frame = a_frame(spec, 100)
    decode(frame)
    before = compiled()
    for kind in (bytearray, memoryview, lambda data: np.frombuffer(bytearray(data), np.uint8)):
        decode(kind(frame))
    assert compiled() == before


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_values_of_a_dtype_that_cannot_be_added_are_refused_before_any_is(dtype: torch.dtype) -> None:
    """Frames with an encoded tensor before the plain one, and with plain ones only."""
    mixed = bytearray(a_frame("3lc:small=5", 8, 1))
    mixed[4] = frames.DTYPES.index(dtype)
    plain = codecs.parse("none").encode(
        torch.ones(9, dtype=dtype), codecs.parse("none").init(torch.ones(9, dtype=dtype))
    )
    for frame, into in ((sealed(mixed), torch.float32), (plain[0], torch.int32 if dtype.is_complex else torch.bool)):
        out = torch.ones(9, dtype=into)
        with pytest.raises(ProtocolError):
            decode_into(frame, out, add=True)
        assert bool((out == 1).all())


@pytest.mark.fault(14)
def test_a_tensor_of_2_to_the_63_is_refused_before_anything_is_allocated() -> None:
    start = struct.pack("<2sBBBBII", b"gx", 1, 3, 0, 1, 0, 10)
    frame = sealed(start + b"\x01" + b"\xff" * 8 + b"\x7f" + bytes(20))
    with pytest.raises(ProtocolError, match="at most 1073741824 are allowed"):
        decode(frame)


def test_frames_say_what_they_are() -> None:
    """The size of a frame's header, and of the rest."""
    frame = a_frame("3lc:sparsity=1", 36_864)
    assert frame[:6] == bytes((*b"gx", 1, 3, 0, 1))
    values, size = codecs.encoded_bytes(frame)
    assert values == 36_864
    assert len(frame) - size == 14 + 1 + 3 + 2  # header, dimensions, 36,864 as a varint, a table of one number


def test_small_tensors_and_normalisation_are_left_as_they_are() -> None:
    tensors = Tensors(((3,), (400,), (40,)), torch.float32, (0, 3, 403), plain=(False, False, True))
    vector = normal(443)
    for spec, exact in (("3lc:small=10", [True, False, True]), ("3lc", [False, False, False])):
        codec = codecs.parse(spec)
        frame, _ = codec.encode(vector, codec.init(tensors))
        back = decode(frame)
        same = [torch.equal(back[a:b], vector[a:b]) for a, b in ((0, 3), (3, 403), (403, 443))]
        assert same == exact
        out = torch.zeros(443)
        decode_into(frame, out, tensors=tensors)
        assert torch.equal(out, back)


def test_a_tensor_larger_than_what_is_left_for_it() -> None:
    with pytest.raises(ProtocolError, match=", expected "):
        decode_into(a_frame("3lc", 40), torch.zeros(41))
    tensors = Tensors.of(normal(20), normal(20))
    with pytest.raises(ProtocolError, match=", expected "):
        decode_into(a_frame("3lc", 40), torch.zeros(40), tensors=tensors)


def test_tensors_of_a_vector_lie_one_after_the_other() -> None:
    with pytest.raises(ValueError, match="must not overlap"):
        Tensors(((4,), (4,)), torch.float32, (0, 3))
    with pytest.raises(ValueError, match="the same length"):
        Tensors(((4,), (4,)), torch.float32, (0,))


# --- compiled loops select and lay out values exactly as torch does -------------------------------


COUNTS = [1, 2, 7, 8, 9, 0, 64, 1025, 4096, 4097, 20_000]


def bits(spec: str, model: str) -> float:
    """Return the payload per value over all steps, with error feedback, and check that nothing is lost."""
    tensors, steps = recorded(model)
    feedback = ErrorFeedback(codecs.parse(spec))
    state, out, size = feedback.init(tensors), torch.zeros(tensors.length), 0
    for step in steps:
        frame, state = feedback.encode(step, state)
        decode_into(frame, out, add=True)
        size += codecs.encoded_bytes(frame)[1]
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


# --- custom codecs, and specs -------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Rounded(PerTensor):
    """A custom codec: integers of one byte."""

    step: float = 1.0
    number: ClassVar[int] = 200

    def _most(self, count: int, shape: tuple[int, ...]) -> int:
        return 4 + count

    def _bytes(self, values: Tensor, shape: tuple[int, ...], state: State, index: int) -> Sequence[Tensor | bytes]:
        step = torch.tensor([self.step])
        return step, (values / self.step).round().clamp(-127, 127).to(torch.int8)

    @classmethod
    def _values(cls, data: np.ndarray, shape: tuple[int, ...], count: int, device: torch.device) -> Tensor:
        if len(data) != 4 + count:
            raise ProtocolError(f"{count} values do not take {len(data)} bytes")
        step = float(data[:4].copy().view("<f4")[0])
        return torch.from_numpy(data[4:].copy()).view(torch.int8).float() * step


def test_a_codec_of_ones_own_is_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("rounded", f"{__name__}:Rounded", codecs.ENTRY_POINT_GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group, name=None: [point] if group == point.group else [])
    codec = codecs.parse("rounded:step=0.5+zlib")
    assert codec == Rounded(0.5, squeezed="zlib")
    feedback = ErrorFeedback(codec)
    tensor = normal(20, 30)
    frame, state = feedback.encode(tensor, feedback.init(tensor))
    assert torch.equal(decode(frame), (tensor / 0.5).round() * 0.5)
    assert torch.allclose(decode(frame) + state.kept["error"].view(20, 30), tensor)


def test_two_codecs_of_one_number_are_refused() -> None:
    with pytest.raises(ValueError, match="codec number 3 is already taken by ThreeLC"):

        class Other(PerTensor):
            number: ClassVar[int] = 3

    with pytest.raises(ValueError, match="codec number 13 was that of 'threshold' and is not given again"):

        class Another(PerTensor):
            number: ClassVar[int] = 13


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("3lb", r"unknown codec '3lb' \(did you mean '3lc'\?\)"),
        ("3lc:sparsity=2", "sparsity must be at least 1 and below 2, not 2.0"),
        ("3lc:residual=0", "residual is a fraction of a norm"),
        ("3lc:small=-1", "small must be a number"),
        ("int8:block=-1", "block counts values"),
        ("topk:ratio=0", "ratio is a fraction of the values"),
        ("topk:sample=2", "sample is a fraction of the values"),
        ("topk2:ratio=0", "ratio is a fraction of the values, above 0"),
        ("topk2:chunk=0", "chunk is a number of values, from 1 on"),
        ("topk2:decay=1.5", "decay is a factor, above 0 and at most 1"),
        ("threshold:0.5", "codec 'threshold' has been retired: use topk"),
        ("natural+zlib", "codec 'natural' has been retired: use int8 or qsgd"),
        ("qsgd:levels=0", "levels are from 1 to 65535"),
        ("signsgd:magnitude=-1", "magnitude must be a finite number"),
        ("powersgd:rank=0", "rank must be from 1 to 65535"),
        ("dgc:momentum=1", "momentum must be at least 0 and below 1"),
        ("dgc:clip=-1", "clip is a norm"),
        ("dgc:feedback=true", "would count them twice"),
        ("localsteps:k=0", "k must be at least 1 frame"),
        ("int8:squeezed=zlib", "unknown key 'squeezed'"),
        ("int8+zlib+zlib", r"one of \+zlib, \+zstd may follow, once"),
    ],
)
def test_a_wrong_spec_names_what_would_have_been_right(spec: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        codecs.parse(spec)


def test_a_missing_package_is_named_and_frames_that_need_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = a_frame("3lc+zstd", 5000)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ProtocolError, match=r"cannot be decompressed: \+zstd needs the package zstandard"):
        decode(frame)
    with pytest.raises(UsageError, match=r"pip install '\.\[zstd\]' in your clone of gossipx, or use \+zlib"):
        codecs.parse("int8+zstd")
    with pytest.raises(UsageError, match="zstandard"):
        frames.zstandard()
