"""Files built to exhaust their readers: each is refused in one line before it is parsed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from gossipx import topology
from gossipx.errors import UsageError
from gossipx.launch.hosts import read_hosts
from gossipx.launch.start import check
from gossipx.metrics import summary
from gossipx.settings import files, scenario
from gossipx.sim import traces
from gossipx.solver import prototxt
from gossipx.specs import toml
from gossipx.tools.dry_run import dry_run

READERS: dict[str, Callable[[Path], object]] = {
    "hosts file": read_hosts,
    "configuration": files.load,
    "scenario": lambda path: scenario.load(path, {}),
    "topology": lambda path: topology.topology_from(str(path), 4),
    "solver": prototxt.read_solver,
    "trace": traces.load,
    "summary": summary.read,
}
"""Readers by what they read."""

pytestmark = pytest.mark.fault(81)


@pytest.mark.parametrize("what", READERS)
@pytest.mark.parametrize("kind", ["device", "pipe", "sparse"])
def test_a_file_without_an_end_is_refused_at_once(tmp_path: Path, what: str, kind: str) -> None:
    """A device was read until the memory was full, and a pipe waited for a writer for ever."""
    file = tmp_path / "file"
    if kind == "device":
        file = Path("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        with file.open("wb") as made:
            made.truncate(2**40)
    told = r"more than \d+ KiB" if kind == "sparse" else "not a regular file"
    with pytest.raises(UsageError) as caught:
        READERS[what](file)
    assert re.fullmatch(f"{file}: cannot read the {what}: {told}", str(caught.value))


@pytest.mark.parametrize("what", READERS)
@pytest.mark.parametrize("name", ["x" * 3000, "a/" * 3000, "zero\0byte"], ids=["name", "path", "zero"])
def test_a_path_that_no_file_can_have_is_refused_in_one_line(what: str, name: str) -> None:
    """A setting or an argument may be anything."""
    with pytest.raises(UsageError) as caught:
        READERS[what](Path(name))
    assert "\n" not in str(caught.value)


def test_a_hosts_file_of_more_peers_than_ranks_is_refused_at_once(tmp_path: Path) -> None:
    """Each line alone is valid, and 1,000 of them took all memory."""
    file = tmp_path / "hosts.txt"
    file.write_text("".join(f"node-{number} slots=30000\n" for number in range(1_000)))
    with pytest.raises(UsageError, match=r"hosts\.txt:3: more than 65536 peers"):
        read_hosts(file)


KEYS = {
    "dotted": "a = 1\na" + ".a" * 20_000 + " = 1\n",
    "spaced": "a = 1\na" + " . b" * 20_000 + " = 1\n",
    "quoted": "a = 1\na" + ".'b c'" * 10_000 + " = 1\n",
    "table": "a = 1\n[a" + ".b" * 20_000 + "]\n",
    "list": "a = 1\n[[ a" + ".b" * 20_000 + "]]\n",
    "inline": "a = 1\nx = {a" + ".b" * 20_000 + " = 1}\n",
}


@pytest.mark.parametrize("text", KEYS.values(), ids=KEYS)
def test_a_key_of_many_parts_is_refused_before_it_is_parsed(text: str) -> None:
    """The parser took 1.5 GB and up to 29 s. Settings of another peer, which a newcomer gets, are parsed alike."""
    with pytest.raises(UsageError, match=r"^x\.toml:2: a key has more than 16 parts between dots$"):
        toml.loads(text, Path("x.toml"))


def test_dots_in_texts_and_keys_of_few_parts_are_read() -> None:
    text = f"a.b.'c d'.e = '{'a.b.' * 5_000}'\nx = [{{a.b = 1}}, 'a, b', 1.5]\n"
    assert toml.loads(text, Path("x.toml")) == {
        "a": {"b": {"c d": {"e": "a.b." * 5_000}}},
        "x": [{"a": {"b": 1}}, "a, b", 1.5],
    }


def test_a_long_toml_file_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(UsageError, match=r"^x\.toml: more than 512 KiB of TOML$"):
        toml.loads("edges = [" + "[0, 1], " * 70_000 + "]", Path("x.toml"))


def test_a_scenario_of_many_faults_says_what_to_use_instead(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text("[simulation]\npeers = 4\n" + "[[faults]]\nkind = 'crash'\n" * 10_000)
    with pytest.raises(UsageError, match="10000 faults, and at most 1000 can be named: use"):
        scenario.load(file, {})


def test_a_dry_run_of_many_peers_says_what_to_use_instead(tmp_path: Path) -> None:
    """It counts the traffic of each pair: 30,000 peers would have taken hours and 7 GB, in silence."""
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("localhost slots=30000\n")
    with pytest.raises(
        UsageError, match="30000 peers, and a dry run has at most 1024: gossipx simulate has up to 10000"
    ):
        dry_run(files.resolve({}), hosts, [])


@pytest.mark.fault(68)
def test_more_peers_than_a_machine_has_memory_for_are_refused_before_one_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30,000 processes, each with torch, had been started until the system ended others' as well."""
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("localhost slots=30000\n")
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 4_000_000}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    wanted = "hosts.txt: 30000 peers on this machine take at least 3000 GB, and it has 16 GB: give fewer slots"
    with pytest.raises(UsageError, match=wanted):
        check(files.resolve({}), hosts, [])
