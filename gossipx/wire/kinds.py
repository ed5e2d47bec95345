"""All kinds of messages, and each as a frame's metadata: a JSON object of its fields, every field within its bound.

What stands here bounds what another peer can make this one take in, allocate and show.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from gossipx.errors import ProtocolError
from gossipx.messages import (
    LAST_WAVE,
    MAX_WAVE,
    AcceptReply,
    ArriveRequest,
    BusyReply,
    CentreRequest,
    CopyReply,
    CopyRequest,
    ElasticRequest,
    GradientRequest,
    HereReply,
    InitialRequest,
    LeaveRequest,
    ModelReply,
    NotReadyReply,
    PairRequest,
    PauseRequest,
    PlacedReply,
    PlaceRequest,
    PrepareRequest,
    PullRequest,
    PushRequest,
    RangesRequest,
    RecordRequest,
    RoundRequest,
    ServersRequest,
    SettleRequest,
    Stage,
    SwitchRequest,
    TablesReply,
    TablesRequest,
    TakeRequest,
    WaitingReply,
    WaitingRequest,
)
from gossipx.wire import (
    CHECKUP_PARTS,
    MAX_DESCRIPTION,
    MAX_LOAD,
    Accepted,
    Carried,
    CarrierReply,
    CarrierRequest,
    Challenge,
    CheckupReply,
    CheckupRequest,
    DescribeRequest,
    Description,
    Hello,
    Message,
    NoCarrierReply,
    NotAuthorised,
    Noted,
    Open,
    Proof,
    Refused,
    Taken,
    Welcome,
)

MAX_RANKS = 65_536
MAX_TEXT = 1_000  # characters
MAX_SECONDS = 7 * 86_400
MAX_FIGURES = 1_000  # names in a report
MAX_SETTINGS = 32
MAX_PARTS = 65_536  # partitions of a shard
MAX_SECTIONS = 16  # of a model: one a dtype
MAX_HAPPENED = 1_000  # entries of one record
MAX_GROUPS, MAX_GROUP = 1_000, 32  # parameter groups of an optimizer, and numbers in one
# Bytes of metadata. The largest honest ones: 65,536 ranks of five digits are 384 KiB; the reports
# of 100 peers have 5 KiB each. The small bound is what a stranger can make us allocate.
MAX_METADATA = 512 * 1024
SMALL_METADATA = 16 * 1024
# Bytes of payload. A model's true size is the receiver's to expect; this only keeps sums sane.
MAX_MODEL = 2**40
MAX_NOTE = 4096  # bytes; gloo has 170, NCCL 128

_DIGITS = "0123456789abcdef"


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


def _part(value: object) -> str:
    if type(value) is not str or value not in CHECKUP_PARTS:
        raise ValueError(f"is none of {', '.join(CHECKUP_PARTS)}")
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


def _settings(value: object) -> dict[str, str]:
    if type(value) is not dict or len(value) > MAX_SETTINGS:
        raise ValueError(f"is not an object of at most {MAX_SETTINGS} texts")
    return {_text(name): _text(item) for name, item in value.items()}


def _entry(value: object) -> object:
    return [_figure(item) for item in value] if type(value) is list else _figure(value)


_U63 = 2**63 - 1


def _seconds(value: object) -> float:
    if type(value) not in (int, float) or not 0 < value <= MAX_SECONDS:  # type: ignore[operator]
        raise ValueError(f"is not a number above 0, up to {MAX_SECONDS}")
    return float(value)  # type: ignore[arg-type]


def _wave(value: object) -> int:
    return LAST_WAVE if value == LAST_WAVE and type(value) is int else _integer(1, MAX_WAVE)(value)


_rank = _integer(0, MAX_RANKS - 1)
_size = _integer(1, MAX_RANKS)
_key = _hexadecimal(64)
_count = _integer(0, _U63)


def _number(value: object) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:  # type: ignore[operator]
        raise ValueError("is not a finite number from 0")
    return float(value)  # type: ignore[arg-type]


def _pair(value: object) -> tuple[int, int]:
    if type(value) is not list or len(value) != 2:
        raise ValueError("holds what is not a pair of numbers")
    return _integer(0, MAX_PARTS)(value[0]), _integer(0, MAX_MODEL)(value[1])


def _parts(value: object) -> tuple[tuple[int, int], ...]:
    if type(value) is not list or len(value) > MAX_PARTS:
        raise ValueError(f"is not a list of at most {MAX_PARTS} parts")
    return tuple(_pair(item) for item in value)


def _sections(value: object) -> tuple[int, ...]:
    if type(value) is not list or len(value) > MAX_SECTIONS:
        raise ValueError(f"is not a list of at most {MAX_SECTIONS} numbers")
    return tuple(_count(item) for item in value)


def _groups(value: object) -> tuple[dict[str, float], ...]:
    if type(value) is not list or len(value) > MAX_GROUPS:
        raise ValueError(f"is not a list of at most {MAX_GROUPS} groups")
    made = []
    for group in value:
        if type(group) is not dict or len(group) > MAX_GROUP:
            raise ValueError(f"holds what is not an object of at most {MAX_GROUP} numbers")
        if not all(type(item) in (int, float) and math.isfinite(item) for item in group.values()):
            raise ValueError("holds what is not a finite number")
        made.append({_text(name): float(item) for name, item in group.items()})
    return tuple(made)


def _happened(value: object) -> tuple[tuple[str | int | float, ...], ...]:
    if type(value) is not list or len(value) > MAX_HAPPENED:
        raise ValueError(f"is not a list of at most {MAX_HAPPENED} entries")
    return tuple(_happening(one) for one in value)


def _happening(value: object) -> tuple[str | int | float, ...]:
    if type(value) is not list or not 1 <= len(value) <= 4:
        raise ValueError("holds what is not a word with at most three figures")
    made = [_figure(item) for item in value]
    if any(item is None or type(item) is bool for item in made):
        raise ValueError("holds what is neither text nor a finite number")
    return tuple(made)  # type: ignore[arg-type]


def _servers(value: object) -> tuple[int, ...]:
    if type(value) is not list or not 0 < len(value) <= MAX_RANKS:
        raise ValueError(f"is not a list of 1 to {MAX_RANKS} ranks")
    ranks = tuple(_rank(item) for item in value)
    if len(set(ranks)) < len(ranks):
        raise ValueError("names a rank twice")
    return ranks


def _workers(value: object) -> tuple[tuple[int, int], ...]:
    if type(value) is not list or len(value) > MAX_RANKS:
        raise ValueError(f"is not a list of at most {MAX_RANKS} workers")
    if not all(type(item) is list and len(item) == 2 for item in value):
        raise ValueError("holds what is not a rank with its iteration")
    return tuple((_rank(rank), _count(iteration)) for rank, iteration in value)


def _state(value: object) -> str:
    if type(value) is not str or not value.isascii():
        raise ValueError("is not ASCII text")
    return value


_shard = _integer(0, MAX_RANKS - 1)
_bucket = _integer(-1, 2**63 - 1)


# --- the kinds -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """One kind of message.

    Attributes:
        message: its class.
        checks: of all its fields, by name.
        metadata, payload: bytes that a frame of it has at most.
    """

    message: type
    checks: Mapping[str, Callable[[object], Any]]
    metadata: int = SMALL_METADATA
    payload: int = 0


_EXCHANGE = {"incarnation": _count, "number": _count}
_STANDING = {"stage": _stage, "report": _report, "wave": _integer(0, MAX_WAVE)}
KINDS = {
    1: Kind(
        Hello,
        {"rank": _rank, "name": _text, "size": _size, "peers": _text, "model": _text, "settings": _settings},
    ),
    2: Kind(Welcome, {"rank": _rank, "name": _text, "model": _text, "machine": _text, "local": _text}),
    3: Kind(Refused, {"reason": _text}),
    4: Kind(DescribeRequest, {}),
    5: Kind(Description, {"size": _integer(0, MAX_DESCRIPTION)}, payload=MAX_DESCRIPTION),
    6: Kind(Open, {"nonce": _key, "run": _text, "opener": _text, "answerer": _text}),
    7: Kind(Challenge, {"nonce": _key}),
    8: Kind(Proof, {"proof": _key}),
    9: Kind(Accepted, {"proof": _key}),
    10: Kind(NotAuthorised, {"reason": _text}),
    11: Kind(Taken, {}),
    12: Kind(CarrierRequest, {"kind": _text}),
    13: Kind(Noted, {"key": _text, "value": _octets(MAX_NOTE)}),
    14: Kind(CarrierReply, {}),
    15: Kind(NoCarrierReply, {"reason": _text}),
    16: Kind(InitialRequest, {}),
    17: Kind(PullRequest, {"step": _count, "patience": _seconds, "bases": _sections}),
    18: Kind(RoundRequest, {"wave": _wave, "round": _count, "members": _members}, MAX_METADATA),
    19: Kind(ArriveRequest, {**_STANDING, "incarnation": _count}, MAX_METADATA),
    20: Kind(LeaveRequest, {}),
    21: Kind(PushRequest, _EXCHANGE),
    22: Kind(PairRequest, _EXCHANGE),
    23: Kind(TakeRequest, {**_EXCHANGE, "bases": _sections}),
    24: Kind(SettleRequest, {**_EXCHANGE, "taken": _flag}),
    25: Kind(
        ElasticRequest,
        {**_EXCHANGE, "step": _count, "patience": _seconds, "bases": _sections, "sizes": _sections},
        payload=MAX_MODEL,
    ),
    26: Kind(CentreRequest, {"patience": _seconds}),
    27: Kind(
        GradientRequest,
        {
            "shard": _shard,
            "bucket": _count,
            "incarnation": _count,
            "progress": _count,
            "parts": _parts,
            "settings": _groups,
            "patience": _seconds,
            "epoch": _count,
            "keep": _count,
        },
        MAX_METADATA,
        MAX_MODEL,
    ),
    28: Kind(
        TablesRequest,
        {
            "shard": _shard,
            "bucket": _bucket,
            "incarnation": _count,
            "progress": _bucket,
            "significance": _number,
            "patience": _seconds,
            "epoch": _count,
            "base": _count,
        },
    ),
    29: Kind(SwitchRequest, {"shard": _shard, "sync": _text, "apply": _text, "pulls": _text}),
    30: Kind(
        RecordRequest,
        {
            "shard": _shard,
            "copy": _count,
            "number": _count,
            "happened": _happened,
            "bucket": _bucket,
            "progress": _bucket,
            "parts": _parts,
            "settings": _groups,
            "patience": _seconds,
        },
        MAX_METADATA,
        MAX_MODEL,
    ),
    31: Kind(CopyRequest, {"shard": _shard, "incarnation": _count, "copy": _bucket, "patience": _seconds}),
    32: Kind(
        ModelReply,
        {"step": _count, "weight": _weight, "bases": _sections, "sizes": _sections},
        payload=MAX_MODEL,
    ),
    33: Kind(HereReply, _STANDING, MAX_METADATA),
    34: Kind(NotReadyReply, {"reason": _text}),
    35: Kind(AcceptReply, {}),
    36: Kind(BusyReply, {}),
    37: Kind(
        TablesReply,
        {"clock": _count, "parts": _parts, "sync": _text, "keep": _count, "base": _count},
        MAX_METADATA,
        MAX_MODEL,
    ),
    38: Kind(
        CopyReply,
        {"incarnation": _count, "copy": _count, "state": _state, "size": _integer(0, MAX_MODEL)},
        MAX_METADATA,
        MAX_MODEL,
    ),
    40: Kind(ServersRequest, {"number": _count, "servers": _members, "patience": _seconds}, MAX_METADATA),
    41: Kind(PauseRequest, {"epoch": _count, "servers": _servers, "patience": _seconds}, MAX_METADATA),
    42: Kind(PrepareRequest, {"epoch": _count, "state": _state, "sync": _text, "patience": _seconds}, MAX_METADATA),
    43: Kind(RangesRequest, {"epoch": _count, "batch": _count, "sync": _text, "patience": _seconds}),
    44: Kind(PlaceRequest, {"epoch": _count, "servers": _servers, "decided": _count}, MAX_METADATA),
    45: Kind(PlacedReply, {"epoch": _count, "servers": _servers, "decided": _count}, MAX_METADATA),
    46: Kind(WaitingRequest, {"shard": _shard}),
    47: Kind(WaitingReply, {"workers": _workers}, MAX_METADATA),
    48: Kind(Carried, {"digest": _octets(32)}),
    49: Kind(CheckupRequest, {"name": _text, "part": _part, "back": _integer(0, MAX_LOAD)}),
    50: Kind(CheckupReply, {"report": _report, "size": _integer(0, MAX_LOAD)}, payload=MAX_LOAD),
}
"""By number, as a frame's header has it."""
NUMBERS = {kind.message: number for number, kind in KINDS.items()}


