"""The declaration of one setting, from which its command-line option and its TOML key are made."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gossipx.specs import known_word

Group = Literal["Peers", "Exchange", "Training", "Run"]
"""Headings of the common options in ``gossipx run --help``, in order of display."""


def absolute_path(path: str) -> str:
    """Return a path in a form that is valid in any working directory."""
    return str(Path(path).absolute())


def _named(name: str) -> Any:
    return pkgutil.resolve_name(f"gossipx.{name}")


def setting(
    default: Any,
    least: float | None = None,
    most: float | None = None,
    marks: str = "",
    **attributes: Any,
) -> Any:
    """Declare a setting: its default, its limits, and the other attributes of a :class:`Key`. The docstring below it is
    its help."""
    if attributes.get("metavar") in ("FILE", "DIR"):
        attributes["absolute"] = "settings.keys:absolute_path"
    meta = {"least": least, "most": most, "marks": frozenset(marks.split()), **attributes}
    return field(default=default, metadata=meta)


@functools.cache
def _documented(module: str) -> Mapping[tuple[str, str], str]:
    """Return the docstrings of the fields of a module's classes, by class and field. Python keeps none of them."""
    found = {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    for section in (one for one in tree.body if isinstance(one, ast.ClassDef)):
        for declared, below in itertools.pairwise(section.body):
            match declared, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[section.name, name] = " ".join(text.split())
    return found


@dataclass(frozen=True)
class Key:
    """A setting as the command line and the TOML file see it.

    Attributes:
        section: the class that declares it.
        table: ``run``, ``task``, ``sync``, ``hub``, ``server`` or ``exchange``.
        name: ``peer_timeout``, for example; the option is then ``--peer-timeout``.
        kind: type of a value, or of an element of a list; without None.
        choices: the allowed values; empty: not restricted to a few.
        many: whether it is a list of values.
        check: name of a function that raises UsageError for an invalid value, or of the valid words, as in
            ``policies:check`` of gossipx; None: ``least`` and ``most`` suffice. A name, since this room is below all
            rooms that read settings.
        numbers: a text setting that also accepts a number, in TOML and in Python.
        peers: ``one``: text that names one peer; ``several``: text or a list that names several; empty: it names none.
        common: heading under which ``gossipx run --help`` shows it; None: only ``--help-all`` shows it.
        metavar: placeholder for the value in the help; None: derived from the type.
        absolute: name of a function that returns a path in a form that is valid in any working directory; None: the
            value is no path. A setting whose placeholder is FILE or DIR is one.
        marks: ``machine``: it describes a machine, so that a newcomer and each process have their own; ``process``:
            each process may have its own; ``later``: it may change when a run resumes; ``real``: it has no effect on a
            simulated run; ``training``: it has no effect on simulated traffic.
        purpose: the beginning of the refusal where it has no purpose; see :class:`~gossipx.settings.modes.AnyMode`.
    """

    section: type
    table: str
    name: str
    kind: type
    choices: tuple[str, ...]
    many: bool
    default: Any
    numbers: bool
    least: float | None
    most: float | None
    marks: frozenset[str]
    check: str | None = None
    peers: Literal["", "one", "several"] = ""
    common: Group | None = None
    metavar: str | None = None
    absolute: str | None = None
    purpose: str = ""

    @property
    def help(self) -> str:
        """Return the docstring below its declaration, which is read from the source: only a command line needs it."""
        return _documented(self.section.__module__)[self.section.__name__, self.name]

    @property
    def option(self) -> str:
        """Return the option's name on the command line."""
        return "--" + self.name.replace("_", "-")

    def check_spec(self, value: Any) -> None:
        """Raise UsageError unless the value is valid to its reader, whose module is imported only now."""
        if self.check is None or value == self.default:
            return
        check = _named(self.check)
        if callable(check):
            check(value)
        else:
            known_word(self.name, value, dict.fromkeys(check))

    def absolute_value(self, value: Any) -> Any:
        """Return the value with a path in a form that is valid in any working directory."""
        return value if self.absolute is None or value is None else _named(self.absolute)(str(value))


def keys_of(tables: Mapping[str, Sequence[type]]) -> dict[str, Key]:
    """Return the settings that the classes of each table declare themselves, by name."""
    keys = {}
    for table, section in ((table, section) for table, sections in tables.items() for section in sections):
        hints, own = get_type_hints(section), vars(section)["__annotations__"]
        for declared in dataclasses.fields(section):
            if (name := declared.name) not in own:
                continue
            meta, hint = declared.metadata, hints[name]
            kind = next((part for part in get_args(hint) if part is not type(None)), None)
            kind = hint if kind is None or get_origin(hint) is Literal else kind
            choices = get_args(kind) if get_origin(kind) is Literal else ()
            many = get_origin(kind) is tuple
            plain = str if choices else float if many else kind
            numbers = "peers" in meta or (plain is str and int in get_args(hint))
            keys[name] = Key(section, table, name, plain, choices, many, declared.default, numbers, **meta)
    return keys
