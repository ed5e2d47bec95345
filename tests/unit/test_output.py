"""Output that nobody reads, that finds no room, or that the console cannot show: no run ends with it."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launches import DEADLINE, hosts, script
from test_cli import summary

import gossipx as gossipx_package
from gossipx.cli.output import _Unfailing
from gossipx.metrics.summary import read

pytestmark = pytest.mark.fault(71)
LOST = "standard output: No space left on device; what is missing there is lost"
PLAIN = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ENCODINGS = {name: {"PYTHONIOENCODING": name} for name in ("latin-1", "ascii")} | {"C": {**PLAIN, "LC_ALL": "C"}}
"""Environments whose consoles cannot show every letter."""
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is the kernel's, on Linux alone")


def no_reader() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def no_terminal() -> int:
    """Return a terminal whose window was closed; no process of the test is told so by SIGHUP."""
    window, terminal = pty.openpty()
    os.close(window)
    return terminal


@pytest.fixture(params=[no_reader, no_terminal, pytest.param(full_disk, marks=needs_full)])
def outlet(request: pytest.FixtureRequest) -> Iterator[tuple[int, bool]]:
    """Where output is lost, and whether someone misses it."""
    writing = request.param()
    yield writing, request.param is full_disk
    os.close(writing)


def gossipx(*arguments: str | Path, stdout: int = subprocess.PIPE, **more: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "gossipx", *map(str, arguments)]
    environment = {**os.environ, **more}
    return subprocess.run(command, env=environment, stdout=stdout, stderr=subprocess.PIPE, timeout=DEADLINE)


def run(directory: Path, body: str, **how: object) -> subprocess.CompletedProcess[bytes]:
    """Run a script as two peers of the run ``mine``."""
    options = ("--peers", hosts(directory, "localhost slots=2"), "--logdir", directory / "runs", "--name", "mine")
    return gossipx("run", *options, script(directory, body), **how)  # type: ignore[arg-type]


# --- runs ---------------------------------------------------------------------------------------------


def test_a_run_continues_without_its_output(tmp_path: Path, outlet: tuple[int, bool]) -> None:
    writing, is_missed = outlet
    ended = run(tmp_path, "print('hello'); train(); print('more', flush=True); finish()", stdout=writing)
    assert ended.returncode == 0
    assert ended.stderr.decode().splitlines() == [LOST] * is_missed
    assert read(tmp_path / "runs" / "mine").lost == []


def test_a_run_whose_streams_were_closed_writes_into_no_file_of_its_own(tmp_path: Path) -> None:
    """``gossipx run >&- 2>&-``: the numbers of its standard streams are free for the first files that it opens."""
    main = "import os; os.close(0); os.close(1); os.close(2)\nimport gossipx.cli\ngossipx.cli.main()"
    body = script(tmp_path, "print('hello'); train(); print('more', flush=True); finish()")
    options = ("--peers", hosts(tmp_path, "localhost slots=2"), "--logdir", tmp_path / "runs", "--name", "mine")
    ended = subprocess.run([sys.executable, "-c", main, "run", *options, body], timeout=DEADLINE)
    assert ended.returncode == 0
    assert read(tmp_path / "runs" / "mine").lost == []


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_a_peer_prints_is_written_with_replacement(tmp_path: Path, encoding: str) -> None:
    """By ``print``, and by a library in C, which knows no encoding."""
    body = r"""
        print("Größe \N{CHECK MARK}", flush=True)
        os.write(1, "Größe \N{CHECK MARK}\n".encode())
        train(); tell(error="Größe \N{CHECK MARK}", exit=1) if rank else finish()
    """
    ended = run(tmp_path, body, **ENCODINGS[encoding])
    assert ended.returncode == 1 and ended.stderr == b""
    shown = ended.stdout.decode({"latin-1": "latin-1", "C": "utf-8"}.get(encoding, encoding))
    assert shown.count("[localhost:29400] Gr") == 2 and "localhost:29401: Gr" in shown
    printed = {"latin-1": "Größe ?", "ascii": "Gr??e ?"}
    if encoding in printed:
        assert f"[localhost:29400] {printed[encoding]}\n" in shown
    assert read(tmp_path / "runs" / "mine").lost == ["localhost:29401"]


# --- other commands -----------------------------------------------------------------------------------

COMMANDS = """
import json, sys
from pathlib import Path
from gossipx.cli import main
codes = []
for command in json.loads(sys.argv[1]):
    try:
        main(command)
    except SystemExit as end:
        codes.append(end.code)
