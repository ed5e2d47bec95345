"""The parts of bin/bench server at their smallest size: they run and count. Measured values are not checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = {
    "throughput": "_throughput.measure(pool, 1, 2, (2**16,), 2**18)",
    "staleness": "_staleness.measure(pool, 1, 12, (2,))",
    "hybrid": "_hybrid.measure(pool, 1, 0.5, ('random, 20 dimensions, MLP',))",
}
PROGRAM = """
import json
import _hybrid, _staleness, _throughput
from _process_pool import ProcessPool

if __name__ == "__main__":
    with ProcessPool() as pool:
        print(json.dumps({"throughput": THROUGHPUT, "staleness": STALENESS, "hybrid": HYBRID}))
"""


@pytest.mark.slow
def test_every_part_runs_in_the_same_processes(tmp_path: Path) -> None:
    # Not by PYTHONPATH: a benchmark has the name of a module that the interpreter begins with.
    program = f"import sys; sys.path.insert(0, {str(ROOT / 'bin' / 'benches')!r})\n{PROGRAM}"
    for name, measure in PARTS.items():
        program = program.replace(name.upper(), measure)
    (tmp_path / "small.py").write_text(program, encoding="utf-8")
    paths = [ROOT, ROOT / "tests"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        [sys.executable, tmp_path / "small.py"], capture_output=True, text=True, timeout=250, env=environment
    )
    assert done.returncode == 0, done.stderr
    parts = json.loads(done.stdout)
    for _, headings, rows, figures in parts.values():
        assert rows and all(len(row) == len(headings) for row in rows)
        assert all(one.keys() == {"name", "value", "unit", "reference", "ratio", "goal", "met"} for one in figures)
    delayed = {one["name"]: one["value"] for one in parts["staleness"][-1]}
    assert delayed["the same: ASP, soft: DPRs per 100 iterations"] == 0
    assert delayed["the same: SSP s=3, soft: DPRs per 100 iterations"] > 0
