"""What a peer keeps in memory: at most its model, two snapshots, one model that comes in, and 64 MB."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runs import PRELUDE, folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps_rollup, which Linux alone has")

MB = 1e6
SCRIPT = (
    PRELUDE
    + """
def resident(process):
    # Proportional: memory that peers of one machine share counts once, not with each of them. No files: libraries.
    lines = [line.split() for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()]
    return sum(1024 * int(words[1]) for words in lines if words[0] in ("Pss_Anon:", "Pss_Shmem:"))

wide, iterations, samples = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
model = nn.Linear(wide, 1000, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
model.weight.grad = torch.ones_like(model.weight)
optimizer.step()
before, seen = resident("self"), []
with gossipx.join(model, optimizer) as peer:
    (FOLDER / f"{peer.rank}.process").write_text(str(os.getpid()))
    while not all_have(peer, "told", True, range(peer.size)):
        optimizer.step()
    processes = [(FOLDER / f"{rank}.process").read_text() for rank in range(peer.size)]
    while peer.iteration < iterations:
        optimizer.step()
        if peer.iteration % (iterations // samples) == 0:
            seen.append(sum(map(resident, processes)))  # all at one time: what is shared moves from one to another
tell(peer, before=before, seen=seen)
"""
)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("peers", [2, 4])
def test_at_most_two_snapshots_and_one_model_that_comes_in(tmp_path: Path, transport: str, peers: int) -> None:
    """Whatever the number of neighbours; 40 MB a model, pulled whenever the last pull is mixed."""
    with folder(tmp_path, peers) as here:
        options = ("--policy", "tau:1", "--transport", transport)
        run = here.run(*options, here.script(SCRIPT), here.path, "10000", "60", "30")
        assert min(run.summary["retrievals"]) > 1
        told = [here.told(rank) for rank in range(peers)]
        most = max(max(one["seen"]) for one in told) - sum(one["before"] for one in told)
        assert most / peers < 3 * 40 * MB + 64 * MB, told


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_ten_thousand_pulls_leave_nothing_behind(tmp_path: Path, transport: str) -> None:
    with folder(tmp_path, 2) as here:
        options = ("--policy", "tau:1", "--transport", transport, "--blocking")
        run = here.run(*options, here.script(SCRIPT), here.path, "100", "10000", "20")
        assert run.summary["retrievals"] == [10_000, 10_000]
        for told in (here.told(rank) for rank in range(2)):
            assert max(told["seen"][10:]) - told["seen"][1] < 2 * MB, told
