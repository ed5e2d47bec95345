"""The protocol between peers: bytes in, events out; no socket, no clock.

A frame, all numbers big-endian::

    offset  bytes
         0      4  magic, "GSPX"            the first two fields never move, so that
         4      2  protocol version         another version can be told by name
         6      2  kind of message; the highest bit: the payload lies beside the connection
         8      8  request id, chosen by the requester, repeated in the reply
        16      4  M, length of the metadata
        20      8  P, length of the payload
        28      C  check of bytes 0..27 and the metadata
      28+C      M  metadata: one JSON object, UTF-8, the message's fields
    28+C+M      P  payload: raw bytes
  28+C+M+P      C  check of the payload; left out where P is 0

A check is the XXH3-64 of its part (C = 8), which finds accidents and is no protection from an attacker; where the run
has a secret, from the handshake on, it is a MAC (C = 32, :mod:`gossipx.wire.auth`).

A payload that lies beside the connection comes another way (:mod:`gossipx.transports.beside`), and the frame ends with
its metadata: the receiver reads it from memory that both share, or it is carried by what they built, and then Carried
tells what its check ends in.

Nothing is unpickled or evaluated. Every length is checked against a bound of its kind before
anything is allocated, and a payload goes straight into the room that its receiver provides.
"""

from __future__ import annotations

import hmac
import itertools
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn, Protocol

import xxhash

from gossipx.errors import ProtocolError
from gossipx.memory import PIECE
from gossipx.messages import (
    AcceptReply,
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
    RoundRequest,
    SettleRequest,
    Stage,
    TakeRequest,
)
from gossipx.wire import (
    MAX_DESCRIPTION,
    Accepted,
    Carried,
    CarrierReply,
    CarrierRequest,
    Challenge,
    DescribeRequest,
    Description,
    Expect,
    Hello,
    Message,
    NoCarrierReply,
    NotAuthorised,
    Noted,
    Open,
    Proof,
    Refused,
    Sink,
    Taken,
    Welcome,
)

MAGIC = b"GSPX"
VERSION = 2
MAX_RANKS = 65_536
MAX_TEXT = 1_000  # characters
MAX_SECONDS = 7 * 86_400
MAX_FIGURES = 1_000  # names in a report
# Bytes of metadata. The largest honest ones: 65,536 ranks of five digits are 384 KiB; the reports
# of 100 peers have 5 KiB each. The small bound is what a stranger can make us allocate.
MAX_METADATA = 512 * 1024
SMALL_METADATA = 16 * 1024
# Bytes of payload. A model's true size is the receiver's to expect; this only keeps sums sane.
MAX_MODEL = 2**40
MAX_NOTE = 4096  # bytes; gloo has 170, NCCL 128
# Of the kind: the payload lies beside the connection.
_BESIDE = 0x8000

Buffers = list[bytes | memoryview]

_DIGITS = "0123456789abcdef"
_START = struct.Struct("!4sH")
_HEADER = struct.Struct("!4sHHQIQ")
HEADER_BYTES = _HEADER.size
"""What follows is a check, whose length is the connection's."""


class Check(Protocol):
    """Looks at one part of a frame, piece by piece; as those of :mod:`hashlib`, :mod:`hmac` and :mod:`xxhash` do."""

    @property
    def digest_size(self) -> int:
        """Bytes of the digest; the same for all checks of a connection and direction."""

    def update(self, piece: bytes | memoryview, /) -> None:
        """Look at the next piece."""

    def digest(self) -> bytes:
        """What the part ends in."""


Checks = Callable[[], Check]
"""Makes the check of each part of each frame: two a frame with a payload, one a frame without, in their order."""
CHECKSUMS: Checks = xxhash.xxh3_64


class VersionError(ProtocolError):
    """The other side speaks another version of the protocol."""


# --- checks: a plain JSON value in, the field's value out; ValueError tells what it should be ----


def _integer(low: int, high: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"is not an integer from {low} to {high}")
        return value

    return check


def _hexadecimal(digits: int) -> Callable[[object], str]:
    def check(value: object) -> str:
        if type(value) is not str or len(value) != digits or not set(value) <= set(_DIGITS):
            raise ValueError(f"is not {digits} hexadecimal digits")
        return value

    return check


def _octets(most: int) -> Callable[[object], str]:
    def check(value: object) -> str:
        if type(value) is not str or len(value) % 2 or len(value) > 2 * most or not set(value) <= set(_DIGITS):
            raise ValueError(f"is not at most {most} bytes in hexadecimal digits")
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


def _seconds(value: object) -> float:
    if type(value) not in (int, float) or not 0 < value <= MAX_SECONDS:  # type: ignore[operator]
        raise ValueError(f"is not a number above 0, up to {MAX_SECONDS}")
    return float(value)  # type: ignore[arg-type]


_rank = _integer(0, MAX_RANKS - 1)
_size = _integer(1, MAX_RANKS)
_key = _hexadecimal(64)
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
    2: _Kind(Welcome, {"rank": _rank, "name": _text, "model": _text, "machine": _text, "local": _text}),
    3: _Kind(Refused, {"reason": _text}),
    4: _Kind(DescribeRequest, {}),
    5: _Kind(Description, {"size": _integer(0, MAX_DESCRIPTION)}, payload=MAX_DESCRIPTION),
    6: _Kind(Open, {"nonce": _key, "run": _text, "opener": _text, "answerer": _text}),
    7: _Kind(Challenge, {"nonce": _key}),
    8: _Kind(Proof, {"proof": _key}),
    9: _Kind(Accepted, {"proof": _key}),
    10: _Kind(NotAuthorised, {"reason": _text}),
    11: _Kind(Taken, {}),
    12: _Kind(CarrierRequest, {"kind": _text}),
    13: _Kind(Noted, {"key": _text, "value": _octets(MAX_NOTE)}),
    14: _Kind(CarrierReply, {}),
    15: _Kind(NoCarrierReply, {"reason": _text}),
    16: _Kind(InitialRequest, {}),
    17: _Kind(PullRequest, {"step": _count, "patience": _seconds}),
    18: _Kind(RoundRequest, {"wave": _count, "round": _count, "members": _members}, MAX_METADATA),
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
    48: _Kind(Carried, {"digest": _octets(32)}),
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


