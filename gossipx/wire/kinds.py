"""The table of all kinds of messages, and each as a frame's metadata: a JSON object of its fields.

The table is generated from what the messages declare (:mod:`gossipx.protocol.fields`), so no field comes in unchecked.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any, NoReturn, get_args

from gossipx.errors import ProtocolError
from gossipx.protocol.fields import Kind, kind_of
from gossipx.wire import Message

KINDS = {kind.number: kind for kind in map(kind_of, get_args(Message))}
"""By number, as a frame's header has it."""


def metadata_of(message: Message) -> bytes:
    """Return the metadata of ``message``.

    NaN and infinite figures of a report go as null, which JSON has and which reads as "no figure".

    Raises:
        ValueError: a field is not one that a peer would accept.
    """
    plain = {field.name: _plain(getattr(message, field.name)) for field in fields(message)}
    _build(kind_of(type(message)), plain)
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
    """Return the message that a frame's metadata tell.

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
    """Return the message with these fields; ValueError tells what is wrong in one line."""
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
