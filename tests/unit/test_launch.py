"""The parent process of the peers on this machine: results, output, failing peers and progress."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
from pathlib import Path

import launches
import pytest
from click.testing import CliRunner
from launches import NAMES, Capture, Run, gone, hosts, script

from gossipx.cli import main
from gossipx.errors import GossipxError, UsageError
from gossipx.launch.run import control_files, restarts
from gossipx.launch.run.processes import launch
from gossipx.launch.start import HostsFile
from gossipx.metrics.summary import FILE, read
from gossipx.settings import files as config_files

run, mine = launches.run, launches.mine


# --- runs that end well -------------------------------------------------------------------------------


def test_when_all_finish_the_summary_is_complete(run: Run, mine: Path, capsys: Capture) -> None:
    assert run("train(); finish()", policy="tau:10", iterations=10, seed=4) == 0
    summary = read(mine)
    assert (summary.name, summary.policy, summary.codec, summary.seed) == ("mine", "tau:10", "none", 4)
    assert (summary.peers, summary.iterations, summary.lost) == (3, 10, [])
    assert (summary.task, summary.model) == (None, None)
    assert summary.retrievals == [10, 11, 12]
    assert summary.bytes_received == [0, 1000, 2000]
    assert summary.test_accuracy == [0.5, 0.625, 0.75]
    assert summary.test_accuracy_before_finish == [0.25] * 3
    assert (summary.consensus_accuracy, summary.consensus_loss) == (0.875, 0.375)
    assert summary.blocked_seconds == [1.0] * 3 and summary.finish_bytes == [7] * 3
    assert summary.wall_seconds > 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert f"wrote {mine / FILE}; compare runs: gossipx compare {mine} ..." in printed.out
    assert f"tensorboard --logdir {mine.parent}" in printed.out


def test_the_run_keeps_its_configuration_and_its_hosts(run: Run, tmp_path: Path, mine: Path) -> None:
    """With its hosts file it can be run again."""
    assert run("finish()", policy="travel:distance=3", iterations=7, peers="# two\nlocalhost slots=2") == 0
    kept = config_files.resolve(config_files.load(mine / "config.toml"))
    assert kept.decides == "travel:distance=3" and kept.run.iterations == 7 and kept.run.name == "mine"
    assert (mine / "hosts.txt").read_text(encoding="utf-8") == "# two\nlocalhost slots=2\n"
    given = config_files.resolve({"logdir": str(mine.parent), "name": "mine", "overwrite": True})
    assert launch(HostsFile(mine / "hosts.txt"), given, [str(tmp_path / "child.py")]).code == 0
    assert read(mine).peers == 2


@pytest.mark.parametrize("threads", [None, "3"])
def test_the_environment_of_a_peer(
    run: Run, tmp_path: Path, mine: Path, monkeypatch: pytest.MonkeyPatch, threads: str | None
) -> None:
    """A number of threads in the environment stands."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    body = """
        names = ("GOSSIPX_CONFIG", "GOSSIPX_PEERS", "GOSSIPX_DEVICE", "OMP_NUM_THREADS")
        (here / f"told-{rank}").write_text(json.dumps([os.environ[name] for name in names]))
        finish()
    """
    peers = "localhost slots=2 device=cpu:0\nlocalhost:5007"
    assert run(body, peers=peers, threads=2, device="cpu") == 0
    told = [json.loads((tmp_path / f"told-{rank}").read_text(encoding="utf-8")) for rank in range(3)]
    files = [str(mine / "config.toml"), str(mine / "hosts.txt")]
    assert told == [[*files, device, threads or "2"] for device in ("cpu:0", "cpu:0", "cpu")]


@pytest.mark.parametrize("device", ["gpu", "cuda:77", "mps:5", "meta"])
def test_a_device_that_is_not_here_is_refused_before_anything_starts(run: Run, mine: Path, device: str) -> None:
    with pytest.raises(UsageError, match=f"--device '{device}'"):
        run("finish()", device=device)
    with pytest.raises(UsageError, match=f"hosts.txt:2: device= '{device}'"):
        run("finish()", peers=f"localhost\nlocalhost:5007 device={device}")
    assert not mine.exists()


def test_a_script_sets_its_own_number_of_iterations(run: Run, mine: Path, capsys: Capture) -> None:
    body = """
        own = {**report(rank), "iterations": 7 - rank}
        tell(result={"report": own, "reports": {}, "doubted": [], "consensus_accuracy": None, "consensus_loss": None})
    """
    told = "decides how long it trains: --iterations 5 has no effect"
    assert run(body, iterations=5) == 0
    assert read(mine).iterations == 7
    assert told in "".join(capsys.readouterr())
    assert run(body, overwrite=True) == 0
    assert "has no effect" not in "".join(capsys.readouterr())


def test_peers_of_other_machines_are_in_the_summary(run: Run, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them sent their reports to this machine's peers in the finish; the other did not, and is lost."""
    monkeypatch.setenv("GOSSIPX_SECRET", "which other machines need")
    body = "finish(_1=report(1))"
    peers = "203.0.113.1 name=here\n203.0.113.2 name=there\n203.0.113.3 name=nowhere"
    assert run(body, peers=peers, advertise="203.0.113.1", bind="0.0.0.0") == 0
    summary = read(mine)
    assert summary.peers == 3 and summary.lost == ["nowhere"]
    assert summary.retrievals == [10, 11, None]


