"""Files and functions stay short enough to be read at once."""

from __future__ import annotations

import ast
import graphlib
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


# --- No modules of the package import each other in a circle, also not for types alone -----------------


PACKAGE = Path(__file__).parents[2] / "gossipx"


def name_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    """Yield the modules of the package that a module imports, also under a condition or within a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else node.module for name in below)


def test_no_modules_import_each_other_in_a_circle() -> None:
    files = {name_of(file): file for file in PACKAGE.rglob("*.py")}
    trees = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in files.items()}
    graph = {name: set(imported(tree, set(files))) - {name} for name, tree in trees.items()}
    assert len(graph) > 200 and "gossipx.errors" in graph["gossipx.specs"]
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the modules of a circle
