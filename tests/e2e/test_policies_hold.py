"""The claims of gossipx on the embedded data: far fewer retrievals at the same accuracy (the paper's Table II).

Means over two seeds, four peers, iid, 10,000 test images, after the finish. The reference is measured beside it.
``bin/bench policies --full`` has whole runs over five seeds, with their interval.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from runs import folder

SEEDS = range(2)
PAPERS = "adaptive:threshold=0.025"
ITERATIONS = "2000"  # of 3000 by default


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_adaptive_and_travel_save_retrievals_and_keep_the_accuracy(tmp_path: Path) -> None:
    pulls, accuracy = {}, {}
    with folder(tmp_path, 4) as place:
        for policy in ("tau:10", PAPERS, "travel"):
            options = ("--policy", policy, "--iterations", ITERATIONS, "--eval-interval", "0", "--overwrite")
            runs = [place.run(*options, "--seed", str(seed), fresh=True).summary for seed in SEEDS]
            pulls[policy] = statistics.fmean(statistics.fmean(one["retrievals"]) for one in runs)
            accuracy[policy] = statistics.fmean(statistics.fmean(one["test_accuracy"]) for one in runs)
    assert pulls[PAPERS] <= 0.10 * pulls["tau:10"]
    assert accuracy[PAPERS] >= accuracy["tau:10"] - 0.010
    assert pulls["travel"] <= 0.15 * pulls["tau:10"]
    assert accuracy["travel"] >= accuracy["tau:10"] - 0.005