Path(sys.argv[2]).write_text(json.dumps(codes))
"""
"""Runs commands in turn, as long as none of them prevents that, and records their exit codes."""


@pytest.fixture
def commands(tmp_path: Path) -> list[list[str]]:
    """Commands that print tables, with dashes and intervals."""
    names = [str(tmp_path / "runs" / f"seed-{seed}") for seed in range(3)]
    for seed, name in enumerate(names):
        Path(name).mkdir(parents=True)
        summary(f"größe-{seed}", 30.0 + seed, seed=seed).write(Path(name))
        (Path(name) / "config.toml").write_text('[run]\nname = "x"\n', encoding="utf-8")
    listed = str(hosts(tmp_path, "localhost:20001"))
    return [
        ["compare", *names],
        ["runs", str(tmp_path / "runs")],
        ["status", "--peers", listed],
        ["topology", "list"],
        ["run", "--help"],
        ["--help"],
    ]


CODES = [0, 0, 1, 0, 0, 0]  # no peer answers 'status'


def each(directory: Path, commands: list[list[str]], **how: object) -> tuple[list[int], bytes, bytes]:
    """Run commands; return their exit codes, and what they have printed."""
    told = directory / "codes.json"
    how = {"stdout": subprocess.PIPE, **how, "env": {**os.environ, **how.get("env", {})}}  # type: ignore[dict-item]
    command = [sys.executable, "-c", COMMANDS, json.dumps(commands), str(told)]
    ended = subprocess.run(command, stderr=subprocess.PIPE, timeout=DEADLINE, **how)  # type: ignore[call-overload]
    assert b"Traceback" not in ended.stderr and ended.returncode == 0, ended.stderr.decode()
    return json.loads(told.read_text()), ended.stdout, ended.stderr


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_tables_are_shown_on_every_console(tmp_path: Path, commands: list[list[str]], encoding: str) -> None:
    codes, printed, _ = each(tmp_path, commands, env=ENCODINGS[encoding])
    assert codes == CODES
    assert b"retrievals per peer" in printed and b"31.0" in printed


def test_a_command_whose_output_is_lost_fails_only_if_someone_misses_it(
    tmp_path: Path, commands: list[list[str]], outlet: tuple[int, bool]
) -> None:
    writing, is_missed = outlet
    codes, _, errors = each(tmp_path, commands, stdout=writing)
    assert codes == ([1] * 4 + [0, 1] if is_missed else CODES), "but gossipx run"
    assert errors.decode().splitlines().count(LOST) == 6 * is_missed


def test_a_reader_that_is_slow_loses_nothing_where_the_pipe_does_not_block(tmp_path: Path) -> None:
    """Another process that has the same terminal or pipe may make it so, as node does."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writing, False)
    text = b"x" * 100_000
    child = os.fork()
    if child == 0:
        os.close(reading)
        stream = _Unfailing(writing, "w")
        os._exit(0 if stream.write(text) == len(text) and stream.error is None else 1)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        assert stream.read() == text
    assert os.waitpid(child, 0)[1] == 0


# --- files --------------------------------------------------------------------------------------------


def encodings_left_out(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of calls that open a text file without naming its encoding, which the locale would choose."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute | ast.Name):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id
        modes = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and str(arg.value)[:1] in "rwax"]
        is_text = {
            "open": not call.args or any("b" not in mode and ":" not in mode for mode in modes),
            "NamedTemporaryFile": any("b" not in mode for mode in modes),
            "read_text": not call.args,
            "write_text": len(call.args) == 1,
        }
        if is_text.get(name) and not any(key.arg in ("encoding", "fileobj") for key in call.keywords):
            yield call.lineno


def test_every_text_file_has_an_encoding_of_its_own() -> None:
    """A run that began under LC_ALL=C is resumed on another machine."""
    found = [
        f"{file}:{line}"
        for file in sorted(Path(gossipx_package.__file__).parent.rglob("*.py"))
        for line in encodings_left_out(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert found == []
