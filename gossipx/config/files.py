"""A run's settings as they are given: read from a TOML file, checked, put together, and written as TOML again.

Values given on the command line come before those of the file, those before the defaults. What settings there are is
:mod:`gossipx.config.settings`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import tomli_w

from gossipx.config.settings import KEYS, Key, RunConfig
from gossipx.errors import UsageError
from gossipx.specs import suggest, toml


def load(path: Path) -> dict[str, Any]:
    """The values that a TOML file gives, by setting.

    Raises:
        UsageError: the file and line of what is wrong in it, and what would have been right.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read the configuration: {reason}", path) from error
    tables = toml.loads(text, path)
    values: dict[str, Any] = {}
    known = dict.fromkeys(key.table for key in KEYS.values())
    for table, content in tables.items():
        here = _line(text, None, table)
        if not isinstance(content, dict):
            outside = KEYS.get(table)
            hint = f": it belongs in [{outside.table}]" if outside else suggest(table, KEYS)
            raise UsageError(f"'{table}' is not a table{hint}", path, here)
        if table not in known:
            raise UsageError(f"unknown table '{table}'{suggest(table, known)}: one of {', '.join(known)}", path, here)
        for name, value in content.items():
            place = (path, _line(text, table, name))
            key = KEYS.get(name)
            if key is None or key.table != table:
                own = {key.name: key for key in KEYS.values() if key.table == table}
                hint = f": it belongs in [{key.table}]" if key else suggest(name, own)
                raise UsageError(f"unknown setting '{name}' in [{table}]{hint}", *place)
            values[name] = _checked(key, value, name, place, typed=True)
    return values


def resolve(*layers: Mapping[str, Any]) -> RunConfig:
    """A configuration from layers of given values, the later ones before the earlier; None is not given.

    Raises:
        UsageError: an unknown setting or a bad value.
    """
    given: dict[str, Any] = {}
    for layer in layers:
        given.update({name: value for name, value in layer.items() if value is not None})
    if "solver" in given:
        given = _with_solver(given)
    sections: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        if name not in KEYS:
            raise UsageError(f"unknown setting '{name}'{suggest(name, KEYS)}")
        key = KEYS[name]
        sections.setdefault(key.table, {})[name] = _checked(key, value, key.option, (None, None))
    kinds = get_type_hints(RunConfig)
    return RunConfig(**{table: kinds[table](**values) for table, values in sections.items()})


def _with_solver(given: dict[str, Any]) -> dict[str, Any]:
    """What is given, and what a solver file says that is not.

    Raises:
        UsageError: the file is not there, or wrong.
    """
    from gossipx.solver.prototxt import read
    from gossipx.tasks import solvers
    from gossipx.tasks.presets import PRESETS

    param = read(solvers.find(str(given["solver"])))
    said: dict[str, Any] = {}
    if param.net in PRESETS:
        said["model"] = param.net
    if param.max_iter > 0:
        said["iterations"] = param.max_iter
    return {**said, **given, "solver": solvers.told(str(given["solver"]))}


def dump(config: RunConfig) -> str:
    """The whole configuration as TOML; what is None is left out. :func:`load` reads it back."""
    tables = {
        table: {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        for table, values in dataclasses.asdict(config).items()
    }
    present = {table: {n: v for n, v in values.items() if v is not None} for table, values in tables.items()}
    return tomli_w.dumps(present)


def _checked(key: Key, value: Any, called: str, place: tuple[Path | None, int | None], typed: bool = False) -> Any:
    """The value that is meant; ``typed``: numbers are numbers, and not their text."""
    if key.many:
        parts = [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            raise UsageError(f"{called} is not a list of numbers: {value!r}", *place)
        return tuple(_checked(dataclasses.replace(key, many=False), part, called, place) for part in parts)
    if key.peers == 2 and isinstance(value, list | tuple):
        alone = dataclasses.replace(key, peers=1)
        return ",".join(_checked(alone, one, called, place) for one in value) or _checked(alone, "", called, place)
    if key.numbers and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    try:
        if typed and isinstance(value, str) and key.kind is not str and not key.many:
            raise TypeError
        made = _converted(key.kind, value)
    except (TypeError, ValueError, OverflowError):
        wanted = {int: "an integer", float: "a number", bool: "true or false"}.get(key.kind, "text")
        wanted = (
            ("text", "a peer's name or number", "peers' names or numbers")[key.peers] if key.kind is str else wanted
        )
        raise UsageError(f"{called} is not {wanted}: {value!r}", *place) from None
    if key.choices and made not in key.choices:
        raise UsageError(f"{called} is '{made}': one of {', '.join(key.choices)}", *place)
    if made == "":
        raise UsageError(f"{called} is empty", *place)
    if key.check is not None:
        try:
            key.check(made)
        except UsageError as error:
            raise UsageError(str(error), *place) from None
    if key.kind is float and math.isinf(made):
        raise UsageError(f"{called} is {made}: a finite number", *place)
    if key.least is not None and not made >= key.least:
        raise UsageError(f"{called} is {made}: at least {key.least}", *place)
    if key.most is not None and not made <= key.most:
        raise UsageError(f"{called} is {made}: at most {key.most}", *place)
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


def _line(text: str, table: str | None, name: str) -> int:
    """The line where a table begins, or a key of it stands; 1 where that cannot be told."""
    current: str | None = None
    start = rf"\s*[\"']?{re.escape(name)}[\"']?\s*[.=]"
    # Above all tables, a table may stand as run.seed = 1 or run = {seed = 1}.
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
