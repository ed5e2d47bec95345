"""Kinds of messages, and field types that carry the check which a received value must pass.

A message class declares its kind number and its fields once. :mod:`gossipx.wire.kinds` derives the decoder from these
declarations, so a role may rely on the types and ranges of received values, though not on the good will of the sender.
The limits below bound what another peer can make this one receive, allocate and display.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar, get_args, get_type_hints

_T = TypeVar("_T")
Check: TypeAlias = Callable[[object], Any]
Setting: TypeAlias = float | tuple[float, ...]
"""A setting of an optimizer: a number, or several, such as Adam's betas."""
"""A function from a plain JSON value to the value of the field. Its ValueError says what is wrong in a few words."""

MAX_COUNT = 2**63 - 1
MAX_RANKS = 65_536
MAX_TEXT = 1_000  # characters
MAX_SECONDS = 7 * 86_400
MAX_FIGURES = 1_000  # entries in a report
MAX_SETTINGS = 32
MAX_SECRETS = 2  # that are valid at a time, so that one can follow the other during a run
MAX_PARTS = 65_536  # partitions of a shard
MAX_SECTIONS = 16  # sections of a model: one per dtype
MAX_SHARD_EVENTS = 1_000  # entries in one record
MAX_GROUPS, MAX_GROUP = 1_000, 32  # parameter groups of an optimizer, and settings in one
MAX_JOINED = 1_000  # peers that join a run under way
MAX_SETTING = 8  # numbers in one setting of an optimizer
# Bytes of metadata. The largest legitimate messages: 65,536 ranks of five digits are 384 KiB, a report of a run of 100
# peers is 5 KiB. The small bound is what an unauthenticated connection can make us allocate.
MAX_METADATA = 512 * 1024
SMALL_METADATA = 16 * 1024
# Bytes of payload. The receiver knows a model's true size; this bound only rejects absurd values.
MAX_MODEL = 2**40

# --- numbers ------------------------------------------------------------------------------------


def integer(low: int, high: int) -> Check:
    """Return a check for integers from ``low`` to ``high``."""

    def check(value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"is not an integer from {low} to {high}")
        return value

    return check


def positive(most: int) -> Check:
    """Return a check for numbers above 0, up to ``most``."""

    def check(value: object) -> float:
        if type(value) not in (int, float) or not 0 < value <= most:  # type: ignore[operator]
            raise ValueError(f"is not a number above 0, up to {most}")
        return float(value)  # type: ignore[arg-type]

    return check


def is_finite(value: object) -> bool:
    """Return whether ``value`` is a finite number that fits a float; integers in JSON are unbounded."""
    try:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:
        return False


def _from_zero(value: object) -> float:
    if not is_finite(value) or value < 0:  # type: ignore[operator]
        raise ValueError("is not a finite number of at least 0")
    return float(value)  # type: ignore[arg-type]


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise ValueError("is not true or false")
    return value


def enumerated(members: type[enum.IntEnum]) -> Check:
    """Return a check for the values of an enum that counts from 0."""
    number = integer(0, max(members))
    return lambda value: members(number(value))


# --- text ---------------------------------------------------------------------------------------


def _text(value: object) -> str:
    # Printable, because the text ends up in logs and terminals of other machines.
    if type(value) is not str or len(value) > MAX_TEXT or not value.isprintable():
        raise ValueError(f"is not one printable line of at most {MAX_TEXT} characters")
    return value


def _ascii(value: object) -> str:
    if type(value) is not str or not value.isascii():
        raise ValueError("is not ASCII text")
    return value


def one_of(words: Sequence[str]) -> Check:
    """Return a check for these words."""

    def check(value: object) -> str:
        if type(value) is not str or value not in words:
            raise ValueError(f"is not one of {', '.join(words)}")
        return value

    return check


def _is_hexadecimal(value: object) -> bool:
    return type(value) is str and set(value) <= set("0123456789abcdef")


def hexadecimal(digits: int) -> Check:
    """Return a check for text of exactly ``digits`` hexadecimal digits."""

    def check(value: object) -> object:
        if not _is_hexadecimal(value) or len(value) != digits:  # type: ignore[arg-type]
            raise ValueError(f"is not {digits} hexadecimal digits")
        return value

    return check


