"""Frames, without sockets: encoding and decoding, declarations, what two peers must have alike, and what is refused.

Mutated frames of codecs are in ``test_codec_frames.py``. ``bin/test --all`` draws many more of either, by ``bin/fuzz``.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import pickle
import random
import re
import struct
import tracemalloc
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import pytest
import torch
import xxhash
from drawn_frames import any_of, feed, forged, messages, mutated_bytes, whole
from hypothesis import Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from joined_frames import joined
from msgspec import Meta
from table_sides import side

from gossipx.errors import ProtocolError, UsageError
from gossipx.memory import Source
from gossipx.protocol.fields import MAX_METADATA, MAX_SECTIONS, SMALL_METADATA, Kind, all_kinds, kind_of
from gossipx.protocol.fields import kind as declare
from gossipx.protocol.messages import (
    MAX_WAVE,
    ArriveRequest,
    HereReply,
    LeaveRequest,
    ModelReply,
    NotReadyReply,
    PullRequest,
    RoundRequest,
    ShardRequest,
    ShareRequest,
    Stage,
)
from gossipx.server.placement import Partition
from gossipx.tables.shard import NextTables, pack_pieces
from gossipx.wire import Bytes, Hello, Message, Refused, Sink, answer_to, no_payload
from gossipx.wire.agreement import difference, manifest_bytes, objection
from gossipx.wire.frames import (
    CHECKSUMS,
    HEADER_BYTES,
    KINDS,
    PIECE,
    VERSION,
    Decoder,
    Frame,
    Unchecked,
    VersionError,
    encode,
    message_of,
    metadata_of,
)

# --- valid frames -------------------------------------------------------------------------------


def test_the_bytes_of_one_frame() -> None:
    expected = bytes.fromhex(
        "47535058"  # GSPX
        "0009"  # version
        "0020"  # kind: ModelReply
        "0000000000000005"  # request
        "0000002c"  # bytes of metadata
        "0000000000000008"  # bytes of payload
        "3198792ce2ab9a62"  # checksum of all this and the metadata
        "7b2273746570223a31322c22776569676874223a312c"  # {"step":12,"weight":1,
        "226261736573223a5b5d2c2273697a6573223a5b5d7d"  # "bases":[],"sizes":[]}
        "0000803f00000040"  # 1.0, 2.0
        "4de8d78f7134f4b7"  # checksum of the payload
    )
    model = memoryview(struct.pack("<2f", 1.0, 2.0))
    assert whole(ModelReply(step=12, weight=1), 5, model) == expected
    (frame,) = feed(Decoder(lambda *_: Bytes(memoryview(bytearray(8)))), expected)
    assert (frame.request, frame.message, frame.out_of_band) == (5, ModelReply(step=12, weight=1), False)
    assert isinstance(frame.payload, Bytes) and frame.payload.view == model


@given(message=messages, request=st.integers(0, 2**64 - 1), step=st.integers(1, 50))
def test_every_message_round_trips(message: Message, request: int, step: int) -> None:
    data = whole(message, request) * 2
    assert feed(Decoder(no_payload), data, step) == [Frame(request, message, None)] * 2


@given(payload=st.binary(min_size=1, max_size=100), step=st.integers(1, 120))
def test_a_payload_is_received_into_the_given_buffer(payload: bytes, step: int) -> None:
    buffer = memoryview(bytearray(len(payload)))
    data = whole(ModelReply(3), 9, memoryview(payload))
    (frame,) = feed(Decoder(answer_to(PullRequest(0, 30.0), 9, Bytes(buffer))), data, step)
    assert isinstance(frame.payload, Bytes) and frame.payload.view.obj is buffer.obj
    assert bytes(buffer) == payload


def test_a_payload_is_sent_in_pieces_without_a_copy() -> None:
    payload = memoryview(bytearray(2 * PIECE + 1))
    sent = [buffer for buffers, _ in encode(ModelReply(1), 1, Source(payload)) for buffer in buffers]
    pieces = [buffer for buffer in sent if isinstance(buffer, memoryview)]
    assert [len(piece) for piece in pieces] == [2 * PIECE, 1], "the last one with the checksum of all"
    assert len(list(encode(ModelReply(1), 1, Source(payload[:PIECE])))) == 1, "what is one piece goes in one call"
    assert all(piece.obj is payload.obj for piece in pieces)


def test_a_model_is_read_for_its_checksum_when_it_is_first_sent_and_then_no_more() -> None:
    model = bytearray(os.urandom(2 * PIECE + 1))
    source = Source(memoryview(model))
    first = joined(encode(ModelReply(1), 1, source))
    assert source.checksum == xxhash.xxh3_64_digest(model) == first[-8:]
    assert joined(encode(ModelReply(1), 1, source)) == first
    model[0] ^= 1  # forbidden by the interface; shows that the model is not read again
    assert joined(encode(ModelReply(1), 1, source))[-8:] == first[-8:]


def test_a_cached_checksum_never_replaces_a_mac() -> None:
    """A MAC depends on the connection and the position in it, so a cached checksum must not replace it."""
    source = Source(memoryview(b"model"))
    encode(ModelReply(1), 1, source)
    (*_, mac) = [buffer for buffers, _ in encode(ModelReply(1), 1, source, hashlib.sha256) for buffer in buffers]
    assert mac == hashlib.sha256(b"model").digest()
    assert source.checksum is None


@pytest.mark.parametrize("step", [1, PIECE - 1, PIECE, 10**7])
def test_a_payload_is_received_in_pieces_each_reported_once_when_full(step: int) -> None:
    model = os.urandom(2 * PIECE + 5)
    told: list[tuple[int, bytes]] = []

    class Noting(Bytes):
        def buffer_at(self, start: int) -> memoryview:
            return self.view[start : start + PIECE]

        def filled(self, start: int) -> None:
            told.append((start, bytes(self.buffer_at(start))))

    data = whole(ModelReply(3), 9, memoryview(model))
    head = len(data) - len(model) - 8
    decoder = Decoder(lambda *_: Noting(memoryview(bytearray(len(model)))))
    feed(decoder, data[:head], head)
    assert decoder.in_payload
    assert len(feed(decoder, data[head:], step)) == 1
    assert not decoder.in_payload
    assert told == [(start, model[start : start + PIECE]) for start in (0, PIECE, 2 * PIECE)]


@pytest.mark.parametrize("step", [1, 7, 2**30])
def test_frames_over_a_checked_transport_have_no_checks(step: int) -> None:
    model = os.urandom(1_000)
    source = Source(memoryview(model))
    first = joined(encode(ModelReply(3), 9, source, Unchecked))
    data = first + joined(encode(LeaveRequest(), 10, checks=Unchecked))
    assert len(first) == HEADER_BYTES + len(metadata_of(ModelReply(3))) + len(model)
    assert source.checksum is None
    buffer = memoryview(bytearray(len(model)))
    decoder = Decoder(lambda message, request: Bytes(buffer) if request == 9 else None)
    decoder.use(Unchecked)
    first, second = feed(decoder, data, step)
    assert (first.message, second.message) == (ModelReply(3), LeaveRequest())
    assert buffer == model


@pytest.mark.fault(12)
@pytest.mark.parametrize("damaged", [None, 0, 1_000, 4_095])
@pytest.mark.parametrize("ahead", [0, 1, 1_000, 4_096])
def test_bytes_checked_ahead_are_checked_once(ahead: int, damaged: int | None) -> None:
    model = bytearray(os.urandom(4_096))
    data = whole(ModelReply(3), 9, memoryview(model))
    head = len(data) - len(model) - 8
    decoder = Decoder(lambda *_: Bytes(memoryview(bytearray(len(model)))))
    feed(decoder, data[:head], head)
    if damaged is not None:
        model[damaged] ^= 1
    buffer = decoder.next_buffer()
    buffer[:] = model
    for start in range(0, ahead, 100):
        decoder.update_check(buffer[start : min(start + 100, ahead)])
    assert decoder.received(len(model)) is None
    if damaged is None:
        assert len(feed(decoder, data[-8:])) == 1
    else:
        with pytest.raises(ProtocolError, match="does not match its checksum"):
            feed(decoder, data[-8:])


def test_an_out_of_band_payload_is_not_part_of_the_frame() -> None:
    model = memoryview(bytearray(1000))
    data = joined(encode(ModelReply(3), 9, Source(model), out_of_band=True))
    sink = Bytes(model)
    (frame,) = feed(Decoder(lambda *_: sink), data)
    assert frame == Frame(9, ModelReply(3), sink, out_of_band=True)
    with pytest.raises(ProtocolError, match="payload of 1000 bytes where 999 were expected"):
        feed(Decoder(lambda *_: Bytes(model[1:])), data)


def test_an_empty_model_has_no_trailer() -> None:
    empty = memoryview(bytearray())
    data = whole(ModelReply(1), 1, empty)
    assert [frame.message for frame in feed(Decoder(lambda *_: Bytes(empty)), data)] == [ModelReply(1)]


def test_the_largest_legitimate_metadata_fit() -> None:
    ranks, most = tuple(range(65_536)), 2**63 - 1
    code = ShardRequest(MAX_WAVE, ranks, most, (most, most), (most,) * MAX_SECTIONS, 604_800.0)
    figures: dict[str, object] = {f"figure {name}": [0.123456789012345] * 100 for name in range(200)}
    for message in (RoundRequest(most, ranks), code, ArriveRequest(Stage.DONE, 1, figures)):
        assert feed(Decoder(no_payload), whole(message)) == [Frame(0, message, None)]


def test_figures_that_are_not_finite_are_sent_as_null() -> None:
    report: dict[str, object] = {"loss": math.nan, "rates": [1.0, math.inf, -math.inf]}
    (frame,) = feed(Decoder(no_payload), whole(HereReply(Stage.DONE, report=report)))
    assert frame.message == HereReply(Stage.DONE, report={"loss": None, "rates": [1.0, None, None]})


# --- declarations -------------------------------------------------------------------------------


def test_every_kind_has_a_unique_number() -> None:
    assert len(KINDS) == len(list(all_kinds()))
    for number, kind in KINDS.items():
        assert kind == kind_of(kind.message) and kind.number == number


@pytest.mark.parametrize("unbounded", [int, Annotated[int, Meta(ge=0)], str, tuple[int, ...], dict[str, float]])
def test_a_field_whose_type_has_no_bound_cannot_be_declared(unbounded: object) -> None:
    message = msgspec.defstruct("Unbounded", [("field", unbounded)])
    with pytest.raises(TypeError, match="Unbounded: the type of field has no bound"):
        declare(99)(message)


# --- agreement before a connection is used --------------------------------------------------------


def test_only_valid_replies_to_the_request_are_accepted() -> None:
    for kind in KINDS.values():
        assert kind.message not in kind.answers
    expect = answer_to(PullRequest(1, 30.0), 4, None)
    assert expect(NotReadyReply("later"), 4) is None
    with pytest.raises(ProtocolError, match="PullRequest by HereReply"):
        expect(HereReply(Stage.TRAIN), 4)
    with pytest.raises(ProtocolError, match="PullRequest by ModelReply"):
        expect(ModelReply(1), 5)
    with pytest.raises(ProtocolError, match="refused: full"):
        expect(Refused("full"), 0)


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (Hello(1, "b", 2, "list", "model", {"--mode": "pull"}), None),
        (Hello(1, "b", 2, "list", "another model", {"--mode": "pull"}), None),
        (Hello(1, "b", 2, "another list", "model"), "hosts files of b .* differ"),
        (Hello(1, "b", 3, "list", "model"), "hosts files of b .* differ"),
        (Hello(0, "a", 2, "list", "model"), "this peer itself"),
        (Hello(2, "c", 2, "list", "model"), "not rank 2 of this run"),
        (Hello(1, "c", 2, "list", "model"), "not rank 1 of this run"),
        (Hello(1, "b", 2, "list", "model", {"--mode": "push"}), "^--mode is push at b and pull at a; give every peer"),
        (Hello(1, "b", 2, "list", "model", {}), "^--mode is none at b and pull at a; give every peer the same value$"),
        (Hello(1, "b", 2, "list", "model", {"--a": "1", "--mode": "pull"}), "^--a is 1 at b and none at a"),
    ],
)
def test_who_may_connect(theirs: Hello, why: str | None) -> None:
    reason = objection(Hello(0, "a", 2, "list", "model", {"--mode": "pull"}), theirs, ["a", "b"])
    assert (reason is None) if why is None else re.search(why, str(reason))


@pytest.mark.fault(21)
def test_the_first_differing_tensor_is_named_on_both_sides() -> None:
    own = b"a float32 (3,) (1,)\nb float32 (5,) (1,)"
    assert difference(own, own.replace(b"(5,)", b"(6,)")) == (
        "tensor 1 is 'b float32 (5,) (1,)' here and 'b float32 (6,) (1,)' there"
    )
    assert "here and 'no such tensor' there" in difference(own, b"a float32 (3,) (1,)")
    assert "\x1b" not in difference(own, b"\x1b[31m\xff" * 1000)
    assert len(difference(own, b"a" * 10_000)) < 400


def test_a_manifest_too_large_to_send_is_refused_locally() -> None:
    assert manifest_bytes(["a", "b"]) == b"a\nb"
    with pytest.raises(UsageError, match="too many tensors"):
        manifest_bytes(["a" * 2**20] * 17)


# --- rejected input -----------------------------------------------------------------------------

# No float holds an integer of 401 digits.
SIGNIFICANCE = b'{"shard":0,"bucket":0,"incarnation":1,"progress":0,"significance":%s,"patience":1,"epoch":0,"base":0}'
GROUP = (
    b'{"shard":0,"bucket":0,"incarnation":1,"progress":0,"parts":[],"settings":[{"lr":%s}],"patience":1,"epoch":0,'
    b'"keep":0}'
)


@pytest.mark.parametrize(
    ("kind", "metadata"),
    [
        (32, b'{"step":1,"weight":0}'),
        (32, b'{"step":1,"weight":65536.5}'),
        (32, b'{"step":1,"weight":1e400}'),
        (32, b'{"step":1,"weight":NaN}'),
        (17, b'{"step":-1}'),
        (17, b'{"step":9223372036854775808}'),
        (17, b'{"step":1.0}'),
        (17, b'{"step":"1"}'),
        (17, b'{"step":' + b"9" * 5000 + b"}"),
        (17, b"{}"),
        (17, b'{"step":1,"more":1}'),
        (17, b'{"step":1,"step":2}'),
        (17, b'\xff{"step":1}'),
        (18, b'{"round":0,"members":[1,1]}'),
        (18, b'{"round":0,"members":[2,1]}'),
        (18, b'{"round":0,"members":[65536]}'),
        (18, b'{"round":0,"members":{"1":1}}'),
        (18, b'{"round":0,"members":[' + b"0," * 65_536 + b"0]}"),
        (19, b'{"report":{}}'),
        (19, b'{"stage":5,"report":[]}'),
        (19, b'{"stage":5,"report":{"loss":NaN}}'),
        (19, b'{"stage":5,"report":{"loss":{"a":1}}}'),
        (19, b'{"stage":5,"report":' + b'{"a":' * 90_000 + b"1" + b"}" * 90_000 + b"}"),
        (19, b'{"stage":5,"report":{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}}"),
        (28, SIGNIFICANCE % (b"1" + b"0" * 400)),
        (27, GROUP % (b"1" + b"0" * 400)),
        (34, b'{"reason":"' + b"a" * 1001 + b'"}'),
        (34, b'{"reason":"two\\nlines"}'),
        (34, b'{"reason":"\\udcff"}'),
        (5, b'{"size":16777217}'),
        (1, b'{"rank":0,"name":"a","size":0,"peers":"","model":""}'),
        (99, b"{}"),
    ],
)
def test_metadata_of_any_other_form_is_refused_in_one_line(kind: int, metadata: bytes) -> None:
    decoder = Decoder(no_payload)
    with pytest.raises(ProtocolError) as caught:
        feed(decoder, forged(kind, metadata))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300
    with pytest.raises(ProtocolError):
        decoder.next_buffer()


@pytest.mark.parametrize(
    "message",
    [
        PullRequest(-1, 30.0),
        PullRequest(1, 0.0),
        PullRequest(1, 604_801.0),
        RoundRequest(0, (2, 1)),
        ShareRequest(0, (1, 2), 0, 1),
        ShareRequest(MAX_WAVE + 1, (1, 2), 0, 1),
        ArriveRequest(Stage.TRAIN, 1, wave=MAX_WAVE + 1),
        NotReadyReply("two\nlines"),
        HereReply(Stage.DONE, report={"a": {"b": 1}}),
        HereReply(Stage.DONE, report={f"{name}": "a" * 1000 for name in range(900)}),
        HereReply(Stage.DONE, report={f"{name}": 0 for name in range(1001)}),
        ModelReply(1, weight=0),
        ModelReply(1, weight=math.nan),
    ],
)
def test_messages_that_a_peer_would_refuse_are_not_sent(message: Message) -> None:
    with pytest.raises(ValueError):
        encode(message, 0)


def test_only_a_model_may_carry_a_payload() -> None:
    with pytest.raises(ValueError, match="PullRequest"):
        encode(PullRequest(1, 30.0), 0, Source(memoryview(b"model")))
    with pytest.raises(ProtocolError, match="payload"):
        feed(Decoder(no_payload), forged(17, b'{"step":1}', payload=5))


@pytest.mark.parametrize("payload", [2**63, 2**64 - 1, 2**40 + 1])
@pytest.mark.fault(14)
def test_a_monstrous_payload_is_refused_before_anything_is_allocated(payload: int) -> None:
    asked: list[object] = []
    decoder = Decoder(lambda *given: asked.append(given))
    with pytest.raises(ProtocolError, match=str(payload)):
        feed(decoder, forged(32, b'{"step":1,"weight":1}', payload=payload)[: HEADER_BYTES + CHECKSUMS().digest_size])
    assert asked == []


@pytest.mark.parametrize("kind", [1, 17, 18])
@pytest.mark.fault(14)
def test_monstrous_metadata_are_refused_before_anything_is_allocated(kind: int) -> None:
    bound = MAX_METADATA if kind == 18 else SMALL_METADATA
    header = forged(kind, b"", announced=bound + 1)
    tracemalloc.start()
    with pytest.raises(ProtocolError, match=str(bound)):
        feed(Decoder(no_payload), header)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize("size", [0, 7, 9])
@pytest.mark.fault(23, 24)
def test_a_payload_of_another_size_than_expected_is_refused(size: int) -> None:
    """No message has an offset that could overlap or point elsewhere: parts follow one another by their lengths."""
    buffer = memoryview(bytearray(8))
    data = whole(ModelReply(1), 1, memoryview(bytes(size)))
    with pytest.raises(ProtocolError, match=f"{size} bytes where 8"):
        feed(Decoder(lambda *_: Bytes(buffer)), data)
    assert bytes(buffer) == bytes(8)


@pytest.mark.fault(13)
def test_a_truncated_frame_is_no_frame() -> None:
    data = whole(ModelReply(1), 1, memoryview(b"8 bytes."))
    for end in range(len(data)):
        assert feed(Decoder(lambda *_: Bytes(memoryview(bytearray(8)))), data[:end]) == []


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b"SSH-2.0", b"GS\n"])
@pytest.mark.fault(15)
def test_strangers_are_refused_by_their_first_bytes(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a gossipx peer"):
        feed(Decoder(no_payload), data, 1)


@pytest.mark.fault(16)
def test_another_version_is_refused_by_six_bytes_and_both_are_named() -> None:
    with pytest.raises(VersionError, match=f"version 515 .* version {VERSION}:"):
        feed(Decoder(no_payload), b"GSPX\x02\x03")


class Bomb:
    went_off = False

    def __reduce__(self) -> tuple[object, ...]:
        return setattr, (Bomb, "went_off", True)


@pytest.mark.fault(17)
def test_a_pickle_is_never_unpickled() -> None:
    bomb = pickle.dumps(Bomb())
    for data in (bomb, forged(17, bomb), forged(17, b'{"step":1}', payload=len(bomb)) + bomb):
        with pytest.raises(ProtocolError):
            feed(Decoder(no_payload), data)
    buffer = memoryview(bytearray(len(bomb)))
    feed(Decoder(lambda *_: Bytes(buffer)), whole(ModelReply(1), 1, memoryview(bomb)))
    assert bytes(buffer) == bomb  # a model's bytes are bytes, whatever they look like
    assert not Bomb.went_off
    pickle.loads(bomb)
    assert Bomb.went_off  # the bomb was live


# --- mutated messages and payloads ------------------------------------------------------------------


PAYLOAD = bytes(range(64))
GUARD = b"guarded " * 512
ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400, 0.5, -0.5, 1e308, 5e-324),
    *(float("nan"), float("inf"), -float("inf"), "", "a", "\n", "\x1b[31m", "\ud800", "١", "0" * 64, "a" * 1001),
    *([], {}, [[]], [[0, 0]], {"": 0}, [0] * 20, [[[[1]]]], ["a", 1, 2.5], [-1, 0], {"a": {"b": [1]}}),
]
"""Values that some field must not accept, or accepts at the edge of its range."""


def drawn(kind: Kind) -> list[Message]:
    """Return some valid messages of a kind, the same ones each time."""
    found: list[Message] = []

    @seeded(0)
    @settings(max_examples=12, database=None, phases=[Phase.generate], derandomize=False)
    @given(any_of(kind.message))
    def collect(message: Message) -> None:
        found.append(message)

    collect()
    return found


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each item in nested lists and objects: what holds it, and its index or key."""
    for key, item in pairs(value):
        yield value, key
        yield from places(item)


