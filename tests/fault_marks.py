"""The tests of each row of the table of faults (docs/faults.md), read from their marks without importing them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent


def rows_of(nodes: list[ast.expr]) -> list[int]:
    """Return the arguments of ``pytest.mark.fault`` among decorators or marks."""
    calls = (one for one in nodes if isinstance(one, ast.Call) and ast.unparse(one.func) == "pytest.mark.fault")
    return [ast.literal_eval(row) for call in calls for row in call.args]


def marked() -> dict[int, dict[str, list[str]]]:
    """Return the tests of each row: their names by file, as in ``scenarios/test_server.py``."""
    found: dict[int, dict[str, list[str]]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for row, name in _marks(ast.parse(path.read_text())):
            found.setdefault(row, {}).setdefault(path.relative_to(TESTS).as_posix(), []).append(name)
    return found


def _marks(tree: ast.Module) -> Iterator[tuple[int, str]]:
    everywhere: list[int] = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            marks = node.value.elts if isinstance(node.value, ast.List) else [node.value]
            everywhere += rows_of(marks)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for row in {*everywhere, *rows_of(node.decorator_list)}:
                yield row, node.name
