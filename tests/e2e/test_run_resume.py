"""Checkpoints and ``gossipx run --resume``: real processes that are killed and resume."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from resuming import BRIEF, equal, kill, resumed, store, wait_for
from seeds import some

from runs import Folder, Run, agree, differences


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Callable[[int], Folder]]:
    """Return a function that creates the test's folder for a number of peers."""
    with contextlib.ExitStack() as undo:

        def make(peers: int) -> Folder:
            made = Folder(tmp_path, peers)
            undo.callback(made.close)
            return made

        yield make


# --- bit for bit --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("finish", ["none", "consensus"])
@pytest.mark.fault(29)
def test_with_never_a_run_that_was_killed_ends_bit_for_bit_as_one_that_was_not(place: Any, finish: str) -> None:
    """Data order across epochs, learning rate steps and momenta are restored. Results cover the whole run."""
    here = place(2)
    # 12,000 images for two peers in batches of 200: an epoch is 30 iterations.
    options = (*BRIEF, "--policy", "never", "--finish", finish, "--iterations", "110", "--batch-size", "200")
    # A late peer would start with another's model, so wait for it on a slow machine.
    options = (*options, "--lr-steps", "0.3,0.6", "--peer-timeout", "100")
    straight = here.run(*options, name="straight")
    run = here.start_run(*options, "--checkpoint-every", "20")
    wait_for(here, 40, run)
    kill(run)
    assert not (here.path / "x" / "summary.json").exists()
    begun = [store(here, rank).find() for rank in range(2)]
    assert all((at or 0) >= 40 for at in begun) and min(at or 0 for at in begun) < 110, "no peer waits for the other"
    again = resumed(here)
    for rank in range(2):
        assert equal(again.model(rank), straight.model(rank)), rank
        left = sorted(path.name for path in store(here, rank).directory.iterdir())
        assert left == ["00000100", "00000110"], "two are kept, of the end of training, too, and nothing half done"
    ours, theirs = again.summary, straight.summary
    for key in ("iterations", "test_accuracy", "test_accuracy_before_finish", "retrievals", "seed", "policy", "lost"):
        assert ours[key] == theirs[key], key


def test_dropout_and_a_checkpoint_by_seconds_resume_bit_for_bit(place: Any) -> None:
    """Random numbers of torch, numpy and Python; a model with BatchNorm, whose counter is not exchanged."""
    here = place(1)
    script = here.script(
        """
import random
import numpy

torch.manual_seed(3)
numpy.random.seed(3)
random.seed(3)
model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
until = int(sys.argv[2])
with gossipx.join(model, optimizer) as peer:
    begun = peer.iteration
    while peer.iteration < until:
        optimizer.zero_grad()
        data = torch.randn(8, 4) * random.random() + numpy.random.standard_normal()
        model(data).square().mean().backward()
        optimizer.step()
        if peer.iteration == 40 and len(sys.argv) > 3:
            while not list(Path(sys.argv[3]).glob("*/manifest.json")):
                os.sched_yield()
            os.kill(os.getpid(), signal.SIGKILL)
tell(peer, begun=begun)
"""
    )
    straight = here.run("--policy", "never", script, here.path, "60", name="straight")
    ended = here.start_run(
        "--policy", "never", "--checkpoint-every", "0.000001s", script, here.path, "60", store(here, 0).directory
    ).end()
    assert ended.code == 1 and "killed by SIGKILL" in ended.output, ended.shown
    again = resumed(here, script, here.path, "60")
    assert 0 < here.told(0)["begun"] <= 40
    assert equal(again.model(0), straight.model(0))
    assert int(again.model(0)["1.num_batches_tracked"]) == 60


OWN_PARTS = """
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [7, 21, 33], gamma=0.5)


class Order:
    # A data order of the script's own: a generator, and where it is.
    def __init__(self):
        self.generator = torch.Generator().manual_seed(5)
        self.seen = []

    def next(self):
        self.seen.append(int(torch.randint(1000, (), generator=self.generator)))
        return torch.full((8, 4), self.seen[-1] / 1000)

    def state_dict(self):
        return {"generator": self.generator.get_state(), "seen": self.seen}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])
        self.seen = state["seen"]


with gossipx.join(model, optimizer) as peer:
    order = Order()
    peer.checkpoint_part("order", state_dict=order.state_dict, load_state_dict=order.load_state_dict)
    peer.checkpoint_part("rate", state_dict=scheduler.state_dict, load_state_dict=scheduler.load_state_dict)
    begun = peer.iteration
    while peer.iteration < 40:
        if peer.iteration:
            scheduler.step()
        optimizer.zero_grad()
        (model(order.next()) - 1).square().mean().backward()
        optimizer.step()
        if peer.iteration % 10 == 0:
            peer._checkpoints.flush()
        if peer.iteration == 28 and not begun and sys.argv[2] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
tell(peer, begun=begun, seen=order.seen, rate=scheduler.get_last_lr())
"""


