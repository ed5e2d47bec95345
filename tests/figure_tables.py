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


def _of_prometheus() -> Iterator[tuple[str, ...]]:
    yield "figure", "", "meaning"
    for figure in FIGURES:
        if figure.where.prometheus:
            kind = "gauge" if figure.where.gauge else "counter"
            yield f"`{figure.where.prometheus}`", kind, figure.help


TABLES: dict[str, Callable[[], Iterator[tuple[str, ...]]]] = {"runs.md": _of_peers, "operating.md": _of_prometheus}


def written(page: str) -> tuple[str, str]:
    """Return a page as it is, and as it should be."""
    text = (HOUSE / "docs" / page).read_text(encoding="utf-8")
    heading, *rows = TABLES[page]()
    lines = [heading, tuple("---" for _ in heading), *rows]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    begins, ends = "<!-- figures, written by bin/docs -->", "<!-- end of the figures -->"
    part = f"{begins}\n\n{table}\n\n{ends}"
    return text, re.sub(f"{begins}.*?{ends}", lambda _: part, text, flags=re.DOTALL)


if __name__ == "__main__":
    for name in TABLES:
        (HOUSE / "docs" / name).write_text(written(name)[1], encoding="utf-8")
