"""The tables of figures in the documentation, made of their declarations. Run as a script, it rewrites the pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from pages import HOUSE

from gossipx.figures import FIGURES


def _of_peers() -> Iterator[tuple[str, ...]]:
    yield "figure", "unit", "meaning", "in `gossipx compare`", "curve"
    for figure in FIGURES:
        if figure.where.summary:
            lines = "; ".join(line.heading for line in figure.where.lines)
            tag = f"`{figure.where.tag}`" if figure.where.tag else ""
            yield f"`{figure.name}`", figure.unit, figure.help, lines, tag


def _of_curves() -> Iterator[tuple[str, ...]]:
    yield "tag", "recorded by", "unit", "meaning"
    for figure in FIGURES:
        if figure.where.tag:
            yield f"`{figure.where.tag}`", figure.where.by, figure.unit, figure.help


def _of_prometheus() -> Iterator[tuple[str, ...]]:
    yield "figure", "", "meaning"
    for figure in FIGURES:
        if figure.where.prometheus:
            kind = "gauge" if figure.where.gauge else "counter"
            yield f"`{figure.where.prometheus}`", kind, figure.help


TABLES: dict[str, dict[str, Callable[[], Iterator[tuple[str, ...]]]]] = {
    "runs.md": {"figures": _of_peers, "curves": _of_curves},
    "operating.md": {"figures": _of_prometheus},
}


def written(page: str) -> tuple[str, str]:
    """Return a page as it is, and as it should be."""
    old = new = (HOUSE / "docs" / page).read_text(encoding="utf-8")
    for name, rows_of in TABLES[page].items():
        heading, *rows = rows_of()
        lines = [heading, tuple("---" for _ in heading), *rows]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        begins, ends = f"<!-- {name}, written by bin/docs -->", f"<!-- end of the {name} -->"
        assert new.count(begins) == new.count(ends) == 1
        part = f"{begins}\n\n{table}\n\n{ends}"
        new = re.sub(f"{begins}.*?{ends}", lambda _, part=part: part, new, flags=re.DOTALL)  # type: ignore[misc]
    return old, new


if __name__ == "__main__":
    for name in TABLES:
        (HOUSE / "docs" / name).write_text(written(name)[1], encoding="utf-8")
