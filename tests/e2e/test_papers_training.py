"""bin/papers hybrid, 3lc and diloco in their fast settings: what the tables say holds, holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("name", "least"), [("hybrid", 3), ("3lc", 10), ("diloco", 5)])
def test_ours_has_the_direction_of_the_papers_where_the_table_says_so(name: str, least: int) -> None:
    """``least``: the number of results that are asserted, at least."""
    done = subprocess.run(
        [sys.executable, f"bin/_papers/{name}.py", "--json"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    asserted = {figure["name"]: figure["met"] for figure in figures if figure["met"] is not None}
    assert len(asserted) >= least
    assert all(asserted.values()), [name for name, met in asserted.items() if not met]