def _digest(value: object) -> object:
    return value if value == "" and type(value) is str else hexadecimal(32)(value)


def octets(most: int) -> Check:
    """Return a check for at most ``most`` bytes, written as hexadecimal digits."""

    def check(value: object) -> object:
        if not _is_hexadecimal(value) or len(value) % 2 or len(value) > 2 * most:  # type: ignore[arg-type]
            raise ValueError(f"is not at most {most} bytes in hexadecimal digits")
        return value

    return check


# --- lists and objects --------------------------------------------------------------------------


def listed(item: Check, what: str, most: int, least: int = 0) -> Check:
    """Return a check for a list of ``least`` to ``most`` items; the field's value is a tuple.

    Args:
        item: check of each item.
        what: name of the items in error messages.
    """
    bounds = f"{least} to {most}" if least else f"at most {most}"

    def check(value: object) -> tuple[Any, ...]:
        if type(value) is not list or not least <= len(value) <= most:
            raise ValueError(f"is not a list of {bounds} {what}")
        return tuple(item(one) for one in value)

    return check


def pair(first: Check, second: Check, what: str) -> Check:
    """Return a check for a list of two values, called ``what`` in error messages; the field's value is a tuple."""

    def check(value: object) -> tuple[Any, Any]:
        if type(value) is not list or len(value) != 2:
            raise ValueError(f"has an item that is not {what}")
        return first(value[0]), second(value[1])

    return check


def named(item: Check, what: str, most: int) -> Check:
    """Return a check for an object of at most ``most`` items, called ``what`` in error messages."""

    def check(value: object) -> dict[str, Any]:
        if type(value) is not dict or len(value) > most:
            raise ValueError(f"is not an object of at most {most} {what}")
        return {_text(name): item(one) for name, one in value.items()}

    return check


def _ascending(value: object) -> tuple[int, ...]:
    ranks: tuple[int, ...] = listed(_rank, "ranks", MAX_RANKS)(value)
    if any(rank >= after for rank, after in itertools.pairwise(ranks)):
        raise ValueError("is not ascending")
    return ranks


def _distinct(value: object) -> tuple[int, ...]:
    ranks: tuple[int, ...] = listed(_rank, "ranks", MAX_RANKS, 1)(value)
    if len(set(ranks)) < len(ranks):
        raise ValueError("names a rank twice")
    return ranks


def _figure(value: object) -> object:
    if value is None or type(value) is bool:
        return value
    if type(value) is str:
        return _text(value)
    if type(value) is int:
        return integer(-MAX_COUNT, MAX_COUNT)(value)
    if is_finite(value):
        return value
    raise ValueError("has a value that is not text, a finite number, true, false or null")


def _figures(value: object) -> object:
    return [_figure(item) for item in value] if type(value) is list else _figure(value)


def _setting(value: object) -> Setting:
    numbers: list[Any] = value if isinstance(value, list) else [value]
    if not 1 <= len(numbers) <= MAX_SETTING or not all(map(is_finite, numbers)):
        raise ValueError(f"has a value that is not a finite number, or at most {MAX_SETTING} of them")
    if isinstance(value, list):
        return tuple(numbers)
    number: float = numbers[0]
    return number


def _group(value: object) -> dict[str, Setting]:
    if type(value) is not dict or len(value) > MAX_GROUP:
        raise ValueError(f"has an item that is not an object of at most {MAX_GROUP} numbers")
    return {_text(name): _setting(one) for name, one in value.items()}


def _happening(value: object) -> tuple[object, ...]:
    if type(value) is not list or not 1 <= len(value) <= 4:
        raise ValueError("has an entry that is not a word with at most three figures")
    entry = tuple(_figure(item) for item in value)
    if any(item is None or type(item) is bool for item in entry):
        raise ValueError("has a value that is not text or a finite number")
    return entry


class JoinedPeer(NamedTuple):
    """A peer that is not in the hosts file, and joined the run while it was in progress.

    Attributes:
        rank: the first number above those of all peers that were known then.
        host, port: the address at which it listens.
        by: rank of the peer that admitted it.
    """

    rank: int
    name: str
    host: str
    port: int
    by: int


