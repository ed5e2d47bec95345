"""The table of message kinds, and the encoding of a message as the metadata of a frame: a JSON object of its fields.

The table is built from the declarations of the messages (:mod:`gossipx.protocol.fields`): every field is checked.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gossipx.errors import ProtocolError, printable
from gossipx.protocol.fields import Kind, all_kinds, kind_of
from gossipx.wire import Message

KINDS = {kind.number: kind for kind in all_kinds()}
"""Kinds by the number in a frame's header."""
_SHOWN = 200  # characters of a refusal: it may quote what the other peer has sent


def metadata_of(message: Message) -> bytes:
    """Return the metadata of ``message``.

    NaN and infinite figures of a report become null, as JSON cannot represent them; null reads as "no figure".

    Raises:
        ValueError: a peer would not accept one of the fields.
    """
    try:
        metadata = _encode(message)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{type(message).__name__}: {error}") from error
    _decoded(kind_of(type(message)), metadata)
    return metadata


def _plain_number(value: Any) -> Any:
    """Return a number of numpy, or of another subclass of int or float, as a plain one."""
    return float(value) if isinstance(value, float) else value.__index__()


_encode = msgspec.json.Encoder(enc_hook=_plain_number).encode


def message_of(kind: Kind, metadata: bytes) -> Message:
    """Return the message that the metadata of a frame encodes.

    Raises:
        ProtocolError: the metadata is not a message of this kind, or a field is not allowed.
    """
    try:
        message: Message = _decoded(kind, metadata)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{kind.message.__name__} refused: {printable(str(error), _SHOWN)}") from None
    return message


def _decoded(kind: Kind, metadata: bytes) -> Any:
    message = kind.decode(metadata)
    for name, check in kind.checks:
        try:
            check(getattr(message, name))
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    return message