def pairs(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())


def mutated_json(content: bytes, draws: random.Random) -> bytes:
    """Replace, remove, add or repeat items of a JSON text."""
    plain = json.loads(content)
    for _ in range(draws.randint(1, 3)):
        known = list(places(plain))
        if not known:
            return content
        held, key = draws.choice(known)
        match draws.randrange(5):
            case 0 | 1:
                held[key] = copy.deepcopy(draws.choice(ODD))
            case 2:
                del held[key]
            case 3 if isinstance(held, dict):
                held[draws.choice(["", "more", str(key) + " "])] = copy.deepcopy(draws.choice(ODD))
            case 3:
                held.insert(key, copy.deepcopy(draws.choice(ODD)))
            case _:
                other, from_ = draws.choice(known)
                held[key] = copy.deepcopy(dict(pairs(other)).get(from_))
    return json.dumps(plain, ensure_ascii=draws.random() < 0.5).encode(errors="surrogatepass")


def mutated_message(message: Message, kind: Kind, draws: random.Random) -> bytes:
    """Return a frame of ``message`` with changed metadata, header or payload; its checksums are mostly valid."""
    metadata, number = metadata_of(message), kind.number
    payload = PAYLOAD if kind.payload else b""
    announced = len(payload)
    match draws.randrange(6):
        case 0 | 1:
            metadata = mutated_json(metadata, draws)
        case 2:
            metadata = mutated_bytes(metadata, draws)
        case 3:
            number = draws.choice([*KINDS, 0, 99, number | 0x8000])
        case 4:
            announced = draws.choice([0, 1, 63, 65, 2**20, 2**40, 2**40 + 1, 2**63, 2**64 - 1])
        case _:
            payload = mutated_bytes(payload, draws)
    frame = forged(number, metadata, payload=announced) + payload
    frame += struct.pack("!Q", xxhash.xxh3_64_intdigest(payload)) * bool(payload)
    return mutated_bytes(frame, draws) if draws.random() < 0.3 else frame


