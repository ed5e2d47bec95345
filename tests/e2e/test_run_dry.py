"""``gossipx run --dry-run`` compared with real runs: the predicted traffic is the measured traffic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runs import folder

ITERATIONS = 60


@pytest.mark.parametrize("codec", ["none", pytest.param("int8", marks=pytest.mark.slow)])
def test_tau_sends_what_the_dry_run_predicts(tmp_path: Path, codec: str) -> None:
    """Three peers receive and send different amounts. With --blocking no decision is skipped."""
    brief = f"--iterations {ITERATIONS} --batch-size 8 --eval-interval 0 --no-save-model"
    options = (*brief.split(), "--policy", "tau:10", "--codec", codec, "--blocking")
    with folder(tmp_path, 3) as here:
        predicted = here.start_run(*options, "--dry-run", "--json").end()
        assert predicted.code == 0, predicted.shown
        assert not (tmp_path / "x").exists()
        summary = here.run(*options).summary
    told = json.loads(predicted.output)
    (row,) = told["traffic"]
    assert summary["retrievals"] == [row["exchanges"]] * 3 == [ITERATIONS / 10] * 3
    # Count all received bytes, as the last pull may arrive in the finish. They include headers and control messages.
    received = sum(summary["bytes_received"]) + sum(summary["finish_bytes"])
    expected = 3 * (row["received_bytes"] + told["finish_bytes"])
    assert expected <= received <= 1.02 * expected