# --- a message as metadata, and back --------------------------------------------------------------


def metadata_of(message: Message) -> bytes:
    """The metadata of ``message``.

    NaN and infinite figures of a report go as null, which JSON has and which reads as "no figure".

    Raises:
        ValueError: a field is not one that a peer would accept.
    """
    plain = {field.name: _plain(getattr(message, field.name)) for field in fields(message)}
    _build(KINDS[NUMBERS[type(message)]], plain)
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()


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


def message_of(kind: Kind, metadata: bytes) -> Message:
    """The message that a frame's metadata tell.

    Raises:
        ProtocolError: they tell none of this kind, or one with a field that is not allowed.
    """
    try:
        # The interpreter's recursion limit bounds the nesting that is read; _build then allows three levels.
        plain = json.loads(metadata.decode(), object_pairs_hook=_object, parse_constant=_constant)
        message: Message = _build(kind, plain)
    except RecursionError:
        raise ProtocolError(f"{kind.message.__name__}: metadata nests too deep") from None
    except ValueError as error:
        raise ProtocolError(f"metadata refused: {error}") from None
    return message


def _build(kind: Kind, plain: object) -> Any:
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


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    named = dict(pairs)
    if len(named) != len(pairs):
        raise ValueError("a field stands twice")
    return named


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
