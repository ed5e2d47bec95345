"""Kinds of messages, and field types with the constraints that a received value must meet.

A message class declares its kind number and its fields once. :mod:`gossipx.wire.frames` decodes and checks by these
declarations, so a role may rely on the types and ranges of received values, though not on the good will of the sender.
msgspec checks types, ranges and lengths while it decodes. What it cannot express is a function beside them in the
``Annotated`` type, called with the decoded value; its ValueError says what is wrong in a few words.

The limits below bound what another peer can make this one receive, allocate and display.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar, get_type_hints

from msgspec import Meta, Struct, inspect
from msgspec.json import Decoder

_T = TypeVar("_T", bound=type)
Check: TypeAlias = Callable[[Any], None]
"""Refuses a decoded value by a ValueError that says what is wrong in a few words."""

MAX_COUNT = 2**63 - 1
MAX_RANKS = 65_536
MAX_TEXT = 1_000  # characters
MAX_SECONDS = 7 * 86_400
MAX_FIGURES = 1_000  # entries in a report
MAX_SETTINGS = 32
MAX_SECRETS = 2  # that are valid at a time, so that one can follow the other during a run
MAX_PARTS = 65_536  # partitions of a shard
MAX_SECTIONS = 16  # sections of a model: one per dtype
MAX_GROUPS, MAX_GROUP = 1_000, 32  # parameter groups of an optimizer, and settings in one
MAX_JOINED = 1_000  # peers that join a run under way
MAX_SETTING = 8  # numbers in one setting of an optimizer
# Bytes of metadata. The largest legitimate messages: 65,536 ranks of five digits are 384 KiB, a report of a run of 100
# peers is 5 KiB. The small bound is what an unauthenticated connection can make us allocate.
MAX_METADATA = 512 * 1024
SMALL_METADATA = 16 * 1024
# Bytes of payload. The receiver knows a model's true size; this bound only rejects absurd values.
MAX_MODEL = 2**40

# --- constraints --------------------------------------------------------------------------------


def between(low: int, high: int) -> Meta:
    """Constrain a number to ``low`` to ``high``."""
    return Meta(ge=low, le=high)


def at_most(length: int, least: int = 0) -> Meta:
    """Constrain the length of text, a list or an object to ``least`` to ``length``."""
    return Meta(max_length=length, min_length=least)


def octets(most: int) -> Meta:
    """Constrain text to at most ``most`` bytes, written as hexadecimal digits."""
    return Meta(pattern=rf"\A([0-9a-f]{{2}}){{0,{most}}}\Z")


def printable_text(value: Any) -> None:
    """Refuse text that is not printable, at any depth: it ends up in logs and terminals of other machines."""
    match value:
        case str() if not value.isprintable():
            raise ValueError("is not one printable line")
        case dict():
            for name, item in value.items():
                printable_text(name)
                printable_text(item)
        case list() | tuple():
            for item in value:
                printable_text(item)


def _ascending(ranks: tuple[int, ...]) -> None:
    if any(rank >= after for rank, after in itertools.pairwise(ranks)):
        raise ValueError("is not ascending")


def _distinct(ranks: tuple[int, ...]) -> None:
    if len(set(ranks)) < len(ranks):
        raise ValueError("names a rank twice")


# --- types of fields ----------------------------------------------------------------------------

Rank = Annotated[int, between(0, MAX_RANKS - 1)]
Ranks = Annotated[tuple[Rank, ...], at_most(MAX_RANKS), _ascending]
Servers = Annotated[tuple[Rank, ...], at_most(MAX_RANKS, 1), _distinct]
"""For each shard, the rank that hosts it."""
Count = Annotated[int, between(0, MAX_COUNT)]
CountOrNone = Annotated[int, between(-1, MAX_COUNT)]
"""A count; −1 means none."""
Whole = Annotated[int, between(-MAX_COUNT, MAX_COUNT)]
Port = Annotated[int, between(1, 65_535)]
Seconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
FromZero = Annotated[float, Meta(ge=0)]
Weight = Annotated[float, Meta(gt=0, le=MAX_RANKS)]
"""The weight of a model in an average; the weights of a run add up to its number of peers."""
Line = Annotated[str, at_most(MAX_TEXT)]
"""Text inside a list or an object, whose type has :func:`printable_text` for all that it contains."""
Text = Annotated[str, at_most(MAX_TEXT), printable_text]
Ascii = Annotated[str, Meta(pattern=r"\A[\x00-\x7f]*\Z")]
Token = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
"""32 bytes as hexadecimal digits: a nonce, or a proof that a peer knows a secret of the run."""
Proofs = Annotated[tuple[Token, ...], at_most(MAX_SECRETS, 1)]
"""One proof for each secret that a peer has."""
Digest = Annotated[str, Meta(pattern=r"\A([0-9a-f]{32})?\Z")]
"""The checksum of a model, of 128 bits; empty: no model."""
Texts = Annotated[Mapping[Line, Line], at_most(MAX_SETTINGS), printable_text]
ReportedFigure: TypeAlias = Line | Whole | float | bool | None
Report = Annotated[dict[Line, ReportedFigure | list[ReportedFigure]], at_most(MAX_FIGURES), printable_text]
Sections = Annotated[tuple[Count, ...], at_most(MAX_SECTIONS)]
"""One number for each section of a model."""
Reference = tuple[Count, Count]
"""Identifies a reference of waves: the number of means of shards that it has taken in, and its checksum. Of two that
differ, the greater one is the later."""
Setting: TypeAlias = Whole | float | Annotated[tuple[Whole | float, ...], at_most(MAX_SETTING, 1)]
"""A setting of an optimizer: a number, or several, such as Adam's betas."""
Groups = Annotated[tuple[Annotated[dict[Line, Setting], at_most(MAX_GROUP)], ...], at_most(MAX_GROUPS), printable_text]
"""The settings of each parameter group of an optimizer, in order."""
_Part: TypeAlias = tuple[Annotated[int, between(0, MAX_PARTS)], Annotated[int, between(0, MAX_MODEL)]]
Parts = Annotated[tuple[_Part, ...], at_most(MAX_PARTS)]
"""For each partition in a bucket, in order: its number in the shard, and its number of bytes in the payload.

A shard is what one server hosts of the model's tables. It consists of partitions, which are parts of tables, and
these are sent in buckets.
"""