def test_words_after_the_script_are_the_scripts(tmp_path: Path) -> None:
    words = ["--policy", "never", "--name=theirs", "--no-such-option", "-x", "--", "--seed", "1"]
    file = script(tmp_path, "(here / f'words-{rank}').write_text(json.dumps(sys.argv)); finish()")
    peers = hosts(tmp_path, "localhost slots=2")
    options = ["--peers", str(peers), "--logdir", str(tmp_path / "runs"), "--name", "mine", "--policy", "tau:7"]
    result = CliRunner().invoke(main, ["run", *options, str(file), *words])
    assert result.exit_code == 0, result.output
    for rank in range(2):
        assert json.loads((tmp_path / f"words-{rank}").read_text(encoding="utf-8")) == [str(file), *words]
    assert read(tmp_path / "runs" / "mine").policy == "tau:7"
    told = f"--policy stands after SCRIPT ({file}), whose option it is; options of gossipx run stand before it"
    assert told in result.output, "the script's text does not have it, so a user of gossipx run may have meant it"
    file.write_text(f"# takes --policy\n{file.read_text()}")
    again = CliRunner().invoke(main, ["run", *options, "--overwrite", str(file), *words])
    assert again.exit_code == 0 and told not in again.output


# --- output -------------------------------------------------------------------------------------------


def test_lines_of_output_are_passed_on_whole(run: Run, capsys: Capture) -> None:
    """Also markup, tabs, text like an emoji's name, and lines longer than any terminal or read."""
    body = """
        print("at 10:100:00 [bold]x[/bold]\\t:rocket:  ")
        print("long " + "x" * 300_000)
        print()
        os.write(2, b"caf\\xc3\\xa9 \\xff\\n")
        print("no end", end="", flush=True)
        finish()
    """
    assert run(body, peers="localhost name=anna") == 0
    lines = capsys.readouterr().out.split("\n")
    assert [line for line in lines if line.startswith("[anna]")] == [
        "[anna] at 10:100:00 [bold]x[/bold]\t:rocket:  ",
        "[anna] long " + "x" * 300_000,
        "[anna] ",
        "[anna] café \N{REPLACEMENT CHARACTER}",
        "[anna] no end",
    ]


def test_output_without_line_ends_is_shown_in_pieces(run: Run, capsys: Capture) -> None:
    """Else "gossipx run" would keep it all, and copy it at each read."""
    assert run("os.write(1, b'x' * 3_000_000); finish()", peers="localhost name=anna") == 0
    pieces = [line.removeprefix("[anna] ") for line in capsys.readouterr().out.splitlines() if "xxx" in line]
    assert "".join(pieces) == "x" * 3_000_000 and max(map(len, pieces)) < 1_200_000


