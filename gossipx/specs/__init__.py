"""Spec strings, ``name[:key=value,...]``, as they read on the command line, in TOML and in Python.

A lone value is the first key: ``tau:10`` is ``tau:period=10``. A class that can be named by a spec is a frozen
dataclass; its fields are the keys, in order, with their types and defaults; but for those that are :data:`TOLD_APART`.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_type_hints

from gossipx.errors import UsageError

T = TypeVar("T")
TOLD_APART: Mapping[str, bool] = {"is_key": False}
"""Metadata of a field that has no key in a spec, as it is told in another way."""


def build(spec: str, table: Mapping[str, Callable[..., T]], what: str) -> T:
    """The object that ``spec`` names in ``table``.

    Args:
        spec: for example ``adaptive:threshold=0.02``.
        table: name to dataclass (keys from its fields) or to any callable (keys from its parameters; text unless they
            are annotated as int, float or bool).
        what: the kind of thing, for messages: ``policy``.

    Raises:
        UsageError: an unknown name or key, or a bad value; the message names what would have been right.
    """
    name, _, rest = spec.partition(":")
    name = name.strip()
    known_word(what, name, table)
    factory = table[name]
    keys = _keys(factory)
    given: dict[str, Any] = {}
    for index, part in enumerate(part.strip() for part in rest.split(",") if rest.strip()):
        key, equals, text = part.partition("=")
        if not equals:
            if index or not keys:
                raise UsageError(f"{what} '{spec}': '{part}' is not key=value; {_usage(name, keys)}")
            key, text = next(iter(keys)), part
        key, text = key.strip(), text.strip()
        if key not in keys:
            raise UsageError(f"{what} '{spec}': unknown key '{key}'{suggest(key, keys)}; {_usage(name, keys)}")
        if key in given:
            raise UsageError(f"{what} '{spec}': key '{key}' is given twice")
        given[key] = _value(text, keys[key], f"{what} '{spec}': {key}")
    try:
        inspect.signature(factory).bind(**given)
    except TypeError as error:
        raise UsageError(f"{what} '{spec}': a value is missing; {_usage(name, keys)}") from error
    try:
        return factory(**given)
    except ValueError as error:
        raise UsageError(f"{what} '{spec}': {error}; {_usage(name, keys)}") from error


def text(value: Any, name: str) -> str:
    """The spec of a dataclass instance, with every key that differs from its default."""
    parts = []
    for field in _own_first(value):
        held = getattr(value, field.name)
        if held != field.default:
            shown = str(held).lower() if isinstance(held, bool) else str(held).replace("e+", "e")  # of 1e+20
            parts.append(f"{field.name}={shown}")
    return name + (":" + ",".join(parts) if parts else "")


def suggest(word: str, known: Mapping[str, Any]) -> str:
    """`` (did you mean 'x'?)`` where something near is known, else nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean '{near[0]}'?)" if near else ""


def known_word(what: str, word: str, known: Mapping[str, Any]) -> None:
    """See that ``word`` is one that is known.

    Raises:
        UsageError: naming those that are.
    """
    if word not in known:
        raise UsageError(f"unknown {what} '{word}'{suggest(word, known)}: one of {', '.join(sorted(known))}")


def rank_of(given: str, option: str, names: Sequence[str]) -> int:
    """The rank of a peer that has a part of its own in a run, and is given by its name or number.

    Args:
        given: one of ``names``, or a rank in digits.
        option: what it was given to, for messages.
        names: of all peers, by rank.

    Raises:
        UsageError: it is no peer.
    """
    if given in names:
        return names.index(given)
    if given.isdecimal() and int(given) < len(names):
        return int(given)
    meant = suggest(given, dict.fromkeys(names))
    raise UsageError(f"{option} '{given}' is no peer: a number from 0 to {len(names) - 1}, or a name{meant}")


def _keys(factory: Callable[..., Any]) -> dict[str, type]:
    """Names and types of what a dataclass, another class or a function takes, in the order in which a spec goes."""
    plain_class = isinstance(factory, type) and not dataclasses.is_dataclass(factory)
    hints = get_type_hints(factory.__init__ if plain_class else factory)
    taken = inspect.signature(factory).parameters.values()
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    fields = dataclasses.fields(factory) if dataclasses.is_dataclass(factory) else ()
    apart = {field.name for field in fields if not field.metadata.get("is_key", True)}
    return {one.name: hints.get(one.name, str) for one in taken if one.kind not in rest and one.name not in apart}


def _own_first(kind: Any) -> list[dataclasses.Field[Any]]:
    """Fields in the order in which a spec names them: keyword-only ones, shared by a whole family, come last."""
    return sorted(dataclasses.fields(kind), key=lambda field: bool(field.kw_only))


def _usage(name: str, keys: Mapping[str, type]) -> str:
    if not keys:
        return f"'{name}' takes no keys"
    return f"'{name}' takes {', '.join(f'{key}={kind_name(kind)}' for key, kind in keys.items())}"


def kind_name(kind: type) -> str:
    """A type in a user's words."""
    return {int: "INTEGER", float: "NUMBER", bool: "true|false"}.get(kind, "TEXT")


def _value(text: str, kind: type, place: str) -> Any:
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
    elif kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    else:
        return text
    raise UsageError(f"{place}='{text}' is not {kind_name(kind)}")
