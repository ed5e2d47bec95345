"""Files and functions stay short enough to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE, FUNCTION = 700, 60
"""Maximum number of lines, of a function from its ``def``. A file cut only for a number is worse than a long one."""


def sources() -> Iterator[Path]:
    for folder in ("gossipx", "tests", "bin", "docs", "examples"):
        yield from (path for path in (ROOT / folder).rglob("*.py") if "_build" not in path.parts)


def test_files_and_functions_are_short() -> None:
    too_long = []
    for path in sources():
        text = path.read_text(encoding="utf-8")
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        lengths = [(node.name, node.lineno, (node.end_lineno or 0) - node.lineno + 1) for node in nodes]
        too_long += [f"{path}:{line}: {name}(): {lines}" for name, line, lines in lengths if lines > FUNCTION]
        too_long += [f"{path}: {lines}" for lines in [text.count("\n")] if lines > FILE]
    assert not too_long, "\n".join(["", *too_long])
