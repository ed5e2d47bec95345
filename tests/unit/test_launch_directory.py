"""The name and directory of a run, or of one per seed: names in use, ``--overwrite``, and the budget of a run."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import launches
import pytest
from click.testing import CliRunner
from launches import Run

from gossipx.assembly.presets import effective_config
from gossipx.cli import main
from gossipx.errors import UsageError
from gossipx.launch.directory import CONFIG_FILE, RunDirectory, replace, run_directory
from gossipx.launch.loops.train import used_of
from gossipx.launch.run import processes, several_seeds
from gossipx.launch.run.stopping import RunEnd
from gossipx.launch.start import HostsFile
from gossipx.launch.world.source import source_of
from gossipx.metrics.summary import FILE, read
from gossipx.settings import files
from gossipx.settings.sections import MOST_ITERATIONS, RunSettings
from gossipx.tasks.presets import PRESETS, cosine_rate, step_rate

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


# --- ``gossipx run --seeds`` and ``--seconds``: arguments, the runs' names, and the share of a budget that is used ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-4", (0, 1, 2, 3, 4)), ("0,2,5", (0, 2, 5)), ("7", (7,)), ("0-1, 9", (0, 1, 9)), ("3-3", (3,))],
)
def test_what_seeds_mean(text: str, expected: tuple[int, ...]) -> None:
    assert several_seeds.seeds_from(text) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("4-0", "'4-0' ends before it begins"),
        ("0-4,2", "seed 2 is given twice"),
        ("", "seeds such as 0-4 or 0,2,5 are required, not ''"),
        ("-1", "are required, not '-1'"),
        ("0-", "are required, not '0-'"),
        ("0-4294967295", "names more than 1000 seeds"),
        ("4294967296", "a seed is at most 4294967295"),
    ],
)
def test_wrong_seeds_are_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=f"^--seeds {text}: ") as raised:
        several_seeds.seeds_from(text)
    assert told in str(raised.value)


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, RunEnd]:
    """Replace runs by the outcomes in this dict, by seed; a run that failed leaves no summary."""
    monkeypatch.chdir(tmp_path)
    Path("hosts.txt").write_text("localhost slots=2\n")
    outcomes: dict[int, RunEnd] = {}
    times = itertools.count(1_000_000_000)

    def launched(source, given, script):
        directory = Path(given.run.logdir, given.run.name)
        directory.mkdir(parents=True, exist_ok=True)
        outcome = outcomes.get(given.run.seed, RunEnd(0, stopped=False))
        if outcome.code != 1:
            (directory / "hosts.txt").touch()
            (directory / "config.toml").write_text("[run]\n")
            (directory / "summary.json").touch()
            os.utime(directory / "summary.json", (0, next(times)))
        return outcome

    monkeypatch.setattr(several_seeds, "launch", launched)
    return outcomes


def launch_all(text: str, **given: object) -> tuple[int, list[str]]:
    """Return the exit code, and the names of all runs so far."""
    settings = files.resolve({"policy": "tau:10", "logdir": "runs", **given})
    code = several_seeds.launch_each(HostsFile(Path("hosts.txt")), settings, several_seeds.seeds_from(text), [])
    return code, sorted(path.name for path in Path("runs").iterdir())


@pytest.mark.parametrize(
    ("seed", "end", "seeds"),
    [
        (1, RunEnd(3, stopped=False), 3),  # the worst exit code counts
        (1, RunEnd(0, stopped=True), 2),  # a signal ends all: SIGTERM too, although its exit code is 0
        (0, RunEnd(2, stopped=False), 1),  # errors that each seed would repeat
        (0, RunEnd(5, stopped=False), 1),
    ],
    ids=str,
)
def test_each_seed_has_a_run_until_all_are_ended(ran: dict[int, RunEnd], seed: int, end: RunEnd, seeds: int) -> None:
    ran[seed] = end
    assert launch_all("0-2") == (end.code, [f"tau-seed{number}" for number in range(seeds)])


@pytest.mark.parametrize(
    ("failed", "told"),
    [
        ((), ["compare the seeds: gossipx compare runs/tau-seed0 runs/tau-seed1 runs/tau-seed2"]),
        ((1,), ["compare the seeds: gossipx compare runs/tau-seed0 runs/tau-seed2"]),
        ((0, 1, 2), []),
    ],
)
def test_only_runs_with_a_summary_are_named_for_the_comparison(
    ran: dict[int, RunEnd], capsys: pytest.CaptureFixture[str], failed: tuple[int, ...], told: list[str]
) -> None:
    ran.update(dict.fromkeys(failed, RunEnd(1, stopped=False)))
    launch_all("0-2")
    assert capsys.readouterr().out.splitlines()[3:] == told


def test_an_earlier_run_that_a_failed_one_should_have_overwritten_is_not_compared(
    ran: dict[int, RunEnd], capsys: pytest.CaptureFixture[str]
) -> None:
    launch_all("0-1", name="mine")
    ran[1] = RunEnd(1, stopped=False)
    launch_all("0-1", name="mine", overwrite=True)
    assert capsys.readouterr().out.splitlines()[-1] == "compare the seeds: gossipx compare runs/mine-seed0"


def test_names_that_are_taken_get_a_number_together(ran: dict[int, RunEnd]) -> None:
    """A given one is refused before the first run."""
    Path("runs/tau-seed1").mkdir(parents=True)
    with pytest.raises(UsageError, match="a run 'tau-seed1' already exists"):
        launch_all("0-1", name="tau")
    assert launch_all("0-1") == (0, ["tau-2-seed0", "tau-2-seed1", "tau-seed1"])


def test_launchers_start_one_run(ran: dict[int, RunEnd]) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": "0"}
    with pytest.raises(UsageError, match=r"--seeds starts all peers of a hosts file, and .* starts one run"):
        several_seeds.launch_each(source_of(None, [], environ), files.resolve({}), (0, 1), [])


# --- seconds ------------------------------------------------------------------------------------------


def used(iteration: int, elapsed: float, **given: float) -> tuple[float, float]:
    return used_of(SimpleNamespace(iteration=iteration, seconds=elapsed), RunSettings(**given))


def test_whichever_budget_ends_first_counts() -> None:
    """And the learning rate follows the share of it."""
    assert used(30, 5.0, iterations=100) == (30, 100)
    assert used(30, 5.0, iterations=100, seconds=10.0) == (5_000, 10_000)
    assert used(60, 5.0, iterations=100, seconds=10.0) == (60, 100)
    steps = PRESETS["lenet"]  # a step at 70 %
    for share, rate in ((0.69, 0.01), (0.71, 0.001)):
        done = used(5, share * 60, iterations=10**6, seconds=60.0)
        assert step_rate(steps.lr, steps.gamma, steps.lr_steps, *done) == pytest.approx(rate)


@pytest.mark.parametrize("seconds", [10.0, 25.0, 60.0, 3600.0])
def test_the_warm_up_of_a_cosine_is_the_same_share_of_any_number_of_seconds(seconds: float) -> None:
    for share, rate in ((0.0005, 0.01), (0.0125, 0.25), (0.0375, 0.75), (0.05, 1.0), (0.525, 0.5)):
        now = cosine_rate(1.0, *used(5, share * seconds, iterations=MOST_ITERATIONS, seconds=seconds))
        assert now == pytest.approx(rate, abs=0.005)


def test_seconds_alone_leave_iterations_without_a_limit() -> None:
    assert effective_config(files.resolve({"seconds": 60}), 2, has_script=False).run.iterations == MOST_ITERATIONS
    both = effective_config(files.resolve({"seconds": 60, "iterations": 500}), 2, has_script=False)
    assert both.run.iterations == 500


FOR_ONE = "--seeds starts several new runs, and {} is for one: leave one out\n"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--seconds", "60", "--dry-run"], "--dry-run cannot tell how many iterations --seconds allows: give --iter"),
        (["--seeds", "0-4", "--seed", "1"], FOR_ONE.format("--seed")),
        (["--seeds", "0-4", "--resume", "x"], FOR_ONE.format("--resume")),
        (["--seeds", "0-4", "--dry-run"], FOR_ONE.format("--dry-run")),
    ],
)
def test_options_that_exclude_each_other(ran: dict[int, RunEnd], options: list[str], told: str) -> None:
    done = CliRunner().invoke(main, ["run", "--peers", "hosts.txt", *options])
    assert done.exit_code == 2 and done.stderr.startswith(told) and done.stderr.count("\n") == 1
