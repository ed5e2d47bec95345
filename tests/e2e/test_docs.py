"""Execution of every example in the documentation, page by page, by the rules in CONTRIBUTING.md ("Documentation")."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import pytest
import shells
from forks.client import readable
from pages import HOUSE, PAGES, Example, examples

LONG = 150.0  # seconds, after which a hanging example fails; examples take up to ten
# The slowest pages, whose content other tests cover too; README.md has the commands of getting-started.
SLOW = {
    "checkpoints",
    "codecs",
    "doctor",
    "getting-started",
    "hub",
    "integrations",
    "launchers",
    "parts",
    "results",
    "runs",
}


def run(example: Example, first_port: int, folder: Path) -> None:
    """Run an example, or write it to the file that it shows; processes that it leaves in the background are ended."""
    text = shells.with_ports(example.text, first_port)
    if example.file is not None:
        (folder / example.file).write_text(text, encoding="utf-8")
        return
    if example.language == "python":
        script = folder / f"line_{example.line}.py"
        script.write_text(text, encoding="utf-8")
        command = ["python", script.name]
    else:
        command = shells.bash(text)
    code, said = shells.run(command, folder, LONG)
    if code != 0:
        pytest.fail(f"{example.place} ended with {code}\n\n{text}\n--- said\n{said}", pytrace=False)


def pages() -> list[object]:
    """Return the pages that have examples to run."""
    slow = pytest.mark.slow
    return [
        pytest.param(page, id=page.stem, marks=[slow] if page.stem in SLOW else [])
        for page in PAGES
        if any(is_run(example) for example in examples(page))
    ]


def is_run(example: Example) -> bool:
    """Return whether an example is run or written; a text fence without a file name shows output."""
    return example.reason is None and (example.language in ("bash", "python") or example.file is not None)


@pytest.mark.parametrize("page", pages())
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path) -> None:
    assert shutil.which("bash") is not None, "examples are bash's"
    first = shells.first_port()
    for example in filter(is_run, examples(page)):
        run(example, first, tmp_path)


# --- the runner itself ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("language", "text", "said"),
    [
        ("bash", "echo before\nls not-there | sort\necho after\n", "not-there"),
        ("python", "print('before')\nraise ValueError('wrong')\n", "ValueError: wrong"),
    ],
    ids=["bash", "python"],
)
def test_an_example_that_fails_is_shown_with_its_output(language: str, text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception) as failed:
        run(Example(HOUSE / "README.md", 7, language, text), 20_000, tmp_path)
    shown = str(failed.value)
    assert shown.startswith("README.md:7 ended with ") and text in shown
    assert "before\n" in shown and said in shown and "\nafter" not in shown.split("--- said")[1]


def test_peers_of_this_machine_get_ports_of_their_own_and_nothing_stays_behind(tmp_path: Path) -> None:
    hosts = "# hosts.txt\nlocalhost slots=2\nlocalhost:29402 name=c\n127.0.0.1:29403\n10.0.0.1:29400\n"
    run(Example(HOUSE / "README.md", 1, "text", hosts), 20_000, tmp_path)
    run(Example(HOUSE / "README.md", 9, "bash", "sleep 600 & echo $! > pid; test -s hosts.txt\n"), 20_000, tmp_path)
    written = "localhost:20000 slots=2\nlocalhost:20002 name=c\n127.0.0.1:20003\n10.0.0.1:29400\n"
    assert (tmp_path / "hosts.txt").read_text() == f"# hosts.txt\n{written}"
    with contextlib.suppress(ProcessLookupError):  # it has already ended
        left = os.pidfd_open(int((tmp_path / "pid").read_text()))
        with os.fdopen(left):
            assert readable(left, 30.0), "it is still there"
