"""The name and directory of a run: names in use, ``--overwrite``, and restoring the overwritten run."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from textwrap import dedent

import launches
import pytest
from launches import Run

from gossipx.errors import UsageError
from gossipx.launch.directory import CONFIG_FILE, RunDirectory, replace, run_directory
from gossipx.launch.run import processes
from gossipx.metrics.summary import FILE, read

run, mine = launches.run, launches.mine


# --- names and directories ----------------------------------------------------------------------------


@pytest.mark.parametrize("body", ["tell(error='wrong', exit=2)", "os.kill(os.getppid(), signal.SIGINT); wait()"])
def test_a_failed_overwrite_leaves_the_previous_run(run: Run, mine: Path, body: str) -> None:
    assert run("finish()", seed=1) == 0
    (mine / "peer-00").mkdir()
    (mine / "peer-00" / "model.safetensors").write_text("weights", encoding="utf-8")
    before = content(mine)
    assert run(body, seed=2, overwrite=True) != 0
    assert content(mine) == before


class Killed(BaseException):
    """Simulates SIGKILL: nothing is cleaned up after it."""


def content(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


@pytest.mark.parametrize("error", [Killed(), pytest.param(OSError(28, "No space"), marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["rename", "mkdir", "replace", "write_bytes", "go"])
def test_an_overwrite_that_is_cut_off_anywhere_loses_nothing(
    run: Run, mine: Path, monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException
) -> None:
    """The next one that fails leaves the previous run, and one that ends well leaves only what no run has written."""
    assert run("finish()", seed=1) == 0
    (mine / "peer-00").mkdir()
    (mine / "peer-00" / "model.safetensors").write_text("weights", encoding="utf-8")
    (mine / "notes.txt").write_text("seed 1 looked odd", encoding="utf-8")
    before = content(mine)

    def cut(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patched, pytest.raises((Killed, OSError, UsageError)):
        patched.setattr(*((processes._Processes, "go") if method == "go" else (Path, method)), cut)
        if isinstance(error, Killed):
            patched.setattr(RunDirectory, "revert", RunDirectory.release)  # a killed process only loses its lock
        run("finish()", seed=2, overwrite=True)
    assert run("sys.exit(1)", seed=3, overwrite=True) == 1
    assert content(mine) == before
    assert run("train(); finish()", seed=4, overwrite=True) == 0
    assert read(mine).seed == 4
    names = {file.name for file in mine.iterdir()}
    assert names == {"all", "config.toml", "hosts.txt", "notes.txt", "script.json", FILE}
    assert [file.name for file in mine.parent.iterdir()] == ["mine"]


def test_a_run_in_progress_is_not_overwritten(run: Run, mine: Path, tmp_path: Path) -> None:
    body = """
        train()
        command = [sys.executable, "-m", "gossipx", "run", "--peers", here / "hosts.txt", "--logdir", here / "runs"]
        again = subprocess.run([*command, "--name", "mine", "--overwrite", __file__], capture_output=True, text=True)
        (here / "told").write_text(f"{again.returncode} {again.stderr}")
        finish()
    """
    assert run("import subprocess\n" + dedent(body), peers="localhost") == 0
    told = (tmp_path / "told").read_text(encoding="utf-8")
    assert told.startswith("2 ") and "a run 'mine' is in progress: give another --name" in told
    assert read(mine).lost == []


def test_a_directory_that_cannot_be_made_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(UsageError, match=r"cannot write the run: .*; give another --logdir"):
        run("finish()")
    (tmp_path / "runs").unlink()
    with pytest.raises(UsageError, match=r"cannot write the run: .*give another .*--name"):
        run("finish()", name="x" * 300)


@pytest.mark.parametrize("precious", ["", "thesis.tex", "config.toml"])
def test_overwrite_refuses_a_directory_that_is_not_a_run(run: Run, tmp_path: Path, mine: Path, precious: str) -> None:
    """Also if it has the configuration of another program."""
    kept = mine / precious
    kept.parent.mkdir(parents=True)
    kept.write_text("title = 'years of work'", encoding="utf-8")
    with pytest.raises(UsageError, match="not the directory of a run, so it is not overwritten"):
        run("(here / 'ran').touch()", overwrite=True)
    assert kept.read_text(encoding="utf-8") == "title = 'years of work'"
    assert not (tmp_path / "ran").exists()


def test_an_empty_directory_can_be_overwritten(run: Run, mine: Path) -> None:
    mine.mkdir(parents=True)
    assert run("finish()", overwrite=True) == 0


def test_a_file_that_cannot_be_replaced_stays_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("old")

    def fails(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="No space left"):
        replace(tmp_path / "file", b"new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("file", "old")]


def test_the_name_of_a_run_is_not_mistaken_for_a_directory_without_a_run(
    run: Run, tmp_path: Path, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("finish()") == 0
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert run_directory("mine", Path("runs")) == Path("runs/mine")
    (tmp_path / "mine" / CONFIG_FILE).touch()
    assert run_directory("mine", Path("runs")) == Path("mine"), "as a path it is a run, too"
    assert run_directory("runs", Path("runs")) == Path("runs"), "a directory of runs"


def test_a_run_without_a_name_is_named_after_its_policy_or_sync_model(run: Run, mine: Path) -> None:
    named = {"tau": "tau:10", "tau-2": "tau:period=5", "never": "never", "tau-3": "tau:10"}
    for policy in named.values():
        assert run("finish()", name=None, policy=policy, peers="localhost") == 0
    assert run("finish()", name=None, servers="0", sync="ssp:staleness=2") == 0
    assert run("finish()", name=None, mode="server") == 0
    named |= {"ssp": "ssp:staleness=2", "bsp": "bsp"}
    assert {file.name: read(file).policy for file in mine.parent.iterdir()} == named
