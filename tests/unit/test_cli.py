"""The commands: their output and exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner, Result
from summaries import summary_of

from gossipx.cli import main
from gossipx.figures import PER_PEER
from gossipx.launch.environment import ENV_DEBUG
from gossipx.metrics import Summary
from gossipx.metrics.summary import FILE
from gossipx.settings.keys import Group
from gossipx.settings.sections import KEYS
from gossipx.topology import shipped
from gossipx.topology.generators import GENERATORS
from gossipx.topology.schedules import SCHEDULES


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a hosts file."""
    (tmp_path / "hosts.txt").write_text("localhost slots=2\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def gossipx(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="gossipx")


def one_line(result: Result) -> str:
    """Return the only line that a refused command prints; it starts no run."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.endswith("\n") and result.stderr.count("\n") == 1, result.stderr
    assert not Path("runs").exists()
    return result.stderr.rstrip("\n")


def summary(name: str, retrievals: float, **others: object) -> Summary:
    """Return the summary of two peers, the second of which is lost."""
    report = dict.fromkeys(PER_PEER, 1.0) | {"retrievals": retrievals, "delayed_pulls": 7}
    report |= {"bytes_received": 2_000_000, "finish_bytes": 250_000, "train_seconds": 10.0, "blocked_seconds": 0.5}
    report |= {"test_accuracy": 0.75, "test_loss": None, "test_loss_before_finish": None}
    ended = {"consensus_accuracy": 0.8125, "consensus_loss": None, "wall_seconds": 12.34}
    return summary_of(report, None, name=name, **{**ended, **others})


def write(directory: Path, *summaries: Summary) -> list[str]:
    for one in summaries:
        (directory / one.name).mkdir(parents=True)
        one.write(directory / one.name)
    return [str(directory / one.name) for one in summaries]


# --- as a whole ---------------------------------------------------------------------------------------


def test_version_and_help() -> None:
    result = gossipx("--version")
    assert result.exit_code == 0 and result.stdout == f"gossipx, version {version('gossipx')}\n"
    assert gossipx("-h").stdout == gossipx("--help").stdout


def test_every_setting_is_an_option_of_run() -> None:
    result = gossipx("run", "--help-all")
    assert result.exit_code == 0
    options = set(re.findall(r"--[\w-]+", result.stdout))
    assert {key.option for key in KEYS.values()} | {"--peers", "--config"} <= options
    # Frozen names: the design, "Public surface".
    assert {"--logdir", "--name", "--overwrite", "--seed", "--iterations", "--bind", "--peer-timeout"} <= options


def test_the_help_of_run_shows_only_the_common_options_under_their_headings() -> None:
    result = gossipx("run", "--help")
    shown = {
        heading: re.findall(r"^  (?:-h, )?(--[\w-]+)", text, re.MULTILINE)
        for heading, text in re.findall(r"^(\w+):\n((?:  .*\n)+)", result.stdout, re.MULTILINE)
    }
    assert list(shown) == [*get_args(Group), "Help"]
    assert shown.pop("Help") == ["--help", "--help-all"]
    assert {"--config", "--resume", "--seeds"} < set(shown["Run"])
    for heading, options in shown.items():
        declared = {key.option for key in KEYS.values() if key.common == heading}
        assert declared == set(options) - {"--config", "--resume", "--seeds"}
    assert 10 <= sum(map(len, shown.values())) <= 16


@pytest.mark.parametrize(
    ("arguments", "told", "help"),
    [
        (["rnu"], "No such command 'rnu'", ""),
        (["run"], "--peers hosts.txt", ""),
        (["--nope"], "--nope", " --help"),
        (["run", "--seed", "one"], "'one' is not a valid integer", " run --help"),
        (["run", "--peers"], "Option '--peers' requires an argument", " run --help"),
        (["run", "--finish", "never"], "'consensus', 'none'", " run --help-all"),
        (["run", "--mixing"], "Option '--mixing' requires an argument", " run --help-all"),
        (["run", "--polcy", "never"], "--policy", " run --help-all"),
        (["compare"], "Missing argument 'RUN...'", ""),
        (["compare", "--jsno", "x"], "--json", ""),
    ],
)
def test_wrong_arguments_exit_2_and_are_named(place: Path, arguments: list[str], told: str, help: str) -> None:
    """With the help that shows the option."""
    line = one_line(gossipx(*arguments))
    assert told in line and line.endswith(f"(see gossipx{help})" if help else "")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "train.py", "--peers", "hosts.txt"], "--peers stands after SCRIPT (train.py)"),
        (["run", "train.py", "--peers=hosts.txt"], "--peers stands after SCRIPT (train.py)"),
        (["run", "train.py", "--config", "run.toml"], "--config stands after SCRIPT (train.py)"),
        (["run", "--dry-run", "train.py", "--peers", "hosts.txt"], "--peers stands after SCRIPT (train.py)"),
        (["tune", "train.py", "--peers", "hosts.txt"], "--peers stands after SCRIPT (train.py)"),
        (["doctor", "train.py", "--peers", "hosts.txt"], "--peers stands after SCRIPT (train.py)"),
        (["run", "hosts.txt"], "'hosts.txt' was read as SCRIPT: give --peers hosts.txt"),
        (["doctor", "hosts.txt"], "'hosts.txt' was read as SCRIPT"),
        (["peer", "join", "train.py", "--peers", "host:29400"], "--peers stands after SCRIPT (train.py)"),
    ],
)
def test_an_argument_in_the_wrong_place_is_named(place: Path, arguments: list[str], told: str) -> None:
    (place / "train.py").touch()
    assert told in one_line(gossipx(*arguments))


# --- run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--policy", "adaptve"], ["unknown policy 'adaptve'", "did you mean 'adaptive'?", "tau"]),
        (["--policy", "adaptive:treshold=1"], ["unknown key 'treshold'", "did you mean 'threshold'?"]),
        (["--policy", "tau:often"], ["policy 'tau:often': period='often' is not INTEGER"]),
        (["--model", "lenett"], ["unknown model 'lenett'", "did you mean 'lenet'?"]),
        (["--mixing", "averge"], ["unknown mixing 'averge'", "did you mean 'average'?"]),
        (["--weights", "push-sum"], ["--weights push-sum needs --mode push, not pull: leave one out"]),
        (["--mode", "push", "--weights", "push-sum", "--mixing", "aged"], ["--weights push-sum", "leave --mixing out"]),
        (["--exchange", "waves", "--schedule", "random"], ["--schedule random orders the exchanges"]),
        (["--mode", "push", "--max-served", "2"], ["--max-served counts pulls", "--mode push"]),
        (["--mode", "push", "--serve-share", "0.1"], ["--serve-share limits answers to pulls", "--mode push"]),
        (["--transport", "shm", "--max-rate", "1gbit"], ["--max-rate 1gbit limits network traffic", "--transport shm"]),
        (["--partition", "dirichlet:alpha=-1"], ["partition 'dirichlet:alpha=-1'"]),
        (["--logdir", ""], ["--logdir is empty"]),
        (["--lr-steps", "0.9,0.1"], ["--lr-steps must be in ascending order: 0.9, 0.1"]),
        (["--bind", "999.1.1.1"], ["--bind '999.1.1.1' is not an address"]),
        (["--min-peers", "3"], ["hosts.txt: --min-peers 3 is more than the 2 peers of the run"]),
        (["--name", "../up"], ["--name '../up': a name consists of letters, digits"]),
        (["--advertise", "elsewhere"], ["hosts.txt: no line has the host 'elsewhere' that --advertise names"]),
        (["none.py", "--epochs", "3"], ["none.py: script not found"]),
        (["--config", "none.toml"], ["none.toml: cannot read the configuration"]),
    ],
)
def test_an_error_of_a_run_is_reported_in_one_line(place: Path, arguments: list[str], parts: list[str]) -> None:
    told = one_line(gossipx("run", "--peers", "hosts.txt", *arguments))
    for part in parts:
        assert part in told


def test_a_missing_hosts_file_is_one_line_of_the_real_command(place: Path) -> None:
    """Fault 34, in a process: no traceback and no other output."""
    command = [sys.executable, "-m", "gossipx", "run", "--peers", "none.txt", "--policy", "never"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "none.txt: hosts file not found: write one line per host, such as 'localhost slots=4'\n"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[run]\npeers = 'none.txt'", "none.txt: hosts file not found"),
        ("[sync]\npolicy = 'foo'", "run.toml:2: unknown policy 'foo'"),
        ("[sync]\nmixing = 'averge'", "run.toml:2: unknown mixing 'averge' (did you mean 'average'?)"),
        ("[task]\nmodel = 'lenett'", "run.toml:2: unknown model 'lenett' (did you mean 'lenet'?)"),
        ("[task]\npartition = 'dirichlet:alpha=0'", "run.toml:2: partition 'dirichlet:alpha=0'"),
    ],
)
def test_an_error_in_the_file_is_reported_with_its_place(place: Path, line: str, told: str) -> None:
    (place / "run.toml").write_text(line + "\n", encoding="utf-8")
    peers = [] if "peers" in line else ["--peers", "hosts.txt"]
    assert one_line(gossipx("run", *peers, "--config", "run.toml")).startswith(told)


@pytest.mark.parametrize("arguments", [["--debug", "run"], ["run", "--debug"]])
def test_debug_shows_where_an_error_began(place: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_DEBUG, "")
    result = gossipx(*arguments, "--peers", "none.txt")
    assert result.exit_code != 0
    assert type(result.exception).__name__ == "UsageError"
    assert os.environ[ENV_DEBUG], "for the peers"


# --- compare ------------------------------------------------------------------------------------------


def cells(text: str) -> dict[str, list[str]]:
    """Return the rows of a printed table, by their first cell."""
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows if row}


def test_compare_prints_a_table(tmp_path: Path) -> None:
    travel = summary("travel", 30.0, policy="travel:distance=2.0", codec="efsignsgd")
    result = gossipx("compare", *write(tmp_path, summary("tau", 300.0), travel))
    assert result.exit_code == 0 and result.stderr == ""
    table = cells(result.stdout)
    assert table[""] == ["tau", "travel"]
    assert table["policy"] == ["tau:period=10", "travel:distance=2.0"]
    assert table["codec"] == ["none", "efsignsgd"]
    assert table["retrievals per peer"] == ["300.0", "30.0"]
    assert table["skipped per peer"] == ["1.0", "1.0"]
    assert table["reduction"] == ["0.0%", "90.0%"]
    assert table["delayed pulls (DPRs)"] == ["7", "7"]
    assert table["MB received per peer"] == ["2.0", "2.0"]
    assert table["MB in the finish"] == ["0.25", "0.25"]
    assert table["accuracy, mean"] == table["accuracy, worst peer"] == ["0.7500", "0.7500"]
    assert table["averaged model"] == ["0.8125", "0.8125"]
    assert (table["training, s"], table["wall time, s"]) == (["10.0", "10.0"], ["12.3", "12.3"])
    assert table["failed per peer"] == ["1.0", "1.0"]
    assert table["time blocked"] == ["5.00%", "5.00%"]
    assert table["one final model"] == ["yes", "yes"]
    assert table["lost peers"] == ["1", "1"]


TAKE_A_NAME = ("compare", "run --peers", "run --resume", "runs", "status", "simulate", "export", "topology show")


@pytest.mark.parametrize("command", [*TAKE_A_NAME, "server set-sync"])
def test_a_name_that_no_file_can_have_is_told_in_one_line(command: str) -> None:
    """It was a traceback of the first look at it."""
    result = gossipx(*command.split(), "x" * 3000, *(["bsp"] if "set-sync" in command else []))
    assert result.stderr.count("\n") == 1 and result.exit_code == 2, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


@pytest.mark.fault(81)
def test_what_controls_a_terminal_is_never_printed(place: Path) -> None:
    """A summary, settings and a file's name that somebody sent; an escape sequence may write to the clipboard."""
    evil = "\x1b]52;c;ZXZpbA==\x07\x9b2J\r\u202e"
    runs = write(place, summary("tau", 300.0, policy=evil, lost=[evil], codec=evil))
    (place / "config.toml").write_text('[sync]\npolicy = "\\u001b]52;c\\u0007"\n')
    shown = [gossipx("compare", *runs), gossipx("compare", *runs, "--json"), gossipx("runs", str(place))]
    shown.append(gossipx("run", "--config", "config.toml", "--peers", "hosts.txt", "--dry-run"))
    shown += [gossipx("run", "--peers", str(place / evil)), gossipx("topology", "show", evil)]
    for result in shown:
        for text in (result.stdout, result.stderr):
            assert all(line.isprintable() for line in text.split("\n")), text
    assert "?]52;c;ZXZpbA==??2J??" in shown[0].stdout and "]52" in shown[3].stderr


def test_compare_into_a_pipe_cuts_nothing(tmp_path: Path) -> None:
    """Eight runs are wider than a terminal."""
    names = [f"adaptive-with-a-long-name-{number}" for number in range(8)]
    runs = write(tmp_path, *(summary(name, 1.0, policy="adaptive:threshold=0.025,relative=true") for name in names))
    result = gossipx("compare", *runs)
    assert cells(result.stdout)[""] == names
    assert "…" not in result.stdout


def test_compare_shows_a_dash_for_a_figure_that_only_some_runs_have(tmp_path: Path) -> None:
    """And no line for one that none has, such as the accuracy of a script that does not evaluate."""
    own = summary("own", 0.0, test_accuracy=[None, None], consensus_accuracy=None)
    table = cells(gossipx("compare", *write(tmp_path, own)).stdout)
    assert not {"reduction", "accuracy, mean", "averaged model"} & table.keys()
    assert table["retrievals per peer"] == ["0.0"]
    both = cells(gossipx("compare", str(tmp_path / "own"), *write(tmp_path, summary("tau", 10.0))).stdout)
    assert both["accuracy, mean"] == ["–", "0.7500"]


def test_compare_shows_servers_and_serving_peers_only_where_there_are_some(tmp_path: Path) -> None:
    gossip = summary("gossip", 300.0, delayed_pulls=[None, None])
    served = {"train_seconds": [10.0, 11.0], "bytes_received": [2_000_000, 16_000_000], "lost": []}
    hub = summary("hub", 300.0, delayed_pulls=[None, None], **served)
    runs = write(tmp_path, gossip, hub, summary("server", 0.0))
    assert {"delayed pulls (DPRs)", "MB per serving peer"}.isdisjoint(cells(gossipx("compare", runs[0]).stdout))
    table = cells(gossipx("compare", *runs).stdout)
    assert table["delayed pulls (DPRs)"] == ["–", "–", "7"]
    assert table["MB per serving peer"] == ["–", "16.0", "–"] and table["MB received per peer"] == ["2.0"] * 3


def test_compare_shows_the_loss_of_runs_without_an_accuracy(tmp_path: Path) -> None:
    accuracies = {"test_accuracy": [None] * 2, "test_accuracy_before_finish": [None] * 2, "consensus_accuracy": None}
    losses = {"test_loss": [1.5, None], "test_loss_before_finish": [1.75, None], "consensus_loss": 1.25}
    runs = write(tmp_path, summary("text", 30.0, **accuracies, **losses), summary("images", 30.0))
    alone = cells(gossipx("compare", runs[0]).stdout)
    assert (alone["loss, mean"], alone["loss before finish"]) == (["1.5000"], ["1.7500"])
    assert alone["loss of averaged model"] == ["1.2500"] and "accuracy, mean" not in alone
    both = cells(gossipx("compare", *runs).stdout)
    assert (both["accuracy, mean"], both["loss, mean"]) == (["–", "0.7500"], ["1.5000", "–"])
    assert "loss, mean" not in cells(gossipx("compare", runs[1]).stdout)


def test_compare_as_json(tmp_path: Path) -> None:
    """A run may be given by its directory, its summary or its name."""
    runs = write(tmp_path, summary("tau", 300.0), summary("travel", 30.0, test_accuracy=[None, None]))
    result = gossipx("compare", "--json", runs[0], str(tmp_path / "travel" / FILE))
    assert result.exit_code == 0 and result.stderr == ""
    first, second = json.loads(result.stdout)
    assert (first["name"], first["policy"], first["reduction"]) == ("tau", "tau:period=10", 0.0)
    assert second["retrievals"] == 30.0 and second["reduction"] == pytest.approx(0.9)
    assert second["accuracy"] is None and second["accuracy_averaged"] == 0.8125
    assert (first["blocked"], first["lost"], first["wall_seconds"]) == (0.05, 1, 12.34)
    assert first.keys() == second.keys()
    named = gossipx("compare", "tau", "--logdir", str(tmp_path), "--json")
    assert json.loads(named.stdout) == [first]


def test_a_plot_says_what_was_written(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On standard error, so that --json prints JSON alone."""
    monkeypatch.setattr("gossipx.tools.plot.draw", lambda runs, target: None)
    runs = write(place, summary("tau", 300.0), summary("travel", 30.0))
    result = gossipx("compare", *runs, "--plot", "runs.png", "--json")
    assert result.exit_code == 0 and len(json.loads(result.stdout)) == 2
    assert result.stderr == "runs.png: a plot of tau, travel\n"


def test_compare_with_a_missing_run_is_one_line(place: Path) -> None:
    [run] = write(place / "mine", summary("tau", 300.0))
    told = "no summary here: name the directory of a finished run"
    for other in ("none", "runs/none"):
        there = "runs has none; give a run's directory, or its name and --logdir"
        assert one_line(gossipx("compare", run, other)) == f"{other}: no such run: {there}"
    write(place / "done", summary("tau", 300.0), summary("travel", 30.0))
    there = "done has tau, travel; give a run's directory, or its name and --logdir"
    assert one_line(gossipx("compare", run, "done")) == f"done: no such run: {there}"
    near = "no such run (did you mean 'travel'?): done has tau, travel; "
    assert near in one_line(gossipx("compare", run, "done/travle"))
    assert near in one_line(gossipx("compare", run, "travle", "--logdir", "done"))
    Path(run, FILE).unlink()
    assert one_line(gossipx("compare", run)) == f"{Path(run, FILE)}: {told}"


# --- ``gossipx topology``, and ``--topology``, ``--schedule`` and ``--weights`` of ``gossipx run`` ---


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
    found = json.loads(gossipx("topology", "show", "slow-link-6", "--json").stdout)
    assert found["neighbours"][2] == [0, 1, 3] and found["sites"] == [0, 0, 0, 3, 3, 3]
    assert sorted(found["weights"]) == [[2, 3, 0.5], [3, 2, 0.5]] and not found["directed"]
    assert found["schedule"] == "inner-outer:outer=0.2" and found["size"] == 6
    told = [gossipx("topology", "show", "regular", "--size", "20", "--seed", seed).stdout for seed in ("1", "1", "2")]
    assert told[0] == told[1] != told[2], "random graphs go by the seed"


def test_check_prints_a_table_and_warns() -> None:
    result = gossipx("topology", "check", "exponential", "--size", "6", "--schedule", "one-peer")
    assert result.exit_code == 0
    for part in ("directed edges", "3, 3.00, 3", "strongly connected", "0.3333", "rounds until models are equal"):
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
    """Or that is too large for it, but can be shown."""
    (place / "parts.edges").write_text("0 1\n2 3\n")
    result = gossipx("topology", "check", "parts.edges")
    assert result.exit_code == 1
    assert "not strongly connected: 2 parts" in result.stderr
    (place / "long.edges").write_text("".join(f"{rank} {rank + 1}\n" for rank in range(1024)))
    told = one_line(gossipx("topology", "check", "long.edges"))
    assert told.startswith("topology 'long.edges' has 1025 peers: at most 1024 peers can be checked")
    assert gossipx("topology", "show", "long.edges").stdout.endswith("\n1024: 1023\n")


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
    assert told in one_line(gossipx("topology", *arguments))


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
    assert told in one_line(gossipx("run", "--peers", "hosts.txt", *arguments))
    assert not (place / "runs").exists()
