"""Tables of published figures beside ours."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from published import Claim, Figure, Paper, read
from rich.console import Console
from rich.table import Table as RichTable

from gossipx.errors import UsageError
from gossipx.tasks.data import load

AGREES = {True: "yes", False: "NO", None: "–"}


@dataclass(frozen=True)
class Line:
    """A result of the paper beside ours.

    Attributes:
        what: the result.
        paper: as published; a text: what it follows from.
        ours: the value, in ``unit``.
        unit: of our value.
        agrees: whether ours has the direction of the paper's; None: no direction is known.
        holds: whether a test of the fast setting asserts that it agrees.
        half: half of the 95 % interval of our value; None: it has none.
    """

    what: str
    paper: Figure | Claim | str
    ours: float
    unit: str
    agrees: bool | None = None
    holds: bool = False
    half: float | None = None

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
        """The line in the schema of all benchmarks; ``met``: it agrees with the paper."""
        compared = isinstance(self.paper, Figure) and self.paper.unit == self.unit
        reference = self.paper.value if compared else None  # type: ignore[union-attr]
        return {
            "name": self.what,
            "value": self.ours,
            "unit": self.unit,
            "reference": reference,
            "ratio": self.ours / reference if reference else None,
            "goal": None,
            "met": self.agrees,
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
        self,
        what: str,
        paper: Figure | Claim | str,
        ours: float,
        unit: str,
        agrees: bool | None = None,
        holds: bool = False,
        half: float | None = None,
    ) -> None:
        """Add a row; the arguments are those of :class:`Line`."""
        self.lines.append(Line(what, paper, ours, unit, agrees, holds, half))


Parts = Callable[[Paper, bool, argparse.Namespace], Sequence[Part]]
"""Makes the tables, given the paper and whether the full setting is wanted."""


def show(name: str, parts: Parts, description: str, options: Sequence[str] = ()) -> None:
    """Make the tables of a paper and print them, as the command line asks.

    Args:
        name: of the paper's file.
        description: of the command.
        options: names of further options with a value, such as ``--data-dir``.
    """
    parser = argparse.ArgumentParser(
        prog=f"bin/papers {name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="larger settings, closer to the paper's")
    parser.add_argument("--json", action="store_true")
    for option in options:
        parser.add_argument(option, help="see above")
    arguments = parser.parse_args()
    paper = read(name)
    try:
        if getattr(arguments, "data_dir", None):
            load("cifar10", Path(arguments.data_dir))  # now, not after minutes
        made = parts(paper, arguments.full, arguments)
    except UsageError as error:
        parser.error(str(error))
    if arguments.json:
        print(json.dumps({"figures": [line.figure for part in made for line in part.lines]}, indent=2))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    console.print(f"{paper.title} ({paper.authors})")
    for part in made:
        table = RichTable("", paper.reference, "where", "here", "agrees", title=f"\n{part.title}", title_justify="left")
        for line in part.lines:
            interval = "" if line.half is None else f" ± {line.half:.3f}"
            table.add_row(line.what, *line.published, f"{line.ours:.4g}{interval} {line.unit}", AGREES[line.agrees])
        console.print(table)
        console.print(f"Setting: {part.setting}")
    console.print(f"\nNot in the {paper.reference}: {'; '.join(paper.not_given)}.")
