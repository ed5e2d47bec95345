"""Reading, checking, combining and writing the settings of a run.

Values come in layers, of which a later one overrides an earlier one: the defaults, a TOML file, the command line.
:mod:`gossipx.settings.sections` declares the settings.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from gossipx.errors import UsageError
from gossipx.settings.keys import Key
from gossipx.settings.refusals import mode_of
from gossipx.settings.sections import KEYS, ExchangeSettings, RunConfig, RunSettings, SyncSettings, TaskSettings
from gossipx.specs import suggest, texts, toml

PRESETS: Mapping[Any, Mapping[str, Any]] = {
    "paper": {"policy": "adaptive", "blocking": True, "finish": "none", "outer": "none"},
}
"""Settings that a preset gives to all that a user has not given. The paper is Adaptive Communication: Algorithm 2 with
the rule of section IV, whose threshold is that of the model (Table I)."""
GIVEN = "given"
"""Name of the list of the settings that a user has given; its table is in files that hold all settings of a run."""


def load(path: Path) -> dict[str, Any]:
    """Return the values that a TOML file sets, by name of the setting.

    Raises:
        UsageError: names the file, the line, the error and the likely intention.
    """
    text = texts.read(path, "configuration")
    tables = toml.loads(text, path)
    values: dict[str, Any] = {}
    if GIVEN in tables:  # written by :func:`dump`
        match tables.pop(GIVEN):
            case {"settings": list(given)} if set(map(str, given)) <= KEYS.keys():
                values[GIVEN] = given
            case _:
                place = (path, line_of(text, None, GIVEN))
                raise UsageError(f"[{GIVEN}] lists settings, as a run writes it: leave it out", *place)
    return {**values, **values_in(tables, KEYS, text, path)}


def values_in(tables: Mapping[str, Any], keys: Mapping[str, Key], text: str, path: Path) -> dict[str, Any]:
    """Return the checked values of TOML tables, by name of the setting.

    Args:
        keys: the settings that the tables may have.
        text, path: the file, for messages.

    Raises:
        UsageError: as :func:`load`.
    """
    values: dict[str, Any] = {}
    known = dict.fromkeys(key.table for key in keys.values())
    for table, content in tables.items():
        here = line_of(text, None, table)
        if not isinstance(content, dict):
            outside = keys.get(table)
            hint = f": it belongs in [{outside.table}]" if outside else suggest(table, keys)
            raise UsageError(f"'{table}' is not a table{hint}", path, here)
        if table not in known:
            raise UsageError(f"unknown table '{table}'{suggest(table, known)}: one of {', '.join(known)}", path, here)
        for name, value in content.items():
            key = keys.get(name)
            try:
                if key is None or key.table != table:
                    own = {key.name: key for key in keys.values() if key.table == table}
                    hint = f": it belongs in [{key.table}]" if key else suggest(name, own)
                    raise UsageError(f"unknown setting '{name}' in [{table}]{hint}")
                values[name] = checked(key, value, name, typed=True)
            except UsageError as error:
                raise UsageError(str(error), path, line_of(text, table, name)) from None
    return values


def merged(*layers: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the checked values that result from layers of them, and the names of those that a user has given.

    Args:
        layers: values by name of the setting; a later layer overrides an earlier one, None means not given. Under the
            name :data:`GIVEN` a layer may list those of its settings that a user has given; without it, all are. A
            preset overrides earlier layers, and values of its own layer override the preset.

    Raises:
        UsageError: a setting is unknown or a value is invalid.
    """
    values: dict[str, Any] = {}
    by_user: set[str] = set()
    for layer in layers:
        own = {name: value for name, value in layer.items() if value is not None and name != GIVEN}
        preset = PRESETS.get(own.get("preset"), {})
        values.update({**preset, **own})
        by_user = by_user - preset.keys() | set(layer.get(GIVEN, own))
    for name, value in values.items():
        if name not in KEYS:
            raise UsageError(f"unknown setting '{name}'{suggest(name, KEYS)}")
        values[name] = checked(KEYS[name], value, KEYS[name].option)
    return values, frozenset(by_user)


def resolve(*layers: Mapping[str, Any]) -> RunConfig:
    """Return the configuration that results from layers of values; as :func:`merged`.

    Raises:
        UsageError: a setting is unknown, a value is invalid, or a given setting has no effect beside the others.
    """
    return _built(*merged(*layers))


