"""Kinds of messages and the types of their fields: each type names the check that a value from the wire must pass.

A message declares its kind and its fields once. :mod:`gossipx.wire.kinds` reads those declarations, so roles may trust
the types of what they are told, not the intentions. The limits here bound what another peer can make this one take in,
allocate and show.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar, get_args, get_type_hints

_T = TypeVar("_T")
Check: TypeAlias = Callable[[object], Any]
"""Takes a plain JSON value and returns the field's; ValueError tells in a few words what it should be."""

MAX_COUNT = 2**63 - 1
MAX_RANKS = 65_536
MAX_TEXT = 1_000  # characters
MAX_SECONDS = 7 * 86_400
MAX_FIGURES = 1_000  # names in a report
MAX_SETTINGS = 32
MAX_PARTS = 65_536  # partitions of a shard
MAX_SECTIONS = 16  # of a model: one per dtype
MAX_HAPPENED = 1_000  # entries of one record
MAX_GROUPS, MAX_GROUP = 1_000, 32  # parameter groups of an optimizer, and numbers in one
# Bytes of metadata. The largest honest ones: 65,536 ranks of five digits are 384 KiB; the reports
# of 100 peers have 5 KiB each. The small bound is what a stranger can make us allocate.
MAX_METADATA = 512 * 1024
SMALL_METADATA = 16 * 1024
# Bytes of payload. A model's true size is the receiver's to expect; this only keeps sums sane.
MAX_MODEL = 2**40

# --- numbers ------------------------------------------------------------------------------------


def integer(low: int, high: int) -> Check:
    """Accept integers from ``low`` to ``high``."""

    def check(value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"is not an integer from {low} to {high}")
        return value

    return check


def positive(most: int) -> Check:
    """Accept numbers above 0, up to ``most``."""

    def check(value: object) -> float:
        if type(value) not in (int, float) or not 0 < value <= most:  # type: ignore[operator]
            raise ValueError(f"is not a number above 0, up to {most}")
        return float(value)  # type: ignore[arg-type]

    return check


def is_finite(value: object) -> bool:
    """Whether ``value`` is a number that a float can hold; JSON's integers have no bound."""
    try:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:
        return False


def _from_zero(value: object) -> float:
    if not is_finite(value) or value < 0:  # type: ignore[operator]
        raise ValueError("is not a finite number from 0")
    return float(value)  # type: ignore[arg-type]


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise ValueError("is neither true nor false")
    return value


def enumerated(members: type[enum.IntEnum]) -> Check:
    """Accept the numbers of an enum that counts from 0."""
    number = integer(0, max(members))
    return lambda value: members(number(value))


# --- text ---------------------------------------------------------------------------------------


def _text(value: object) -> str:
    # Printable: such text ends up in logs and terminals of other machines.
    if type(value) is not str or len(value) > MAX_TEXT or not value.isprintable():
        raise ValueError(f"is not one printable line of at most {MAX_TEXT} characters")
    return value


def _ascii(value: object) -> str:
    if type(value) is not str or not value.isascii():
        raise ValueError("is not ASCII text")
    return value


def one_of(words: Sequence[str]) -> Check:
    """Accept these words."""

    def check(value: object) -> str:
        if type(value) is not str or value not in words:
            raise ValueError(f"is none of {', '.join(words)}")
        return value

    return check


def _is_hexadecimal(value: object) -> bool:
    return type(value) is str and set(value) <= set("0123456789abcdef")


def hexadecimal(digits: int) -> Check:
    """Accept text of exactly so many hexadecimal digits."""

    def check(value: object) -> object:
        if not _is_hexadecimal(value) or len(value) != digits:  # type: ignore[arg-type]
            raise ValueError(f"is not {digits} hexadecimal digits")
        return value

    return check


def octets(most: int) -> Check:
    """Accept at most so many bytes, written as hexadecimal digits."""

    def check(value: object) -> object:
        if not _is_hexadecimal(value) or len(value) % 2 or len(value) > 2 * most:  # type: ignore[arg-type]
            raise ValueError(f"is not at most {most} bytes in hexadecimal digits")
        return value

    return check


# --- lists and objects --------------------------------------------------------------------------


def listed(item: Check, what: str, most: int, least: int = 0) -> Check:
    """Accept a list of ``least`` to ``most`` items, named ``what``; the field's value is a tuple."""
    bounds = f"{least} to {most}" if least else f"at most {most}"

    def check(value: object) -> tuple[Any, ...]:
        if type(value) is not list or not least <= len(value) <= most:
            raise ValueError(f"is not a list of {bounds} {what}")
        return tuple(item(one) for one in value)

    return check


