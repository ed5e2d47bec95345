"""Peers that ``gossipx run`` starts again, seen from its process."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from launches import NAMES, Run, launcher

from gossipx.launch.run import control_files, restarts
from gossipx.metrics.summary import read


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(restarts, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(restarts, "LOOK_EVERY", 0.0)
    return launcher(tmp_path)


@pytest.mark.fault(1)
def test_a_restart_that_fails_does_not_end_the_other_peers(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even by an error of use, which before the training ends the run: its script may have changed since."""
    os.mkfifo(tmp_path / "pid")
    body = """
        train()
        if rank == 1 and not (here / "again").exists():
            (here / "again").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            (here / "pid").write_text(str(os.getpid()))
            tell(error="its model differs", exit=2)
            sys.exit(2)
        await_end(int((here / "pid").read_text()))
        finish()
    """
    assert run(body, peers="localhost slots=2", restart=1) == 1
    printed = capsys.readouterr()
    assert f"{NAMES[1]}: its model differs" in printed.out and printed.err == ""
    assert read(tmp_path / "runs" / "mine").lost == [NAMES[1]]


@pytest.mark.fault(1)
def test_a_peer_that_dies_while_the_run_stops_is_not_started_again(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    body = """
        if rank == 1:
            signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            train()
            (here / "ready").touch()
            wait()
        while not (here / "ready").exists():
            pass
        stop_alone()
    """
    assert run(body, peers="localhost slots=2", restart=3) == 0
    printed = capsys.readouterr().out
    assert "restart" not in printed and f"peer {NAMES[1]} is lost: killed by SIGKILL" in printed


@pytest.mark.fault(1)
def test_a_peer_that_was_started_by_hand_is_not_started_a_second_time(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pid")
    body = """
        train()
        if rank == 1:
            (here / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        await_end(int((here / "pid").read_text()))
        tell(state="train", step=6, restarted=[1])
        control = here / "runs" / "mine" / "control"
        control.mkdir(exist_ok=True)
        (control / "unfinished").write_text(json.dumps({"peer": NAME}))
        (control / "unfinished").rename(control / "1.restart")
        while not (control / "1.answer").exists():
            pass
        (control / "1.answer").rename(here / "answer")
        finish(_1=report(1))
    """.replace("NAME", repr(NAMES[1]))
    assert run(body, peers="localhost slots=2") == 0
    assert "was started by hand" in json.loads((tmp_path / "answer").read_text())["problem"]


@pytest.mark.fault(1)
@pytest.mark.parametrize(("end", "code"), [("os.kill(os.getpid(), signal.SIGKILL)", 0), ("sys.exit(1)", 1)])
def test_a_restart_that_comes_after_the_others_have_finished_is_given_up(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str, code: int
) -> None:
    """Alone the peer would wait for a model that nobody has: the run ends as without a restart."""
    body = f"""
        if rank == 1 and (here / "died").exists():
            tell(state="joining")
            (here / "again").touch()
            signal.pause()
        train()
        if rank == 1:
            (here / "died").touch()
            {end}
        while not (here / "again").exists():
            pass
        finish()
    """
    assert run(body, peers="localhost slots=2", restart=1) == code
    found = read(tmp_path / "runs" / "mine")
    assert found.lost == [NAMES[1]] and found.retrievals[0] is not None
    assert "the others have finished before it was back" in capsys.readouterr().out


def test_a_script_that_fails_once_leaves_the_exit_code_as_it_is(run: Run) -> None:
    body = """
        train()
        if rank == 1 and not (here / "died").exists():
            (here / "died").touch()
            sys.exit(1)
        if rank == 1:
            (here / "again").touch()
        while not (here / "again").exists():
            pass
        finish()
    """
    assert run(body, peers="localhost slots=2", restart=1) == 0


@pytest.mark.fault(1)
def test_restarts_of_peers_that_this_process_did_not_start_are_theirs(run: Run, tmp_path: Path) -> None:
    """Of peers of other machines and of newcomers only other peers know: that one was restarted, and that it left."""
    body = """
        train()
        tell(state="train", step=6, restarted=[7])
        tell(state="train", step=7)
        finish()
    """
    assert run(body, peers="localhost slots=2") == 0
    assert read(tmp_path / "runs" / "mine").lost == []


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_only_its_owner_writes_commands_to_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int) -> None:
    """Also if the directory was made with the mode of an umask before."""
    monkeypatch.setattr(control_files, "TAKEN_WITHIN", 0.0)
    for _ in range(2):
        before = os.umask(umask)
        try:
            assert not control_files.send(tmp_path, control_files.RESTART, {"peer": "a"}, 0.0), "nobody has taken it"
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "control").stat().st_mode) == 0o700
        (tmp_path / "control").chmod(0o777)