class JoinedPeer(NamedTuple):
    """A peer that is not in the hosts file, and joined the run while it was in progress.

    Attributes:
        rank: the first number above those of all peers that were known then.
        host, port: the address at which it listens.
        by: rank of the peer that admitted it.
    """

    rank: Rank
    name: Line
    host: Line
    port: Port
    by: Rank


Joined = Annotated[tuple[JoinedPeer, ...], at_most(MAX_JOINED), printable_text]

# --- kinds --------------------------------------------------------------------------------------


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages. Each says ``frozen=True`` again: type checkers do not take it from here."""


@dataclass(frozen=True)
class Kind:
    """A kind of message.

    Attributes:
        number: identifies it in the header of a frame.
        message: its class.
        decode: makes the message from metadata, without the checks.
        checks: what msgspec cannot express, by field, in order.
        metadata: maximum bytes of metadata in a frame.
        payload: maximum bytes of payload in a frame.
        answers: the replies that may answer it; empty: it is no request.
    """

    number: int
    message: type
    decode: Callable[[bytes], Any]
    checks: tuple[tuple[str, Check], ...]
    metadata: int
    payload: int
    answers: tuple[type, ...]


_DECLARED: dict[type, Kind] = {}


def kind(
    number: int, metadata: int = SMALL_METADATA, payload: int = 0, answers: tuple[type, ...] = ()
) -> Callable[[_T], _T]:
    """Return a decorator that declares a class as a kind of message. For the arguments see :class:`Kind`.

    Raises:
        TypeError: a field's type has no bound; every field that is received must have one.
    """

    def declare(message: _T) -> _T:
        for field in inspect.type_info(message).fields:  # type: ignore[attr-defined]
            if not _is_bounded(field.type):
                raise TypeError(f"{message.__name__}: the type of {field.name} has no bound")
        checks = tuple(
            (name, check)
            for name, hint in get_type_hints(message, include_extras=True).items()
            for check in getattr(hint, "__metadata__", ())
            if callable(check)
        )
        _DECLARED[message] = Kind(number, message, Decoder(message).decode, checks, metadata, payload, answers)
        return message

    return declare


def _is_bounded(field: inspect.Type) -> bool:
    match field:
        case inspect.IntType():
            return field.ge is not None and field.le is not None
        case inspect.StrType():
            return field.max_length is not None or field.pattern is not None
        case inspect.VarTupleType() | inspect.ListType() | inspect.DictType():
            return field.max_length is not None
    return True


def kind_of(message: type) -> Kind:
    """Return the kind that a message class was declared as."""
    return _DECLARED[message]


def all_kinds() -> Iterable[Kind]:
    """Return the kinds that were declared so far."""
    return _DECLARED.values()