def survives(data: bytes, step: int) -> int:
    """Decode all frames in ``data`` and return their number; payloads are received between guarded bytes."""
    memory = bytearray(GUARD + bytes(len(PAYLOAD)) + GUARD)
    sink = Bytes(memoryview(memory)[len(GUARD) : -len(GUARD)])

    def expect(message: Message, request: int) -> Sink | None:
        return sink if KINDS[number_of[type(message)]].payload else None

    decoder, place, frames = Decoder(expect), 0, 0
    try:
        while place < len(data):
            buffer = decoder.next_buffer()
            assert 0 < len(buffer) <= MAX_METADATA
            part = data[place : place + min(step, len(buffer))]
            buffer[: len(part)] = part
            place += len(part)
            frame = decoder.received(len(part))
            if frame is not None:
                kind = KINDS[number_of[type(frame.message)]]
                assert message_of(kind, metadata_of(frame.message)) == frame.message, "it could be sent again"
                frames += 1
    except ProtocolError as error:
        assert str(error).isprintable() and len(str(error)) < 500
    assert memory.startswith(GUARD) and memory.endswith(GUARD)
    return frames


number_of = {kind.message: kind.number for kind in KINDS.values()}


def fuzz(many: int, seed: int) -> int:
    """Return how many frames of ``many`` mutated ones of all kinds decode."""
    draws = random.Random(seed)
    messages = [(message, kind) for kind in KINDS.values() for message in drawn(kind)]
    frames = (mutated_message(*draws.choice(messages), draws) for _ in range(many))
    return sum(survives(frame, draws.choice([1, 7, 2**20])) for frame in frames)


