"""The report of ``gossipx compare --html``: one file that needs no network."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gossipx.errors import GossipxError, UsageError
from gossipx.launch.directory import CONFIG_FILE, HOSTS_FILE
from gossipx.metrics.board import TensorBoardRecorder
from gossipx.settings import files
from gossipx.tools import recorded, report
from gossipx.tools.report import ReportTable

pytest.importorskip("matplotlib", reason="matplotlib draws the pictures")
COMPARISON = ReportTable("Comparison", ["", "one"], [])


def run(logdir: Path, name: str, policy: str, curves: bool = True) -> Path:
    made = logdir / name
    made.mkdir()
    config = files.resolve({"name": name, "policy": policy, "max_served": 2})
    (made / CONFIG_FILE).write_text(files.dump(config))
    (made / HOSTS_FILE).write_text("localhost name=<a>\nlocalhost:29500 name=b\n")
    for rank in range(2):
        recorder = TensorBoardRecorder(made / f"peer-{rank:02d}")
        for step in (20, 40, 60):
            for tag, value in (("sync/retrievals", step / 10), ("comm/bytes_received", step * 1e6)):
                recorder.scalar(tag, value, step)
            if curves:
                recorder.scalar("time/train_seconds", step / 2, step)
                recorder.scalar("test/accuracy", 0.5 + step / 200, step)
        recorder.close()
    return made


class Page(HTMLParser):
    """Tables of a page as rows of cells, and everything that a browser would load."""

    def __init__(self, text: str):
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.loads: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self.open.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]

    def handle_endtag(self, tag: str) -> None:
        if self.open and tag == self.open[-1]:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open:
            self.tables[-1][-1][-1] += data


def written(tmp_path: Path, *paths: Path) -> str:
    target = tmp_path / "out.html"
    runs = [(path, recorded.read(path)) for path in paths]
    table = ReportTable(
        "Comparison", ["", *(path.name for path in paths)], [["policy & codec", *["<tau>"] * len(paths)]]
    )
    report.write(runs, table, target)
    return target.read_text()


def test_the_report_has_the_picture_and_all_tables_and_loads_nothing(tmp_path: Path) -> None:
    text = written(tmp_path, run(tmp_path, "one", "tau:10"), run(tmp_path, "two", "tau:20"))
    page = Page(text)
    assert text.count("<svg") == 1 and "Accuracy by traffic" in text
    assert all(load.startswith("#") for load in page.loads), page.loads
    assert not re.search(r"url\((?!#)|@import|<script", text)
    comparison, differing, one, two = page.tables
    assert comparison == [["", "one", "two"], ["policy & codec", "<tau>", "<tau>"]]
    assert differing == [["", "one", "two"], ["policy", "tau:10", "tau:20"]], "the setting in which they differ"
    assert one == two
    assert one[0] == ["peer", "", "retrievals", "MB received", "accuracy before finish", "training, s", "blocked, s"]
    assert one[1] == ["<a>", "stopped", "6", "60.0", "0.8000", "30.00", "0.00"]


def test_a_run_without_curves_has_its_tables_and_a_note(tmp_path: Path) -> None:
    text = written(tmp_path, run(tmp_path, "one", "tau:10", curves=False))
    assert "<svg" not in text and "No curves:" in text
    assert len(Page(text).tables) == 2


def test_the_picture_has_the_runs_that_have_curves(tmp_path: Path) -> None:
    text = written(tmp_path, run(tmp_path, "one", "tau:10"), run(tmp_path, "bare", "tau:20", curves=False))
    assert text.count("<svg") == 1 and text.count("No curves:") == 1 and f"{tmp_path / 'bare'}: nothing to plot" in text
    assert len(Page(text).tables) == 4


def test_lost_peers_are_marked(tmp_path: Path) -> None:
    made = run(tmp_path, "one", "tau:10")
    found = dataclasses.replace(recorded.read(made), lost=["b"], stopped=[])
    report.write([(made, found)], COMPARISON, tmp_path / "out.html")
    rows = Page((tmp_path / "out.html").read_text()).tables[-1]
    assert [row[:2] for row in rows[1:]] == [["<a>", ""], ["b", "lost"]]


@pytest.mark.parametrize(
    ("name", "told"), [("out.pdf", "ends with .html"), ("no/out.html", "in an existing directory")]
)
def test_a_target_that_cannot_be_written_is_refused_first(tmp_path: Path, name: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        report.check_target(tmp_path / name)


def test_a_report_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    made = run(tmp_path, "one", "tau:10")
    with pytest.raises(GossipxError, match="the report cannot be written"):
        report.write([(made, recorded.read(made))], COMPARISON, tmp_path / "no" / "out.html")
