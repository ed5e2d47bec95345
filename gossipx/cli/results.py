"""``gossipx runs`` and ``gossipx export``: the runs of a directory, and the model of one."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click
from rich.table import Table

from gossipx.cli.main_group import main
from gossipx.cli.output import print_tables, shown
from gossipx.cli.parsing import complete_run, debug, logdir_option
from gossipx.errors import UsageError


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
