"""``gossipx topology``, and ``--topology``, ``--schedule`` and ``--weights`` of ``gossipx run``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gossipx.cli import main
from gossipx.topology import shipped
from gossipx.topology.generators import GENERATORS
from gossipx.topology.schedules import SCHEDULES


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def gossipx(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="gossipx")


def refused(*arguments: str) -> str:
    """The one line of a command that ends with exit code 2."""
    result = gossipx(*arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.rstrip("\n")


def test_list() -> None:
    told = gossipx("topology", "list")
    assert told.exit_code == 0
    for name in [*GENERATORS, *SCHEDULES, *shipped()]:
        assert f" {name}" in told.stdout
    assert "small-world:degree=4,p=0.1" in told.stdout and "…  │" not in told.stdout
    found = json.loads(gossipx("topology", "list", "--json").stdout)
    assert {name.partition(":")[0] for name in found["topology"]} == set(GENERATORS)
    assert set(found["schedule"]) >= {"random", "inner-outer:outer=0.1"} and set(found["file"]) == set(shipped())


def test_show() -> None:
    assert gossipx("topology", "show", "ring", "--size", "4").stdout == "0: 1 3\n1: 0 2\n2: 1 3\n3: 0 2\n"
    assert gossipx("topology", "show", "full", "--size", "1").stdout == "0:\n"
    assert gossipx("topology", "show", "slow-link-6").stdout.splitlines()[2:4] == ["2: 0 1 3×0.5", "3: 2×0.5 4 5"]


def test_show_as_json() -> None:
    found = json.loads(gossipx("topology", "show", "slow-link-6", "--json").stdout)
    assert found["neighbours"][2] == [0, 1, 3] and found["sites"] == [0, 0, 0, 3, 3, 3]
    assert sorted(found["weights"]) == [[2, 3, 0.5], [3, 2, 0.5]] and not found["directed"]
    assert found["schedule"] == "inner-outer:outer=0.2" and found["size"] == 6


def test_random_graphs_go_by_the_seed() -> None:
    told = [gossipx("topology", "show", "regular", "--size", "20", "--seed", seed).stdout for seed in ("1", "1", "2")]
    assert told[0] == told[1] != told[2]


def test_check_prints_a_table_and_warns() -> None:
    result = gossipx("topology", "check", "exponential", "--size", "6", "--schedule", "one-peer")
    assert result.exit_code == 0
    for part in (
        "directed edges",
        "3, 3.00, 3",
        "strongly connected",
        "0.3333",
        "rounds until models are equal to 0.001",
    ):
        assert part in result.stdout
    told = "warning: a one-peer exponential schedule averages exactly only with base 2 and 2^k peers\n"
    assert result.stderr == told
    assert gossipx("topology", "check", "exponential", "--size", "8", "--schedule", "one-peer").stderr == ""


def test_check_as_json() -> None:
    arguments = ("check", "star", "--size", "5", "--weights", "metropolis", "--slots", "2", "--tolerance", "0.1")
    result = gossipx("topology", *arguments, "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and result.stderr == ""
    assert (found["degree_min"], found["degree_mean"], found["degree_max"]) == (1, 1.6, 4)
    assert (found["weights"], found["slots"], found["nics"], found["tolerance"]) == ("metropolis", 2, 3, 0.1)
    assert found["keeps_mean"] and found["strongly_connected"] and found["warnings"] == []
    assert found["messages_per_round"] == 5.0 and found["messages_per_nic"] == pytest.approx([2.5, 3.75])
    strict = json.loads(gossipx("topology", *arguments[:-1], "0.001", "--json").stdout)
    assert 0 < found["rounds_to_consensus"] < strict["rounds_to_consensus"]


def test_check_fails_for_a_graph_that_a_run_would_refuse(place: Path) -> None:
    (place / "parts.edges").write_text("0 1\n2 3\n")
    result = gossipx("topology", "check", "parts.edges")
    assert result.exit_code == 1
    assert "not strongly connected: 2 parts" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("show", "rnig", "--size", "4"), "unknown topology 'rnig' (did you mean 'ring'?)"),
        (("show", "ring"), "topology 'ring' has no fixed number of peers: give one (--size N)"),
        (("show", "ring:4"), "'ring' takes no keys; give the number of peers apart: ring --size 4"),
        (("check", "torus:3x3"), "'torus' takes no keys; give the number of peers apart: torus --size N"),
        (("show", "none/x.toml"), "none/x.toml: no such topology file"),
        (("show", "hypercube", "--size", "9" * 30), "is not in the range 1<=x<=65536"),
        (("check", "petersen-10", "--size", "8"), "(gossipx topology: --size 10), or another --topology"),
        (("check", "full", "--size", "60000"), "--size 60000: at most 1024 peers can be checked"),
        (("check", "ring", "--size", "4", "--schedule", "onepeer"), "unknown schedule 'onepeer'"),
        (("check", "ring", "--size", "4", "--weights", "metropolitan"), "'uniform', 'metropolis'"),
        (("check", "kautz-12", "--weights", "metropolis"), "needs an undirected graph"),
        (("check", "ring", "--size", "4", "--tolerance", "nan"), "'--tolerance': nan is not in the range 0<x<1"),
    ],
)
def test_wrong_usage_is_reported_in_one_line(arguments: tuple[str, ...], told: str) -> None:
    assert told in refused("topology", *arguments)


def test_a_graph_too_large_to_check_is_refused_and_can_be_shown(place: Path) -> None:
    (place / "long.edges").write_text("".join(f"{rank} {rank + 1}\n" for rank in range(1024)))
    told = refused("topology", "check", "long.edges")
    assert told.startswith("topology 'long.edges' has 1025 peers: at most 1024 peers can be checked")
    assert gossipx("topology", "show", "long.edges").stdout.endswith("\n1024: 1023\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--topology", "petersen-10"), "its graph has 10 nodes and the run 3 peers: give a hosts file of 10 peers"),
        (("--topology", "small-world:degree=3"), "degree must be even"),
        (("--schedule", "sometimes"), "unknown schedule 'sometimes'"),
        (("--topology", "directed.toml", "--weights", "metropolis"), "needs an undirected graph"),
        (("--topology", "bad.edges"), "bad.edges:1: not an edge list"),
    ],
)
def test_a_run_refuses_them_before_it_starts(place: Path, arguments: tuple[str, ...], told: str) -> None:
    (place / "hosts.txt").write_text("localhost slots=3\n")
    (place / "bad.edges").write_text("a b\n")
    (place / "directed.toml").write_text("directed = true\nedges = [[0, 1], [1, 2], [2, 0]]\n")
    assert told in refused("run", "--peers", "hosts.txt", *arguments)
    assert not (place / "runs").exists()