def encode(
    message: Message,
    request: int,
    payload: memoryview | None = None,
    checks: Checks = CHECKSUMS,
    beside: bool = False,
) -> Iterator[Buffers]:
    """The frame of ``message``, as lists of buffers to send in turn; the payload is never copied.

    NaN and infinite figures of a report go as null, which JSON has and which reads as "no figure".

    Args:
        message: what to say.
        request: id of the request, 0 to 2⁶⁴ − 1.
        payload: contiguous; must not change until its last piece is sent.
        checks: of the connection and direction that it goes out by, as MACs count: what is encoded must be sent, whole
            and before the next is encoded.
        beside: whether the payload lies beside the connection, and is no part of the frame.

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
    header = _HEADER.pack(MAGIC, VERSION, number | beside * _BESIDE, request, len(metadata), size)
    check = checks()
    check.update(header + metadata)
    head = header + check.digest() + metadata
    return _pieces(head, payload.cast("B") if payload is not None and size and not beside else None, checks)


def _pieces(head: bytes, payload: memoryview | None, checks: Checks) -> Iterator[Buffers]:
    if payload is None:
        yield [head]
        return
    buffers: Buffers = [head]
    check = checks()
    for start in range(0, len(payload), PIECE):
        piece = payload[start : start + PIECE]
        buffers.append(piece)
        if start + PIECE < len(payload):
            yield buffers
            buffers = []
            check.update(piece)  # after it was sent, which has brought it into the processor's cache
        else:
            check.update(piece)
            yield [*buffers, check.digest()]


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
        payload: the sink that ``expect`` gave; None where the frame has none.
        beside: whether that is still to be filled, from beside the connection.
    """

    request: int
    message: Message
    payload: Sink | None
    beside: bool = False


class Decoder:
    """Frames from bytes. Put bytes into :meth:`next_buffer`, tell :meth:`received` how many.

    Args:
        expect: asked before a payload is accepted.

    Attributes:
        in_payload: whether the next bytes are a payload's.
        most: bytes of metadata that are allocated; as long as the other side is a stranger, SMALL_METADATA.
    """

    def __init__(self, expect: Expect, most: int = MAX_METADATA):
        self.most = most
        self._expect = expect
        self._broken: ProtocolError | None = None
        self._frame: Frame
        self._sink: Sink
        self._start = 0  # of the piece that comes in, in the payload
        self.in_payload = False
        self.use(CHECKSUMS)

    def use(self, checks: Checks) -> None:
        """Check frames from the next one on by ``checks``; between two frames only."""
        self._checks, self._check = checks, checks()
        self._header = bytearray(HEADER_BYTES + self._check.digest_size)
        self._await(memoryview(self._header), self._header_whole)

    def part(self) -> Check:
        """Looks at what comes next, beside the connection, as at the next part of a frame; between two frames only."""
        check, self._check = self._check, self._checks()
        return check

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
        kind = _KINDS.get(number & ~_BESIDE)
        if kind is None:
            raise ProtocolError(f"a frame of unknown kind {number}")
        if not 2 <= metadata <= min(kind.metadata, self.most) or payload > kind.payload:
            raise ProtocolError(
                f"{kind.message.__name__} announced {metadata} bytes of metadata and {payload} of"
                f" payload: at most {min(kind.metadata, self.most)} and {kind.payload} are allowed"
            )
        self._await(memoryview(bytearray(metadata)), self._metadata_whole)

    def _metadata_whole(self) -> Frame | None:
        _, _, number, request, _, payload = _HEADER.unpack_from(self._header)
        check = self._check
        check.update(memoryview(self._header)[:HEADER_BYTES])
        check.update(self._view)
        self._check = self._checks()
        if not hmac.compare_digest(check.digest(), self._header[HEADER_BYTES:]):
            raise ProtocolError("a frame whose header or metadata does not match its checksum")
        message = _parse(_KINDS[number & ~_BESIDE], bytes(self._view))
        sink = self._expect(message, request)
        size = 0 if sink is None else sink.nbytes
        if payload != size:
            raise ProtocolError(
                f"{type(message).__name__} with a payload of {payload} bytes where {size} were expected"
            )
        beside = bool(number & _BESIDE)
        self._frame = Frame(request, message, sink, beside and size > 0)
        if sink is None or not size or beside:
            return self._trailer_whole()
        self._sink, self._start, self.in_payload = sink, 0, True
        self._await(sink.room(0), self._piece_whole)
        return None

    def _piece_whole(self) -> None:
        self._check.update(self._view)
        self._sink.filled(self._start)
        self._start += len(self._view)
        if self._start < self._sink.nbytes:
            self._await(self._sink.room(self._start), self._piece_whole)
        else:
            self.in_payload = False
            self._await(memoryview(bytearray(self._check.digest_size)), self._check_payload)

    def _check_payload(self) -> Frame:
        check, self._check = self._check, self._checks()
        if not hmac.compare_digest(check.digest(), self._view):
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
