"""Spec strings, ``name[:key=value,...]``: short descriptions of an object on the command line, in TOML and in Python.

A value without a key belongs to the first key: ``tau:10`` is ``tau:period=10``. Classes that a spec can name are frozen
dataclasses. Their fields are the keys, in order, with types and defaults, except fields marked :data:`NOT_A_KEY`.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_type_hints

from gossipx.errors import UsageError

T = TypeVar("T")
NOT_A_KEY: Mapping[str, bool] = {"is_key": False}
"""Metadata of a dataclass field that is not a key of the spec, because another syntax sets it."""


def build(spec: str, table: Mapping[str, Callable[..., T]], what: str) -> T:
    """Build the object that ``spec`` describes.

    Args:
        spec: for example ``adaptive:threshold=0.02``.
        table: maps names to dataclasses (keys are the fields) or other callables (keys are the parameters; values are
            text unless annotated as int, float or bool).
        what: the kind of object, for messages, such as ``policy``.

    Raises:
        UsageError: an unknown name or key, or a bad value; the message lists the valid ones.
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
    """Return the spec of a dataclass instance, with every key that differs from its default."""
    parts = []
    for field in _own_first(value):
        setting = getattr(value, field.name)
        if setting != field.default:  # 1e20 for 1e+20, as + separates a codec from its compressor
            shown = str(setting).lower() if isinstance(setting, bool) else str(setting).replace("e+", "e")
            parts.append(f"{field.name}={shown}")
    return name + (":" + ",".join(parts) if parts else "")


LEAST = 0.6
"""Similarity of a word that was probably meant."""


def suggest(word: str, known: Mapping[str, Any], least: float = LEAST) -> str:
    """Return `` (did you mean 'x'?)`` if a word is known whose similarity, from 0 to 1, is ``least`` or more, else an
    empty string. With the default, a word with which this one ends after a ``_`` will do."""
    near = difflib.get_close_matches(word[:100], list(known), n=1, cutoff=least)
    near = near or [one for one in known if word.endswith(f"_{one}") and least <= LEAST]
    return f" (did you mean '{near[0]}'?)" if near else ""


def known_word(what: str, word: str, known: Mapping[str, Any]) -> None:
    """Check that ``word`` is a known name of a ``what``.

    Raises:
        UsageError: it is not; the message lists the known names.
    """
    if word not in known:
        raise UsageError(f"unknown {what} '{word}'{suggest(word, known)}: one of {', '.join(sorted(known))}")


def rank_of(given: str, option: str, names: Sequence[str]) -> int:
    """Return the rank of the peer that an option names.

    Args:
        given: one of ``names``, or a rank in digits.
        option: name of the option, for messages.
        names: names of all peers, by rank.

    Raises:
        UsageError: no peer has that name or rank.
    """
    if given in names:
        return names.index(given)
    if given.isdecimal() and int(given) < len(names):
        return int(given)
    meant = suggest(given, dict.fromkeys(names))
    raise UsageError(f"{option} '{given}' is not a peer: give a rank from 0 to {len(names) - 1}, or a name{meant}")


def _keys(factory: Callable[..., Any]) -> dict[str, type]:
    """Return the keys of a dataclass, another class or a function, in order, with their types."""
    plain_class = isinstance(factory, type) and not dataclasses.is_dataclass(factory)
    hints = get_type_hints(factory.__init__ if plain_class else factory)
    parameters = inspect.signature(factory).parameters.values()
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    fields = dataclasses.fields(factory) if dataclasses.is_dataclass(factory) else ()
    hidden = {field.name for field in fields if not field.metadata.get("is_key", True)}
    kinds = {p.name: hints.get(p.name, str) for p in parameters if p.kind not in rest and p.name not in hidden}
    return {name: _without_none(kind) for name, kind in kinds.items()}


def _without_none(kind: Any) -> Any:
    """Return the type of a key that may be missing: the first of its types."""
    return get_args(kind)[0] if type(None) in get_args(kind) else kind


def _own_first(kind: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields in the order of a spec: keyword-only ones, which a base class shares, are last."""
    return sorted(dataclasses.fields(kind), key=lambda field: bool(field.kw_only))


def _usage(name: str, keys: Mapping[str, type]) -> str:
    if not keys:
        return f"'{name}' takes no keys"
    return f"'{name}' takes {', '.join(f'{key}={kind_name(kind)}' for key, kind in keys.items())}"


def kind_name(kind: type) -> str:
    """Return the name of a type for messages to users."""
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
