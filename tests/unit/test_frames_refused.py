"""Frames that must be refused, without sockets: malformed, too large, damaged or foreign."""

from __future__ import annotations

import math
import pickle
import tracemalloc

import pytest
from drawn_frames import feed, forged, whole

from gossipx.errors import ProtocolError
from gossipx.memory import Source
from gossipx.protocol.fields import MAX_METADATA, SMALL_METADATA
from gossipx.protocol.messages import (
    LAST_WAVE,
    MAX_WAVE,
    ArriveRequest,
    HereReply,
    ModelReply,
    NotReadyReply,
    PullRequest,
    RoundRequest,
    Stage,
)
from gossipx.wire import (
    Bytes,
    Message,
    no_payload,
)
from gossipx.wire.frames import (
    CHECKSUMS,
    HEADER_BYTES,
    VERSION,
    Decoder,
    VersionError,
    encode,
)

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
        (21, b'{"incarnation":1}'),
        (22, b'{"incarnation":1,"number":-1}'),
        (23, b'{"incarnation":1.5,"number":1}'),
        (24, b'{"incarnation":1,"number":1,"taken":1}'),
        (32, b'{"step":1,"weight":0}'),
        (32, b'{"step":1,"weight":65536.5}'),
        (32, b'{"step":1,"weight":1e400}'),
        (32, b'{"step":1,"weight":NaN}'),
        (32, b'{"step":1,"weight":"1"}'),
        (17, b'{"step":-1}'),
        (17, b'{"step":9223372036854775808}'),
        (17, b'{"step":1.0}'),
        (17, b'{"step":"1"}'),
        (17, b'{"step":' + b"9" * 5000 + b"}"),
        (17, b"{}"),
        (17, b'{"step":1,"more":1}'),
        (17, b'{"step":1,"step":2}'),
        (17, b'{"step":1'),
        (17, b"[1]"),
        (17, b'\xff{"step":1}'),
        (17, b'{"step":1}\x00'),
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
        RoundRequest(1, 0, (2, 1)),
        RoundRequest(MAX_WAVE + 1, 0, (1, 2)),
        RoundRequest(LAST_WAVE - 1, 0, (1, 2)),
        ArriveRequest(Stage.TRAIN, 1, wave=LAST_WAVE),
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


@pytest.mark.parametrize("bit", range(0, 64, 5))
@pytest.mark.fault(12)
def test_a_flipped_bit_of_the_payload_is_refused(bit: int) -> None:
    data = bytearray(whole(ModelReply(1), 1, memoryview(b"8 bytes.")))
    data[-16 + bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError, match="payload that does not match its checksum"):
        feed(Decoder(lambda *_: Bytes(memoryview(bytearray(8)))), bytes(data))


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
