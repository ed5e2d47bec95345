"""Plots that compare runs: accuracy or loss against traffic and time, and retrievals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossipx.errors import GossipxError, UsageError, how_to_install
from gossipx.metrics.curves import EMPTY, FIGURES, Band, Curves
from gossipx.specs import texts

SUFFIXES = (".png", ".svg")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours that people with colour blindness can distinguish (Okabe and Ito, 2008)."""
STYLES = ("-", "--", ":", "-.")
"""Line styles; the second and later ones are used from the eighth run on."""
LONGEST = 44
"""Largest number of characters per run in the legend."""


@dataclass(frozen=True)
class Drawn:
    """A run, or runs that differ only in their seeds.

    Attributes:
        name: of the run.
        by: policy or sync model.
        curves: of its peers.
        skipped, failed: decisions to exchange that had no effect, and failed exchanges, means over peers.
    """

    name: str
    by: str
    curves: Curves
    skipped: float = 0.0
    failed: float = 0.0


def check_target(target: Path) -> None:
    """Check that a plot can be written to ``target``, before any work is done.

    Raises:
        UsageError: it cannot, or matplotlib is not installed.
    """
    texts.check_target("--plot", target, SUFFIXES)
    check_library("--plot")


def check_library(option: str) -> None:
    """Check that matplotlib is installed.

    Raises:
        UsageError: it is not; names the option that needs it.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{option} needs matplotlib: {how_to_install('plots')}") from error


def draw(runs: Sequence[Drawn], target: Path) -> None:
    """Draw the runs to ``target``, as png or svg; equal runs give equal bytes.

    Raises:
        GossipxError: the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "gossipx", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(11, 7.6), layout="constrained")
        cells = figure.add_gridspec(2, 2)
        panels = [figure.add_subplot(cells[place]) for place in ((0, 0), (0, 1), (1, 0))]
        figure_drawn = min((run.curves.figure for run in runs), key=FIGURES.index)
        drawn = [run.curves.figure == figure_drawn for run in runs]  # a loss has no place on an axis of accuracies
        traffic = [run.curves.by_megabytes if is_drawn else EMPTY for run, is_drawn in zip(runs, drawn, strict=True)]
        seconds = [run.curves.by_seconds if is_drawn else EMPTY for run, is_drawn in zip(runs, drawn, strict=True)]
        _curves(panels[0], traffic, "MB received per peer", f"test {figure_drawn}")
        _curves(panels[1], seconds, "seconds", f"test {figure_drawn}")
        _curves(panels[2], [run.curves.retrievals for run in runs], "iterations", "retrievals per peer")
        titles = (f"{figure_drawn} by traffic", f"{figure_drawn} by time", "retrievals")
        for panel, title in zip(panels, titles, strict=True):
            panel.set_title(title.capitalize())
        names = figure.add_subplot(cells[1, 1])
        names.set_axis_off()
        names.legend(panels[0].get_lines(), [_labelled(run) for run in runs], loc="center", frameon=False)
        metadata = {"Date": None} if target.suffix.lower() == ".svg" else {"Software": None}
        try:
            figure.savefig(target, dpi=150, metadata=metadata)
        except OSError as error:
            raise GossipxError(f"{target}: the plot cannot be written ({error.strerror})") from error


def _curves(panel: Any, bands: Sequence[Band], x: str, y: str) -> None:
    for number, band in enumerate(bands):
        colour = COLOURS[number % len(COLOURS)]
        style = STYLES[number // len(COLOURS) % len(STYLES)]
        marker = "o" if len(band.x) < 30 else ""
        panel.plot(band.x, band.mean, color=colour, linestyle=style, marker=marker, markersize=3, linewidth=1.5)
        panel.fill_between(band.x, band.least, band.most, color=colour, alpha=0.15, linewidth=0)
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.set_xlim(left=0)
    panel.grid(alpha=0.3)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _labelled(run: Drawn) -> str:
    """Return the legend entry of a run; the policy is shortened last, because runs differ in it."""
    name = _short(f"{_short(run.name, max(LONGEST - len(run.by) - 2, LONGEST // 3))}: {run.by}")
    counts = [f"{count:.1f} {what}" for count, what in ((run.skipped, "skipped"), (run.failed, "failed")) if count]
    return "\n".join([name, *([", ".join(counts)] if counts else [])])


def _short(text: str, most: int = LONGEST) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
