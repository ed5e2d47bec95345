"""The declarations of figures: each reaches every place that shows figures, under the names that files have."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from figure_tables import TABLES, written
from summaries import summary_of

from gossipx.cli.results import _lines
from gossipx.figures import COUNTED, FIGURES, LINES, PER_PEER, Counters
from gossipx.metrics import summary
from gossipx.metrics.aggregate import WORST
from gossipx.metrics.compare import compare
from gossipx.metrics.prometheus import Exporter
from gossipx.peer.server_role import Total
from gossipx.runtime.figures.measured import Figures
from gossipx.runtime.figures.reporting import Reporter
from gossipx.tools import recorded


def ended(**figures: list[float | None]) -> summary.Summary:
    return summary_of(*[dict.fromkeys(PER_PEER, 0)] * 2, **figures)


def test_each_place_shows_a_name_once() -> None:
    for of_place in (
        [figure.name for figure in FIGURES if figure.where.summary],
        [figure.where.prometheus for figure in FIGURES if figure.where.prometheus],
        [figure.where.tag for figure in FIGURES if figure.where.tag],
        [line.key for _, line in LINES],
        [line.heading for _, line in LINES],
    ):
        assert len(set(of_place)) == len(of_place)


def test_names_of_curves_that_are_read_back() -> None:
    assert recorded._TAGS["retrievals"] == "sync/retrievals" and "test_accuracy" not in recorded._TAGS
    assert (WORST["test/accuracy"], WORST["test/loss"], WORST["train/loss"]) == (min, max, None)


@pytest.mark.fault(12, 15, 22, 57)
@pytest.mark.parametrize("name", COUNTED)
def test_a_counter_is_shown_wherever_figures_are(name: str, tmp_path: Path) -> None:
    """A peer counts twice, another one once; the checkpoint of the first has counted three before."""
    counts = Counters()
    counts.add(name)
    counts.add(name)
    earlier, resumed = Figures(lambda: 1.0), Figures(lambda: 1.0)
    resumed.load_state_dict(earlier.state_dict(0, 0, counts | {name: 3}))
    of_first = resumed.all_counts(counts)[name]
    assert of_first == 5
    ended(**{name: [of_first, 1]}).write(tmp_path)
    [row] = rows = compare([summary.read(tmp_path)])
    total = 5 if name == "shard_rollbacks" else 6  # each worker sees the same one
    assert row.as_dict()[name] == total
    [line] = [line for figure, line in LINES if figure.name == name]
    assert [cell(row) for heading, cell in _lines(rows) if heading == line.heading] == [str(total)]
    exporter: Any = SimpleNamespace(_sample=lambda family, name, *rest, **labels: (name, rest[1]))
    core = SimpleNamespace(CounterMetricFamily=None, GaugeMetricFamily=None)
    exporter._prometheus, exporter._status = SimpleNamespace(core=core), lambda: {**counts, "stage": "train"}
    [shown] = [figure.where.prometheus for figure in FIGURES if figure.name == name]
    assert (shown, 2) in Exporter.collect(exporter)


def test_what_is_not_declared_is_not_counted() -> None:
    with pytest.raises(KeyError):
        Counters().add("reconnects")
    assert not {line.heading for figure, line in LINES if figure.name in COUNTED} & {
        heading for heading, _ in _lines(compare([ended()]))
    }, "and what did not happen has no line"


@pytest.mark.parametrize(("was", "name"), [("taken_in", "merged_by_hub"), ("set_back", "shard_rollbacks")])
def test_files_of_earlier_versions_are_read(was: str, name: str, tmp_path: Path) -> None:
    """With other names, and without a counter that came later."""
    data = ended(**{name: [3, 4]}).as_dict()
    data[was] = data.pop(name)
    del data["outliers"]
    (tmp_path / summary.FILE).write_text(json.dumps(data), encoding="utf-8")
    found = summary.read(tmp_path)
    assert getattr(found, name) == [3, 4] and found.outliers == [None, None]
    figures = Figures(lambda: 1.0)
    state = figures.state_dict(0, 0, Counters())
    state["before"] = {"set_back" if key == "shard_rollbacks" else key: 7 for key in state["before"]}
    figures.load_state_dict(state)
    assert figures.earlier.counts["shard_rollbacks"] == 7


@pytest.mark.parametrize("page", TABLES)
def test_the_pages_have_the_tables_of_the_declarations(page: str) -> None:
    found, wanted = written(page)
    assert found == wanted, "run bin/docs"


# --- The curves of a server ----------------------------------------------------------------------------


def test_a_total_is_recorded_as_the_mean_since_the_last_record() -> None:
    now: dict[str, Any] = {}
    recorded: list[tuple[str, float, int]] = []
    role = SimpleNamespace(server=SimpleNamespace(metrics=now))
    driver: Any = SimpleNamespace(role=role, arena=None, read=lambda look: look(role), now=time.monotonic)
    recorder: Any = SimpleNamespace(scalar=lambda *record: recorded.append(record))
    unused: Any = None
    place: Any = SimpleNamespace(progress=None)
    reporter = Reporter(unused, driver, unused, recorder, unused, place, "")
    for step, total, clock in ((5, (6, 3), 4), (7, (8, 4), 6), (10, (26, 7), 9), (20, (26, 7), 9), (30, (1, 1), 29)):
        now.update({"staleness": (step, Total(*total)), "clock": (step, clock)})
        reporter.record_server_metrics(every=5)
    assert [record for record in recorded if record[0] == "clock"] == [
        *(("clock", 4, 5), ("clock", 9, 10), ("clock", 9, 20), ("clock", 29, 30))
    ]
    # Nothing was applied from 10 to 20. At 30 the shard has moved here from another peer, and counts anew.
    assert [record for record in recorded if record[0] == "staleness"] == [("staleness", 2, 5), ("staleness", 5, 10)]
