"""The parent of the peers on this machine, over small scripts in the place of peers: no torch, no sockets.

Numbers in brackets are rows of the project's fault list.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from click.testing import CliRunner

from gossipx.cli import main
from gossipx.config import files as config_files
from gossipx.errors import UsageError
from gossipx.launch import local
from gossipx.launch import progress as progress_module
from gossipx.launch.directory import RunDirectory
from gossipx.launch.environment import ENV_PROGRESS, progress
from gossipx.launch.local import launch
from gossipx.launch.progress import Display, PeerStatus
from gossipx.metrics.summary import FILE, read

NAMES = [f"localhost:{29400 + rank}" for rank in range(4)]
DEADLINE = 120.0
"""Seconds after which a process that should have ended long ago fails the test."""

PRELUDE = f"""\
import json, os, signal, sys
from pathlib import Path

signal.alarm({DEADLINE:.0f})  # nothing outlives a test that failed
here = Path(__file__).parent
rank = int(os.environ["GOSSIPX_RANK"])
told = int(os.environ["GOSSIPX_PROGRESS_FD"])

def tell(**word):
    os.write(told, json.dumps(word).encode() + b"\\n")

def train(step=5):
    tell(state="train", step=step, iterations=10, loss=0.5, accuracy=None, retrievals=rank, bytes=100 * rank)

def report(rank):
    return {{
        "retrievals": 10 + rank, "bytes_received": 1000 * rank, "finish_bytes": 7, "test_accuracy": 0.5 + rank / 8,
        "test_accuracy_before_finish": 0.25, "consensus_distance": 1.5, "train_seconds": 4.0, "blocked_seconds": 1.0,
        "overhead_seconds": 0.5, "skipped": 2, "failed": 1, "poisoned": 0,
    }}

def finish(**reports):
    tell(result={{
        "report": report(rank), "reports": {{name.strip("_"): value for name, value in reports.items()}},
        "missing": [], "consensus_accuracy": 0.875,
    }})
"""
"""How a script in the place of a peer tells its parent how it gets on: the protocol of ``gossipx.runtime.progress``."""


def script(directory: Path, body: str) -> Path:
    file = directory / "child.py"
    file.write_text(PRELUDE + dedent(body), encoding="utf-8")
    return file


def hosts(directory: Path, text: str) -> Path:
    file = directory / "hosts.txt"
    file.write_text(text + "\n", encoding="utf-8")
    return file


Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Launches ``body`` as every peer of a run ``mine``, in this process; gives the exit code."""

    def launched(body: str, *arguments: str, peers: str = "localhost slots=3", **settings: Any) -> int:
        given = config_files.resolve({"logdir": str(tmp_path / "runs"), "name": "mine", **settings})
        return launch(given, hosts(tmp_path, peers), [str(script(tmp_path, body)), *arguments], {})

    return launched


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The directory of the run ``mine``."""
    return tmp_path / "runs" / "mine"


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# --- runs that end well -------------------------------------------------------------------------------


def test_when_all_finish_the_summary_is_complete(run: Run, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train(); finish()", policy="tau:10", iterations=10, seed=4) == 0
    summary = read(mine)
    assert (summary.name, summary.policy, summary.codec, summary.seed) == ("mine", "tau:10", "none", 4)
    assert (summary.peers, summary.iterations, summary.lost) == (3, 10, [])
    assert (summary.task, summary.model) == (None, None)
    assert summary.retrievals == [10, 11, 12]
    assert summary.bytes_received == [0, 1000, 2000]
    assert summary.test_accuracy == [0.5, 0.625, 0.75]
    assert summary.test_accuracy_before_finish == [0.25] * 3
    assert summary.consensus_accuracy == 0.875
    assert summary.blocked_seconds == [1.0] * 3 and summary.finish_bytes == [7] * 3
    assert summary.wall_seconds > 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert f"{mine / FILE} is written; compare runs: gossipx compare {mine} ..." in printed.out
    assert f"tensorboard --logdir {mine.parent}" in printed.out


def test_the_run_keeps_its_configuration_and_its_hosts(run: Run, mine: Path) -> None:
    assert run("finish()", policy="travel:distance=3", iterations=7, peers="# two\nlocalhost slots=2") == 0
    kept = config_files.resolve(config_files.load(mine / "config.toml"))
    assert kept.sync.policy == "travel:distance=3" and kept.run.iterations == 7 and kept.run.name == "mine"
    assert (mine / "hosts.txt").read_text(encoding="utf-8") == "# two\nlocalhost slots=2\n"


def test_what_a_peer_is_told(run: Run, tmp_path: Path, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    body = """
        names = ("GOSSIPX_CONFIG", "GOSSIPX_PEERS", "GOSSIPX_DEVICE", "OMP_NUM_THREADS")
        (here / f"told-{rank}").write_text(json.dumps([os.environ[name] for name in names]))
        finish()
    """
    peers = "localhost slots=2 device=cpu:0\nlocalhost:7"
    assert run(body, peers=peers, threads=2, device="cpu") == 0
    told = [json.loads((tmp_path / f"told-{rank}").read_text(encoding="utf-8")) for rank in range(3)]
    files = [str(mine / "config.toml"), str(mine / "hosts.txt")]
    assert told == [[*files, device, "2"] for device in ("cpu:0", "cpu:0", "cpu")]


@pytest.mark.parametrize("device", ["gpu", "cuda:77", "mps:5", "meta"])
def test_a_device_that_is_not_here_is_refused_before_anything_starts(run: Run, mine: Path, device: str) -> None:
    with pytest.raises(UsageError, match=f"--device '{device}'"):
        run("finish()", device=device)
    with pytest.raises(UsageError, match=f"hosts.txt:2: device= '{device}'"):
        run("finish()", peers=f"localhost\nlocalhost:7 device={device}")
    assert not mine.exists()


def test_a_script_that_fails_after_the_finish_fails(run: Run, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its figures are kept; the run has failed if no peer's script ended well."""
    assert run("finish(); sys.exit(rank)", peers="localhost slots=3") == 0
    printed = capsys.readouterr().out
    assert f"{NAMES[1]} finished, but its process ended: exit code 1" in printed
    assert f"{NAMES[2]} finished, but its process ended: exit code 2" in printed
    assert read(mine).lost == []
    assert run("finish(); sys.exit(3)", peers="localhost slots=3", overwrite=True) == 1
    assert read(mine).retrievals == [10, 11, 12]


