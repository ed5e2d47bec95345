"""The versions of Python and of packages that the project states: setup.cfg, constraints, bin/test and the README."""

from __future__ import annotations

import configparser
import os
import re
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
