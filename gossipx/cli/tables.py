"""Tables on a terminal, in a file and through a pipe."""

from __future__ import annotations

from rich.console import Console, RenderableType


def show(*tables: RenderableType) -> None:
    """Print tables, and what stands between them, one below the other."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:  # a file or a pipe has no width that the table should be cut to
        console.width = 200
    for table in tables:
        console.print(table)
