"""``gossipx topology``: what a graph would cost, without a run."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from gossipx.cli.main_group import main
from gossipx.cli.output import print_tables
from gossipx.cli.parsing import FloatRange, complete_schedule, complete_topology, debug
from gossipx.launch.world.launchers import MOST


@main.group("topology", short_help="List, show or check topologies.")
def topology_group() -> None:
    """List, show or check topologies, which define the neighbours of each peer.

    \b
    gossipx topology list
    gossipx topology show ring --size 8
    """


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_name = click.argument("name", metavar="NAME|FILE", shell_complete=complete_topology)


def _selects_graph(command: Callable[..., None]) -> Callable[..., None]:
    """Add the argument and options that select a graph."""
    seed = click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, help="Seed of random graphs and draws.")
    size = click.option(
        "--size", type=click.IntRange(1, MOST), help="Number of peers. Default: number of peers in the file."
    )
    return _name(size(seed(command)))


@topology_group.command("list", short_help="List generators, schedules and shipped files.")
@debug
@_json
def list_command(as_json: bool) -> None:
    """List the generators with their parameters, the schedules, and the topology files included in gossipx.

    \b
    gossipx topology list
    gossipx topology list --json
    """
    from gossipx.topology import shipped
    from gossipx.topology.generators import GENERATORS
    from gossipx.topology.graphs import generator_descriptions
    from gossipx.topology.schedules import SCHEDULES

    files = {name: str(path) for name, path in shipped().items()}
    kinds = {
        "topology": generator_descriptions(GENERATORS),
        "schedule": generator_descriptions(SCHEDULES),
        "file": files,
    }
    if as_json:
        print(json.dumps(kinds, indent=2))
        return
    table = Table("", "name", "description")
    for kind, lines in kinds.items():
        for number, (name, text) in enumerate(lines.items()):
            table.add_row("" if number else kind, name, text)
        table.add_section()
    print_tables(table)


@topology_group.command("show", short_help="Show the neighbours of each peer.")
@debug
@_selects_graph
@_json
def show_command(name: str, size: int | None, seed: int, as_json: bool) -> None:
    """Show the neighbours from which each peer may pull, one line per rank.

    \b
    gossipx topology show torus --size 12
    gossipx topology show topologies/two-sites-8.edges
    """
    from gossipx.topology import topology_from

    found = topology_from(name, size, seed, connected=False)
    if as_json:
        neighbours = [list(others) for others in found.neighbours]
        shown = {"name": found.name, "size": found.size, "directed": found.directed, "neighbours": neighbours}
        weights = [[*edge, share] for edge, share in found.edge_shares.items()]
        print(json.dumps({**shown, "sites": found.sites, "weights": weights, "schedule": found.schedule}))
        return
    for rank, others in enumerate(found.neighbours):
        shares = [(other, found.edge_shares.get((rank, other))) for other in others]
        words = [str(other) if share is None else f"{other}×{share:g}" for other, share in shares]
        print(" ".join([f"{rank}:", *words]))


@topology_group.command("check", short_help="Estimate how fast peers agree, and the traffic.")
@debug
@_selects_graph
@click.option(
    "--schedule",
    help="How partners are chosen, as for run. Default: the topology's, or random.",
    shell_complete=complete_schedule,
)
@click.option(
    "--weights", type=click.Choice(["uniform", "metropolis", "push-sum"]), default="uniform", help="As for run."
)
@click.option("--slots", type=click.IntRange(1), default=1, help="Peers per machine, on consecutive ranks.")
@click.option("--tolerance", type=FloatRange(0, 1, True, True), help="Distance below which models count as equal.")
@_json
def check_command(name: str, size: int | None, seed: int, as_json: bool, **settings: Any) -> None:
    """Estimate how fast up to 1024 peers agree over a topology, and at what cost. Exit code 1: it is not connected.

    \b
    gossipx topology check hypercube --size 16 --schedule one-peer
    gossipx topology check hierarchical:sites=2 --size 8 --schedule inner-outer --slots 4
    """
    from gossipx.topology import topology_from
    from gossipx.topology.analysis import analyse, check_graph_size

    if size is not None:
        check_graph_size(size, f"--size {size}")  # before a large graph is built
    graph = topology_from(name, size, seed, connected=False)
    with Console(stderr=True).status(f"{graph.size} peers: this may take minutes"):  # shown on a terminal only
        found = analyse(graph, seed=seed, **{key: value for key, value in settings.items() if value is not None})
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        table = Table("", found.topology)
        for line in found.lines():
            table.add_row(*line)
        print_tables(table)
        for warning in found.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    sys.exit(0 if found.strongly_connected else 1)
