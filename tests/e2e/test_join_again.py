"""A process that joins and closes repeatedly keeps no memory or file of earlier runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from runs import all_end, folder

SCRIPT = """
import gc
import threading
import weakref

RANK, SETTINGS = int(sys.argv[2]), json.loads(sys.argv[3])
os.chdir(FOLDER)
gc.disable()  # what only a gc run would release counts as kept
descriptors, arenas = [], []
for number in range(5):
    # A peer that joins while the other is still leaving meets its last life, and counts it as restarted.
    while number and not (FOLDER / f"{1 - RANK}-over-{number - 1}").exists():
        signal.sigtimedwait([], 0.01)
    model = nn.Linear(4, 50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    joined = gossipx.join(
        model, optimizer, peers="hosts.txt", rank=RANK, name=f"{number}-{RANK}", **SETTINGS
    )
    with joined as peer:
        # A peer that ends earlier may leave the other without anyone to exchange with.
        while not all_have(peer, f"mixed-{number}", peer._role.sync.retrievals > 0, range(2), 100_000):
            train(peer, model, optimizer, peer.iteration + 20)
    retrievals = peer._role.sync.retrievals
    arenas.append(weakref.ref(peer._arena))
    del joined, peer, model, optimizer
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        thread.join(10)  # close() tells them to end, and does not wait for all
    descriptors.append(len(os.listdir("/dev/fd")))
    (FOLDER / f"{RANK}-over-{number}").touch()
    assert retrievals > 0, "nothing was exchanged"
(FOLDER / f"{RANK}.json").write_text(
    json.dumps({"descriptors": descriptors, "arenas": sum(arena() is not None for arena in arenas)})
)
"""


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param('{"policy": "tau:5", "blocking": true}', marks=pytest.mark.slow),
        pytest.param('{"policy": "tau:5", "hub": 0}', marks=pytest.mark.slow),
        '{"mode": "server", "servers": [0, 1], "checkpoint_every": "5"}',
    ],
)
def test_nothing_stays_open_and_no_arena_stays(tmp_path: Path, settings: str) -> None:
    with folder(tmp_path, 2) as here:
        script = here.script(SCRIPT)
        all_end([here.start(script, here.path, str(rank), settings) for rank in range(2)])
        for rank in range(2):
            told = here.told(rank)
            assert told["arenas"] == 0
            # Resources that are opened once per process stay open.
            assert told["descriptors"][1:] == [told["descriptors"][0]] * 4
