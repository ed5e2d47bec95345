"""bin/papers modular-server and fluentps: both run, and ours has the papers' directions where that is claimed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "least"), [("modular-server", 10), ("fluentps", 15)])
def test_the_directions_hold(name: str, least: int) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests"))),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, ROOT / "bin" / "_papers" / f"{name.replace('-', '_')}.py", "--json"],
        capture_output=True,
        text=True,
        timeout=580,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert all(one.keys() == {"name", "value", "unit", "reference", "ratio", "goal", "met"} for one in figures)
    asserted = {one["name"]: one["met"] for one in figures if one["met"] is not None}
    assert [what for what, met in asserted.items() if not met] == []
    assert len(asserted) >= least
