"""Plots of runs: reading real event files, and drawing them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gossipx.errors import UsageError
from gossipx.metrics import TensorBoardRecorder, curves, plot
from gossipx.metrics.curves import EMPTY, Curves
from gossipx.metrics.plot import Drawn


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
    found = curves.read(written(tmp_path))
    by = found.by_megabytes  # at 10 and 20: the second peer has no 30
    np.testing.assert_allclose(by.x, [1.5, 3.0])
    np.testing.assert_allclose(by.mean, [0.15, 0.3], rtol=1e-6)
    np.testing.assert_allclose(by.least, [0.1, 0.2], rtol=1e-6)
    np.testing.assert_allclose(by.most, [0.2, 0.4], rtol=1e-6)
    np.testing.assert_allclose(found.retrievals.x, [0, 10, 20, 30])
    np.testing.assert_allclose(found.retrievals.mean, [0, 1.5, 3, 4.5])
    np.testing.assert_allclose(found.by_seconds.x, [15, 30])


def test_traffic_between_two_records_is_interpolated(tmp_path: Path) -> None:
    found = curves.read(written(tmp_path, peers=1, tests=(5, 25)))
    np.testing.assert_allclose(found.by_megabytes.x, [0.5, 2.5])


def test_seeds_share_a_curve(tmp_path: Path) -> None:
    """Two peers of one run and one of another: the band covers all three."""
    found = curves.read(written(tmp_path / "one"), written(tmp_path / "two", peers=1))
    np.testing.assert_allclose(found.by_megabytes.mean, np.array([0.1 + 0.2 + 0.1, 0.2 + 0.4 + 0.2]) / 3, rtol=1e-6)
    np.testing.assert_allclose(found.by_megabytes.most, [0.2, 0.4], rtol=1e-6)
    np.testing.assert_allclose(found.retrievals.mean, np.array([0, 4, 8, 12]) / 3)
    np.testing.assert_allclose(found.by_seconds.x, [(10 + 20 + 10) / 3, (20 + 40 + 20) / 3])


def test_a_run_without_accuracies_has_its_losses_drawn(tmp_path: Path) -> None:
    text = curves.read(written(tmp_path / "text", figure="loss"))
    assert text.figure == "loss" and len(text.by_megabytes.x) == 2
    images = curves.read(written(tmp_path / "images"))
    drawn = {}
    for name, found in {"loss": [text], "accuracy": [text, images]}.items():
        runs = [Drawn(f"run-{number}", "tau:10", one) for number, one in enumerate(found)]
        plot.draw(runs, tmp_path / f"{name}.svg")
        drawn[name] = (tmp_path / f"{name}.svg").read_text()
    assert "Loss by traffic" in drawn["loss"] and "test loss" in drawn["loss"]
    assert "Accuracy by traffic" in drawn["accuracy"] and "test loss" not in drawn["accuracy"]


def test_a_run_without_curves_is_reported(tmp_path: Path) -> None:
    (tmp_path / "peer-00").mkdir()
    with pytest.raises(
        UsageError, match="nothing to plot: none of its peers has recorded all of comm/bytes_received, "
    ):
        curves.read(tmp_path)


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


def test_a_run_without_accuracies_has_its_retrievals_drawn(tmp_path: Path) -> None:
    found = curves.read(written(tmp_path / "run", tests=()))
    np.testing.assert_allclose(found.retrievals.mean, [0, 1.5, 3, 4.5])
    assert found.by_megabytes.x.size == found.by_seconds.x.size == 0
    plot.draw([Drawn("run", "tau:10", found)], tmp_path / "one.png")


def test_a_long_name_is_shortened_before_the_policy() -> None:
    label = plot._labelled(Drawn("n" * 60, "adaptive:threshold=0.02", Curves(EMPTY, EMPTY, EMPTY)))
    assert label.endswith("…: adaptive:threshold=0.02") and len(label) == plot.LONGEST


def test_invalid_targets_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    for name, told in (("x.pdf", r"ends with \.png or \.svg"), ("none/x.png", "in an existing directory")):
        with pytest.raises(UsageError, match=told):
            plot.check_target(tmp_path / name)
