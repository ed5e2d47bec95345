"""Tables of benchmarks, and their figures in the common schema."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from gossipx.metrics.intervals import estimate


@dataclass
class Table:
    """A table and its figures.

    Attributes:
        title: above it.
        headings: of its columns.
        rows: as shown.
        figures: in the common schema, see :meth:`figure`.
    """

    title: str
    headings: Sequence[str]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)

    def row(self, *cells: object) -> None:
        """Add a row."""
        self.rows.append(tuple(map(str, cells)))

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        reference: float | None = None,
        least: float | None = None,
        most: float | None = None,
        met: bool | None = None,
    ) -> None:
        """Add a measured figure.

        Args:
            name: of the figure.
            value: as measured.
            unit: of the value.
            reference: measured in the same run; the figure's ``ratio`` is the value divided by it.
            least: the goal of a value that should be large; None: no goal.
            most: the goal of a value that should be small; None: no goal.
            met: whether the goal is met, where more is needed than the comparison of the value with it.
        """
        goal = least if most is None else most
        if goal is not None and met is None:
            met = value >= goal if most is None else value <= goal
        ratio = value / reference if reference else None
        self.figures.append(
            {
                "name": name,
                "value": value,
                "unit": unit,
                "reference": reference,
                "ratio": ratio,
                "goal": goal,
                "met": met,
            }
        )

    def show(self) -> None:
        """Print the table, and whether each goal is met."""
        table = RichTable(*self.headings, title=self.title, title_justify="left")
        for row in self.rows:
            table.add_row(*row)
        console = console_of(150)
        console.print(table)
        for one in self.figures:
            if one["met"] is not None:
                goal = f"goal {one['goal']:g} {one['unit']}: {'met' if one['met'] else 'NOT met'}"
                console.print(f"{one['name']}: {one['value']:.4g} {one['unit']}, {goal}")


def console_of(width: int) -> Console:
    """Return a console that has this width if it is no terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = width
    return console


def medians(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median by name."""
    return {name: median(each) for name, each in values.items()}


def median_ratio(values: Sequence[float], references: Sequence[float]) -> float:
    """Return the median of the rounds' ratios: other load on the machine slows both sides of a round equally."""
    return median(value / reference for value, reference in zip(values, references, strict=True))


def interval(values: Sequence[float]) -> float:
    """Return half the 95 % interval of the mean; NaN for one value."""
    found = estimate(values).interval
    return math.nan if found is None else found


def known(values: Sequence[float | None]) -> list[float]:
    """Return the values that are there."""
    return [float(value) for value in values if value is not None]
