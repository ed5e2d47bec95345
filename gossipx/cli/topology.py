"""``gossipx topology``: what there is, whom it makes neighbours, and what to expect of it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from gossipx.cli import words
from gossipx.cli.commands import FloatRange, debug
from gossipx.cli.tables import show as show_table
from gossipx.launch.cluster.world import MOST


@click.group("topology")
def topology() -> None:
    """Who may pull from whom: list, show or check topologies.

    \b
    gossipx topology list
    gossipx topology show ring --size 8
    """


_json = click.option("--json", "as_json", is_flag=True, help="For programs.")
_name = click.argument("name", metavar="NAME|FILE", shell_complete=words.topologies)


def _which(command: Callable[..., None]) -> Callable[..., None]:
    """The graph that a command is about."""
    seed = click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, help="Seed of random graphs and draws.")
    size = click.option(
        "--size", type=click.IntRange(1, MOST), help="Number of peers. Default: as many as the file has."
    )
    return _name(size(seed(command)))


@topology.command("list")
@debug
@_json
def list_command(as_json: bool) -> None:
    """The generators with their parameters, the schedules, and the files that gossipx brings along.

    \b
    gossipx topology list
    gossipx topology list --json
    """
    from gossipx.topology import shipped
    from gossipx.topology.generators import GENERATORS
    from gossipx.topology.graphs import described
    from gossipx.topology.schedules import SCHEDULES

    files = {name: str(path) for name, path in shipped().items()}
    kinds = {"topology": described(GENERATORS), "schedule": described(SCHEDULES), "file": files}
    if as_json:
        print(json.dumps(kinds, indent=2))
        return
    table = Table("", "name", "what it is")
    for kind, lines in kinds.items():
        for number, (name, text) in enumerate(lines.items()):
            table.add_row("" if number else kind, name, text)
        table.add_section()
    show_table(table)


@topology.command("show")
@debug
@_which
@_json
def show(name: str, size: int | None, seed: int, as_json: bool) -> None:
    """Whom each peer may pull from, a line a rank.

    \b
    gossipx topology show torus --size 12
    gossipx topology show topologies/two-sites-8.edges
    """
    from gossipx.topology import load

    found = load(name, size, seed, connected=False)
    if as_json:
        shown = {"name": found.name, "size": found.size, "directed": found.directed, "neighbours": found.neighbours}
        weights = [[*edge, share] for edge, share in found.edge_shares.items()]
        print(json.dumps({**shown, "sites": found.sites, "weights": weights, "schedule": found.schedule}))
        return
    for rank, others in enumerate(found.neighbours):
        shares = [(other, found.edge_shares.get((rank, other))) for other in others]
        words = [str(other) if share is None else f"{other}×{share:g}" for other, share in shares]
        print(" ".join([f"{rank}:", *words]))


@topology.command("check")
@debug
@_which
@click.option(
    "--schedule",
    help="Whose turn it is, as for run. Default: the topology's own, or random.",
    shell_complete=words.schedules,
)
@click.option(
    "--weights", type=click.Choice(["uniform", "metropolis", "push-sum"]), default="uniform", help="As for run."
)
@click.option("--slots", type=click.IntRange(1), default=1, help="Peers a machine, on consecutive ranks.")
@click.option("--tolerance", type=FloatRange(0, 1, True, True), help="Models count as equal at this distance.")
@_json
def check(name: str, size: int | None, seed: int, as_json: bool, **settings: Any) -> None:
    """How fast up to 1024 peers agree over a topology, and what it costs. Exits with 1 if not all can reach all.

    \b
    gossipx topology check hypercube --size 16 --schedule one-peer
    gossipx topology check hierarchical:sites=2 --size 8 --schedule inner-outer --slots 4
    """
    from gossipx.topology import load
    from gossipx.topology.analysis import analyse, check_size

    if size is not None:
        check_size(size, f"--size {size}")  # before a graph is made of it
    graph = load(name, size, seed, connected=False)
    with Console(stderr=True).status(f"{graph.size} peers: this may take minutes"):  # on a terminal alone
        found = analyse(graph, seed=seed, **{key: value for key, value in settings.items() if value is not None})
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        table = Table("", found.topology)
        for line in found.lines():
            table.add_row(*line)
        show_table(table)
        for warning in found.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    sys.exit(0 if found.strongly_connected else 1)
