"""Checkpoints and ``gossipx run --resume``: real processes that are killed and resume, and what is refused."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from resuming import BRIEF, equal, kill, manifests, resumed, store, wait_for
from seeds import some
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gossipx.cli import main
from runs import Folder, Run, agree, folder

# --- bit for bit --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.fault(29)
def test_with_never_a_run_that_was_killed_ends_bit_for_bit_as_one_that_was_not(two: Folder) -> None:
    """Data order across epochs, learning rate steps and momenta are restored. Results cover the whole run."""
    # 12,000 images for two peers in batches of 200: an epoch is 30 iterations.
    options = (*BRIEF, "--policy", "never", "--iterations", "110", "--batch-size", "200")
    # A late peer would start with another's model, so wait for it on a slow machine.
    options = (*options, "--lr-steps", "0.3,0.6", "--peer-timeout", "100")
    straight = two.run(*options, name="straight")
    run = two.start_run(*options, "--checkpoint-every", "20")
    wait_for(two, 40, run)
    kill(run)
    assert not (two.path / "x" / "summary.json").exists()
    begun = [store(two, rank).find() for rank in range(2)]
    assert all((at or 0) >= 40 for at in begun) and min(at or 0 for at in begun) < 110, "no peer waits for the other"
    again = resumed(two)
    for rank in range(2):
        assert equal(again.model(rank), straight.model(rank)), rank
        left = sorted(path.name for path in store(two, rank).directory.iterdir())
        assert left == ["00000100", "00000110"], "two are kept, of the end of training, too, and nothing half done"
    ours, theirs = again.summary, straight.summary
    for key in ("iterations", "test_accuracy", "test_accuracy_before_finish", "retrievals", "seed", "policy", "lost"):
        assert ours[key] == theirs[key], key


OWN_PARTS = """
import random
import numpy

for seed in (torch.manual_seed, numpy.random.seed, random.seed):
    seed(3)
model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
has_muon = hasattr(torch.optim, "Muon")
optimizer = gossipx.optimizers.muon(model, lr=0.01) if has_muon else torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [7, 21, 33], gamma=0.5)


class Order:
    # A data order of the script's own: a generator, and where it is.
    def __init__(self):
        self.generator = torch.Generator().manual_seed(5)
        self.seen = []

    def next(self):
        self.seen.append(int(torch.randint(1000, (), generator=self.generator)))
        return torch.randn(8, 4) * random.random() + numpy.random.standard_normal() + self.seen[-1] / 1000

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


def test_random_numbers_and_a_scripts_own_parts_resume_bit_for_bit(tmp_path: Path) -> None:
    """Those of torch, numpy and Python; Muon with AdamW; BatchNorm, whose counter is not exchanged; and the script need
    not be named again."""
    with folder(tmp_path, 1) as here:
        script = here.script(OWN_PARTS)
        straight = here.run("--policy", "never", script, here.path, "whole", name="straight")
        expected = here.told(0)
        (here.path / "0.json").unlink()
        killed = here.start_run("--policy", "never", "--checkpoint-every", "10", script, here.path, "killed").end(
            code=1
        )
        assert "killed by SIGKILL" in killed.output, killed.shown
        again = resumed(here)
        assert here.told(0) == {**expected, "begun": 20}
        assert equal(again.model(0), straight.model(0))
        assert int(again.model(0)["1.num_batches_tracked"]) == 40


# --- resuming -----------------------------------------------------------------------------------------


