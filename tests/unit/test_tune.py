"""``gossipx tune``: the choice from measured figures, and the file with the chosen settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gossipx.errors import UsageError
from gossipx.settings import files
from gossipx.settings.sections import RunConfig
from gossipx.tools.tune import CANDIDATES, Measured, Tuned, choose, write


def measured(*exchange_seconds: float, step_seconds: float = 0.1) -> list[Measured]:
    """Return figures of the candidates with these durations of exchanges; a negative one has no figures."""
    return [
        Measured(candidate.name, "", why="failed")
        if seconds < 0
        else Measured(
            candidate.name,
            "",
            step_seconds=step_seconds,
            model_bytes=1e6,
            exchange_seconds=seconds,
            blocked=0.02,
            period=int(str(candidate.settings["policy"]).removeprefix("tau:")),
        )
        for candidate, seconds in zip(CANDIDATES, exchange_seconds, strict=True)
    ]


def test_figures_per_thousand_iterations() -> None:
    """By hand: 1 MB every 10 iterations of 0.1 s, 0.25 s each, 2 % blocked."""
    [pulls, _, _] = measured(0.25, 0.1, 0.1)
    assert pulls.share == pytest.approx(0.25)
    assert pulls.megabytes == pytest.approx(100.0)
    assert pulls.blocked_seconds == pytest.approx(2.0)
    assert pulls.rate == pytest.approx(4e6)


DEFAULT, CODED, PAIRS = (candidate.settings for candidate in CANDIDATES)


@pytest.mark.parametrize(
    ("seconds", "expected", "told"),
    [
        ((0.5, 0.01, 0.01), DEFAULT, "exchanges take these shares of the time between two: pulls 50%, pulls, 3LC 1%"),
        ((0.6, 0.1, 0.02), CODED, "pulls 60%"),
        ((-1, 0.1, 0.1), CODED, ""),
        # Pairs of 1 s each need 20 iterations of 0.1 s to take half of the time.
        ((30.0, 5.0, 1.0), {**PAIRS, "policy": "tau:20"}, "pairs, one bit 200%"),
        ((30.0, 5.0, 1.0), {**PAIRS, "policy": "tau:20"}, "of pairs, one bit with tau:20, 50% at most"),
        # Exchanges of 0.9 s each need 18 iterations, whatever their size: fewer bytes would only cost values.
        ((0.9, 0.9, 0.9), {"policy": "tau:18"}, ""),
    ],
)
def test_a_link_gets_the_first_kind_of_exchange_that_it_carries_or_a_longer_period(
    seconds: tuple[float, ...], expected: dict[str, Any], told: str
) -> None:
    """A candidate without figures is not chosen."""
    chosen, reason = choose(measured(*seconds))
    assert chosen == expected and told in reason


def test_the_file_has_the_chosen_settings_and_those_given(tmp_path: Path) -> None:
    chosen, _ = choose(measured(30.0, 5.0, 1.0))
    given = files.resolve({}, {"peers": "hosts.txt", "batch_size": 16})
    target = tmp_path / "run.toml"
    write(Tuned([], chosen, "", True), given, target)
    found = files.resolve(files.load(target))
    assert (found.run.peers, found.task.batch_size) == ("hosts.txt", 16)
    assert {name: found.values[name] for name in chosen} == chosen
    assert found.given == {"peers", "batch_size", *chosen}
    with pytest.raises(UsageError, match="the file exists"):
        write(Tuned([], chosen, "", True), RunConfig(), target)