def test_a_number_of_threads_in_the_environment_stands(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    body = "(here / 'threads').write_text(os.environ['OMP_NUM_THREADS']); finish()"
    assert run(body, peers="localhost", threads=2) == 0
    assert (tmp_path / "threads").read_text(encoding="utf-8") == "3"


def test_a_script_has_a_length_of_its_own(run: Run, mine: Path) -> None:
    body = """
        tell(result={"report": {**report(rank), "iterations": 7 - rank}, "reports": {}, "consensus_accuracy": None})
    """
    assert run(body) == 0
    assert read(mine).iterations == 7


def test_peers_of_other_machines_are_in_the_summary(run: Run, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have told their figures to this machine's in the finish; one has not, and is lost."""
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


# --- output -------------------------------------------------------------------------------------------


def test_lines_of_output_are_passed_on_whole(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Also markup, tabs, what looks like an emoji's name, and lines longer than any terminal or read."""
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


def test_each_peers_lines_have_its_name(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("print('I am', rank, end=''); finish()", peers="localhost slots=2\nlocalhost:7 name=berta") == 0
    printed = capsys.readouterr().out.splitlines()
    assert {f"[{NAMES[0]}] I am 0", f"[{NAMES[1]}] I am 1", "[berta] I am 2"} <= set(printed)


def test_output_that_a_processs_own_child_holds_open_is_not_waited_for(
    run: Run, tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a data loader's worker that hangs."""
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


def test_a_killed_peer_is_named_and_the_others_go_on(run: Run, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """[1] kill -9 in the middle of a line to the parent, even."""
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


def test_a_crash_of_one_peers_script_is_shown(run: Run, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """[32] It dies alone."""
    assert run("if rank == 2: raise MemoryError('too much')\nfinish()") == 0
    assert read(mine).lost == [NAMES[2]]
    printed = capsys.readouterr().out
    assert f"[{NAMES[2]}] MemoryError: too much\n" in printed
    assert f"peer {NAMES[2]} is lost: exit code 1\n" in printed


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(1)", "pass"])
def test_when_nobody_finishes_the_run_has_failed(
    run: Run, mine: Path, capsys: pytest.CaptureFixture[str], end: str
) -> None:
    assert run(f"train(); {end}") == 1
    summary = read(mine)
    assert summary.lost == NAMES[:3] and summary.retrievals == [None] * 3
    assert summary.consensus_accuracy is None
    assert capsys.readouterr().out.endswith("no peer finished\n")


@pytest.mark.parametrize("body", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(1)"])
def test_when_all_are_lost_before_training_the_name_stays_free(
    run: Run, mine: Path, capsys: pytest.CaptureFixture[str], body: str
) -> None:
    assert run(body) == 1
    assert capsys.readouterr().out.endswith("no peer finished\n")
    assert not mine.exists()


def test_a_script_that_never_joins_is_told_so(run: Run, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = """
        if rank == 1:
            sys.exit()
        while True:
            signal.pause()
    """
    assert run(body) == 1
    assert (
        capsys.readouterr().err == f"{NAMES[1]}: its script ended without gossipx.join, the line that makes it a peer\n"
    )
    assert not mine.exists()


def test_a_peer_that_is_told_to_end_before_it_joins_has_left(
    run: Run, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """[4] It could not say so itself yet."""
    body = """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        train(); finish()
    """
    assert run(body) == 0
    assert "lost:" not in capsys.readouterr().out.replace(f"lost: {NAMES[1]}", "")
    assert read(mine).retrievals == [10, None, 12]


def test_an_error_of_one_peer_alone_does_not_stop_the_run(
    run: Run, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = """
        train()
        if rank == 0:
            tell(error="no room for a model", exit=1)
            sys.exit(1)
        finish()
    """
    assert run(body) == 0
    assert read(mine).lost == [NAMES[0]]
    assert f"{NAMES[0]}: no room for a model\n" in capsys.readouterr().out


@pytest.mark.parametrize("who", ["rank == 0", "True"])
def test_an_error_before_training_has_begun_ends_the_run_and_frees_its_name(
    run: Run, mine: Path, capsys: pytest.CaptureFixture[str], who: str
) -> None:
    """[33] One peer's port is in use, or all are: told once, whoever is first."""
    body = f"""
        if {who}:
            tell(error="port is in use", exit=1)
            sys.exit(1)
        while True:
            signal.pause()
    """
    assert run(body) == 1
    assert capsys.readouterr().err == "port is in use\n"
    assert not mine.exists()


@pytest.mark.parametrize("code", [2, 4, 5])
def test_an_error_that_the_user_must_mend_stops_all_and_is_told_once(
    run: Run, tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    """[21] Peer 0 has not found it out yet, and never would; peers 1 and 2 both tell it."""
    body = f"""
        (here / f"pid-{{rank}}").write_text(str(os.getpid()))
        train()
        if rank:
            tell(error="data/x.gz: wrong checksum", exit={code})
            sys.exit({code})
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()
    """
    assert run(body) == code
    assert capsys.readouterr().err == "data/x.gz: wrong checksum\n"
    assert not (mine / FILE).exists()
    pids = [int(file.read_text(encoding="utf-8")) for file in tmp_path.glob("pid-*") if file.stat().st_size]
    assert pids and all(gone(pid) for pid in pids)


def test_with_too_few_peers_left_the_run_stops(
    run: Run, tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """[11] min_peers = 3 of 4: one may be lost, the second ends the run. The others would go on for ever."""
    body = """
        (here / f"pid-{rank}").write_text(str(os.getpid()))
        if rank in (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            signal.pause()
    """
    assert run(body, peers="localhost slots=4", min_peers=3) == 4
    printed = capsys.readouterr()
    assert printed.err == "2 of 4 peers left, fewer than --min-peers 3\n"
    assert f"peer {NAMES[1]} is lost" in printed.out and f"peer {NAMES[2]} is lost" in printed.out
    assert not (mine / FILE).exists()
    pids = [int(file.read_text(encoding="utf-8")) for file in tmp_path.glob("pid-*") if file.stat().st_size]
    assert pids and all(gone(pid) for pid in pids)


def test_with_just_enough_peers_left_it_goes_on(run: Run, mine: Path) -> None:
    """[11]"""
    body = "os.kill(os.getpid(), signal.SIGKILL) if rank in (1, 2) else finish()"
    assert run(body, peers="localhost slots=4", min_peers=2) == 0
    assert read(mine).lost == [NAMES[1], NAMES[2]]


# --- names and directories ----------------------------------------------------------------------------


def test_a_name_in_use_is_refused(run: Run, tmp_path: Path, mine: Path) -> None:
    assert run("(here / f'ran-{rank}').touch(); finish()") == 0
    before = (mine / FILE).read_bytes()
    for file in tmp_path.glob("ran-*"):
        file.unlink()
    with pytest.raises(UsageError, match=r"a run 'mine' is there already: give another --name, or --overwrite"):
        run("(here / f'ran-{rank}').touch(); finish()")
    assert (mine / FILE).read_bytes() == before
    assert not list(tmp_path.glob("ran-*"))


def test_overwrite_leaves_nothing_of_the_run_before(run: Run, mine: Path) -> None:
    assert run("finish()", seed=1) == 0
    (mine / "peer-00").mkdir()
    (mine / "peer-00" / "model.safetensors").touch()
    assert run("finish()", seed=2, overwrite=True) == 0
    assert read(mine).seed == 2
    assert sorted(file.name for file in mine.iterdir()) == ["config.toml", "hosts.txt", "script.json", FILE]


def test_overwrite_keeps_what_no_run_has_written(run: Run, mine: Path) -> None:
    assert run("finish()") == 0
    (mine / "notes.txt").write_text("seed 0 looked odd", encoding="utf-8")
    assert run("finish()", overwrite=True) == 0
    assert (mine / "notes.txt").read_text(encoding="utf-8") == "seed 0 looked odd"


@pytest.mark.parametrize(
    "body", ["sys.exit(1)", "tell(error='wrong', exit=2)", "os.kill(os.getppid(), signal.SIGINT); signal.pause()"]
)
def test_an_overwrite_that_comes_to_nothing_leaves_the_run_before(run: Run, mine: Path, body: str) -> None:
    assert run("finish()", seed=1) == 0
    (mine / "peer-00").mkdir()
    (mine / "peer-00" / "model.safetensors").write_text("weights", encoding="utf-8")
    before = {file: file.read_bytes() for file in mine.rglob("*") if file.is_file()}
    assert run(body, seed=2, overwrite=True) != 0
    assert {file: file.read_bytes() for file in mine.rglob("*") if file.is_file()} == before
    assert run("train(); finish()", seed=3, overwrite=True) == 0
    assert read(mine).seed == 3
    assert sorted(file.name for file in mine.iterdir()) == ["config.toml", "hosts.txt", "script.json", FILE]


class Killed(BaseException):
    """In the place of SIGKILL: nothing is cleaned up after it."""


def content(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


@pytest.mark.parametrize("error", [Killed(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("method", ["rename", "mkdir", "replace", "write_bytes", "go"])
def test_an_overwrite_that_is_cut_off_anywhere_loses_nothing(
    run: Run, mine: Path, monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException
) -> None:
    assert run("finish()", seed=1) == 0
    (mine / "peer-00").mkdir()
    (mine / "peer-00" / "model.safetensors").write_text("weights", encoding="utf-8")
    (mine / "notes.txt").write_text("seed 1 looked odd", encoding="utf-8")
    before = content(mine)

    def cut(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patched, pytest.raises((Killed, OSError, UsageError)):
        patched.setattr(*((local._Run, "go") if method == "go" else (Path, method)), cut)
        if isinstance(error, Killed):
            patched.setattr(RunDirectory, "give_up", RunDirectory.release)  # all that the system does then
        run("finish()", seed=2, overwrite=True)
    assert run("sys.exit(1)", seed=3, overwrite=True) == 1
    assert content(mine) == before
    assert run("train(); finish()", seed=4, overwrite=True) == 0
    assert read(mine).seed == 4
    assert sorted(file.name for file in mine.iterdir()) == [
        "config.toml",
        "hosts.txt",
        "notes.txt",
        "script.json",
        FILE,
    ]
    assert sorted(file.name for file in mine.parent.iterdir()) == ["mine"]


def test_a_run_that_is_under_way_is_not_overwritten(run: Run, mine: Path, tmp_path: Path) -> None:
    body = """
        train()
        command = [sys.executable, "-m", "gossipx", "run", "--peers", here / "hosts.txt", "--logdir", here / "runs"]
        again = subprocess.run([*command, "--name", "mine", "--overwrite", __file__], capture_output=True, text=True)
        (here / "told").write_text(f"{again.returncode} {again.stderr}")
        finish()
    """
    assert run("import subprocess\n" + dedent(body), peers="localhost") == 0
    told = (tmp_path / "told").read_text(encoding="utf-8")
    assert told.startswith("2 ") and "a run 'mine' is under way: give another --name" in told
    assert read(mine).lost == []


def test_a_name_that_no_file_can_have(run: Run) -> None:
    with pytest.raises(UsageError, match=r"cannot write the run: .*give another .*--name"):
        run("finish()", name="x" * 300)


@pytest.mark.parametrize(
    "shut",
    [
        True,
        pytest.param(
            False,
            marks=pytest.mark.skipif(
                not Path("/dev/full").exists(), reason="/dev/full is the kernel's, on Linux alone"
            ),
        ),
    ],
)
def test_a_run_goes_on_without_anyone_to_read_its_output(tmp_path: Path, shut: bool) -> None:
    file = script(tmp_path, "print('hello'); train(); print('more'); finish()")
    start = [sys.executable, "-m", "gossipx", "run", "--peers", str(hosts(tmp_path, "localhost slots=2"))]
    command = [*start, "--logdir", str(tmp_path / "runs"), "--name", "mine", str(file)]
    if shut:
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open("/dev/full", os.O_WRONLY)
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=DEADLINE, check=False)
    os.close(writing)
    assert ended.returncode == 0 and ended.stderr == b""
    assert read(tmp_path / "runs" / "mine").lost == []


def test_another_programs_directory_is_no_run(run: Run, mine: Path) -> None:
    mine.mkdir(parents=True)
    (mine / "config.toml").write_text("title = 'mine'\n", encoding="utf-8")
    with pytest.raises(UsageError, match="not the directory of a run, so it is not overwritten"):
        run("finish()", overwrite=True)
    assert (mine / "config.toml").read_text(encoding="utf-8") == "title = 'mine'\n"


def test_a_run_that_failed_can_be_overwritten(run: Run, mine: Path) -> None:
    assert run("tell(error='no', exit=2)") == 2
    assert run("finish()", overwrite=True) == 0


@pytest.mark.parametrize("precious", ["file", "directory"])
def test_overwrite_refuses_what_is_no_run(run: Run, tmp_path: Path, mine: Path, precious: str) -> None:
    kept = mine if precious == "file" else mine / "thesis.tex"
    kept.parent.mkdir(parents=True)
    kept.write_text("years of work", encoding="utf-8")
    with pytest.raises(UsageError, match="not the directory of a run, so it is not overwritten"):
        run("(here / 'ran').touch()", overwrite=True)
    assert kept.read_text(encoding="utf-8") == "years of work"
    assert not (tmp_path / "ran").exists()


def test_an_empty_directory_can_be_overwritten(run: Run, mine: Path) -> None:
    mine.mkdir(parents=True)
    assert run("finish()", overwrite=True) == 0


def test_the_hosts_file_of_a_run_can_be_used_to_run_it_again(tmp_path: Path, run: Run, mine: Path) -> None:
    assert run("finish()", peers="localhost slots=2") == 0
    given = config_files.resolve({"logdir": str(mine.parent), "name": "mine", "overwrite": True})
    assert launch(given, mine / "hosts.txt", [str(tmp_path / "child.py")], {}) == 0
    assert read(mine).peers == 2


def test_a_logdir_that_is_a_file_is_told(run: Run, tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(UsageError, match=r"cannot write the run: .*; give another --logdir"):
        run("finish()")


def test_a_run_without_a_name_gets_its_policys(run: Run, mine: Path) -> None:
    for policy in ("tau:10", "tau:period=5", "never", "tau:10"):
        assert run("finish()", name=None, policy=policy, peers="localhost") == 0
    assert {file.name: read(file).policy for file in mine.parent.iterdir()} == {
        "tau": "tau:10",
        "tau-2": "tau:period=5",
        "never": "never",
        "tau-3": "tau:10",
    }


def test_with_servers_it_gets_that_of_its_sync_model(run: Run, mine: Path) -> None:
    assert run("finish()", name=None, servers="0", sync="ssp:staleness=2") == 0
    assert run("finish()", name=None, mode="server") == 0
    assert {file.name: read(file).policy for file in mine.parent.iterdir()} == {
        "ssp": "ssp:staleness=2",
        "bsp": "bsp",
    }


# --- signals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_handlers_of_before_are_back_after_a_run(run: Run, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    assert run("finish()", peers="localhost") == 0
    assert signal.getsignal(number) is before


def test_peers_that_do_not_heed_an_interruption_are_killed(
    run: Run, tmp_path: Path, mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C: a peer that hangs in foreign code has a short grace."""
    monkeypatch.setattr(local, "INTERRUPT_GRACE", 0.0)
    body = """
        (here / "pid").write_text(str(os.getpid()))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.kill(os.getppid(), signal.SIGINT)
        while True:
            signal.pause()
    """
    assert run(body, peers="localhost") == 130
    assert gone(int((tmp_path / "pid").read_text(encoding="utf-8")))
    assert not (mine / FILE).exists() and capsys.readouterr().err == ""


def test_a_second_interruption_kills_without_grace(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The child answers the first by sending the second; without it, it would have an hour."""
    monkeypatch.setattr(local, "INTERRUPT_GRACE", 3600.0)
    body = """
        signal.signal(signal.SIGINT, lambda *_: ((here / "asked").touch(), os.kill(os.getppid(), signal.SIGINT)))
        os.kill(os.getppid(), signal.SIGINT)
        while True:
            signal.pause()
    """
    assert run(body, peers="localhost") == 130
    assert (tmp_path / "asked").exists()


def test_who_leaves_on_request_has_not_finished_but_has_not_failed(
    run: Run, tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """[4] SIGTERM comes when one peer has finished and the other has not."""
    os.mkfifo(tmp_path / "finished")
    body = """
        if rank == 0:
            finish()
            (here / "finished").write_text("yes")
            sys.exit()
        def leave(*_):
            tell(state="left", step=3, iterations=10, loss=None, accuracy=None, retrievals=1, bytes=1)
            sys.exit()
        signal.signal(signal.SIGTERM, leave)
        assert (here / "finished").read_text() == "yes"
        os.kill(os.getppid(), signal.SIGTERM)
        while True:
            signal.pause()
    """
    assert run(body, peers="localhost slots=2") == 0
    summary = read(mine)
    assert summary.lost == [NAMES[1]] and summary.retrievals == [10, None]
    assert "is lost: " not in capsys.readouterr().out


def test_who_is_terminated_before_it_has_joined_has_left_too(
    run: Run, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """[4] Loading torch takes seconds, in which nothing but the signal's default handles it."""
    body = """
        if rank == 0:
            os.kill(os.getppid(), signal.SIGTERM)
        while True:
            signal.pause()
    """
    assert run(body) == 0
    assert not (mine / FILE).exists()
    assert "is lost" not in capsys.readouterr().out


def test_who_does_not_leave_in_time_is_killed_and_the_run_has_not_failed(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "INTERRUPT_GRACE", 0.0)
    body = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getppid(), signal.SIGTERM)
        while True:
            signal.pause()
    """
    assert run(body, peers="localhost", peer_timeout=0.5) == 0
    assert "is lost" not in capsys.readouterr().out


def test_a_signal_that_comes_while_peers_are_started_reaches_all(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    really = local.Child

    def interrupted(*arguments: Any, **options: Any) -> Any:
        child = really(*arguments, **options)
        signal.raise_signal(signal.SIGINT)  # the parent does not know of this child yet
        return child

    monkeypatch.setattr(local, "INTERRUPT_GRACE", 3600.0)
    monkeypatch.setattr(local, "Child", interrupted)
    assert run("while True: signal.pause()", peers="localhost") == 130


WAITING = """
    signal.signal(signal.SIGTERM, lambda *_: leave())
    def leave():
        (here / f"asked-{rank}").touch()
        tell(state="left", step=3, iterations=10, loss=None, accuracy=None, retrievals=1, bytes=1)
        sys.exit()
    train()
    print("pid", os.getpid(), flush=True)
    while True:
        signal.pause()
"""
"""A peer that trains until it is told to stop."""


@contextlib.contextmanager
def waiting_run(directory: Path, peers: int) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """``gossipx run`` in a process, and the processes of its peers, which all wait by then."""
    file, listed = script(directory, WAITING), hosts(directory, f"localhost slots={peers}")
    options = ["--peers", str(listed), "--logdir", str(directory / "runs"), "--name", "mine"]
    command = [sys.executable, "-m", "gossipx", "run", *options, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            pids: list[int] = []
            for line in process.stdout:
                name, _, pid = line.partition(" pid ")
                if pid:
                    assert name.strip("[]") in NAMES
                    pids.append(int(pid))
                if len(pids) == peers:
                    break
            assert len(pids) == peers, "the run ended before its peers were there"
            yield process, pids
        finally:
            process.kill()


def test_interrupting_the_run_ends_every_process(tmp_path: Path, mine: Path) -> None:
    """Ctrl-C, in real processes."""
    with waiting_run(tmp_path, peers=3) as (process, pids):
        assert not any(gone(pid) for pid in pids)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=DEADLINE)
        assert process.returncode == 130
        assert "Traceback" not in out + err
        assert all(gone(pid) for pid in pids)
        assert not list(tmp_path.glob("asked-*")) and not (mine / FILE).exists()


def test_terminating_the_run_asks_every_peer_to_leave(tmp_path: Path, mine: Path) -> None:
    """[4] SIGTERM to the parent is SIGTERM to its peers; that they all leave so is no failure."""
    with waiting_run(tmp_path, peers=3) as (process, pids):
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0
        assert err == "" and "is lost" not in out
        assert sorted(file.name for file in tmp_path.glob("asked-*")) == ["asked-0", "asked-1", "asked-2"]
        assert all(gone(pid) for pid in pids)
        assert not (mine / FILE).exists()


# --- progress -----------------------------------------------------------------------------------------


def test_plain_lines_of_progress_come_when_something_has_changed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "LINES_EVERY", 0.0)
    standings = {0: PeerStatus("anna", iterations=10), 1: PeerStatus("berta", iterations=10)}
    with Display("mine", standings) as display:
        display.refresh()
        display.refresh()
        standings[1] = PeerStatus("berta", "train", 5, 10, 0.25, 0.5, 3, 1_000_000)
        display.refresh()
        display.refresh()
    assert capsys.readouterr().out.splitlines() == [
        "anna starting  berta starting",
        "anna starting  berta train 5/10 acc 0.500 pulls 3",
    ]


def test_on_a_terminal_of_80_columns_peers_can_be_told_apart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    figures = {"step": 2500, "iterations": 3000, "loss": 0.5, "accuracy": 0.75, "retrievals": 300, "bytes": 10**8}
    with Display("mine", {rank: PeerStatus(name, "joining", **figures) for rank, name in enumerate(NAMES)}):
        pass
    printed = capsys.readouterr().out
    for word in (*NAMES, "joining", "2500/3000", "0.500", "0.750", "300", "100.0", "iteration", "retrievals"):
        assert word in printed


def test_plain_lines_of_progress_are_not_more_than_one_can_read(capsys: pytest.CaptureFixture[str]) -> None:
    standings = {0: PeerStatus("anna")}
    with Display("mine", standings) as display:
        display.refresh()
        standings[0].state = "train"
        display.refresh()
    assert capsys.readouterr().out == "anna starting\n"


def test_without_a_parent_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_PROGRESS, raising=False)
    hook = sys.excepthook
    told = progress()
    told.tell(state="train")
    assert not told.due and sys.excepthook is hook


def test_a_process_tells_its_parent_on_the_pipe_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # put back after the test
    monkeypatch.setenv(ENV_PROGRESS, str(writing))
    try:
        told = progress()
        assert told.due
        told.tell(state="train", step=1)
        error = UsageError("no such thing", "hosts.txt", 3)
        sys.excepthook(UsageError, error, None)
    finally:
        os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        assert [json.loads(line) for line in pipe] == [
            {"state": "train", "step": 1},
            {"error": "hosts.txt:3: no such thing", "exit": 2},
        ]
