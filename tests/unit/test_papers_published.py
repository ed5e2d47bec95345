"""The published figures of bin/_papers: each file can be read, and each figure says where in its paper it is."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "bin" / "_papers"
NAMES = ("3lc", "adaptive-gossip", "diloco", "fluentps", "hybrid", "modular-server")


@pytest.fixture(scope="module")
def published() -> Iterator[Any]:
    """Import the module, which is in no package."""
    sys.path.append(str(FOLDER))
    yield importlib.import_module("published")
    sys.path.remove(str(FOLDER))
    for name in ("published", "_table"):
        sys.modules.pop(name, None)


def groups(setting: Mapping[str, Any], path: str = "setting") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Return the tables of settings that have values, by path."""
    if any(not isinstance(value, dict) for value in setting.values()):
        yield path, setting
    for key, value in setting.items():
        if isinstance(value, dict):
            yield from groups(value, f"{path}.{key}")


@pytest.mark.parametrize("name", NAMES)
def test_each_figure_has_a_value_a_unit_and_a_place(published: Any, name: str) -> None:
    """And so has each claim and each group of settings."""
    paper = published.read(name)
    assert paper.title and paper.authors and paper.figures and paper.claims and paper.setting
    for id, figure in paper.figures.items():
        assert figure.id == id
        assert type(figure.value) in (int, float) and math.isfinite(figure.value), id
        assert figure.unit.strip() and figure.place.strip(), id
        assert id.startswith("derived/") == bool(figure.derived), id
    for id, claim in paper.claims.items():
        assert claim.says.strip() and claim.place.strip(), id
    assert not [path for path, settings in groups(paper.setting) if not settings.get("place", "").strip()]


def test_a_value_of_a_table_is_found_by_row_and_column(published: Any) -> None:
    gossip, codec = published.read("adaptive-gossip"), published.read("3lc")
    assert gossip.figures["table-2/retrievals/alexnet/adaptive"].value == 365
    assert gossip.figures["table-2/time/convnet/tau:10"].value == 30
    assert str(codec.figures["table-1/3LC (s=1.75)/10mbit"]) == "22.8 times", "a unit per column"
    assert str(codec.figures["table-1/3LC (s=1.75)/accuracy"]) == "93.51 %"
    assert str(codec.figures["abstract/speedup/most"]) == "up to 23 times"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('id = "figure-6/never/time"', 'id = "table-2/time/alexnet/tau:10"', "twice: table-2/time/alexnet/tau:10"),
        ("365, 5000, 532, 5000, 250]", "365, 5000, 532, 5000]", "shorter"),
        ("365, 5000, 532, 5000, 250]", "365, 5000, 532, 5000, 250, 1]", "longer"),
    ],
)
def test_a_repeated_id_and_a_row_of_another_length_are_refused(
    published: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, message: str
) -> None:
    text = (FOLDER / "adaptive-gossip.toml").read_text(encoding="utf-8")
    (tmp_path / "changed.toml").write_text(text.replace(old, new), encoding="utf-8")
    monkeypatch.setattr(published, "HERE", tmp_path)
    with pytest.raises(ValueError, match=message):
        published.read("changed")


@pytest.mark.parametrize(
    ("value", "qualifier", "unit", "ours", "half", "agreement"),
    [
        (1440, "", "min", 1000, None, "yes"),
        (1440, "", "min", 694, None, "other size"),  # less than half
        (1.5, "", "points", -1.5, None, "NO"),
        (1.5, "", "points", 2, 2.5, "–"),
        (-0.1, "", "loss", -0.15, 0.1, "yes"),
        (1.38, "", "times SSP", 1.2, None, "yes"),  # of a ratio, what is above 1 is compared
        (1.38, "", "×", 1.06, None, "other size"),
        (28.5, "up to", "%", 15, None, "yes"),
        (28.5, "up to", "%", 1, None, "other size"),
        (56.9, "at least", "points", 20, None, "other size"),
        (5, "within", "points", -3, None, "yes"),
        (5, "within", "points", 5.1, None, "NO"),
    ],
)
def test_all_figures_agree_by_one_rule(
    published: Any, value: float, qualifier: str, unit: str, ours: float, half: float | None, agreement: str
) -> None:
    """The direction, and the size within a factor of two."""
    table = importlib.import_module("_table")
    line = table.Line("it", published.Figure("", value, unit, "Table 1", qualifier), ours, unit, half=half)
    assert line.agreement == agreement
    assert line.figure["met"] == {"yes": True, "–": None}.get(agreement, False)
    assert line.direction == {"NO": False, "–": None}.get(agreement, True)


def test_a_statement_agrees_or_not_and_a_figure_says_it_itself(published: Any) -> None:
    table = importlib.import_module("_table")
    claim = published.Claim("", "it grows", "section 1")
    for agrees, word in ((True, "yes"), (False, "NO"), (None, "–")):
        assert table.Line("it", claim, 3.0, "", agrees).agreement == word
    figure = published.Figure("", 8.0, "times the computation time", "Figure 1")
    assert table.Line("it", figure, 0.2, figure.unit, none=0.0).agreement == "other size"
    assert table.Line("it", figure, 0.2, "s").agreement == "–", "in another unit"
    with pytest.raises(ValueError, match="it: whether it agrees follows"):
        table.Line("it", figure, 0.2, figure.unit, True)
