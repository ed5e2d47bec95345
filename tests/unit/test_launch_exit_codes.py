"""The exit code of a run whose peers have ended: failed scripts, crashes, and final models that differ."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import launches
import pytest
from launches import NAMES, Run

from gossipx.errors import GossipxError
from gossipx.metrics.summary import read

run, mine = launches.run, launches.mine


@pytest.mark.fault(55)
def test_a_script_that_fails_after_the_finish_fails(run: Run, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its results are kept, and the run has failed."""
    assert run("finish(); sys.exit(rank)", peers="localhost slots=3") == 1
    printed = capsys.readouterr().out
    assert f"{NAMES[1]} finished, but its process ended: exit code 1" in printed
    assert f"{NAMES[2]} finished, but its process ended: exit code 2" in printed
    assert read(mine).lost == []
    assert run("finish(); sys.exit(3)", peers="localhost slots=3", overwrite=True) == 1
    assert read(mine).retrievals == [10, 11, 12]


@pytest.mark.fault(55)
@pytest.mark.parametrize("name", ["SIGKILL", "SIGABRT", "SIGSEGV"])
@pytest.mark.parametrize("when", ["train()", "finish()"])
def test_a_peer_that_dies_of_its_own_fault_fails_the_run(run: Run, mine: Path, name: str, when: str) -> None:
    """A peer that was killed, or whose machine was lost, does not."""
    body = f"""
        if rank == 1:
            {when}
            import resource
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.kill(os.getpid(), signal.{name})
        train(); finish()
    """
    assert run(body) == (0 if name == "SIGKILL" else 1)
    assert read(mine).lost == ([NAMES[1]] if when == "train()" else [])


@pytest.mark.fault(51)
@pytest.mark.parametrize(
    ("digests", "code", "agreed"),
    [
        (["a", "a", "a"], 0, True),
        (["a", "b", "a"], 3, False),
        (["a", "", "a"], 3, False),
        (["a", None, "a"], 0, True),
        ([None, None, None], 0, None),
    ],
)
def test_the_final_models_of_the_peers_are_compared(
    run: Run, mine: Path, digests: list[str | None], code: int, agreed: bool | None
) -> None:
    """None: the peer makes no claim, as it only serves or the run has no finish; empty: it took no part."""
    body = f"""
        plain = report
        def report(rank):
            return {{**plain(rank), "digest": {digests!r}[rank]}}
        finish()
    """
    assert run(body) == code
    assert read(mine).agreed is agreed


@pytest.mark.fault(79)
@pytest.mark.parametrize(("peers", "code"), [("203.0.113.1\n203.0.113.2", 3), ("203.0.113.1 slots=2", 0)])
def test_a_peer_whose_end_the_others_did_not_see(
    run: Run, mine: Path, monkeypatch: pytest.MonkeyPatch, peers: str, code: int
) -> None:
    """It may have ended on another machine; a process of this one is known to have died."""
    monkeypatch.setenv("GOSSIPX_SECRET", "which other machines need")
    body = """
        train()
        plain = report
        def report(rank):
            return {**plain(rank), "digest": "a"}
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        finish(doubted=[1])
    """
    assert run(body, peers=peers, advertise="203.0.113.1", bind="0.0.0.0") == code
    summary = read(mine)
    assert summary.agreed is (code == 0) and len(summary.lost) == 1


@pytest.mark.fault(53)
@pytest.mark.fault(57)
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 1), ("SIGINT", 130)])
def test_a_stopped_run_in_which_a_peer_failed_has_failed(
    run: Run, mine: Path, capsys: pytest.CaptureFixture[str], name: str, code: int
) -> None:
    """SIGTERM was obeyed, but the checkpoint of one peer could not be written."""
    body = f"""
        def leave(*_):
            tell(state="left", step=5, report={{**report(rank), "iterations": 5}})
            if rank == 1:
                tell(error="peer-01/checkpoints: it cannot be written", exit=1)
            sys.exit(rank == 1)
        signal.signal(signal.SIGTERM, leave)
        train()
        stop_run(signal.{name})
    """
    assert run(body) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        f"failed: {NAMES[1]}" + ("; the exit code is 1" if code == 1 else ""),
        "stopped at 5; there is no checkpoint to continue from",
    ]
    assert read(mine).stopped == NAMES[:3]


@pytest.mark.fault(55)
def test_a_script_that_fails_after_it_has_left_has_failed(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    body = """
        def leave(*_):
            tell(state="left", step=5, report={**report(rank), "iterations": 5})
            sys.exit(rank == 1)
        signal.signal(signal.SIGTERM, leave)
        train()
        stop_run(signal.SIGTERM)
    """
    assert run(body) == 1
    assert f"{NAMES[1]} left, but its process ended: exit code 1" in capsys.readouterr().out


@pytest.mark.fault(53)
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 0), ("SIGINT", 130)])
def test_what_scripts_do_after_the_training_can_be_stopped(
    run: Run, mine: Path, capsys: pytest.CaptureFixture[str], name: str, code: int
) -> None:
    body = f"""
        train()
        finish()
        stop_run(signal.{name})
    """
    assert run(body) == code
    assert f"{NAMES[0]} had finished; what its script did then was stopped" in capsys.readouterr().out
    assert read(mine).stopped == []


def test_a_process_that_cannot_be_started_is_named(run: Run, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of file descriptors, for example."""

    def pipe() -> tuple[int, int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("gossipx.launch.run.children.os.pipe", pipe)
    with pytest.raises(GossipxError, match=rf"{NAMES[0]} cannot be started: Too many open files; start fewer peers"):
        run("train()")
    assert not mine.exists()


@pytest.mark.fault(53)
@pytest.mark.fault(57)
def test_a_stopped_run_without_room_for_its_summary_says_how_to_continue(
    run: Run, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = """
        def leave(*_):
            tell(state="left", step=5, report={**report(rank), "iterations": 5})
            sys.exit()
        signal.signal(signal.SIGTERM, leave)
        (here / "runs" / "mine" / "summary.json").mkdir(exist_ok=True)
        train()
        stop_run(signal.SIGTERM)
    """
    with pytest.raises(GossipxError, match="the summary cannot be written"):
        run(body)
    assert capsys.readouterr().out.splitlines()[-1] == "stopped at 5; there is no checkpoint to continue from"


@pytest.mark.fault(53)
def test_a_stopped_run_does_not_call_peers_of_other_machines_lost(
    run: Run, mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is known about them: they may train on, or have been stopped too."""
    monkeypatch.setenv("GOSSIPX_SECRET", "which other machines need")
    peers = "203.0.113.1 name=here\n203.0.113.2 name=there"
    assert run("stop_alone()", peers=peers, advertise="203.0.113.1", bind="0.0.0.0") == 0
    assert "lost" not in capsys.readouterr().out
    assert read(mine).stopped == ["here"]
