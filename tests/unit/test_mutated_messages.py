"""Mutated messages of every kind, and mutated content of their payloads: a ProtocolError or a valid value, no more.

Mutated frames of codecs are in ``test_codec_frames.py``. ``bin/test --all`` draws many more, by ``bin/fuzz``.
"""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import xxhash
from drawn_frames import any_of, forged
from hypothesis import Phase, given, settings
from hypothesis import seed as seeded
from table_sides import side

from gossipx.errors import ProtocolError
from gossipx.protocol.fields import MAX_METADATA, Kind
from gossipx.server.placement import Partition
from gossipx.tables.shard import NextTables, pack_pieces
from gossipx.wire import Bytes, Message, Sink
from gossipx.wire.frames import KINDS, Decoder, message_of, metadata_of

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