def _built(values: Mapping[str, Any], given: frozenset[str]) -> RunConfig:
    def section(kind: Any) -> Any:
        return kind(**{name: values[name] for name in kind.__dataclass_fields__ if name in values})

    return RunConfig(
        section(RunSettings),
        section(TaskSettings),
        section(SyncSettings),
        mode_of(values, given),  # refuses what has no effect in that mode
        section(ExchangeSettings),
        given,
    )


def changed(config: RunConfig, given: Collection[str] = (), **values: Any) -> RunConfig:
    """Return the configuration with other values, of which those named in ``given`` count as given by a user.

    Raises:
        UsageError: as :func:`resolve`. The values are not checked.
    """
    return _built({**config.values, **values}, config.given.union(given))


def absolute(config: RunConfig) -> RunConfig:
    """Return the same configuration with absolute paths, for processes that run in another directory, or change it."""
    return changed(config, **absolute_values(config.values))


def absolute_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name of the setting, with absolute paths."""
    return {name: KEYS[name].absolute_value(value) if name in KEYS else value for name, value in values.items()}


def dump(config: RunConfig) -> str:
    """Return the whole configuration as TOML, with absolute paths, without settings that are None. :func:`load` reads
    it."""
    tables = {
        table: {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        for table, values in absolute(config).tables.items()
    }
    present = {table: {n: v for n, v in values.items() if v is not None} for table, values in tables.items()}
    return tomli_w.dumps({**present, GIVEN: {"settings": sorted(config.given)}})


def checked(key: Key, value: Any, called: str, typed: bool = False) -> Any:
    """Return the converted value of a setting, or raise UsageError.

    Args:
        called: the name of the setting in messages.
        typed: numbers must have a number's type (TOML) instead of being text (command line).
    """
    if key.many:
        parts = [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            raise UsageError(f"{called} is not a list of numbers: {value!r}")
        return tuple(checked(dataclasses.replace(key, many=False), part, called) for part in parts)
    if key.peers == "several" and isinstance(value, list | tuple):
        alone = dataclasses.replace(key, peers="one")
        return ",".join(checked(alone, one, called) for one in value) or checked(alone, "", called)
    if key.numbers and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    try:
        if typed and isinstance(value, str) and key.kind is not str and not key.many:
            raise TypeError
        made = _converted(key.kind, value)
    except (TypeError, ValueError, OverflowError):
        wanted = {int: "an integer", float: "a number", bool: "true or false"}.get(key.kind, "text")
        if key.kind is str:
            wanted = {"one": "a peer's name or number", "several": "peers' names or numbers"}.get(key.peers, "text")
        raise UsageError(f"{called} is not {wanted}: {value!r}") from None
    if key.choices and made not in key.choices:
        raise UsageError(f"{called} is '{made}': one of {', '.join(key.choices)}")
    if made == "":
        raise UsageError(f"{called} is empty")
    key.check_spec(made)
    if key.kind is float and math.isinf(made):
        raise UsageError(f"{called} is {made}: a finite number")
    if key.least is not None and not made >= key.least:
        raise UsageError(f"{called} is {made}: at least {key.least}")
    if key.most is not None and not made <= key.most:
        raise UsageError(f"{called} is {made}: at most {key.most}")
    return made


def _converted(kind: type, value: Any) -> Any:
    if kind is bool or isinstance(value, bool):
        if kind is bool and isinstance(value, bool):
            return value
        raise TypeError
    if kind is str:
        if isinstance(value, str | Path):
            return str(value)
        raise TypeError
    if kind is int and isinstance(value, float):
        raise TypeError
    return kind(value)


def line_of(text: str, table: str | None, name: str) -> int:
    """Return the line number of a table's header or of a key in a table; 1 if it is not found."""
    current: str | None = None
    start = rf"\s*[\"']?{re.escape(name)}[\"']?\s*[.=]"
    # Before the first header, a table may be written as run.seed = 1 or run = {seed = 1}.
    dotted = rf"\s*{re.escape(table or name)}\s*(\.\s*[\"']?{re.escape(name)}[\"']?\s*)?="
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[+\s*([^\]]+?)\s*\]", line)
        if header:
            current = header.group(1)
            if current == f"{table}.{name}" or (table is None and current.split(".")[0] == name):
                return number
        elif re.match(dotted if current is None and table else start, line) and current in (table, None):
            return number
    return 1
