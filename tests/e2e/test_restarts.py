"""Peers of a run that ``gossipx run`` starts again, and peers that are drained."""

from __future__ import annotations

from pathlib import Path

import pytest
from resuming import store

from gossipx.metrics import summary
from runs import TEN_LINES, Folder, Process, children, kill_processes, one_line

LOOP = (
    TEN_LINES
    + """
with peer:
    tell(peer, began=peer.iteration)
    while peer.iteration < 200_000 and not (FOLDER / "stop").exists():
        train(peer, model, optimizer, peer.iteration + 1)
"""
)
"""A script that trains until a file ``stop`` exists."""


def started(here: Folder, *options: str | Path, text: str = LOOP) -> Process:
    """Return a run of this script."""
    return here.start_run("--policy", "tau:5", "--peer-timeout", "20", *options, here.script(text), here.path)


def training(here: Folder, *options: str | Path) -> Process:
    """Return a run all of whose peers train."""
    run = started(here, *options)
    run.line(".*".join(rf"{name} train \d+" for name in here.names))
    return run


def operate(here: Folder, *command: str | Path) -> Process:
    return here.gossipx("peer", command[0], "--logdir", here.path, *command[1:])


def ends(here: Folder, run: Process) -> summary.Summary:
    (here.path / "stop").touch()
    run.end(code=0)
    return summary.read(here.path / "x")


@pytest.mark.fault(1)
def test_a_restarted_peer_continues_from_its_checkpoint_and_ends_with_the_others(two: Folder) -> None:
    run = training(two, "--restart", "3", "--checkpoint-every", "10")
    while store(two, 1).find() is None:
        run.line(rf"{two.names[1]} train \d+")
    kill_processes(children(run.pid)[1])
    run.line("restart 1 of 3")
    run.line(rf"{two.names[1]} train \d+")
    found = ends(two, run)
    assert found.lost == [] and found.agreed is True
    assert two.told(1)["began"] > 0 and two.told(0)["began"] == 0


@pytest.mark.slow
def test_a_script_that_always_fails_is_given_up(two: Folder) -> None:
    run = started(two, "--restart", "2", text=f"{LOOP}        assert peer.rank == 0 or peer.iteration < 40\n")
    run.line("restart 2 of 2 in 2 s")
    run.line(f"peer {two.names[1]} is lost: exit code 1")
    (two.path / "stop").touch()
    assert run.end().code == 1 and summary.read(two.path / "x").lost == [two.names[1]]


def test_a_peer_is_restarted_on_request(two: Folder) -> None:
    """It ends in order, with a checkpoint, and another process continues from there."""
    run = training(two)
    before = children(run.pid)[1]
    asked = operate(two, "restart", "x", two.names[1]).end(code=0)
    assert f"{two.names[1]} is being restarted" in asked.output
    run.line(f"{two.names[1]} is restarted, as asked")
    run.line(rf"{two.names[1]} train \d+")
    after = children(run.pid)[1]
    assert after != before
    at = store(two, 1).find()
    assert at is not None and at > 0
    found = ends(two, run)
    assert found.lost == [] and found.agreed is True
    assert "died" not in "".join(run.output)


def test_a_drained_peer_leaves_and_the_others_train_on(three: Folder) -> None:
    run = training(three)
    name = three.names[2]
    asked = operate(three, "drain", name).end(code=0)  # the only run in progress
    assert asked.output.splitlines()[-1] == f"{name} has left"
    at = store(three, 2).find()
    assert at is not None and at > 0
    found = ends(three, run)
    assert found.lost == [name] and found.agreed is True
    assert all(figure is not None for figure in found.retrievals[:2])


def test_what_cannot_be_restarted_or_drained_is_told_in_one_line(two: Folder) -> None:
    run = training(two)
    for command, told in (
        (("restart", "x", "nobody"), f"no peer 'nobody': the run has {two.names[0]}"),
        (("restart", "y", two.names[0]), "no such run"),
        (("drain", "x", two.names[0], "more"), "give a run and a peer, not 3 names"),
    ):
        assert told in one_line(operate(two, *command).end(), 2)
    ends(two, run)
    assert "0 runs in progress" in one_line(operate(two, "drain", two.names[0]).end(), 2)
    assert "not running" in one_line(operate(two, "drain", "x", two.names[0]).end(), 1)
