"""bin/papers in the fast setting: where a table says that ours has the paper's direction, it has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEAST = {"adaptive-gossip": 4, "modular-server": 12, "fluentps": 7, "hybrid": 3, "3lc": 5, "diloco": 4}
"""The number of results that each paper's table asserts, at least."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", LEAST)
def test_the_directions_hold(name: str) -> None:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "bin")))
    done = subprocess.run(
        [sys.executable, ROOT / "bin" / "_papers" / f"{name.replace('-', '_')}.py", "--json"],
        capture_output=True,
        text=True,
        timeout=840,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    keys = {"name", "value", "unit", "reference", "ratio", "goal", "met", "direction", "asserted"}
    assert all(one.keys() == keys for one in figures)
    asserted = [(one["name"], one["direction"]) for one in figures if one["asserted"]]
    assert [what for what, holds in asserted if not holds] == []
    assert len(asserted) >= LEAST[name]
