"""No modules of the package import each other in a circle, also not for types alone."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "gossipx"


def name_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(nodes: Iterable[ast.stmt], modules: set[str]) -> Iterator[str]:
    """Yield the modules of the package that statements import, also under a condition; not what functions import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else node.module for name in below)
        elif isinstance(node, ast.If | ast.Try):
            yield from imported(node.body, modules)


def test_no_modules_import_each_other_in_a_circle() -> None:
    files = {name_of(file): file for file in PACKAGE.rglob("*.py")}
    trees = {name: ast.parse(file.read_text(encoding="utf-8")).body for name, file in files.items()}
    graph = {name: set(imported(body, set(files))) - {name} for name, body in trees.items()}
    assert len(graph) > 200 and "gossipx.errors" in graph["gossipx.specs"]
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the modules of a circle
