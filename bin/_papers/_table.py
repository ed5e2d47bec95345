"""Tables of published figures beside ours."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _bench.cli import Given, parser_of
from _bench.tables import console_of
from published import Claim, Figure, Paper
from rich.table import Table as RichTable

from gossipx.errors import UsageError
from gossipx.tasks.data import load

FACTOR = 2.0
"""By how much ours may be larger or smaller than the paper's and still agree: results in another setting differ."""
LIMITS = "within", "less than"
"""Qualifiers of a figure that ours must not exceed."""
RULE = (
    f"agrees: yes: the paper's direction, and within a factor of {FACTOR:g} of its size; other size: its direction;"
    " NO: against it; –: nothing to compare, or not beyond its interval. Sizes count from 0, those of ratios from 1."
    " “at least” has no upper bound, a limit is kept or not, and a statement has no size"
)


@dataclass(frozen=True)
class Line:
    """A result of the paper beside ours.

    Attributes:
        what: the result.
        paper: as published; a text: what it follows from.
        ours: the value, in ``unit``.
        unit: of our value.
        agrees: whether ours agrees with what the paper states; None for a figure in our unit, which says it itself.
        holds: whether a test of the fast setting asserts the direction.
        half: half of the 95 % interval of our value; None: it has none.
        none: the value that is no effect; None: 1 of a ratio, by its unit, otherwise 0.
    """

    what: str
    paper: Figure | Claim | str
    ours: float
    unit: str
    agrees: bool | None = None
    holds: bool = False
    half: float | None = None
    none: float | None = None

    def __post_init__(self) -> None:
        if self._compared is not None and self.agrees is not None:
            raise ValueError(f"{self.what}: whether it agrees follows from the paper's figure")

    @property
    def _compared(self) -> Figure | None:
        """The paper's figure, if it is in our unit."""
        return self.paper if isinstance(self.paper, Figure) and self.paper.unit == self.unit else None

    @property
    def _effects(self) -> tuple[float, float]:
        """How far ours and the paper's figure are from no effect."""
        assert self._compared is not None
        is_ratio = self.unit.startswith(("times", "×"))
        none = float(is_ratio) if self.none is None else self.none
        return self.ours - none, self._compared.value - none

    @property
    def direction(self) -> bool | None:
        """Whether ours has the direction of the paper's, or keeps its limit; None: it is not known."""
        if self._compared is None:
            return self.agrees
        if self._compared.qualifier in LIMITS:
            return self.ours <= self._compared.value
        ours, theirs = self._effects
        return ours * theirs > 0 if self.half is None or abs(ours) > self.half else None

    @property
    def agreement(self) -> str:
        """``yes``, ``other size``, ``NO`` or ``–``: see :data:`RULE`."""
        if self.direction is not True:
            return "–" if self.direction is None else "NO"
        if self._compared is None or self._compared.qualifier in LIMITS:
            return "yes"
        ours, theirs = self._effects
        most = math.inf if self._compared.qualifier == "at least" else FACTOR
        return "yes" if 1 / FACTOR <= ours / theirs <= most else "other size"

    @property
    def published(self) -> tuple[str, str]:
        """The paper's result and its place."""
        match self.paper:
            case Figure():
                derived = f": {self.paper.derived}" if self.paper.derived else ""
                return str(self.paper), self.paper.place + derived
            case Claim():
                return f"“{self.paper.says}”", self.paper.place
        return str(self.paper), ""

    @property
    def figure(self) -> dict[str, Any]:
        """The line in the schema of all benchmarks; ``met``: it agrees with the paper, also in size."""
        reference = None if self._compared is None else self._compared.value
        return {
            "name": self.what,
            "value": self.ours,
            "unit": self.unit,
            "reference": reference,
            "ratio": self.ours / reference if reference else None,
            "goal": None,
            "met": None if self.direction is None else self.agreement == "yes",
            "direction": self.direction,
            "asserted": self.holds,
        }


@dataclass
class Part:
    """A table of the output.

    Attributes:
        title: which table or figures of the paper.
        setting: how ours differs from the paper's.
        lines: its rows.
    """

    title: str
    setting: str
    lines: list[Line] = field(default_factory=list)

    def add(
        self, what: str, paper: Figure | Claim | str, ours: float, unit: str | None = None, *more: Any, **named: Any
    ) -> None:
        """Add a row; the arguments are those of :class:`Line`, and by default the unit is the paper's."""
        if unit is None:
            unit = paper.unit if isinstance(paper, Figure) else ""
        self.lines.append(Line(what, paper, ours, unit, *more, **named))


def show(
    paper: Paper, parts: Callable[[Given], Iterable[Part]], description: str | None, data_dir: bool = True
) -> None:
    """Make the tables of a paper and print them, as the command line asks.

    Args:
        paper: the paper.
        parts: makes its tables.
        description: of the command.
        data_dir: whether CIFAR-10 can be used.
    """
    options = {"--data-dir": {"help": "with CIFAR-10; see above"}} if data_dir else {}
    parser = parser_of(f"bin/papers {paper.name}", description, options)
    given = parser.parse_args(namespace=Given())
    try:
        if data_dir and given.data_dir:
            load("cifar10", Path(given.data_dir))  # now, not after minutes
        made = list(parts(given))
    except UsageError as error:
        parser.error(str(error))
    if given.json:
        print(json.dumps({"figures": [line.figure for part in made for line in part.lines]}, indent=2))
        return
    console = console_of(160)
    console.print(f"{paper.title} ({paper.authors})")
    for part in made:
        table = RichTable("", paper.reference, "where", "here", "agrees", title=f"\n{part.title}", title_justify="left")
        for line in part.lines:
            interval = "" if line.half is None else f" ± {line.half:.3f}"
            table.add_row(line.what, *line.published, f"{line.ours:.4g}{interval} {line.unit}", line.agreement)
        console.print(table)
        console.print(f"Setting: {part.setting}")
    console.print(f"\n{RULE}.")
    console.print(f"Not in the {paper.reference}: {'; '.join(paper.not_given)}.")
