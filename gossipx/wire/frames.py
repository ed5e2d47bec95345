"""The protocol between peers: bytes in, events out; no socket, no clock.

A frame, all numbers big-endian::

    offset  bytes
         0      4  magic, "GSPX"            the first two fields never move, so that
         4      2  protocol version         another version can be told by name
         6      2  kind of message
         8      8  request id, chosen by the requester, repeated in the reply
        16      4  M, length of the metadata
        20      8  P, length of the payload
        28      8  XXH3-64 of bytes 0..27 and the metadata
        36      M  metadata: one JSON object, UTF-8, the message's fields
      36+M      P  payload: raw bytes
    36+M+P      8  XXH3-64 of the payload; left out where P is 0

Nothing is unpickled or evaluated. Every length is checked against a bound of its kind before
anything is allocated, and a payload goes straight into the buffer that its receiver provides.
The checksums find accidents; they are no protection from an attacker.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import xxhash

from gossipx.errors import ProtocolError
from gossipx.messages import (
    AcceptReply,
    AgreeRequest,
    ArriveRequest,
    BusyReply,
    HereReply,
    InitialRequest,
    LeaveRequest,
    ModelReply,
    NotReadyReply,
    PairRequest,
    PullRequest,
    PushRequest,
    SettleRequest,
    Stage,
    TakeRequest,
)
from gossipx.wire import MAX_DESCRIPTION, DescribeRequest, Description, Expect, Hello, Message, Refused, Welcome

MAGIC = b"GSPX"
VERSION = 1
MAX_RANKS = 65_536
MAX_TEXT = 1_000  # characters
MAX_FIGURES = 1_000  # names in a report
# Bytes of metadata. The largest honest ones: 65,536 ranks of five digits are 384 KiB; the reports
# of 100 peers have 5 KiB each. The small bound is what a stranger can make us allocate.
MAX_METADATA = 512 * 1024
SMALL_METADATA = 16 * 1024
# Bytes of payload. A model's true size is the receiver's to expect; this only keeps sums sane.
MAX_MODEL = 2**40
# Bytes hashed and handed to the transport at once: small enough that they are still in the
# processor's cache when the kernel copies them.
PIECE = 2**20

Buffers = list[bytes | memoryview]

_START = struct.Struct("!4sH")
_HEADER = struct.Struct("!4sHHQIQ")
_CHECK = struct.Struct("!Q")
HEADER_BYTES = _HEADER.size + _CHECK.size


class VersionError(ProtocolError):
    """The other side speaks another version of the protocol."""


# --- checks: a plain JSON value in, the field's value out; ValueError tells what it should be ----


def _integer(low: int, high: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"is not an integer from {low} to {high}")
        return value

    return check


def _text(value: object) -> str:
    # Printable: such text ends up in logs and terminals of other machines.
    if type(value) is not str or len(value) > MAX_TEXT or not value.isprintable():
        raise ValueError(f"is not one printable line of at most {MAX_TEXT} characters")
    return value


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise ValueError("is neither true nor false")
    return value


def _weight(value: object) -> float:
    # All weights of a run sum up to its number of peers.
    if type(value) not in (int, float) or not 0 < value <= MAX_RANKS:  # type: ignore[operator]
        raise ValueError(f"is not a number above 0, up to {MAX_RANKS}")
    return float(value)  # type: ignore[arg-type]


def _stage(value: object) -> Stage:
    return Stage(_integer(0, max(Stage))(value))


def _members(value: object) -> tuple[int, ...]:
    if type(value) is not list or len(value) > MAX_RANKS:
        raise ValueError(f"is not a list of at most {MAX_RANKS} ranks")
    ranks = tuple(_rank(item) for item in value)
    if any(rank >= after for rank, after in itertools.pairwise(ranks)):
        raise ValueError("is not ascending")
    return ranks


def _figure(value: object) -> object:
    if value is None or type(value) is bool:
        return value
    if type(value) is str:
        return _text(value)
    if type(value) is int:
        return _integer(-_U63, _U63)(value)
    if type(value) is float and math.isfinite(value):
        return value
    raise ValueError("holds what is neither text, a finite number, true, false nor null")


def _report(value: object) -> dict[str, object]:
    if type(value) is not dict or len(value) > MAX_FIGURES:
        raise ValueError(f"is not an object of at most {MAX_FIGURES} figures")
    return {_text(name): _entry(item) for name, item in value.items()}


def _entry(value: object) -> object:
    return [_figure(item) for item in value] if type(value) is list else _figure(value)


_U63 = 2**63 - 1
_rank = _integer(0, MAX_RANKS - 1)
_size = _integer(1, MAX_RANKS)
_count = _integer(0, _U63)


@dataclass(frozen=True)
class _Kind:
    message: type
    checks: Mapping[str, Callable[[object], Any]]
    metadata: int = SMALL_METADATA  # upper bounds, bytes
    payload: int = 0


_EXCHANGE = {"incarnation": _count, "number": _count}
_STANDING = {"stage": _stage, "report": _report}
_KINDS = {
    1: _Kind(
        Hello,
        {"rank": _rank, "name": _text, "size": _size, "peers": _text, "model": _text},
    ),
    2: _Kind(Welcome, {"rank": _rank, "name": _text, "model": _text}),
    3: _Kind(Refused, {"reason": _text}),
    4: _Kind(DescribeRequest, {}),
    5: _Kind(Description, {"size": _integer(0, MAX_DESCRIPTION)}, payload=MAX_DESCRIPTION),
    16: _Kind(InitialRequest, {}),
    17: _Kind(PullRequest, {"step": _count}),
    18: _Kind(AgreeRequest, {"round": _count, "members": _members}, MAX_METADATA),
    19: _Kind(ArriveRequest, {**_STANDING, "incarnation": _count}, MAX_METADATA),
    20: _Kind(LeaveRequest, {}),
    21: _Kind(PushRequest, _EXCHANGE),
    22: _Kind(PairRequest, _EXCHANGE),
    23: _Kind(TakeRequest, _EXCHANGE),
    24: _Kind(SettleRequest, {**_EXCHANGE, "taken": _flag}),
    32: _Kind(ModelReply, {"step": _count, "weight": _weight}, payload=MAX_MODEL),
    33: _Kind(HereReply, _STANDING, MAX_METADATA),
    34: _Kind(NotReadyReply, {"reason": _text}),
    35: _Kind(AcceptReply, {}),
    36: _Kind(BusyReply, {}),
}
_NUMBERS = {kind.message: number for number, kind in _KINDS.items()}


def _build(kind: _Kind, plain: object) -> Any:
    """The message with these fields; ValueError tells what is wrong in one line."""
    if type(plain) is not dict or plain.keys() != kind.checks.keys():
        named = ", ".join(kind.checks) or "none"
        raise ValueError(f"{kind.message.__name__} has not exactly its fields ({named})")
    values = {}
    for name, check in kind.checks.items():
        try:
            values[name] = check(plain[name])
        except ValueError as error:
            raise ValueError(f"{kind.message.__name__}: {name} {error}") from None
    return kind.message(**values)


# --- out ----------------------------------------------------------------------------------------


def encode(message: Message, request: int, payload: memoryview | None = None) -> Iterator[Buffers]:
    """The frame of ``message``, as lists of buffers to send in turn; the payload is never copied.

    NaN and infinite figures of a report go as null, which JSON has and which reads as "no figure".

    Args:
        message: what to say.
        request: id of the request, 0 to 2⁶⁴ − 1.
        payload: contiguous; must not change until its last piece is sent.

    Raises:
        ValueError: at once, not when iterated: the message is not one that a peer would accept.
    """
    number = _NUMBERS[type(message)]
    kind = _KINDS[number]
    plain = {field.name: _plain(getattr(message, field.name)) for field in fields(message)}
    _build(kind, plain)
    metadata = json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()
    size = 0 if payload is None else payload.nbytes
    if len(metadata) > kind.metadata or size > kind.payload:
        raise ValueError(
            f"{kind.message.__name__} with {len(metadata)} bytes of metadata and {size} of payload:"
            f" at most {kind.metadata} and {kind.payload} can be sent"
        )
    header = _HEADER.pack(MAGIC, VERSION, number, request, len(metadata), size)
    head = header + _CHECK.pack(xxhash.xxh3_64_intdigest(header + metadata)) + metadata
    return _pieces(head, payload.cast("B") if payload is not None and size else None)


def _pieces(head: bytes, payload: memoryview | None) -> Iterator[Buffers]:
    if payload is None:
        yield [head]
        return
    buffers: Buffers = [head]
    checksum = xxhash.xxh3_64()
    for start in range(0, len(payload), PIECE):
        piece = payload[start : start + PIECE]
        checksum.update(piece)
        buffers.append(piece)
        if start + PIECE >= len(payload):
            buffers.append(_CHECK.pack(checksum.intdigest()))
        yield buffers
        buffers = []


def _plain(value: object) -> object:
    """As JSON has it: enums and subclasses of numbers as numbers, tuples as lists."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    return value


