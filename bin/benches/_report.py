"""The common schema of all benchmarks' tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def figure(
    name: str,
    value: float,
    unit: str,
    *,
    reference: float | None = None,
    goal: float | None = None,
    met: bool | None = None,
) -> dict[str, Any]:
    """Return one measured figure; ``ratio`` is the value divided by the reference measured in the same run."""
    ratio = value / reference if reference else None
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "reference": reference,
        "ratio": ratio,
        "goal": goal,
        "met": met,
    }


def report(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], figures: list[Any]) -> None:
    """Print the table, and whether each goal is met."""
    table = Table(*headings, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 150
    console.print(table)
    for one in figures:
        if one["met"] is not None:
            goal = f"goal {one['goal']:g} {one['unit']}: {'met' if one['met'] else 'NOT met'}"
            console.print(f"{one['name']}: {one['value']:.4g} {one['unit']}, {goal}")
