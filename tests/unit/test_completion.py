"""Shell completion, in the installed shells; and the examples in the help of every command."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from gossipx.cli import main, parsing
from gossipx.cli.parsing import COMPLETION_VARIABLE, SHELLS
from gossipx.settings import files as config_files
from gossipx.settings.keys import Key
from gossipx.settings.sections import KEYS
from gossipx.tasks import partition
from gossipx.topology.generators import GENERATORS
from gossipx.topology.schedules import SCHEDULES

SECONDS = 60.0


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a hosts file, two runs of which one has ended, and a ``gossipx`` for PATH."""
    (tmp_path / "hosts.txt").write_text("localhost\n", encoding="utf-8")
    for name, files in {"adaptive": ["config.toml", "summary.json"], "tau": ["config.toml"]}.items():
        (tmp_path / "runs" / name).mkdir(parents=True)
        for file in files:
            (tmp_path / "runs" / name / file).touch()
    program = tmp_path / "bin" / "gossipx"
    program.parent.mkdir()
    code = "from gossipx.cli import main; main(prog_name='gossipx')"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "{code}" "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return tmp_path


def run(place: Path, *command: str, **more: str) -> str:
    environment = {**os.environ, "PATH": f"{place / 'bin'}:{os.environ['PATH']}", "HOME": str(place), **more}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def asked(place: Path, line: str, after: str = "") -> set[str]:
    """Return what bash would offer for a line, through its script's protocol; ``after``: Python code to run then."""
    typed = shlex.split(line) + ([""] if line.endswith(" ") else [])
    code = f"from gossipx.cli import main\ntry:\n    main(prog_name='gossipx')\nfinally:\n    {after or 'pass'}"
    told = {COMPLETION_VARIABLE: "bash_complete", "COMP_WORDS": "\n".join(typed), "COMP_CWORD": str(len(typed) - 1)}
    return set(run(place, sys.executable, "-c", code, **told).split())


# --- what is offered ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("gossipx comp", {"plain,compare", "plain,completion"}),
        ("gossipx run --poli", {"plain,--policy"}),
        ("gossipx run --policy t", {"plain,tau", "plain,travel"}),
        ("gossipx run --policy = ad", {"plain,adaptive"}),  # bash splits --policy=ad so
        ("gossipx run --policy tau :", set()),  # bash splits --policy tau: so; it must not offer files
        ("gossipx run --policy tau : 10 --codec 3", {"plain,3lc"}),
        ("gossipx run --peers h", {"file,h"}),
        ("gossipx run --resume ", {"plain,adaptive", "plain,tau"}),
        ("gossipx run --logdir elsewhere --resume ", {"dir,"}),
        ("gossipx compare ", {"plain,adaptive", "plain,tau"}),
        ("gossipx compare runs/a", {"dir,runs/a"}),
        ("gossipx topology show h", {"plain,hypercube", "plain,hierarchical"}),
        pytest.param("gossipx server set-sync tau ds", {"plain,dsps"}, marks=pytest.mark.slow),
    ],
)
def test_commands_options_and_values_are_offered(place: Path, line: str, offered: set[str]) -> None:
    assert asked(place, line) == offered


@pytest.mark.parametrize("line", ["gossipx run --codec ", "gossipx run --topology ", "gossipx compare "])
def test_a_key_press_loads_nothing_large(place: Path, line: str) -> None:
    look = "import sys; print('large:', *{'torch', 'numpy', 'networkx', 'tensorboard'} & set(sys.modules), sep='')"
    assert "large:" in asked(place, line, look)


def test_names_match_the_tables() -> None:
    """They are repeated so that completion does not import torch."""
    assert tuple(GENERATORS) == parsing.TOPOLOGIES and tuple(SCHEDULES) == parsing.SCHEDULES
    assert tuple(partition.PARTITIONS) == parsing.PARTITIONS


@pytest.mark.parametrize("key", [key for key in KEYS.values() if key.check], ids=lambda key: key.name)
def test_settings_that_are_specs_are_completed(key: Key) -> None:
    """Except for numbers with units."""
    complete = parsing.COMPLETERS.get(key.name)
    if key.name in ("checkpoint_every", "max_rate", "metrics_port"):
        assert complete is None
        return
    assert complete is not None
    assert len(complete(click.Context(main), click.Option(["--x"]), "")) > 1


# --- in shells ------------------------------------------------------------------------------------

IN_SHELL = {
    "bash": (
        "source ./script; COMP_WORDS=(gossipx run --policy ad); COMP_CWORD=3; _gossipx_completion gossipx;"
        ' echo "${COMPREPLY[@]}"'
    ),
    "zsh": (
        "autoload -Uz compinit; compinit -D; source ./script; compadd() { print -r -- $completions };"
        " words=(gossipx run --policy ad); CURRENT=4; _gossipx_completion"
    ),
    "fish": "source ./script; complete -C 'gossipx run --policy ad'",
}
PLAIN = {"bash": ("--norc", "-c"), "zsh": ("-f", "-c"), "fish": ("--no-config", "-c")}
"""Options that make shells ignore the user's own files."""


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_completes_in_the_shell(place: Path, shell: str) -> None:
    script = run(place, "gossipx", "completion", shell)
    assert "_gossipx_completion" in script
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    (place / "script").write_text(script, encoding="utf-8")
    assert run(place, shell, *PLAIN[shell], IN_SHELL[shell]).split() == ["adaptive"]


# --- help -----------------------------------------------------------------------------------------


def commands(group: click.Group = main, path: tuple[str, ...] = ("gossipx",)) -> Iterator[tuple[str, click.Command]]:
    yield " ".join(path), group
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


@pytest.mark.parametrize(("name", "command"), [pytest.param(*pair, id=pair[0]) for pair in commands()])
def test_every_command_shows_examples_of_itself_that_are_right(name: str, command: click.Command) -> None:
    shown = CliRunner().invoke(main, [*name.split()[1:], "--help"], prog_name="gossipx", terminal_width=200)
    assert shown.exit_code == 0
    examples = re.findall(rf"^ +({re.escape(name)} .+)$", shown.stdout, re.MULTILINE)
    assert examples
    for example in examples:
        _, *given = shlex.split(example.partition(" > ")[0])
        parsed = main.make_context("gossipx", given)
        while isinstance(parsed.command, click.Group):
            step, found, rest = parsed.command.resolve_command(parsed, [*parsed._protected_args, *parsed.args])
            assert found is not None
            parsed = found.make_context(step, rest, parent=parsed)
        assert isinstance(command, click.Group) or parsed.command is command
        if name == "gossipx run":
            config_files.resolve({key: value for key, value in parsed.params.items() if key in KEYS})
