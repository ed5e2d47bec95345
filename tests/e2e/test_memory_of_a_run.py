"""Memory of a peer: at most its model, two snapshots, one incoming model, and 64 MB.

The runs are fresh: pages that forked processes share, and copy when they write to them, would count as growth.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import resident_memory

from runs import folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps_rollup, which Linux alone has")

MB = 1e6
SCRIPT = resident_memory.__file__


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "peers"), [("tcp", 4), ("shm", 2)])
def test_at_most_two_snapshots_and_one_incoming_model(tmp_path: Path, transport: str, peers: int) -> None:
    """This holds for any number of neighbours; models have 40 MB, and each pull follows the previous one."""
    with folder(tmp_path, peers) as here:
        options = ("--policy", "tau:1", "--transport", transport)
        run = here.run(*options, SCRIPT, here.path, "10000", "30", "15", "2", fresh=True)
        assert min(run.summary["retrievals"]) > 1
        told = resident_memory.told(here.path, peers)
        assert resident_memory.growth(told) < 3 * 40 * MB + 64 * MB, told


@pytest.mark.slow
def test_thousands_of_pulls_leave_nothing_behind(tmp_path: Path) -> None:
    with folder(tmp_path, 2) as here:
        # Records of curves wait for the disk for ten seconds, which here is most of the run.
        options = ("--policy", "tau:1", "--transport", "tcp", "--blocking", "--recorder", "none")
        run = here.run(*options, SCRIPT, here.path, "100", "2000", "20", "0", fresh=True)
        assert run.summary["retrievals"] == [2_000, 2_000]
        for told in resident_memory.told(here.path, 2):
            # What is left behind is in two samples that follow each other; a copy that comes and goes is not.
            lasting = max(map(min, itertools.pairwise(told["seen"][10:])))
            assert lasting - told["seen"][1] < 2 * MB, told
