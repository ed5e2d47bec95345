"""Memory of a peer: at most its model, two snapshots, one incoming model, and 64 MB; and pulls leave nothing behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runs import Folder, folder

MB = 1e6
RESIDENT = """
def resident(process):
    # Bytes of one process. Proportional: memory that peers of one machine share counts once, not with each of them. No
    # files: libraries.
    lines = [line.split() for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()]
    return sum(1024 * int(words[1]) for words in lines if words[0] in ("Pss_Anon:", "Pss_Shmem:"))


model = nn.Linear(10_000, 1000, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
model.weight.grad = torch.ones_like(model.weight)
optimizer.step()
before, seen = resident("self"), []
with gossipx.join(model, optimizer) as peer:
    tell(peer, process=os.getpid())
    while not all_have(peer, "begun", True, range(peer.size)):
        optimizer.step()
    processes = [json.loads((FOLDER / f"{rank}.json").read_text())["process"] for rank in range(peer.size)]
    while not all_have(peer, "mixed", peer.iteration >= 30 and peer.mixes >= 2, range(peer.size), 200_000):
        optimizer.step()
        if peer.iteration % 2 == 0:
            seen.append(sum(map(resident, processes)))  # all at one time: what is shared moves from one to another
    while not all_have(peer, "measured", True, range(peer.size), 200_000):
        optimizer.step()
tell(peer, before=before, most=max(seen))
"""
"""Each peer has read the others' process ids when all have mixed, and none ends before all have measured."""

COUNTED = """
import gc

model = nn.Linear(4, 50)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
objects = []
with gossipx.join(model, optimizer) as peer:
    for until in (100, 300):
        train(peer, model, optimizer, until)
        gc.collect()
        objects.append(len(gc.get_objects()))
tell(peer, objects=objects)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps_rollup, which Linux alone has")
@pytest.mark.parametrize(("transport", "peers"), [("tcp", 4), ("shm", 2)])
def test_at_most_two_snapshots_and_one_incoming_model(tmp_path: Path, transport: str, peers: int) -> None:
    """This holds for any number of neighbours; models have 40 MB, and each pull follows the previous one.

    The run is fresh: pages that forked processes share, and copy when they write to them, would count as growth.
    """
    with folder(tmp_path, peers) as here:
        run = here.run("--policy", "tau:1", "--transport", transport, here.script(RESIDENT), here.path, fresh=True)
        assert min(run.summary["retrievals"]) > 1
        told = [here.told(rank) for rank in range(peers)]
        growth = max(one["most"] for one in told) - sum(one["before"] for one in told)
        assert growth / peers < 3 * 40 * MB + 64 * MB, told


def test_hundreds_of_pulls_leave_no_object_behind(two: Folder) -> None:
    """Those in use at one time vary by a few, however many pulls there were."""
    options = ("--policy", "tau:1", "--transport", "tcp", "--blocking", "--recorder", "none")
    run = two.run(*options, two.script(COUNTED), two.path)
    assert run.summary["retrievals"] == [300, 300]
    for rank in range(2):
        before, after = two.told(rank)["objects"]
        assert after - before < 100, "200 pulls later"
