"""Printing of tables to a terminal, a file or a pipe."""

from __future__ import annotations

from rich.console import RenderableType

from gossipx.launch.run.display import plain_console


def show(*tables: RenderableType) -> None:
    """Print tables, and the text between them, one below the other."""
    console = plain_console()
    if not console.is_terminal:  # a file or a pipe has no width to fit
        console.width = 200
    for table in tables:
        console.print(table)
