"""``gossipx compare --html``: a comparison as one HTML file, with its pictures and tables, that needs no network."""

from __future__ import annotations

import html
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

_COLUMNS = tuple(figure for figure in FIGURES if figure.where.column)
"""Figures in the table of a run's peers. Columns without a value are left out."""
_SHOWN = {"bytes": (1e-6, ".1f"), "share": (1.0, ".4f"), "nats": (1.0, ".4f"), "s": (1.0, ".2f")}
"""Factor and format of figures by their unit; others are whole numbers."""
NOT_COMPARED = ("name", "peers", "logdir", "overwrite")
"""Settings in which all runs differ, or that say only where a run is."""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1a1a1a; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 2px solid #888; vertical-align: bottom; }
.scroll { overflow-x: auto; } svg { width: 100%; height: auto; } .note { color: #555; }
"""


@dataclass(frozen=True)
class Compared:
    """The table of a comparison as text: a heading per column, and per line a heading and its cells."""

    columns: Sequence[str]
    lines: Sequence[tuple[str, Sequence[str]]]


def check_target(target: Path) -> None:
    """Check that a report can be written to ``target``, before any work is done.

    Raises:
        UsageError: it cannot, or matplotlib is not installed.
    """
    texts.check_target("--html", target, (".html", ".htm"))
    plot.check_library("--html")


def write(runs: Sequence[tuple[Path, Summary]], compared: Compared, target: Path) -> None:
    """Write the report.

    Args:
        runs: the runs' directories and summaries.
        compared: their comparison.
        target: the file.

    Raises:
        GossipxError: it cannot be written.
    """
    names = ", ".join(summary.name for _, summary in runs)
    parts = [
        f"<h1>gossipx: {html.escape(names)}</h1>",
        _picture(runs),
        "<h2>Comparison</h2>",
        _table(["", *compared.columns], [[heading, *cells] for heading, cells in compared.lines]),
        *_settings(runs),
    ]
    for path, summary in runs:
        parts += [f"<h2>Peers of {html.escape(summary.name)}</h2>", _peers(path, summary)]
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>gossipx: {html.escape(names)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )
    try:
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise GossipxError(f"{target}: the report cannot be written ({error.strerror})") from error


def _picture(runs: Sequence[tuple[Path, Summary]]) -> str:
    """Return the plot of the runs that have curves as elements of the page, with a note on each that has none."""
    drawable, notes = [], []
    for path, summary in runs:
        try:
            curves.read(path if path.is_dir() else path.parent)
            drawable.append((path, summary))
        except UsageError as error:
            notes.append(f'<p class="note">No curves: {html.escape(str(error))}</p>')
    if not drawable:
        return "\n".join(notes)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plot.svg"
        try:
            plotting.draw(drawable, file)
        except UsageError as error:
            return f'<p class="note">No curves: {html.escape(str(error))}</p>'
        drawn = file.read_text(encoding="utf-8")
    return "\n".join([drawn[drawn.index("<svg") :], *notes])  # without the prologue, which belongs to its own file


def _settings(runs: Sequence[tuple[Path, Summary]]) -> list[str]:
    """Return the table of the settings in which the runs differ."""
    found: list[Mapping[str, Any]] = []
    for path, _ in runs:
        try:
            tables = files.resolve(settings_in(path if path.is_dir() else path.parent)).tables
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
    return ["<h2>Settings that differ</h2>", _table(["", *(summary.name for _, summary in runs)], rows)]


def _peers(path: Path, summary: Summary) -> str:
    directory = path if path.is_dir() else path.parent
    hosts = directory / HOSTS_FILE
    names = [line.name for line in read_hosts(hosts)] if hosts.is_file() else []
    if len(names) != summary.peers:
        names = [f"peer {rank}" for rank in range(summary.peers)]
    shown = [one for one in _COLUMNS if any(value is not None for value in summary.figures[one.name])]
    states = [_state(name, summary) for name in names]
    rows = [
        [name, state, *(_cell(summary.figures[one.name][rank], one.unit) for one in shown)]
        for rank, (name, state) in enumerate(zip(names, states, strict=True))
    ]
    return _table(["peer", "", *(one.where.column for one in shown)], rows)


def _state(name: str, summary: Summary) -> str:
    return "lost" if name in summary.lost else "stopped" if name in summary.stopped else ""


def _cell(value: float | None, unit: str) -> str:
    factor, form = _SHOWN.get(unit, (1.0, ".0f"))
    return "–" if value is None else format(value * factor, form)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
