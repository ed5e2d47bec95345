"""``gossipx run --resume`` with another number of peers, in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from resuming import BRIEF, kill, resumed, store, wait_for
from seeds import some

from runs import Folder, Run, agree

MODES = {
    "pull": ("--policy", "tau:5"),
    "push-sum": ("--mode", "push", "--weights", "push-sum", "--policy", "tau:5"),
    "pushpull": ("--mode", "pushpull", "--policy", "tau:5"),
    "waves": ("--exchange", "waves", "--policy", "tau:5"),
    "coded waves": ("--exchange", "waves", "--policy", "tau:5", "--codec", "topk2:ratio=0.1"),
}


def steps(run: Run, rank: int) -> list[int]:
    """Return the iterations on the curve of a peer."""
    boards = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = boards.EventAccumulator(str(run.directory / f"peer-{rank:02d}"))
    board.Reload()
    return [event.step for event in board.Scalars("sync/delta")]


@pytest.mark.parametrize("mode", some(["pull", "push-sum", "pushpull", "waves", "coded waves"]))
def test_a_run_resumes_with_fewer_peers_and_then_with_more(tmp_path: Path, mode: str) -> None:
    """Checkpoints of peers that are gone stay in place, and a peer that comes in their place does not use them."""
    here = Folder(tmp_path, 3)
    others: list[Folder] = []
    try:
        options = (*MODES[mode], "--iterations", "100000", "--checkpoint-every", "10", *BRIEF)
        run = here.start_run(*options)
        wait_for(here, 20, run)
        kill(run)
        begun = [store(here, rank).find() or 0 for rank in range(3)]
        kept = sorted(store(here, 2).directory.iterdir())

        others.append(Folder(tmp_path, 2))
        until = max(begun) + 60
        fewer = resumed(others[0], "--peers", others[0].hosts, "--iterations", str(until))
        told = "the run had 3 peers, and 2 resume: checkpoints in peer-02 are left in place"
        assert fewer.ended.errors.count(told) == 1, fewer.ended.shown
        assert sorted(store(here, 2).directory.iterdir()) == kept
        assert fewer.summary["peers"] == 2 and fewer.summary["lost"] == [] and agree(fewer, 2)
        assert fewer.summary["iterations"] == until

        others.append(Folder(tmp_path, 4))
        last = until + 40
        options = ("--peers", others[1].hosts, "--iterations", str(last), "--log-interval", "1")
        more = resumed(others[1], *options)
        names = ", ".join(others[1].names[2:])
        told = f"the run had 2 peers, and {names} had no part in it: each starts with the model of a peer that resumes"
        assert more.ended.errors.count(told) == 1, more.ended.shown
        assert more.summary["peers"] == 4 and more.summary["lost"] == [] and agree(more, 4)
        assert steps(more, 3)[0] == until + 1, "its first model is that of a peer that resumed"
        assert until + 1 in steps(more, 2) and until not in steps(more, 2), "not that of its own old checkpoint"
    finally:
        for folder in (here, *others):
            folder.close()