def test_sigterm_writes_one_and_figures_add_up(three: Folder) -> None:
    """[4, 36] Even without checkpoints at intervals. The peers' names are the same, and no state of their previous
    processes disturbs them."""
    run = three.start_run("--policy", "tau:5", "--iterations", "100000", *BRIEF)
    run.line(".*".join(rf"{name} train \d+/" for name in three.names))
    run.signal(signal.SIGTERM)
    run.end(code=0)
    found = [store(three, rank).load() for rank in range(3)]
    begun = [one.iteration for one in found if one is not None]
    assert len(begun) == 3 and min(begun) > 0
    kept = [one.parts["peer"].state for one in found if one is not None]
    retrievals = [state["sync"]["counts"][0] for state in kept]
    until = max(begun) + 60
    again = resumed(three, "--iterations", str(until), "--checkpoint-every", "25")
    summary = again.summary
    assert (summary["iterations"], summary["lost"], summary["name"]) == (until, [], "x")
    for rank in range(3):
        before = kept[rank]["figures"]["before"]
        since = summary["retrievals"][rank] - retrievals[rank]
        assert 0 < since + summary["skipped"][rank] - kept[rank]["sync"]["counts"][1] <= (until - begun[rank]) // 5 + 1
        assert summary["bytes_received"][rank] >= before["bytes_received"] > 0
        assert summary["train_seconds"][rank] > before["seconds"] > 0
        drawn = steps(again, rank)
        assert drawn == sorted(set(drawn)), "one curve, each step once"
        assert set(range(10, until + 1, 10)) - set(drawn) <= {begun[rank]}, "the step that SIGTERM came in is not drawn"
    assert agree(again, 3)
    assert summary["wall_seconds"] > max(state["figures"]["before"]["seconds"] for state in kept)


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
    board = EventAccumulator(str(run.directory / f"peer-{rank:02d}")).Reload()
    return [event.step for event in board.Scalars("sync/delta")]


@pytest.mark.parametrize("mode", some(MODES))
def test_a_run_resumes_with_fewer_peers_and_then_with_more(three: Folder, tmp_path: Path, mode: str) -> None:
    """Checkpoints of peers that are gone stay in place, and a peer that comes in their place does not use them."""
    run = three.start_run(*MODES[mode], "--iterations", "100000", "--checkpoint-every", "10", *BRIEF)
    wait_for(three, 20, run)
    kill(run)
    begun = [store(three, rank).find() or 0 for rank in range(3)]
    kept = sorted(store(three, 2).directory.iterdir())

    with folder(tmp_path, 2) as two:
        until = max(begun) + 60
        fewer = resumed(two, "--peers", two.hosts, "--iterations", str(until))
    told = "the run had 3 peers, and 2 resume: checkpoints in peer-02 are left in place"
    assert fewer.ended.errors.count(told) == 1, fewer.ended.shown
    assert sorted(store(three, 2).directory.iterdir()) == kept
    assert fewer.summary["peers"] == 2 and fewer.summary["lost"] == [] and agree(fewer, 2)
    assert fewer.summary["iterations"] == until

    with folder(tmp_path, 4) as four:
        last = until + 40
        more = resumed(four, "--peers", four.hosts, "--iterations", str(last), "--log-interval", "1")
    names = ", ".join(four.names[2:])
    told = f"the run had 2 peers, and {names} had no part in it: each starts with the model of a peer that resumes"
    assert more.ended.errors.count(told) == 1, more.ended.shown
    assert more.summary["peers"] == 4 and more.summary["lost"] == [] and agree(more, 4)
    assert steps(more, 3)[0] == until + 1, "its first model is that of a peer that resumed"
    assert until + 1 in steps(more, 2) and until not in steps(more, 2), "not that of its own old checkpoint"


# --- uses of --resume that are refused, and changes that are allowed ------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    """A run of two peers that SIGTERM ended."""
    with folder(tmp_path_factory.mktemp("stopped"), 2) as here:
        options = ("--policy", "tau:5", "--iterations", "100000", "--checkpoint-every", "10", "--seed", "3")
        run = here.start_run(*options, "--peer-timeout", "20")
        wait_for(here, 20, run)
        run.signal(signal.SIGTERM)
        run.end()
        yield here


