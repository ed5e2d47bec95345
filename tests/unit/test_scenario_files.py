"""Files of simulations, scenarios and traces of deltas: what they may say, and how a mistake in one is told."""

from __future__ import annotations

import configparser
import re
from importlib import resources
from pathlib import Path

import pytest

from gossipx.errors import UsageError
from gossipx.launch.simulation import scenarios
from gossipx.settings.scenario import OF_FAULT, OWN, load
from gossipx.sim import compute, network, traces
from gossipx.tasks.presets import PRESETS

ROOT = Path(__file__).parents[2]
REAL = "[compute]\nseconds = 0.1\n"
TRAFFIC = '[simulation]\nwork = "traffic"\nmodel = "resnet110"\n'


def written(folder: Path, text: str) -> Path:
    file = folder / "one.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("name", scenarios.described())
def test_each_shipped_scenario_is_valid_and_says_what_it_shows(name: str) -> None:
    scenario = load(scenarios.find(name), {})
    assert scenario.simulation.peers > 1 and len(scenarios.described()[name]) > 20


def test_options_replace_what_the_file_says(tmp_path: Path) -> None:
    file = written(tmp_path, REAL + "[run]\nseed = 3\niterations = 7\n")
    assert load(file, {}).config.run.seed == 3
    changed = load(file, {"seed": 4, "iterations": None}).config.run
    assert (changed.seed, changed.iterations) == (4, 7)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[simulation]\npeers = 0\n" + REAL, 2, "at least 1"),
        ("peers = 4\n" + REAL, 1, "it belongs in [simulation]"),
        ("[simulation]\npears = 3\n" + REAL, 2, "did you mean 'peers'"),
        ("[simulations]\npeers = 3\n" + REAL, 1, "did you mean 'simulation'"),
        (REAL + '[network]\nup = "fast"\n', 4, "not a rate"),
        (REAL + '[sync]\npolicy = "tao:5"\n', 4, "did you mean 'tau'"),
        (REAL + "[faults]\nat = 3\n", 3, "[[faults]]"),
        (REAL + '[[faults]]\nkind = "crash"\n', 3, "needs a kind and the ranks"),
        (REAL + '[[faults]]\nkind = "pause"\npeers = [1]\n', 3, "give until"),
        (REAL + '[[faults]]\nkind = "leave"\npeers = [1]\nuntil = 3\n', 3, "has no end"),
        (REAL + '[[faults]]\nkind = "crash"\npeers = [1]\nat = 5\nuntil = 3\n', 3, "before it begins"),
        (REAL + '[[faults]]\nkind = "crash"\npeers = [1]\none_way = true\n', 3, "for a partition"),
        (REAL + '[[faults]]\nkind = "pause"\npeers = [1]\nuntil = 1\nstate = "kept"\n', 3, "for a crash"),
    ],
)
def test_a_mistake_is_told_with_its_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    with pytest.raises(UsageError) as error:
        load(written(tmp_path, text), {})
    assert f"one.toml:{line}: " in str(error.value) and words in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "needs the seconds"),
        (REAL + '[simulation]\nmodel = "alexnet"\n', 'for work = "traffic"'),
        ('[simulation]\nwork = "traffic"\n', "needs the model"),
        (TRAFFIC + "retrievals = [1, 2]\n", "2 numbers for 4 peers"),
        (REAL + '[[faults]]\nkind = "crash"\npeers = [4]\n', "the last of 4 peers is 3"),
        (REAL + "[network]\nsites = 5\n", "sites is 5"),
        (REAL + "[run]\nrestart = 3\n", "restart has no effect on a simulated run"),
        (REAL + '[exchange]\ntransport = "tcp"\n', "transport has no effect"),
        (TRAFFIC + "[run]\ncheckpoint_every = 10\n", 'for work = "real"'),
        (REAL + '[network]\nuplink = "10mbit"\n', "for several sites"),
        (REAL + '[churn]\nstate = "kept"\nrate = 1\n', "no effect without checkpoints"),
    ],
)
def test_settings_that_exclude_or_need_each_other(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        load(written(tmp_path, text), {})


def test_a_scenario_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match=r"did you mean 'thousand'.*give a TOML file, or one of"):
        scenarios.find("thousnd")


def test_the_page_names_every_setting_and_value() -> None:
    text = (ROOT / "docs" / "simulate.md").read_text(encoding="utf-8")
    for key in [*OWN.values(), *OF_FAULT.values()]:
        assert f"`{key.name}`" in text or f"`{key.name} =" in text, key.name
        for word in key.choices:
            assert f"`{word}`" in text or f'"{word}"' in text, word
    assert all(f"`{name}" in text for name in (*compute.SPREADS, *network.PRESETS))


# --- the time of an iteration -----------------------------------------------------------------------


def times(seconds: float = 0.5, spread: str = "constant", **more: tuple[float, float]) -> compute.StepTimes:
    stragglers, delays = more.get("stragglers", (0.0, 1.0)), more.get("delays", (0.0, 0.0))
    return compute.StepTimes.drawn(100, seconds, compute.sigma_from(spread), stragglers, delays, seed=1)