@pytest.mark.fault(13, 14, 15, 16, 17, 23)
def test_mutated_messages_of_every_kind_are_refused_or_valid() -> None:
    assert 400 < fuzz(10_000, seed=0) < 8_000


# --- content of payloads -----------------------------------------------------------------------------------------


def sized(content: bytes, draws: random.Random) -> bytes:
    """Mutate the JSON text whose length is the first eight bytes, or bytes anywhere."""
    end = 8 + int.from_bytes(content[:8], "little")
    if draws.random() < 0.4:
        return mutated_bytes(content, draws)
    text = mutated_json(content[8:end], draws)
    return len(text).to_bytes(8, "little") + text + content[end:]


@pytest.mark.fault(23)
def test_mutated_ranges_are_refused_or_valid(many: int = 1_000) -> None:
    draws = random.Random(0)
    here = side([torch.zeros(8), torch.zeros(5)])
    here.update([torch.ones(8), torch.ones(5)])
    here.push()
    store = here.stores[0]
    pieces = [Partition(part.table, part.start, part.stop) for bucket in store.buckets for part in bucket.partitions]
    content = bytes(pack_pieces(store, pieces, ({"lr": 0.5},), 3))
    taken = 0
    for _ in range(many):
        try:
            NextTables({0: store}).take(memoryview(sized(content, draws)), pieces)
        except ProtocolError:
            continue
        taken += 1
    assert 0 < taken < many