def refused_at_once(here: Folder, *options: str | Path, name: str | Path = "x") -> str:
    """Like :func:`refused`, for refusals before any process is started."""
    command = ["run", "--logdir", here.path, "--resume", name, *options]
    result = CliRunner().invoke(main, list(map(str, command)))
    assert result.exit_code == 2 and result.stdout == "" and result.stderr.count("\n") == 1, result.output
    return result.stderr.strip()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--model", "resnet20"), "--model cannot change when a run resumes; it is lenet"),
        (("--seed", "4"), "--seed cannot change when a run resumes; it is 3"),
        (("--policy", "adaptive"), "--policy cannot change when a run resumes; it is tau:5"),
        (("--mode", "push"), "--mode cannot change"),
        (("--name", "y"), "--name cannot change"),
        (("--overwrite",), "--overwrite cannot change when a run resumes; it is false"),
        (("--iterations", "5"), "--iterations 5, but its checkpoints already have"),
        (("--config", "x/config.toml"), "--config is for a new run"),
        (("--checkpoint-every", "5m"), "'5m' is not an interval: use iterations such as 500, seconds such as 60s"),
        (("--keep-checkpoints", "0"), "--keep-checkpoints is 0: at least 1"),
    ],
)
def test_a_setting_that_cannot_change_is_refused_by_its_option(
    stopped: Folder, options: tuple[str, ...], told: str
) -> None:
    config = stopped.path / "x" / "config.toml"
    before = config.read_bytes()
    assert told in refused_at_once(stopped, *options)
    assert config.read_bytes() == before


@pytest.mark.fault(58)
@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("config.toml", None, "the settings of the run are missing"),
        ("config.toml", "", "not the settings of a run"),
        ("config.toml", "[task]\n", "not the settings of a run"),
        ("config.toml", "a = " + "[" * 200_000, "nested too deeply"),
        ("hosts.txt", None, "hosts file not found"),
        ("hosts.txt", "", "no peers"),
        ("script.json", "", "not a script with its arguments"),
        ("script.json", "[" * 200_000, "not a script with its arguments"),
        ("script.json", "[1]", "not a script with its arguments"),
    ],
)
def test_a_missing_or_damaged_file_of_the_run_is_named(
    stopped: Folder, tmp_path: Path, name: str, content: str | None, told: str
) -> None:
    shutil.copytree(stopped.path / "x", tmp_path / "x")
    file = tmp_path / "x" / name
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    line = refused_at_once(stopped, name=tmp_path / "x")
    assert line.startswith(f"{file}:") and told in line


@pytest.mark.fault(30)
def test_without_a_complete_checkpoint_it_is_refused(tmp_path: Path) -> None:
    """Also for a run that never wrote one, and a directory without a run."""
    with folder(tmp_path, 1) as here:
        assert "x: no such run: " in refused_at_once(here)
        here.run("--policy", "never", "--iterations", "5", *BRIEF)
        told = "no peer has a complete checkpoint to resume from: "
        assert f"{told}a run writes checkpoints with --checkpoint-every" in refused_at_once(here)
        store(here, 0).save(5, {})
        (manifests(here, 0)[0]).write_text("{}")
        assert f"{told}{manifests(here, 0)[0]}: does not match its own hash" in refused_at_once(here)
        assert (here.path / "x" / "summary.json").exists(), "the refusal removes nothing of the run"


def test_allowed_changes_apply_when_a_run_resumes_by_its_directory(stopped: Folder) -> None:
    """A hosts file with other ports and as many peers, and another parameter of the policy; the new settings are
    recorded."""
    done = max(store(stopped, rank).find() or 0 for rank in range(2))
    others = Folder(stopped.path, 2)  # overwrites the first hosts file
    options = ("--peers", others.hosts, "--policy", "tau:7", "--iterations", str(done + 10))
    run = resumed(stopped, *options, name=stopped.path / "x")
    assert run.summary["policy"] == "tau:7" and run.summary["iterations"] == done + 10
    assert 'policy = "tau:7"' in (stopped.path / "x" / "config.toml").read_text()
    assert (stopped.path / "x" / "hosts.txt").read_bytes() == others.hosts.read_bytes()
