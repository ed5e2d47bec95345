"""``gossipx compare --html``: a comparison as one HTML file, with its pictures and tables, that needs no network."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossipx.errors import GossipxError, UsageError
from gossipx.figures import FIGURES
from gossipx.launch.directory import HOSTS_FILE, settings_in
from gossipx.launch.hosts import read_hosts
from gossipx.metrics import curves, plot
from gossipx.metrics.summary import Summary
from gossipx.settings import files
from gossipx.specs import texts
from gossipx.tools import plot as plotting
from gossipx.tools.templates import filled

_COLUMNS = tuple(figure for figure in FIGURES if figure.where.column)
"""Figures in the table of a run's peers: those that have a heading for it. Columns without a value are left out."""
_SHOWN = {"bytes": (1e-6, ".1f"), "share": (1.0, ".4f"), "nats": (1.0, ".4f"), "s": (1.0, ".2f")}
"""Factor and format of figures by their unit; others are whole numbers."""
NOT_COMPARED = ("name", "peers", "logdir", "overwrite")
"""Settings in which all runs differ, or that say only where a run is."""


@dataclass(frozen=True)
class ReportTable:
    """A table of the report: its heading, the headings of its columns, and the cells of its rows."""

    heading: str
    columns: Sequence[str | None]
    rows: Sequence[Sequence[str]]


def check_target(target: Path) -> None:
    """Check that a report can be written to ``target``, before any work is done.

    Raises:
        UsageError: it cannot, or matplotlib is not installed.
    """
    texts.check_target("--html", target, (".html", ".htm"))
    plot.check_library("--html")


def write(runs: Sequence[tuple[Path, Summary]], comparison: ReportTable, target: Path) -> None:
    """Write the report.

    Args:
        runs: the runs' directories, or their summaries' files, and their summaries.
        comparison: of the runs.
        target: the file.

    Raises:
        GossipxError: it cannot be written.
    """
    picture, notes = _picture(runs)
    page = filled(
        "report.html",
        title=f"gossipx: {', '.join(summary.name for _, summary in runs)}",
        picture=picture,
        notes=notes,
        tables=[comparison, *_settings(runs), *(_peers(path, summary) for path, summary in runs)],
    )
    try:
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise GossipxError(f"{target}: the report cannot be written ({error.strerror})") from error


def _directory_of(path: Path) -> Path:
    """Return the directory of a run that was given by its directory, or by its summary's file."""
    return path if path.is_dir() else path.parent


def _picture(runs: Sequence[tuple[Path, Summary]]) -> tuple[str, list[str]]:
    """Return the plot of the runs that have curves, as SVG, and why others have none; empty: no run has curves."""
    drawable, notes = [], []
    for path, summary in runs:
        try:
            curves.read(_directory_of(path))
            drawable.append((path, summary))
        except UsageError as error:
            notes.append(str(error))
    if not drawable:
        return "", notes
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plot.svg"
        try:
            plotting.draw(drawable, file)
        except UsageError as error:
            return "", [str(error)]
        drawn = file.read_text(encoding="utf-8")
    return drawn[drawn.index("<svg") :], notes  # without the prologue, which belongs to its own file


def _settings(runs: Sequence[tuple[Path, Summary]]) -> list[ReportTable]:
    """Return the table of the settings in which the runs differ, if there are such."""
    found: list[Mapping[str, Any]] = []
    for path, _ in runs:
        try:
            tables = files.resolve(settings_in(_directory_of(path))).tables
        except UsageError:  # only the summary was kept
            return []
        found.append({name: value for table in tables.values() for name, value in table.items()})
    differing = [
        name
        for name in found[0]
        if name not in NOT_COMPARED and any(settings[name] != found[0][name] for settings in found)
    ]
    if not differing:
        return []
    rows = [[name, *("–" if one[name] is None else str(one[name]) for one in found)] for name in differing]
    return [ReportTable("Settings that differ", ["", *(summary.name for _, summary in runs)], rows)]


def _peers(path: Path, summary: Summary) -> ReportTable:
    hosts = _directory_of(path) / HOSTS_FILE
    names = [line.name for line in read_hosts(hosts)] if hosts.is_file() else []
    if len(names) != summary.peers:
        names = [f"peer {rank}" for rank in range(summary.peers)]
    shown = [one for one in _COLUMNS if any(value is not None for value in summary.figures[one.name])]
    states = [_state(name, summary) for name in names]
    rows = [
        [name, state, *(_cell(summary.figures[one.name][rank], one.unit) for one in shown)]
        for rank, (name, state) in enumerate(zip(names, states, strict=True))
    ]
    return ReportTable(f"Peers of {summary.name}", ["peer", "", *(one.where.column for one in shown)], rows)


def _state(name: str, summary: Summary) -> str:
    return "lost" if name in summary.lost else "stopped" if name in summary.stopped else ""


def _cell(value: float | None, unit: str) -> str:
    factor, form = _SHOWN.get(unit, (1.0, ".0f"))
    return "–" if value is None else format(value * factor, form)
