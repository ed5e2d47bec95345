"""Every benchmark and every paper's tables at their smallest size: they run, and print figures in the common schema.

What they measure is not checked: at this size it says nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from forks.client import TESTS, Piped, commands
from seeds import some

BIN = TESTS.parent / "bin"
BENCHES = sorted((BIN / "benches").glob("[a-z0-9]*.py"))
PAPERS = sorted(file.with_name(f"{file.stem.replace('-', '_')}.py") for file in (BIN / "_papers").glob("*.toml"))
OFTEN = [*BENCHES, PAPERS[0]]
FIGURE = {"name", "value", "unit", "reference", "ratio", "goal", "met"}
ON_EMULATED_LINKS = {"evidence", "network", "simulation"}
MORE = {"gpu": ("--device", "cpu")}


@pytest.mark.parametrize("file", some([*BENCHES, *PAPERS], *OFTEN), ids=lambda file: file.stem)
def test_the_smoke_form_prints_figures(file: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS, BIN))),
        "OMP_NUM_THREADS": "1",
        "GOSSIPX_PYTHON": str(commands() / "python"),  # forks all further processes, too
        "FORKED_PYTHON": str(commands() / "python"),  # and those on emulated hosts
    }
    command = [commands() / "python", file, "--smoke", "--json", *MORE.get(file.stem, ())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert figures or (file.stem in ON_EMULATED_LINKS and "skipped" in done.stderr)
    assert all(one.keys() >= FIGURE for one in figures)


def test_no_benchmark_is_left_out() -> None:
    assert len(BENCHES) >= 13 and len(PAPERS) == 6
    assert all(file.exists() for file in PAPERS)


def test_what_a_smoke_form_does_not_reach_can_be_imported() -> None:
    """Scripts for runs on emulated links, among others: a name that was changed in gossipx must not wait for them."""
    files = [str(file) for folder in ("benches", "_papers") for file in sorted((BIN / folder).glob("*.py"))]
    program = f"""
import runpy, sys
sys.path += {[str(BIN / "benches"), str(BIN / "_papers"), str(BIN), str(TESTS)]!r}
for file in {files!r}:
    runpy.run_path(file, run_name="imported")
print("imported")
"""
    with Piped("-c", program) as process:
        assert process.stdout.read() == "imported\n"
