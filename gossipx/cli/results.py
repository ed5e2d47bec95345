"""``gossipx runs``, ``gossipx compare`` and ``gossipx export``: what runs have written, and the model of one."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import click
from rich.table import Table

from gossipx.cli.main_group import main
from gossipx.cli.output import print_tables, shown
from gossipx.cli.parsing import complete_run, debug, logdir_option
from gossipx.errors import UsageError
from gossipx.figures import LINES, Combine, ComparedLine
from gossipx.launch.directory import CONFIG_FILE, no_run, run_directory
from gossipx.launch.run.display import plain_console
from gossipx.metrics import summary
from gossipx.metrics.compare import Row
from gossipx.metrics.compare import compare as compared

Cell = Callable[[Row], str]
NONE = shown(None, "")
"""A figure that a run does not have."""


@main.command("runs", short_help="List runs.")
@click.argument("logdir", type=click.Path(path_type=Path), default=Path("runs"), metavar="[DIR]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@debug
def runs_command(logdir: Path, as_json: bool) -> None:
    """List the runs in DIR, by default runs, the newest last.

    \b
    gossipx runs
    gossipx runs experiments --json
    """
    from gossipx.tools.runs import runs_in

    if not logdir.is_dir():
        raise UsageError("no such directory: give the DIR of your runs", logdir)
    found = runs_in(logdir)
    if as_json:
        print(json.dumps([vars(run) for run in found], indent=2))
        return
    figures = ("iterations", "accuracy", "loss", "MB per peer")
    table = Table("run", "state", "peers", "began", "policy", *figures, "resumable")
    for run in found:
        table.add_row(
            run.name,
            run.state,
            str(run.peers),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(run.began)),
            run.policy,
            shown(run.iterations, "d"),
            shown(run.accuracy, ".4f"),
            shown(run.loss, ".4f"),
            shown(run.received_mb, ".1f"),
            "–" if run.resumable is None else f"from {run.resumable}",
        )
    print_tables(table if found else f"{logdir} has no runs")


@main.command("export", short_help="Write a run's final model to a file.")
@click.argument("run", metavar="RUN", shell_complete=complete_run)
@click.option(
    "--to", "target", type=click.Path(path_type=Path), required=True, help="Output file, such as model.safetensors."
)
@click.option("--peer", help="Export the model of this peer, by name or number, instead of the average.")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@logdir_option
@debug
def export_command(run: str, target: Path, peer: str | None, overwrite: bool, logdir: Path) -> None:
    """Write the average of all peers' final models, or of their newest checkpoints.

    \b
    gossipx export runs/adaptive --to model.safetensors
    gossipx export adaptive --to own.safetensors --peer 1
    """
    from gossipx.tools import export as exporting

    print(exporting.export(run, target, logdir, peer, overwrite))


@main.command("compare", short_help="Compare runs in a table or a plot.")
@click.argument(
    "runs",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
    metavar="RUN...",
    shell_complete=complete_run,
)
@logdir_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--plot", type=click.Path(path_type=Path), help="Also plot the runs into a .png or .svg file.")
@click.option("--html", type=click.Path(path_type=Path), help="Also write plot and tables into one .html file.")
@debug
def compare(runs: tuple[Path, ...], logdir: Path, as_json: bool, plot: Path | None, html: Path | None) -> None:
    """Compare runs, given by directory or name; reductions are relative to the first run.

    Runs that differ only in their seeds share a column, with means and 95 % intervals over the seeds. A run that was
    stopped or killed, or is in progress, has the figures that its peers last recorded.

    \b
    gossipx compare runs/tau runs/adaptive runs/travel
    gossipx compare runs/tau-seed* runs/adaptive-seed*
    gossipx compare runs/tau runs/adaptive --plot runs.png --html runs.html
    """
    from gossipx.tools import recorded  # imports numpy, which a completion must not

    if html is not None:
        from gossipx.tools import report

        report.check_target(html)
    places = [run_directory(str(path), logdir) for path in runs]
    for path, place in zip(runs, places, strict=True):
        is_run = (place / summary.FILE).exists() or (place / CONFIG_FILE).exists()
        if not place.exists() or (not is_run and any(place.glob(f"*/{summary.FILE}"))):
            raise no_run(str(path), logdir, summary.FILE)
    summaries = [recorded.read(path) for path in places]
    if plot is not None:
        from gossipx.tools import plot as plotting

        plotting.draw(list(zip(places, summaries, strict=True)), plot)
        print(f"{plot}: a plot of {', '.join(found.name for found in summaries)}", file=sys.stderr)
    rows = compared(summaries, [recorded.setting_of(place) for place in places])
    if html is not None:
        lines = [[heading, *map(cell, rows)] for heading, cell in _lines(rows)]
        table = report.ReportTable("Comparison", ["", *map(_column, rows)], lines)
        report.write(list(zip(places, summaries, strict=True)), table, html)
        print(f"{html}: a report on {', '.join(found.name for found in summaries)}", file=sys.stderr)
    if as_json:
        print(json.dumps([row.as_dict() for row in rows], indent=2))
    else:
        _print_table(rows)


def _print_table(rows: Sequence[Row]) -> None:
    """Print a line per figure and a column per row, which fits a terminal better than the transposed table."""
    table = Table()
    table.add_column(no_wrap=True)
    for row in rows:
        table.add_column(_column(row), overflow="fold")  # truncated names could be equal
    for heading, cell in _lines(rows):
        table.add_row(heading, *map(cell, rows))
    console = plain_console()
    if not console.is_terminal:  # a file or a pipe has no width to fit
        console.width = 40 * (len(rows) + 1)
    console.print(table)


def _column(row: Row) -> str:
    return f"{row.name}, {len(row.seeds)} seeds" if len(row.seeds) > 1 else row.name


def _lines(rows: Sequence[Row]) -> list[tuple[str, Cell]]:
    """Return heading and cells of each line; figures that no run has, such as those of servers, have no line."""
    lines: list[tuple[str, Cell]] = [("policy", lambda row: row.policy), ("codec", lambda row: row.codec)]
    counts: list[tuple[str, Cell]] = []
    for _, line in LINES:
        if line.combine in (Combine.COUNT, Combine.SEEN):
            counts += [_figure(line)] if any(row.figures[line.key] for row in rows) else []
            continue
        lines.append(_figure(line))
        if line.key == "failed":
            lines.append(("reduction", lambda row: shown(row.reduction, ".1%")))
        if line.key in ("accuracy_averaged", "loss_averaged"):
            lines += _beside(rows, line.key.removesuffix("_averaged"))
    lines += [
        ("one final model", lambda row: {None: NONE, True: "yes", False: "no"}[row.agreed]),
        ("lost peers", lambda row: str(row.lost)),
        ("stopped peers", lambda row: str(row.stopped)),
        *counts,
    ]
    return [(heading, cell) for heading, cell in lines if any(cell(row) != NONE for row in rows)]


def _beside(rows: Sequence[Row], name: str) -> Iterator[tuple[str, Cell]]:
    """Yield what accuracy or loss are compared with: the first row over the same seeds, and a fixed period."""
    headings = {name: f"{name}, mean", f"{name}_before_finish": f"{name} before finish"}
    for one, heading in headings.items():
        if any(len(row.seeds) > 1 for row in rows) and any(one in row.paired for row in rows):
            yield f"{heading}, paired", partial(_paired, one)
    for one, heading in headings.items():
        if any(row.fixed_period and one in row.fixed_period.figures for row in rows):
            yield f"{heading}, tau interpolated", partial(_interpolated, one)


def _figure(line: ComparedLine) -> tuple[str, Cell]:
    """Return the line of a figure, with its interval where there are several seeds."""

    def cell(row: Row) -> str:
        interval = row.intervals.get(line.key)
        more = "" if interval is None else f" ± {interval:{line.form}}"
        return shown(row.figures[line.key], line.form) + more

    return line.heading, cell


def _paired(name: str, row: Row) -> str:
    """Return the difference from the first row over the same seeds."""
    difference = row.paired.get(name)
    if difference is None:
        return NONE
    interval = "" if difference.interval is None else f" ± {difference.interval:.4f}"
    return f"{difference.mean:+.4f}{interval}"


def _interpolated(name: str, row: Row) -> str:
    """Return what a fixed period with as many retrievals reached."""
    return shown(None if row.fixed_period is None else row.fixed_period.figures.get(name), ".4f")
