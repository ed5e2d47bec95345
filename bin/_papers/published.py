"""Settings and published figures of a paper, from a TOML file beside this module, for the tables of bin/papers.

A file has ``title``, ``authors``, and

- ``not_given``: what a reproduction must choose, because the paper does not say it;
- ``[setting]``: nested tables of the paper's settings; each has a ``place``, which says where in the paper they are;
- ``[[tables]]``: published tables with ``id``, ``place``, ``columns``, and ``rows`` of ``id``, ``unit`` and ``values``,
  or one unit per column in ``units``. A value becomes the figure ``TABLE/ROW/COLUMN``;
- ``[text]``: ``figures``, single ones, such as those in the text, see :class:`Figure`; and ``claims``, results that the
  text states without a figure, in its words, see :class:`Claim`.

Values that only a plot shows are in no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gossipx.specs.toml import loads

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Figure:
    """A published figure: its value and unit, its place in the paper, a qualifier such as "up to", and how it follows
    from published figures if it is not published itself."""

    id: str
    value: float
    unit: str
    place: str
    qualifier: str = ""
    derived: str = ""

    def __str__(self) -> str:
        return f"{self.qualifier} {self.value:g} {self.unit}{', derived' if self.derived else ''}".lstrip()


@dataclass(frozen=True)
class Claim:
    """A result that the paper states without a figure, in its words, and where it is in the paper."""

    id: str
    says: str
    place: str


@dataclass(frozen=True)
class Paper:
    """A paper's setting, as nested tables, and its results by id, in the file's order, tables first.

    Its name is that of its file. The figures are from its ``reference``, usually the paper itself.
    """

    name: str
    title: str
    authors: str
    reference: str
    not_given: tuple[str, ...]
    setting: Mapping[str, Any]
    figures: Mapping[str, Figure]
    claims: Mapping[str, Claim]

    def __getitem__(self, key: str) -> Any:
        """Return a figure or a claim by its id."""
        return self.figures[key] if key in self.figures else self.claims[key]


def read(name: str) -> Paper:
    """Return the paper ``name``, which has a file beside this one.

    Raises:
        UsageError: its file is not TOML.
        ValueError: an id occurs twice, or a row has not as many values as there are columns.
    """
    file = HERE / f"{name}.toml"
    content = loads(file.read_text(encoding="utf-8"), file)
    tables = [figure for table in content.get("tables", []) for figure in _cells(table)]
    figures = tables + [Figure(**each) for each in content["text"].get("figures", [])]
    claims = [Claim(**each) for each in content["text"]["claims"]]
    ids = [one.id for one in (*figures, *claims)]
    if twice := {each for each in ids if ids.count(each) > 1}:
        raise ValueError(f"{file.name}: twice: {', '.join(sorted(twice))}")
    return Paper(
        name,
        content["title"],
        content["authors"],
        content.get("reference", "paper"),
        tuple(content["not_given"]),
        MappingProxyType(content["setting"]),
        MappingProxyType({one.id: one for one in figures}),
        MappingProxyType({one.id: one for one in claims}),
    )


def _cells(table: Mapping[str, Any]) -> Iterator[Figure]:
    columns = table["columns"]
    for row in table["rows"]:
        units = table.get("units") or [row["unit"]] * len(columns)
        for column, unit, value in zip(columns, units, row["values"], strict=True):
            yield Figure(f"{table['id']}/{row['id']}/{column}", value, unit, table["place"])
