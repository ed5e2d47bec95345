"""Plugins: names in specs that installed packages add by entry points.

A separate module, so that code that only parses specs does not import package metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, TypeVar

from gossipx import specs
from gossipx.errors import UsageError

T = TypeVar("T")


def names(built_in: Mapping[str, Callable[..., T]], group: str) -> dict[str, Callable[..., Any]]:
    """Return all known names: built-in ones, and those of installed packages, which are not imported yet.

    Args:
        group: the group of entry points.
    """
    return {point.name: _unused for point in entry_points(group=group)} | dict(built_in)


def build(spec: str, built_in: Mapping[str, Callable[..., T]], group: str, what: str) -> Any:
    """Build the object that ``spec`` describes, see :func:`gossipx.specs.build`; import its plugin if it has one.

    Raises:
        UsageError: the spec is wrong, or the plugin cannot be loaded.
    """
    name = spec.partition(":")[0].strip()
    if name in built_in:  # listing all entry points takes tens of milliseconds
        return specs.build(spec, built_in, what)
    table = names(built_in, group)
    if table.get(name) is _unused:
        (point,) = entry_points(group=group, name=name)
        try:
            table[name] = point.load()
        except (ImportError, AttributeError) as error:
            raise UsageError(f"{what} '{name}' is installed but cannot be loaded: {error}") from error
    return specs.build(spec, table, what)


def _unused(**_: Any) -> None:
    """Stand in for plugins that are not loaded."""