def test_a_progress_bar_of_a_script_is_shown_as_a_terminal_shows_it(run: Run, capsys: Capture) -> None:
    """A framework's bar writes itself anew after each carriage return: its states must not run together."""
    body = """
        for done in range(0, 101, 20):
            sys.stderr.write(f"\\r{done:3}% |" + "#" * (done // 20))
            sys.stderr.flush()
        sys.stderr.write("\\n")
        print("dos\\r")
        print("50%\\rdone")
        finish()
    """
    assert run(body, peers="localhost name=anna") == 0
    lines = [line for line in capsys.readouterr().out.split("\n") if line.startswith("[anna]")]
    assert lines == ["[anna] 100% |#####", "[anna] dos", "[anna] done"]


def test_output_that_a_processs_own_child_holds_open_is_not_waited_for(
    run: Run, tmp_path: Path, mine: Path, capsys: Capture
) -> None:
    """For example, a worker of a data loader that hangs."""
    body = """
        pid = os.fork()
        if not pid:
            signal.pause()
        (here / "pid").write_text(str(pid))
        print("last words", end="", flush=True)
        finish()
    """
    try:
        assert run(body, peers="localhost") == 0
    finally:
        os.kill(int((tmp_path / "pid").read_text(encoding="utf-8")), signal.SIGKILL)
    assert f"[{NAMES[0]}] last words\n" in capsys.readouterr().out
    assert read(mine).lost == []


# --- peers that fail ----------------------------------------------------------------------------------


@pytest.mark.fault(1)
def test_a_killed_peer_is_named_and_the_others_continue(run: Run, mine: Path, capsys: Capture) -> None:
    """kill -9, even in the middle of a progress event."""
    body = """
        train()
        if rank == 1:
            os.write(told, b'{"state": "tra')
            os.kill(os.getpid(), signal.SIGKILL)
        finish()
    """
    assert run(body) == 0
    summary = read(mine)
    assert summary.lost == [NAMES[1]]
    assert summary.retrievals == [10, None, 12] and summary.test_accuracy == [0.5, None, 0.75]
    assert summary.peers == 3
    printed = capsys.readouterr()
    assert f"peer {NAMES[1]} is lost: killed by SIGKILL\n" in printed.out
    assert f"lost: {NAMES[1]}\n" in printed.out and printed.err == ""


KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize("body", [f"train(); {KILLED}", "train(); sys.exit(1)", "train()", KILLED, "sys.exit(1)"])
def test_when_nobody_finishes_the_run_has_failed(run: Run, mine: Path, capsys: Capture, body: str) -> None:
    """If all were lost before training, its name stays free."""
    assert run(body) == 1
    assert capsys.readouterr().out.endswith("no peer finished\n")
    assert mine.exists() == body.startswith("train()")
    if mine.exists():
        summary = read(mine)
        assert summary.lost == NAMES[:3] and summary.retrievals == [None] * 3
        assert summary.consensus_accuracy is None


def test_a_script_that_never_joins_fails_with_a_message(run: Run, mine: Path, capsys: Capture) -> None:
    assert run("sys.exit() if rank == 1 else wait()") == 1
    told = f"{NAMES[1]}: its script ended without a call of gossipx.join, which makes it a peer\n"
    assert capsys.readouterr().err == told
    assert not mine.exists()


@pytest.mark.fault(4)
def test_a_peer_terminated_before_it_joins_has_left(run: Run, mine: Path, capsys: Capture) -> None:
    """At that time it cannot report so itself."""
    body = """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        train(); finish()
    """
    assert run(body) == 0
    assert "lost:" not in capsys.readouterr().out.replace(f"lost: {NAMES[1]}", "")
    assert read(mine).retrievals == [10, None, 12]


def test_an_error_of_one_peer_does_not_stop_the_run(run: Run, mine: Path, capsys: Capture) -> None:
    body = """
        train()
        if rank == 0:
            tell(error="no room for a model", exit=1)
            sys.exit(1)
        finish()
    """
    assert run(body) == 1
    assert read(mine).lost == [NAMES[0]]
    assert f"{NAMES[0]}: no room for a model\n" in capsys.readouterr().out


@pytest.mark.parametrize("who", ["rank == 0", "True"])
@pytest.mark.fault(33)
def test_an_error_before_training_has_begun_ends_the_run_and_frees_its_name(
    run: Run, mine: Path, capsys: Capture, who: str
) -> None:
    """The port of one peer or of all is in use: the error is shown once."""
    body = f"""
        if {who}:
            tell(error="port is in use", exit=1)
            sys.exit(1)
        wait()
    """
    assert run(body) == 1
    assert capsys.readouterr().err == "port is in use\n"
    assert not mine.exists()