# --- in -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """One whole frame, checked.

    Attributes:
        payload: the buffer that ``expect`` gave, now filled; None where the frame has none.
    """

    request: int
    message: Message
    payload: memoryview | None


class Decoder:
    """Frames from bytes. Put bytes into :meth:`next_buffer`, tell :meth:`received` how many.

    Args:
        expect: asked before a payload is accepted; its buffer must be writable and contiguous.
    """

    def __init__(self, expect: Expect):
        self._expect = expect
        self._header = bytearray(HEADER_BYTES)
        self._broken: ProtocolError | None = None
        self._frame: Frame
        self._checksum = xxhash.xxh3_64()
        self._await(memoryview(self._header), self._header_whole)

    def next_buffer(self) -> memoryview:
        """Where the next bytes belong; never empty. Raises the ProtocolError that came before."""
        if self._broken is not None:
            raise self._broken
        return self._view[self._filled :]

    def received(self, count: int) -> Frame | None:
        """Take ``count`` bytes as put into :meth:`next_buffer`; the frame, if they end one.

        Raises:
            ProtocolError: they are not what the protocol allows; the decoder is of no more use.
        """
        arrived = self.next_buffer()[:count]
        if not 0 < count == len(arrived):
            raise ValueError(f"{count} bytes cannot have been received")
        self._filled += count
        try:
            if self._whole == self._header_whole:
                self._check_start()
            elif self._whole == self._payload_whole:
                self._checksum.update(arrived)
            return self._whole() if self._filled == len(self._view) else None
        except ProtocolError as error:
            self._broken = error
            raise

    def _await(self, view: memoryview, whole: Callable[[], Frame | None]) -> None:
        self._view, self._filled, self._whole = view, 0, whole

    def _check_start(self) -> None:
        """Refuse strangers by their first bytes; they may never send a header's worth."""
        start = bytes(self._header[: min(self._filled, len(MAGIC))])
        if not MAGIC.startswith(start):
            raise ProtocolError(f"no gossipx peer: it began with {start!r}")
        if self._filled >= _START.size:
            version = _START.unpack_from(self._header)[1]
            if version != VERSION:
                raise VersionError(
                    f"the other side speaks version {version} of the protocol, this side version"
                    f" {VERSION}: install the same gossipx on both"
                )

    def _header_whole(self) -> None:
        _, _, number, _, metadata, payload = _HEADER.unpack_from(self._header)
        kind = _KINDS.get(number)
        if kind is None:
            raise ProtocolError(f"a frame of unknown kind {number}")
        if not 2 <= metadata <= kind.metadata or payload > kind.payload:
            raise ProtocolError(
                f"{kind.message.__name__} announced {metadata} bytes of metadata and {payload} of"
                f" payload: at most {kind.metadata} and {kind.payload} are allowed"
            )
        self._await(memoryview(bytearray(metadata)), self._metadata_whole)

    def _metadata_whole(self) -> Frame | None:
        _, _, number, request, _, payload = _HEADER.unpack_from(self._header)
        checksum = xxhash.xxh3_64(memoryview(self._header)[: _HEADER.size])
        checksum.update(self._view)
        if checksum.intdigest() != _CHECK.unpack_from(self._header, _HEADER.size)[0]:
            raise ProtocolError("a frame whose header or metadata does not match its checksum")
        message = _parse(_KINDS[number], bytes(self._view))
        room = self._expect(message, request)
        size = 0 if room is None else room.nbytes
        if payload != size:
            raise ProtocolError(
                f"{type(message).__name__} with a payload of {payload} bytes where {size} were expected"
            )
        self._frame = Frame(request, message, room)
        if room is None or not size:
            return self._trailer_whole()
        self._checksum.reset()
        self._await(room.cast("B"), self._payload_whole)
        return None

    def _payload_whole(self) -> None:
        self._await(memoryview(bytearray(_CHECK.size)), self._check_payload)

    def _check_payload(self) -> Frame:
        if self._checksum.intdigest() != _CHECK.unpack(self._view)[0]:
            raise ProtocolError("a payload that does not match its checksum")
        return self._trailer_whole()

    def _trailer_whole(self) -> Frame:
        self._await(memoryview(self._header), self._header_whole)
        return self._frame


def _parse(kind: _Kind, metadata: bytes) -> Message:
    try:
        # The interpreter's recursion limit bounds the nesting that is read; _build then allows
        # three levels.
        plain = json.loads(metadata.decode(), object_pairs_hook=_object, parse_constant=_constant)
        message: Message = _build(kind, plain)
    except RecursionError:
        raise ProtocolError(f"{kind.message.__name__}: metadata nests too deep") from None
    except ValueError as error:
        raise ProtocolError(f"metadata refused: {error}") from None
    return message


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    named = dict(pairs)
    if len(named) != len(pairs):
        raise ValueError("a field stands twice")
    return named


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
