"""Scenario files: what they may say, and how a mistake in one is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gossipx.errors import UsageError
from gossipx.launch.simulation import scenarios
from gossipx.settings.scenario import OF_FAULT, OWN, load
from gossipx.sim import compute
from gossipx.sim.network import PRESETS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "simulate.md"
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
        (REAL + '[churn]\nstate = "kept"\nrate = 1\n[run]\ncheckpoint_every = 0\n', "no effect without checkpoints"),
    ],
)
def test_settings_that_exclude_or_need_each_other(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        load(written(tmp_path, text), {})


def test_a_scenario_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match=r"did you mean 'thousand'.*give a TOML file, or one of"):
        scenarios.find("thousnd")


def test_the_page_names_every_setting_and_value() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for key in [*OWN.values(), *OF_FAULT.values()]:
        assert f"`{key.name}`" in text or f"`{key.name} =" in text, key.name
        for word in key.choices:
            assert f"`{word}`" in text or f'"{word}"' in text, word
    assert all(f"`{name}" in text for name in (*compute.SPREADS, *PRESETS))


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