@pytest.mark.parametrize("code", [2, 5])
@pytest.mark.fault(21)
def test_an_error_that_the_user_must_fix_stops_all_and_is_shown_once(
    run: Run, tmp_path: Path, mine: Path, capsys: Capture, code: int
) -> None:
    """Peers 1 and 2 both report it; peer 0 has not detected it, and never would."""
    body = f"""
        (here / f"pid-{{rank}}").write_text(str(os.getpid()))
        train()
        if rank:
            tell(error="data/x.gz: wrong checksum", exit={code})
            sys.exit({code})
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wait()
    """
    assert run(body) == code
    assert capsys.readouterr().err == "data/x.gz: wrong checksum\n"
    assert not (mine / FILE).exists()
    pids = [int(file.read_text(encoding="utf-8")) for file in tmp_path.glob("pid-*") if file.stat().st_size]
    assert pids and all(gone(pid) for pid in pids)


@pytest.mark.fault(54)
def test_a_peer_that_the_others_have_met_again_counts(run: Run, tmp_path: Path, mine: Path, capsys: Capture) -> None:
    """Peer 0 is killed and started again by hand, as peer 2 reports, before peer 1 is killed: 3 of 4 are left."""
    for name in ("pid", "met"):
        os.mkfifo(tmp_path / name)
    body = """
        train()
        if rank == 0:
            (here / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            assert (here / "met").read_text() == "yes"
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            await_end(int((here / "pid").read_text()))
            tell(state="train", step=6, restarted=[0])
            (here / "met").write_text("yes")
        finish(_0=report(0))
    """
    assert run(body, peers="localhost slots=4", min_peers=3) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and f"peer {NAMES[0]} is back: it was started again\n" in printed.out
    assert f"{NAMES[0]} done" in printed.out
    summary = read(mine)
    assert summary.lost == [NAMES[1]] and summary.retrievals == [10, None, 12, 13]


@pytest.mark.fault(11)
def test_with_too_few_peers_left_the_run_stops(run: Run, tmp_path: Path, mine: Path, capsys: Capture) -> None:
    """min_peers = 3 of 4: one peer may be lost, the second loss ends the run, which would otherwise continue
    forever."""
    body = """
        (here / f"pid-{rank}").write_text(str(os.getpid()))
        if rank in (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        wait()
    """
    assert run(body, peers="localhost slots=4", min_peers=3) == 4
    printed = capsys.readouterr()
    assert printed.err == "2 of 4 peers left, fewer than --min-peers 3\n"
    assert f"peer {NAMES[1]} is lost" in printed.out and f"peer {NAMES[2]} is lost" in printed.out
    assert not (mine / FILE).exists()
    pids = [int(file.read_text(encoding="utf-8")) for file in tmp_path.glob("pid-*") if file.stat().st_size]
    assert pids and all(gone(pid) for pid in pids)


# --- The exit code of a run whose peers have ended: failed scripts, crashes, and final models that diffe


