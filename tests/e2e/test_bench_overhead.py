"""bin/bench overhead at its smallest size: two peers join, and every step is counted. Times are not checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHES = Path(__file__).parents[2] / "bin" / "benches"
SMALLEST = """
import json
import overhead

measured = overhead.measure("lenet", "tau:2", 30)
whole = zip(measured.inside, measured.joined, strict=True)
print(json.dumps([len(measured.plain), measured.pulls > 0, all(inside.wall < joined.wall for inside, joined in whole)]))
print(json.dumps(overhead.interval([float(value) for value in range(100)])))
"""


@pytest.mark.slow
def test_every_step_is_timed_and_pulls_succeed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SMALLEST], cwd=BENCHES, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    timed, interval = done.stdout.splitlines()
    assert timed == "[30, true, true]"
    assert interval == "[40.0, 60.0]"  # of 100 values, the ranks that are 1.96 standard deviations of 5 away
