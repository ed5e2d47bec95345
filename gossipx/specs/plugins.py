"""What installed packages add to the names that specs may begin with, by entry points.

Beside :mod:`gossipx.specs`, as who only reads specs needs nothing of packages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, TypeVar

from gossipx import specs
from gossipx.errors import UsageError

T = TypeVar("T")


def names(built_in: Mapping[str, Callable[..., T]], group: str) -> dict[str, Callable[..., Any]]:
    """What a spec may begin with: built-in names, and those that installed packages add; these are not imported yet.

    Args:
        group: of their entry points.
    """
    return {point.name: _unused for point in entry_points(group=group)} | dict(built_in)


def build(spec: str, built_in: Mapping[str, Callable[..., T]], group: str, what: str) -> Any:
    """As :func:`gossipx.specs.build`, of :func:`names`: what is asked for is imported, if a package has it.

    Raises:
        UsageError: as that, or what is installed under that name cannot be loaded.
    """
    name = spec.partition(":")[0].strip()
    if name in built_in:  # looking through all that is installed takes tens of milliseconds
        return specs.build(spec, built_in, what)
    table = names(built_in, group)
    if table.get(name) is _unused:
        (point,) = entry_points(group=group, name=name)
        try:
            table[name] = point.load()
        except (ImportError, AttributeError) as error:
            raise UsageError(f"{what} '{name}' is installed and cannot be loaded: {error}") from error
    return specs.build(spec, table, what)


def _unused(**_: Any) -> None:
    """Stands for what is installed and was not asked for."""