@pytest.mark.fault(55)
def test_a_script_that_fails_after_the_finish_fails(run: Run, mine: Path, capsys: Capture) -> None:
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
    assert run(f"finish(digest={digests!r}[rank])") == code
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
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        finish(doubted=[1], digest="a")
    """
    assert run(body, peers=peers, advertise="203.0.113.1", bind="0.0.0.0") == code
    summary = read(mine)
    assert summary.agreed is (code == 0) and len(summary.lost) == 1


@pytest.mark.fault(53, 55, 57)
@pytest.mark.parametrize("error", ["peer-01/checkpoints: it cannot be written", None])
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 1), ("SIGINT", 130)])
def test_a_stopped_run_in_which_a_peer_failed_has_failed(
    run: Run, mine: Path, capsys: Capture, name: str, code: int, error: str | None
) -> None:
    """SIGTERM was obeyed, but the checkpoint of one peer could not be written, or its script failed after it left."""
    body = f"""
        leave_when_asked(rank == 1, {error!r} if rank == 1 else None)
        train()
        stop_run(signal.{name})
    """
    assert run(body) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        f"failed: {NAMES[1]}" + ("; the exit code is 1" if code == 1 else ""),
        "stopped at 5; there is no checkpoint to continue from",
    ]
    assert (f"{NAMES[1]}: {error}" if error else f"{NAMES[1]} left, but its process ended: exit code 1") in lines
    assert read(mine).stopped == NAMES[:3]


@pytest.mark.fault(53)
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 0), ("SIGINT", 130)])
def test_scripts_can_be_stopped_after_training(run: Run, mine: Path, capsys: Capture, name: str, code: int) -> None:
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


@pytest.mark.fault(53, 57)
def test_a_stopped_run_without_room_for_its_summary_says_how_to_continue(run: Run, mine: Path, capsys: Capture) -> None:
    body = """
        leave_when_asked()
        (here / "runs" / "mine" / "summary.json").mkdir(exist_ok=True)
        train()
        stop_run(signal.SIGTERM)
    """
    with pytest.raises(GossipxError, match="the summary cannot be written"):
        run(body)
    assert capsys.readouterr().out.splitlines()[-1] == "stopped at 5; there is no checkpoint to continue from"


@pytest.mark.fault(53)
def test_a_stopped_run_does_not_call_peers_of_other_machines_lost(
    run: Run, mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Nothing is known about them: they may train on, or have been stopped too."""
    monkeypatch.setenv("GOSSIPX_SECRET", "which other machines need")
    peers = "203.0.113.1 name=here\n203.0.113.2 name=there"
    assert run("stop_alone()", peers=peers, advertise="203.0.113.1", bind="0.0.0.0") == 0
    assert "lost" not in capsys.readouterr().out
    assert read(mine).stopped == ["here"]


# --- Peers that ``gossipx run`` starts again, seen from its process ----------------------------------


@pytest.fixture
def restarting(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Restarts peers at once."""
    monkeypatch.setattr(restarts, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(restarts, "LOOK_EVERY", 0.0)
    return run


@pytest.mark.fault(1)
def test_a_failed_restart_ends_no_other_peer(restarting: Run, mine: Path, tmp_path: Path, capsys: Capture) -> None:
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
    assert restarting(body, peers="localhost slots=2", restart=1) == 1
    printed = capsys.readouterr()
    assert f"{NAMES[1]}: its model differs" in printed.out and printed.err == ""
    assert read(mine).lost == [NAMES[1]]


@pytest.mark.fault(1)
def test_a_peer_that_dies_while_the_run_stops_is_not_started_again(restarting: Run, capsys: Capture) -> None:
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
    assert restarting(body, peers="localhost slots=2", restart=3) == 0
    printed = capsys.readouterr().out
    assert "restart" not in printed and f"peer {NAMES[1]} is lost: killed by SIGKILL" in printed


@pytest.mark.fault(1)
def test_a_peer_that_was_started_by_hand_is_not_started_a_second_time(restarting: Run, tmp_path: Path) -> None:
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
    assert restarting(body, peers="localhost slots=2") == 0
    assert "was started by hand" in json.loads((tmp_path / "answer").read_text())["problem"]


@pytest.mark.fault(1)
@pytest.mark.parametrize(("end", "code"), [("os.kill(os.getpid(), signal.SIGKILL)", 0), ("sys.exit(1)", 1)])
def test_a_restart_that_comes_after_the_others_have_finished_is_given_up(
    restarting: Run, mine: Path, capsys: Capture, end: str, code: int
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
    assert restarting(body, peers="localhost slots=2", restart=1) == code
    found = read(mine)
    assert found.lost == [NAMES[1]] and found.retrievals[0] is not None
    assert "the others have finished before it was back" in capsys.readouterr().out


def test_a_script_that_fails_once_leaves_the_exit_code_as_it_is(restarting: Run) -> None:
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
    assert restarting(body, peers="localhost slots=2", restart=1) == 0


@pytest.mark.fault(1)
def test_restarts_of_peers_that_this_process_did_not_start_are_theirs(restarting: Run, mine: Path) -> None:
    """Of peers of other machines and of newcomers only other peers know: that one was restarted, and that it left."""
    body = """
        train()
        tell(state="train", step=6, restarted=[7])
        tell(state="train", step=7)
        finish()
    """
    assert restarting(body, peers="localhost slots=2") == 0
    assert read(mine).lost == []


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