def test_a_scripts_own_parts_resume_and_the_script_need_not_be_named_again(place: Any) -> None:
    here = place(1)
    script = here.script(OWN_PARTS)
    straight = here.run("--policy", "never", script, here.path, "whole", name="straight")
    expected = here.told(0)
    (here.path / "0.json").unlink()
    ended = here.start_run("--policy", "never", "--checkpoint-every", "10", script, here.path, "killed").end()
    assert ended.code == 1, ended.shown
    again = resumed(here)
    assert here.told(0) == {**expected, "begun": 20}
    assert equal(again.model(0), straight.model(0))


# --- resuming -----------------------------------------------------------------------------------------


def test_sigterm_writes_one_and_figures_add_up(place: Any) -> None:
    """[4, 36] Even without checkpoints at intervals. The peers' names are the same, and no state of their previous
    processes disturbs them."""
    here = place(3)
    run = here.start_run("--policy", "tau:5", "--iterations", "100000", *BRIEF)
    run.line(".*".join(rf"{name} train \d+/" for name in here.names))
    run.signal(signal.SIGTERM)
    ended = run.end()
    assert ended.code == 0 and "Traceback" not in ended.output + ended.errors, ended.shown
    found = [store(here, rank).load() for rank in range(3)]
    begun = [one.iteration for one in found if one is not None]
    assert len(begun) == 3 and min(begun) > 0
    kept = [one.parts["peer"].state for one in found if one is not None]
    retrievals = [state["sync"]["counts"][0] for state in kept]
    until = max(begun) + 60
    again = resumed(here, "--iterations", str(until), "--checkpoint-every", "25")
    summary = again.summary
    assert (summary["iterations"], summary["lost"], summary["name"]) == (until, [], "x")
    for rank in range(3):
        before = kept[rank]["figures"]["before"]
        since = summary["retrievals"][rank] - retrievals[rank]
        assert 0 < since + summary["skipped"][rank] - kept[rank]["sync"]["counts"][1] <= (until - begun[rank]) // 5 + 1
        assert summary["bytes_received"][rank] >= before["bytes_received"] > 0
        assert summary["train_seconds"][rank] > before["seconds"] > 0
        assert max(differences(again.model(0), again.model(rank)).values()) <= 1e-6
    assert summary["wall_seconds"] > max(state["figures"]["before"]["seconds"] for state in kept)
    boards = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for rank in range(3):
        board = boards.EventAccumulator(str(here.path / "x" / f"peer-{rank:02d}"))
        board.Reload()
        steps = [event.step for event in board.Scalars("sync/delta")]
        assert steps == sorted(set(steps)), "one curve, each step once"
        assert set(range(10, until + 1, 10)) - set(steps) <= {begun[rank]}, "the step that SIGTERM came in is not drawn"


@pytest.mark.parametrize(
    "mode",
    some(["push-sum", "waves", "blocking"]),
)
def test_other_modes_resume(place: Any, mode: str) -> None:
    here = place(3)
    modes = {
        "push-sum": ("--mode", "push", "--weights", "push-sum", "--policy", "tau:3"),
        "waves": ("--exchange", "waves", "--policy", "drift:distance=0.05"),
        "blocking": ("--blocking", "--policy", "adaptive"),
    }
    run = here.start_run(*modes[mode], "--iterations", "100000", "--checkpoint-every", "10", *BRIEF)
    wait_for(here, 30, run)
    kill(run)
    kept = [one for rank in range(3) if (one := store(here, rank).load()) is not None]
    until = max(one.iteration for one in kept) + 30
    again = resumed(here, "--iterations", str(until))
    counts = [one.parts["peer"].state["sync"]["counts"] for one in kept]
    completed, failed = (sum(one[place] for one in counts) for place in (0, 2))
    failed, completed = sum(again.summary["failed"]) - failed, sum(again.summary["retrievals"]) - completed
    assert again.summary["lost"] == []
    # On a busy machine a peer may miss several rounds, each of which counts for its partner; most are not missed.
    assert failed < completed if mode == "waves" else failed <= 3
    assert all(max(differences(again.model(0), again.model(rank)).values()) <= 1e-5 for rank in (1, 2))


# --- ``gossipx run --resume`` with another number of peers, in real processes --------------------------


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
