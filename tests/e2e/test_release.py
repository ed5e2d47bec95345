"""The files of a release: what they hold, that an index takes them, and that the wheel works."""

from __future__ import annotations

import configparser
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest
import yaml
from pages import HOUSE

SDIST = ("CHANGELOG.md", "docs/index.md", "tests/conftest.py", "tests/e2e/test_release.py", "bin/test", "topologies")


def run(*command: str | Path, folder: Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_sdist_and_wheel_are_complete_and_the_wheel_works(tmp_path: Path) -> None:
    """The wheel is built from the sdist."""
    python = sys.executable
    run(python, "-m", "build", "--no-isolation", "--outdir", tmp_path, HOUSE, folder=tmp_path)
    (sdist,), (wheel,) = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    run(python, "-m", "twine", "check", "--strict", sdist, wheel, folder=tmp_path)
    with tarfile.open(sdist) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert names >= set(SDIST) and not [name for name in names if "__pycache__" in name]
    # A new environment, into which only the wheel is installed; its dependencies are those of this one.
    run(python, "-m", "venv", tmp_path / "venv", folder=tmp_path)
    new = tmp_path / "venv" / "bin" / "python"
    run(new, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel, folder=tmp_path)
    site = Path(run(new, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=tmp_path).strip())
    (site / "dependencies.pth").write_text(f"import sys; sys.path.append({sysconfig.get_path('purelib')!r})\n")
    command = tmp_path / "venv" / "bin" / "gossipx"
    assert run(command, "--version", folder=tmp_path).split() == ["gossipx,", "version", version()]
    assert str(site) in run(new, "-c", "import gossipx; print(gossipx.__file__)", folder=tmp_path)
    assert "two-sites-8" in run(command, "topology", "list", folder=tmp_path)
    names = "from gossipx.sim import traces; print(*traces.names())"
    assert run(new, "-c", names, folder=tmp_path).split() == ["lenet", "transformer"]


def version() -> str:
    setup = configparser.ConfigParser()
    setup.read(HOUSE / "setup.cfg", encoding="utf-8")
    return setup["metadata"]["version"]


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((HOUSE / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert cited["version"] == version() and cited["license"] == "MIT"
    assert cited["repository-code"] == "https://github.com/gossipx/gossipx"
