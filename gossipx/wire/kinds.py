"""The table of message kinds, and the encoding of a message as the metadata of a frame: a JSON object of its fields.

The table is built from the declarations of the messages (:mod:`gossipx.protocol.fields`): every field is checked.
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
"""Kinds by the number in a frame's header."""


def metadata_of(message: Message) -> bytes:
    """Return the metadata of ``message``.

    NaN and infinite figures of a report become null, as JSON cannot represent them; null reads as "no figure".

    Raises:
        ValueError: a peer would not accept one of the fields.
    """
    plain = {field.name: _plain(getattr(message, field.name)) for field in fields(message)}
    _build(kind_of(type(message)), plain)
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()


def _plain(value: object) -> object:
    """Convert to JSON's types: enums and number subclasses to numbers, tuples to lists."""
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
    """Return the message that the metadata of a frame encodes.

    Raises:
        ProtocolError: the metadata is not a message of this kind, or a field is not allowed.
    """
    try:
        # The interpreter's recursion limit bounds the nesting of the JSON text; _build then allows three levels.
        plain = json.loads(metadata.decode(), object_pairs_hook=_object, parse_constant=_constant)
        message: Message = _build(kind, plain)
    except RecursionError:
        raise ProtocolError(f"{kind.message.__name__}: the metadata is nested too deeply") from None
    except ValueError as error:
        raise ProtocolError(f"metadata refused: {error}") from None
    return message


def _build(kind: Kind, plain: object) -> Any:
    """Build the message from plain fields. The ValueError of a wrong field is one line."""
    if type(plain) is not dict or plain.keys() != kind.checks.keys():
        named = ", ".join(kind.checks) or "none"
        raise ValueError(f"{kind.message.__name__} must have exactly the fields {named}")
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
        raise ValueError("a field is repeated")
    return named


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