def pair(first: Check, second: Check, what: str) -> Check:
    """Accept a list of two; the field's value is a tuple."""

    def check(value: object) -> tuple[Any, Any]:
        if type(value) is not list or len(value) != 2:
            raise ValueError(f"holds what is not {what}")
        return first(value[0]), second(value[1])

    return check


def named(item: Check, what: str, most: int) -> Check:
    """Accept an object of at most ``most`` items, named ``what``."""

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
    raise ValueError("holds what is neither text, a finite number, true, false nor null")


def _figures(value: object) -> object:
    return [_figure(item) for item in value] if type(value) is list else _figure(value)


def _group(value: object) -> dict[str, float]:
    if type(value) is not dict or len(value) > MAX_GROUP:
        raise ValueError(f"holds what is not an object of at most {MAX_GROUP} numbers")
    if not all(is_finite(number) for number in value.values()):
        raise ValueError("holds what is not a finite number")
    return {_text(name): float(number) for name, number in value.items()}


def _happening(value: object) -> tuple[object, ...]:
    if type(value) is not list or not 1 <= len(value) <= 4:
        raise ValueError("holds what is not a word with at most three figures")
    made = tuple(_figure(item) for item in value)
    if any(item is None or type(item) is bool for item in made):
        raise ValueError("holds what is neither text nor a finite number")
    return made


# --- types of fields ----------------------------------------------------------------------------

_rank = integer(0, MAX_RANKS - 1)
_count = integer(0, MAX_COUNT)
Rank = Annotated[int, _rank]
Ranks = Annotated[tuple[int, ...], _ascending]
Servers = Annotated[tuple[int, ...], _distinct]
"""By shard, the rank that holds it."""
Count = Annotated[int, _count]
CountOrNone = Annotated[int, integer(-1, MAX_COUNT)]
"""−1 is none."""
Seconds = Annotated[float, positive(MAX_SECONDS)]
FromZero = Annotated[float, _from_zero]
Weight = Annotated[float, positive(MAX_RANKS)]
"""All weights of a run sum up to its number of peers."""
Flag = Annotated[bool, _flag]
Text = Annotated[str, _text]
Ascii = Annotated[str, _ascii]
Key = Annotated[str, hexadecimal(64)]
Texts = Annotated[Mapping[str, str], named(_text, "texts", MAX_SETTINGS)]
Report = Annotated[dict[str, object], named(_figures, "figures", MAX_FIGURES)]
Sections = Annotated[tuple[int, ...], listed(_count, "numbers", MAX_SECTIONS)]
"""A number for each section of a model."""
Groups = Annotated[tuple[dict[str, float], ...], listed(_group, "groups", MAX_GROUPS)]
"""The numbers of each parameter group of an optimizer, in order."""
_part = pair(integer(0, MAX_PARTS), integer(0, MAX_MODEL), "a pair of numbers")
Parts = Annotated[tuple[tuple[int, int], ...], listed(_part, "parts", MAX_PARTS)]
"""Of each partition in a bucket, in order: its number in the shard, and how many bytes of the payload are its."""
Happening = tuple[str | int | float, ...]
"""What happened to a shard: a word, and its figures; see :class:`gossipx.server.shard.Shard`."""
Happenings = Annotated[tuple[Happening, ...], listed(_happening, "entries", MAX_HAPPENED)]
_worker = pair(_rank, _count, "a rank with its iteration")
Workers = Annotated[tuple[tuple[int, int], ...], listed(_worker, "workers", MAX_RANKS)]

# --- kinds --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """One kind of message.

    Attributes:
        number: stands for it in a frame's header.
        message: its class.
        checks: of all its fields, by name, in their order.
        metadata, payload: the most bytes that a frame of it has.
    """

    number: int
    message: type
    checks: Mapping[str, Check]
    metadata: int
    payload: int


_DECLARED: dict[type, Kind] = {}


def kind(number: int, metadata: int = SMALL_METADATA, payload: int = 0) -> Callable[[type[_T]], type[_T]]:
    """Declare a dataclass a kind of message; arguments as the attributes of :class:`Kind`.

    TypeError if the type of a field names no check: nothing unchecked comes in.
    """

    def declare(message: type[_T]) -> type[_T]:
        checks = {}
        for name, hint in get_type_hints(message, include_extras=True).items():
            declared = [one for one in get_args(hint)[1:] if callable(one)] if hasattr(hint, "__metadata__") else []
            if len(declared) != 1:
                raise TypeError(f"{message.__name__}: the type of {name} names no check")
            checks[name] = declared[0]
        _DECLARED[message] = Kind(number, message, checks, metadata, payload)
        return message

    return declare


def kind_of(message: type) -> Kind:
    """Return what a class of messages was declared to be."""
    return _DECLARED[message]
