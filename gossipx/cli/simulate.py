"""The command ``gossipx simulate``, made with click."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from gossipx.cli import completers
from gossipx.cli.commands import debug
from gossipx.cli.options import options
from gossipx.cli.tables import show
from gossipx.errors import UsageError


@click.command("simulate", short_help="Run a scenario in virtual time.")
@click.argument("scenario", required=False, metavar="SCENARIO", shell_complete=completers.paths("file"))
@click.option("--list", "lists", is_flag=True, help="List the scenarios that gossipx has.")
@options(
    *("name", "logdir", "overwrite", "seed", "iterations"),
    help={
        "name": "Name of the run and of its directory in --logdir. Default: the scenario's, and a number if taken.",
        "seed": "Seed of all random numbers. Default: the scenario's, or 0.",
        "iterations": "Iterations per peer. Default: the scenario's, or 3000.",
    },
)
@debug
def simulate(scenario: str | None, lists: bool, **settings: Any) -> None:
    """Run the peers of a SCENARIO in virtual time: a TOML file, or the name of one that gossipx has.

    The peers decide as in a real run, over a modelled network. The result is the directory of a run.

    \b
    gossipx simulate --list
    gossipx simulate stragglers
    gossipx simulate my-cluster.toml --seed 1 --name second
    gossipx compare runs/stragglers runs/second
    """
    from gossipx.launch.simulation import scenarios

    if lists:
        table = Table("scenario", "what it shows")
        for name, shows in scenarios.described().items():
            table.add_row(name, shows)
        show(table)
        return
    if scenario is None:
        raise UsageError("no scenario given: name a TOML file, or one of gossipx simulate --list")
    from gossipx.launch.simulation.run import simulate as run
    from gossipx.settings.scenario import load

    path = scenarios.find(scenario)
    sys.exit(run(load(path, settings), Path(path).stem))
