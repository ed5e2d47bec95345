"""``gossipx export``: a run's model as a file."""

from __future__ import annotations

from pathlib import Path

import click

from gossipx.cli import words
from gossipx.cli.commands import debug


@click.command("export")
@click.argument("run", metavar="RUN", shell_complete=words.runs())
@click.option("--to", "target", type=click.Path(path_type=Path), required=True, help="The file, model.safetensors.")
@click.option("--peer", help="One peer's own model, by name or number, instead of the average.")
@click.option("--overwrite", is_flag=True, help="Replace a file that is there.")
@click.option("--logdir", type=click.Path(path_type=Path), default=Path("runs"), help="Where runs are named by name.")
@debug
def export(run: str, target: Path, peer: str | None, overwrite: bool, logdir: Path) -> None:
    """Write the average of all peers' models, of the end or of their newest checkpoints.

    \b
    gossipx export runs/adaptive --to model.safetensors
    gossipx export adaptive --to own.safetensors --peer 1
    """
    from gossipx.tools import export as exporting

    print(exporting.export(run, target, logdir, peer, overwrite))
