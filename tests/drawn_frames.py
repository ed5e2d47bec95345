"""Frames and messages for tests: strategies that draw every kind of message, and frames forged byte by byte."""

from __future__ import annotations

import io
import random
import struct
from typing import get_type_hints

import xxhash
from hypothesis import strategies as st
from joined_frames import joined

from gossipx.memory import Source
from gossipx.protocol import fields
from gossipx.protocol.messages import MAX_WAVE, PastWave, Stage, TrainingWave
from gossipx.wire import (
    MAX_NOTE,
    AdmitReply,
    AdmitRequest,
    Carried,
    CheckupReply,
    CheckupRequest,
    Description,
    Hello,
    Message,
    SetNote,
)
from gossipx.wire.frames import KINDS, VERSION, Decoder, Frame, encode

ranks = st.integers(0, 65_535)
counts = st.integers(0, 2**63 - 1)
groups = st.lists(
    st.dictionaries(st.sampled_from(["lr", "momentum"]), st.floats(allow_nan=False, allow_infinity=False)), max_size=3
).map(tuple)
lines = st.text(max_size=40).filter(str.isprintable)
hosts = st.sampled_from(["", "node-a", "10.0.0.1:29400", "[::1]:29400", "Zürich"])
figures = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63) + 1, 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    lines,
)
words = st.text('{}[]":,0123456789', max_size=50)
FITS: dict[object, st.SearchStrategy[object]] = {
    fields.Rank: ranks,
    fields.Ranks: st.sets(ranks, max_size=20).map(lambda found: tuple(sorted(found))),
    fields.Servers: st.lists(ranks, min_size=1, max_size=20, unique=True).map(tuple),
    fields.Count: counts,
    fields.CountOrNone: st.integers(-1, 2**63 - 1),
    fields.Seconds: st.floats(0, 604_800, exclude_min=True),
    fields.FromZero: st.floats(0, 1e300),
    fields.Weight: st.floats(0, 65_536, exclude_min=True) | st.integers(1, 65_536),
    bool: st.booleans(),
    fields.Text: lines,
    fields.Ascii: words,
    fields.Token: st.binary(min_size=32, max_size=32).map(bytes.hex),
    fields.Proofs: st.lists(st.binary(min_size=32, max_size=32).map(bytes.hex), min_size=1, max_size=2).map(tuple),
    fields.Digest: st.just("") | st.binary(min_size=16, max_size=16).map(bytes.hex),
    fields.Texts: st.dictionaries(lines, lines, max_size=16),
    fields.Report: st.dictionaries(lines, figures | st.lists(figures, max_size=5), max_size=8),
    fields.Reference: st.tuples(counts, counts),
    fields.Sections: st.lists(counts, max_size=8).map(tuple),
    fields.Groups: groups,
    fields.Parts: st.lists(st.tuples(st.integers(0, 65_536), st.integers(0, 2**40)), max_size=5).map(tuple),
    fields.Joined: st.lists(
        st.builds(fields.JoinedPeer, ranks, hosts, hosts, st.integers(1, 65_535), ranks), max_size=5
    ).map(tuple),
    Stage: st.sampled_from(Stage),
    TrainingWave: st.integers(1, MAX_WAVE),
    PastWave: st.integers(0, MAX_WAVE),
}
"""Strategies for the values of each field type."""
OWN: dict[tuple[type, str], st.SearchStrategy[object]] = {
    (Hello, "size"): st.integers(1, 65_536),
    (Description, "size"): st.integers(0, 2**24),
    (SetNote, "value"): st.binary(max_size=MAX_NOTE).map(bytes.hex),
    (Carried, "digest"): st.binary(max_size=32).map(bytes.hex),
    (CheckupRequest, "part"): st.sampled_from(["facts", "load", "status"]),
    (CheckupRequest, "back"): st.integers(0, 2**24),
    (CheckupReply, "size"): st.integers(0, 2**24),
    (AdmitRequest, "port"): st.integers(1, 65_535),
    (AdmitReply, "size"): st.integers(0, 2**20),
}
"""Strategies for fields with their own bounds."""


def any_of(message: type[Message]) -> st.SearchStrategy[Message]:
    hints = get_type_hints(message, include_extras=True)
    given = {name: OWN[message, name] if (message, name) in OWN else FITS[hint] for name, hint in hints.items()}
    return st.builds(message, **given)


messages = st.one_of([any_of(kind.message) for kind in KINDS.values()])


def whole(message: Message, request: int = 0, payload: memoryview | None = None) -> bytes:
    source = None if payload is None else Source(payload)
    return joined(encode(message, request, source))


def feed(decoder: Decoder, data: bytes, step: int = 2**30) -> list[Frame]:
    """Decode ``data`` in chunks of at most ``step`` bytes and return all frames."""
    frames: list[Frame] = []
    source = io.BytesIO(data)
    while True:
        buffer = decoder.next_buffer()
        assert len(buffer) > 0
        count = source.readinto(buffer[:step])
        if not count:
            return frames
        frame = decoder.received(count)
        if frame is not None:
            frames.append(frame)


def forged(
    kind: int,
    metadata: bytes,
    *,
    payload: int = 0,
    magic: bytes = b"GSPX",
    version: int = VERSION,
    announced: int | None = None,
) -> bytes:
    """Return a frame with a valid checksum around arbitrary metadata and payload."""
    length = len(metadata) if announced is None else announced
    header = struct.pack("!4sHHQIQ", magic, version, kind, 7, length, payload)
    return header + struct.pack("!Q", xxhash.xxh3_64_intdigest(header + metadata)) + metadata


def mutated_bytes(content: bytes, draws: random.Random) -> bytes:
    """Flip, overwrite, remove, add or repeat bytes."""
    body = bytearray(content)
    for _ in range(draws.randint(1, 3)):
        place = draws.randrange(len(body) + 1)
        match draws.randrange(5):
            case 0:
                del body[place:]
            case 1:
                body[place:place] = draws.randbytes(draws.randint(1, 9))
            case 2:
                body[place : place + 8] = draws.choice([b"\xff" * 8, bytes(8), struct.pack("!Q", 2**63)])
            case 3:
                body[place : place + 1] = draws.randbytes(1)
            case _:
                del body[place : place + draws.randint(1, 9)]
    return bytes(body)
