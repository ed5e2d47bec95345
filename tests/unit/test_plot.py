"""Plots and reports of runs: reading real event files, and drawing them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gossipx.errors import GossipxError, UsageError
from gossipx.launch.directory import CONFIG_FILE, HOSTS_FILE
from gossipx.metrics import TensorBoardRecorder, curves, plot
from gossipx.metrics.plot import Drawn
from gossipx.settings import files
from gossipx.tools import recorded, report, tune
from gossipx.tools.report import ReportTable


def written(folder: Path, peers: int = 2, tests: tuple[int, ...] = (10, 20, 30), figure: str = "accuracy") -> Path:
    """Write a run's curves: peer p has accuracy .1·(p+1)·i/10, and receives 1 MB·(p+1) in 10·(p+1) s, per 10 steps."""
    for peer in range(peers):
        recorder = TensorBoardRecorder(folder / f"peer-{peer:02d}")
        for step in (0, 10, 20, 30):
            recorder.scalar("comm/bytes_received", 1e5 * (peer + 1) * step, step)
            recorder.scalar("sync/retrievals", step // 10 * (peer + 1), step)
            recorder.scalar("time/train_seconds", (peer + 1) * step, step)
        for step in tests[: len(tests) - peer]:
            recorder.scalar(f"test/{figure}", 0.01 * (peer + 1) * step, step)
        recorder.close()
    return folder


def test_curves_are_means_over_peers_with_the_least_and_the_most(tmp_path: Path) -> None:
    found = curves.read(written(tmp_path / "two"))
    by = found.by_megabytes  # at 10 and 20: the second peer has no 30
    np.testing.assert_allclose(by.x, [1.5, 3.0])
    np.testing.assert_allclose(by.mean, [0.15, 0.3], rtol=1e-6)
    np.testing.assert_allclose(by.least, [0.1, 0.2], rtol=1e-6)
    np.testing.assert_allclose(by.most, [0.2, 0.4], rtol=1e-6)
    np.testing.assert_allclose(found.retrievals.x, [0, 10, 20, 30])
    np.testing.assert_allclose(found.retrievals.mean, [0, 1.5, 3, 4.5])
    np.testing.assert_allclose(found.by_seconds.x, [15, 30])
    between = curves.read(written(tmp_path / "between", peers=1, tests=(5, 25)))
    np.testing.assert_allclose(between.by_megabytes.x, [0.5, 2.5])  # the traffic between two records is interpolated


def test_seeds_share_a_curve(tmp_path: Path) -> None:
    """Two peers of one run and one of another: the band covers all three."""
    found = curves.read(written(tmp_path / "one"), written(tmp_path / "two", peers=1))
    np.testing.assert_allclose(found.by_megabytes.mean, np.array([0.1 + 0.2 + 0.1, 0.2 + 0.4 + 0.2]) / 3, rtol=1e-6)
    np.testing.assert_allclose(found.by_megabytes.most, [0.2, 0.4], rtol=1e-6)
    np.testing.assert_allclose(found.retrievals.mean, np.array([0, 4, 8, 12]) / 3)
    np.testing.assert_allclose(found.by_seconds.x, [(10 + 20 + 10) / 3, (20 + 40 + 20) / 3])


def test_a_run_without_accuracies_has_its_losses_drawn(tmp_path: Path) -> None:
    """And one without either its retrievals."""
    text = curves.read(written(tmp_path / "text", figure="loss"))
    assert text.figure == "loss" and len(text.by_megabytes.x) == 2
    images, bare = curves.read(written(tmp_path / "images")), curves.read(written(tmp_path / "bare", tests=()))
    np.testing.assert_allclose(bare.retrievals.mean, [0, 1.5, 3, 4.5])
    assert bare.by_megabytes.x.size == bare.by_seconds.x.size == 0
    for found, has, has_not in (
        ([text], ["Loss by traffic", "test loss"], "Accuracy"),
        ([text, images], ["Accuracy by traffic"], "test loss"),
        ([bare], ["Retrievals"], "test loss"),
    ):
        runs = [Drawn(f"run-{number}", "tau:10", one) for number, one in enumerate(found)]
        plot.draw(runs, tmp_path / "one.svg")
        drawn = (tmp_path / "one.svg").read_text()
        assert all(words in drawn for words in has) and has_not not in drawn


def test_a_plot_shows_the_runs_and_is_reproducible(tmp_path: Path) -> None:
    found = curves.read(written(tmp_path))
    runs = [Drawn(f"run-{number}", "tau:10", found, 0.5 * number, number // 8) for number in range(9)]
    for name in ("one.svg", "two.svg", "one.png"):
        plot.draw(runs, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    text = set(re.findall(r">([^<>]+)</text>", (tmp_path / "one.svg").read_text()))
    assert {f"run-{number}: tau:10" for number in range(9)} <= text
    assert {"0.5 skipped", "4.0 skipped, 1.0 failed"} <= text and "0.0 skipped" not in text
    assert {"Accuracy by traffic", "Accuracy by time", "Retrievals", "MB received per peer"} <= text
    with Image.open(tmp_path / "one.png") as picture:
        assert picture.size == (1650, 1140)
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 50


# --- the report of ``gossipx compare --html``: one file that needs no network -------------------------


def run(logdir: Path, name: str, policy: str = "tau:10", has_curves: bool = True) -> Path:
    made = logdir / name
    made.mkdir()
    config = files.resolve({"name": name, "policy": policy, "max_served": 2})
    (made / CONFIG_FILE).write_text(files.dump(config))
    (made / HOSTS_FILE).write_text("localhost name=<a>\nlocalhost:29500 name=b\n")
    if has_curves:
        return written(made, tests=(10, 20, 30))
    recorder = TensorBoardRecorder(made / "peer-00")
    recorder.scalar("sync/retrievals", 3, 30)
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


def reported(folder: Path, *paths: Path) -> str:
    """Return the text of the report of these runs."""
    row = ["policy & codec", *["<tau>"] * len(paths)]
    table = ReportTable("Comparison", ["", *(path.name for path in paths)], [row])
    report.write([(path, recorded.read(path)) for path in paths], table, folder / "out.html")
    return (folder / "out.html").read_text()


def test_the_report_has_the_picture_and_all_tables_and_loads_nothing(tmp_path: Path) -> None:
    text = reported(tmp_path, run(tmp_path, "one"), run(tmp_path, "two", "tau:20"))
    page = Page(text)
    assert text.count("<svg") == 1 and "Accuracy by traffic" in text
    assert all(load.startswith("#") for load in page.loads), page.loads
    assert not re.search(r"url\((?!#)|@import|<script", text)
    comparison, differing, one, two = page.tables
    assert comparison == [["", "one", "two"], ["policy & codec", "<tau>", "<tau>"]]
    assert differing == [["", "one", "two"], ["policy", "tau:10", "tau:20"]], "the setting in which they differ"
    assert one == two
    assert one[0] == ["peer", "", "retrievals", "MB received", "accuracy before finish", "training, s", "blocked, s"]
    assert one[1] == ["<a>", "stopped", "3", "3.0", "0.3000", "30.00", "0.00"]


def test_the_picture_has_the_runs_that_have_curves(tmp_path: Path) -> None:
    """The others have their tables, and a note."""
    bare = run(tmp_path, "bare", "tau:20", has_curves=False)
    told = f"{bare}: nothing to plot: none of its peers has recorded all of comm/bytes_received, "
    for paths, pictures, tables in (([bare], 0, 2), ([run(tmp_path, "one"), bare], 1, 4)):
        text = reported(tmp_path, *paths)
        assert (text.count("<svg"), text.count("No curves:"), len(Page(text).tables)) == (pictures, 1, tables)
        assert told in text


def test_lost_peers_are_marked(tmp_path: Path) -> None:
    made = run(tmp_path, "one")
    found = dataclasses.replace(recorded.read(made), lost=["b"], stopped=[])
    table = ReportTable("Comparison", ["", "one"], [])
    report.write([(made, found)], table, tmp_path / "out.html")
    rows = Page((tmp_path / "out.html").read_text()).tables[-1]
    assert [row[:2] for row in rows[1:]] == [["<a>", ""], ["b", "lost"]]
    with pytest.raises(GossipxError, match="the report cannot be written"):
        report.write([(made, found)], table, tmp_path / "no" / "out.html")


@pytest.mark.parametrize(
    ("check", "name", "told"),
    [
        (plot.check_target, "out.pdf", r"ends with \.png or \.svg"),
        (plot.check_target, "no/out.png", "in an existing directory"),
        (report.check_target, "out.pdf", r"ends with \.html"),
        (report.check_target, "no/out.html", "in an existing directory"),
        (tune.check_target, "run.toml", "the file exists"),
        (tune.check_target, "no/run.toml", "in an existing directory"),
    ],
)
def test_a_target_that_cannot_be_written_is_refused_before_anything_is_read_or_measured(
    tmp_path: Path, check: Callable[[Path], None], name: str, told: str
) -> None:
    (tmp_path / "run.toml").touch()
    with pytest.raises(UsageError, match=told):
        check(tmp_path / name)
