"""bin/bench evidence at its smallest size: two peers in network namespaces, whose interfaces count the bytes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulated import lacking

ROOT = Path(__file__).parents[2]
STEPS, TRANSFORMER = 19, 354_144
SMALLEST = ("--systems", "ddp,pairs", "--steps", str(STEPS), "--peers", "2")


@pytest.mark.slow
def test_bytes_of_ddp_are_those_of_a_ring(tmp_path: Path) -> None:
    """A ring all-reduce sends 2 (N - 1)/N times the gradients in each step."""
    if (reason := lacking()) is not None:
        pytest.skip(reason)
    command = [sys.executable, ROOT / "bin" / "benches" / "evidence.py", *SMALLEST, "--json", "--keep", tmp_path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "bin")))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    figures = {one["name"]: one for one in json.loads(done.stdout)["figures"]}
    ddp, pairs = (figures[f"text, 100mbit, {name}: bytes"]["value"] for name in ("ddp", "gossipx pairs"))
    assert 1 <= ddp / (STEPS * 4 * TRANSFORMER) < 1.05
    # One pair, after ten steps, and its messages; nine more steps take longer than its 0.11 s on the link.
    assert 1 <= pairs / (4 * TRANSFORMER) < 1.2
    assert figures["text, 100mbit, gossipx pairs: loss"]["value"] < math.log(64)  # that of a model that knows nothing
    assert {file.name for file in tmp_path.glob("*.png")} == {
        f"text-100mbit-{axis}.png" for axis in ("bytes", "seconds")
    }