def _joined_peer(value: object) -> JoinedPeer:
    if type(value) is not list or len(value) != len(JoinedPeer._fields):
        raise ValueError("has an item that is not a rank, name, host, port and rank")
    rank, name, host, port, by = value
    return JoinedPeer(_rank(rank), _text(name), _text(host), integer(1, 65_535)(port), _rank(by))


# --- types of fields ----------------------------------------------------------------------------

_rank = integer(0, MAX_RANKS - 1)
_count = integer(0, MAX_COUNT)
Rank = Annotated[int, _rank]
Ranks = Annotated[tuple[int, ...], _ascending]
Servers = Annotated[tuple[int, ...], _distinct]
"""For each shard, the rank that hosts it."""
Count = Annotated[int, _count]
CountOrNone = Annotated[int, integer(-1, MAX_COUNT)]
"""A count; −1 means none."""
Seconds = Annotated[float, positive(MAX_SECONDS)]
FromZero = Annotated[float, _from_zero]
Weight = Annotated[float, positive(MAX_RANKS)]
"""The weight of a model in an average; the weights of a run add up to its number of peers."""
Flag = Annotated[bool, _flag]
Text = Annotated[str, _text]
Ascii = Annotated[str, _ascii]
Key = Annotated[str, hexadecimal(64)]
Proofs = Annotated[tuple[str, ...], listed(hexadecimal(64), "proofs", MAX_SECRETS, 1)]
Digest = Annotated[str, _digest]
"""The checksum of a model, of 128 bits; empty: no model."""
Texts = Annotated[Mapping[str, str], named(_text, "texts", MAX_SETTINGS)]
Report = Annotated[dict[str, object], named(_figures, "figures", MAX_FIGURES)]
Sections = Annotated[tuple[int, ...], listed(_count, "numbers", MAX_SECTIONS)]
"""One number for each section of a model."""
Groups = Annotated[tuple[dict[str, Setting], ...], listed(_group, "groups", MAX_GROUPS)]
"""The settings of each parameter group of an optimizer, in order."""
_part = pair(integer(0, MAX_PARTS), integer(0, MAX_MODEL), "a pair of numbers")
Parts = Annotated[tuple[tuple[int, int], ...], listed(_part, "parts", MAX_PARTS)]
"""For each partition in a bucket, in order: its number in the shard, and its number of bytes in the payload."""
ShardEvent = tuple[str | int | float, ...]
"""An event of a shard: a word and its figures; see :class:`gossipx.server.shard.Shard`."""
ShardEvents = Annotated[tuple[ShardEvent, ...], listed(_happening, "entries", MAX_SHARD_EVENTS)]
_worker = pair(_rank, integer(-1, MAX_COUNT), "a rank with its iteration")
Workers = Annotated[tuple[tuple[int, int], ...], listed(_worker, "workers", MAX_RANKS)]

Joined = Annotated[tuple[JoinedPeer, ...], listed(_joined_peer, "peers", MAX_JOINED)]

# --- kinds --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of message.

    Attributes:
        number: identifies it in the header of a frame.
        message: its class.
        checks: of all fields, by name, in order.
        metadata: maximum bytes of metadata in a frame.
        payload: maximum bytes of payload in a frame.
    """

    number: int
    message: type
    checks: Mapping[str, Check]
    metadata: int
    payload: int


_DECLARED: dict[type, Kind] = {}


def kind(number: int, metadata: int = SMALL_METADATA, payload: int = 0) -> Callable[[type[_T]], type[_T]]:
    """Return a decorator that declares a dataclass as a kind of message. For the arguments see :class:`Kind`.

    Raises:
        TypeError: a field's type carries no check; every field that is received must have one.
    """

    def declare(message: type[_T]) -> type[_T]:
        checks = {}
        for name, hint in get_type_hints(message, include_extras=True).items():
            declared = [one for one in get_args(hint)[1:] if callable(one)] if hasattr(hint, "__metadata__") else []
            if len(declared) != 1:
                raise TypeError(f"{message.__name__}: the type of {name} carries no check")
            checks[name] = declared[0]
        _DECLARED[message] = Kind(number, message, checks, metadata, payload)
        return message

    return declare


def kind_of(message: type) -> Kind:
    """Return the kind that a message class was declared as."""
    return _DECLARED[message]
