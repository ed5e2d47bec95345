"""Disks that are full or read-only under a run: training continues, and what is lost is told and counted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_disks import SmallDisk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from runs import Folder, folder, one_line

SCRIPT = """
import subprocess

DISK = Path(sys.argv[2])


def fill():
    try:
        with (DISK / f"filler-{os.getpid()}").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        pass


def free():
    for file in DISK.glob("filler-*"):
        file.unlink()


def remount(how):
    # It fails while a file is open for writing.
    while subprocess.run(["mount", "-o", f"remount,{how}", DISK], stderr=subprocess.DEVNULL).returncode:
        pass


def both(peer, what, action=None):
    # Peer 0 acts, then both continue.
    if peer.rank == 0:
        action and action()
    while not all_have(peer, what, peer.rank == 0 or (FOLDER / f"0-{what}").exists(), range(2)):
        train(peer, model, optimizer, peer.iteration + 1)


spoil, mend = {
    "full": (fill, free), "read-only": (lambda: remount("ro"), lambda: remount("rw")),
}[sys.argv[3]]
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with gossipx.join(model, optimizer) as peer:
    train(peer, model, optimizer, 20)
    peer._checkpoints.flush()
    both(peer, "spoilt", spoil)
    for _ in range(4):  # checkpoints, and writes of curves
        train(peer, model, optimizer, (peer.iteration // 10 + 1) * 10)
        peer._checkpoints.flush()
        spoil()  # again: a checkpoint that was being written may have replaced an old one, and left room
        for number in range(100):  # more than fits into the last page of the file
            peer.log("notes", number)
        peer._reporter._recorder.unwritten()
    while not all_have(peer, "tried", True, range(2)):
        train(peer, model, optimizer, peer.iteration + 1)
    if sys.argv[4] == "for a while":
        both(peer, "mended", mend)
    train(peer, model, optimizer, (peer.iteration // 10 + 1) * 10 + 5)
"""


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Folder]:
    """A folder for two peers."""
    (tmp_path / "outside").mkdir()
    with folder(tmp_path / "outside", 2) as made:
        yield made


def command(two: Folder, disk: SmallDisk, *arguments: str) -> tuple[str | Path, ...]:
    options = ("--logdir", disk.path, "--policy", "tau:5", "--checkpoint-every", "10", "--peer-timeout", "20")
    return (*options, two.script(SCRIPT), two.path, disk.path, *arguments)


@pytest.mark.fault(57, 28)
@pytest.mark.parametrize("how", ["full", pytest.param("read-only", marks=pytest.mark.slow)])
def test_training_continues_while_nothing_can_be_written(two: Folder, small_disk: SmallDisk, how: str) -> None:
    ended = two.start_run(*command(two, small_disk, how, "for a while")).end()
    output = ended.output + ended.errors
    assert ended.code == 0 and "Traceback" not in output, ended.shown
    directory = small_disk.path / "x"
    summary = json.loads((directory / "summary.json").read_text())
    assert all(count > 0 for count in summary["unwritten"]) and summary["lost"] == []
    assert len(re.findall(r"peer-\d\d/\S*: curves cannot be written", output)) == 2, ended.shown
    assert output.count("the checkpoint cannot be written") == 2, ended.shown
    for rank in range(2):
        assert (directory / f"peer-{rank:02d}" / "model.safetensors").stat().st_size > 0
        events = EventAccumulator(str(directory / f"peer-{rank:02d}"), size_guidance={"scalars": 0})
        events.Reload()
        steps = [one.step for one in events.Scalars("sync/delta")]
        assert steps == [*range(10, steps[-1] + 1, 10)] and steps[-1] >= 70, "curves have no gap"


@pytest.mark.fault(57, 28)
@pytest.mark.parametrize("how", ["full", pytest.param("read-only", marks=pytest.mark.slow)])
def test_the_exit_code_tells_that_results_could_not_be_written(two: Folder, small_disk: SmallDisk, how: str) -> None:
    ended = two.start_run(*command(two, small_disk, how, "to the end")).end()
    output = ended.output + ended.errors
    assert ended.code == 1 and "Traceback" not in output, ended.shown
    assert output.count("model.safetensors: it cannot be written") == 2, ended.shown
    assert output.count("x/summary.json: the summary cannot be written") == 1, ended.shown
    assert "records of curves were not written" in output, ended.shown
    assert not list(small_disk.path.glob("x/*.tmp")) and not list(small_disk.path.glob("x/peer-*/.*.tmp"))


@pytest.mark.fault(57)
def test_joining_where_nothing_can_be_written_is_refused_in_one_line(two: Folder, small_disk: SmallDisk) -> None:
    small_disk.allow_writing(False)
    script = two.script(
        """
gossipx.join(nn.Linear(4, 1), peers="hosts.txt", rank=0, logdir=sys.argv[2])
"""
    )
    told = one_line(two.start(script, two.path, small_disk.path).end(), 2)
    assert told == (
        f"{small_disk.path}/joined/peer-00: cannot write there: Read-only file system; give another --logdir"
    )