@pytest.mark.parametrize("spread", ["constant", "log-normal:sigma=0.5"])
def test_the_mean_is_as_given_whatever_the_spread(spread: str) -> None:
    next_seconds = times(spread=spread).of(3)
    drawn = [next_seconds() for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(0.5, rel=0.02) and min(drawn) > 0
    assert (len(set(drawn)) == 1) == (spread == "constant")


def test_stragglers_and_delays_fall_on_their_share_of_the_peers() -> None:
    slow = times(stragglers=(0.25, 4.0))
    assert sorted({slow.of(rank)() for rank in range(100)}) == [0.5, 2.0]
    assert sum(slow.of(rank)() == 2.0 for rank in range(100)) == 25
    late = times(delays=(0.5, 0.25))
    delayed = [rank for rank in range(100) if late.of(rank)() > 0.5]
    assert len(delayed) == 50
    drawn = late.of(delayed[0])
    mean = sum(drawn() - 0.5 for _ in range(20_000)) / 20_000
    assert mean == pytest.approx(0.25 * (2 / 3.14159265) ** 0.5, rel=0.02), "E|N(0, σ)| = σ √(2/π)"


# --- Traces of deltas: those that come with gossipx, and files ---------------------------------------


def test_shipped_traces_are_files_of_the_package_which_a_wheel_has() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    patterns = setup["options.package_data"]["gossipx"].split()
    packaged = {path for pattern in patterns for path in (ROOT / "gossipx").glob(pattern)}
    assert traces.names() == [*RECORDED]
    for name in RECORDED:
        file = ROOT / "gossipx" / "sim" / "traces" / f"{name}.csv"
        assert file in packaged and len(file.read_bytes()) < 150_000


RECORDED = {"lenet": (3000, [37, 38, 38, 37]), "transformer": (800, [12, 10, 10, 13])}
"""The iterations and retrievals of the recorded runs."""


@pytest.mark.parametrize("name", RECORDED)
def test_a_shipped_trace_is_of_four_peers_and_names_its_command(name: str) -> None:
    trace, (iterations, _) = traces.load(name), RECORDED[name]
    assert [len(deltas) for deltas in trace.deltas] == [iterations] * 4
    assert all(delta > 0 for deltas in trace.deltas for delta in deltas)
    assert len({tuple(deltas) for deltas in trace.deltas}) == 4, "peers with data of their own"
    comments = [line for line in (resources.files(traces) / f"{name}.csv").read_text().splitlines() if line[0] == "#"]
    assert any("gossipx run --peers hosts.txt" in line and f"--iterations {iterations}" in line for line in comments)


@pytest.mark.parametrize("name", RECORDED)
def test_travel_with_the_presets_distance_pulls_as_often_as_in_the_recorded_run(name: str) -> None:
    distance = float(PRESETS[name].policies["travel"].partition("=")[2])
    for deltas, retrievals in zip(traces.load(name).deltas, RECORDED[name][1], strict=True):
        pulls, travelled = 0, 0.0
        for delta in deltas:
            travelled += delta
            if travelled > distance:
                pulls, travelled = pulls + 1, 0.0
        assert abs(pulls - retrievals) <= 1, "a pull takes time, which a trace does not have"


def test_a_file(tmp_path: Path) -> None:
    """It has a delta for more peers and iterations than were recorded, too."""
    path = tmp_path / "mine.csv"
    path.write_text("\ufeff# recorded by hand\niteration,a,b\n\n1,0.5,1e-3\n# later\n2,0.25,0\n", encoding="utf-8")
    trace = traces.load(path)
    assert trace == traces.load(str(path)) == traces.Trace([[0.5, 0.25], [0.001, 0.0]])
    assert [trace.delta(rank, 1) for rank in range(5)] == [0.5, 0.001, 0.5, 0.001, 0.5]
    assert [trace.delta(0, step) for step in (1, 2, 3, 1000)] == [0.5, 0.25, 0.25, 0.25]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "mine.csv: a trace has a header, 'iteration' and the name of each peer between commas, and a line per"),
        (b"# only\niteration,a\n", "mine.csv: a trace has a header"),
        (b"step,a\n1,0.5\n", "mine.csv: a trace has a header"),
        (b"iteration,a,b\n1,0.5\n", "mine.csv: each iteration of a trace has a delta of at least 0"),
        (b"iteration,a,b\n1,0.5,1\n2,1\n", "mine.csv: not a trace: the number of columns changed from 3 to 2 at row 2"),
        (b"iteration,a\n1,0.5\n\n3,0.5\n", "mine.csv: the iterations of a trace count from 1 without gaps"),
        (b"iteration,a\n1,long\n", "mine.csv: not a trace: could not convert string 'long' to float64"),
        (b"iteration,a\n1,-0.5\n", "mine.csv: each iteration of a trace has a delta of at"),
        (b"iteration,a\n1,nan\n", "a delta of at least 0 for each peer"),
        (b"\xff\xfe\x00", "mine.csv: cannot read the trace: not UTF-8 text"),
    ],
)
def test_a_malformed_file_is_refused_in_one_line(tmp_path: Path, text: bytes, told: str) -> None:
    (tmp_path / "mine.csv").write_bytes(text)
    with pytest.raises(UsageError) as raised:
        traces.load(tmp_path / "mine.csv")
    message = str(raised.value)
    assert message.startswith(str(tmp_path)) and told in message and "\n" not in message


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.csv: no such trace file"):
        traces.load(tmp_path / "absent.csv")
    told = r"unknown trace 'lenett' .did you mean 'lenet'.*: give a file, or one of lenet, t"
    with pytest.raises(UsageError, match=told):
        traces.load("lenett")
