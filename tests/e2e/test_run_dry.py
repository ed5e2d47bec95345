"""``gossipx run --dry-run`` compared with real runs: the predicted traffic is the measured traffic."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from runs import LONG, free_ports

ITERATIONS = 60


def gossipx(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "gossipx", "run", "--peers", "hosts.txt", "--iterations", str(ITERATIONS)]
    done = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("codec", ["none", pytest.param("int8", marks=pytest.mark.slow)])
def test_tau_sends_what_the_dry_run_predicts(tmp_path: Path, codec: str) -> None:
    """Three peers receive and send different amounts. With --blocking no decision is skipped."""
    (tmp_path / "hosts.txt").write_text("".join(f"127.0.0.1:{port}\n" for port in free_ports(3)), encoding="utf-8")
    options = ("--policy", "tau:10", "--codec", codec, "--blocking", "--eval-interval", "0", "--no-save-model")
    told = json.loads(gossipx(tmp_path, *options, "--dry-run", "--json"))
    assert not (tmp_path / "runs").exists()
    gossipx(tmp_path, *options, "--name", "real")
    summary = json.loads((tmp_path / "runs" / "real" / "summary.json").read_text())
    (row,) = told["traffic"]
    assert summary["retrievals"] == row["exchanges"][:1] * 3 == [ITERATIONS / 10] * 3
    # Count all received bytes, as the last pull may arrive in the finish. They include headers and control messages.
    received = sum(summary["bytes_received"]) + sum(summary["finish_bytes"])
    expected = 3 * (row["received_bytes"][0] + told["finish_bytes"])
    assert expected <= received <= 1.02 * expected
