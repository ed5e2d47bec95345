"""``gossipx export``: writes a run's model to a file."""

from __future__ import annotations

from pathlib import Path

import click

from gossipx.cli import completers
from gossipx.cli.commands import debug
from gossipx.cli.options import logdir_option


@click.command("export", short_help="Write a run's final model to a file.")
@click.argument("run", metavar="RUN", shell_complete=completers.runs())
@click.option(
    "--to", "target", type=click.Path(path_type=Path), required=True, help="Output file, such as model.safetensors."
)
@click.option("--peer", help="Export the model of this peer, by name or number, instead of the average.")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@logdir_option
@debug
def export(run: str, target: Path, peer: str | None, overwrite: bool, logdir: Path) -> None:
    """Write the average of all peers' final models, or of their newest checkpoints.

    \b
    gossipx export runs/adaptive --to model.safetensors
    gossipx export adaptive --to own.safetensors --peer 1
    """
    from gossipx.tools import export as exporting

    print(exporting.export(run, target, logdir, peer, overwrite))
