"""Uses of ``gossipx run --resume`` that are refused, and changes that are allowed."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from resuming import BRIEF, manifests, resumed, store, wait_for

from gossipx.cli import main
from runs import Folder, folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    """A run of two peers that SIGTERM ended."""
    here = Folder(tmp_path_factory.mktemp("stopped"), 2)
    options = ("--policy", "tau:5", "--iterations", "100000", "--checkpoint-every", "10", "--seed", "3")
    run = here.start_run(*options, "--peer-timeout", "20")
    wait_for(here, 20, run)
    run.signal(signal.SIGTERM)
    run.end()
    yield here
    here.close()


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
        (("--batch-size", "64"), "--batch-size cannot change"),
        (("--partition", "dirichlet:alpha=1"), "--partition cannot change"),
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
    before = (stopped.path / "x" / "config.toml").read_bytes()
    assert told in refused_at_once(stopped, *options)
    assert (stopped.path / "x" / "config.toml").read_bytes() == before


def test_a_directory_without_a_run_is_refused(stopped: Folder) -> None:
    assert "nothing: no such run: " in refused_at_once(stopped, name="nothing")


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
        ("script.json", '{"train.py": 1}', "not a script with its arguments"),
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
    """Also for a run that never wrote one."""
    with folder(tmp_path, 1) as here:
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
