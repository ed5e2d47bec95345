"""``gossipx topology`` and ``gossipx placement``: what a graph or a placement would cost, without a run."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from gossipx.cli.main_group import main
from gossipx.cli.output import print_tables
from gossipx.cli.parsing import (
    FloatRange,
    complete_model,
    complete_placement,
    complete_schedule,
    complete_topology,
    debug,
)
from gossipx.launch.world.launchers import MOST

if TYPE_CHECKING:
    from gossipx.server.placement import Survey


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


_MOST = 1024
"""Maximum number of servers: more than any of the models has tensors, and the table can still be scrolled through."""
_BAR = 18
"""Characters of the longest bar; with it the widest table, that of transformer-1b, has fewer than 80 columns."""


@main.command("placement", short_help="Compare how placements spread a model.")
@debug
@click.argument("model", metavar="MODEL", shell_complete=complete_model)
@click.option("--servers", type=click.IntRange(1, _MOST), default=4, show_default=True, help="Number of servers.")
@click.option(
    "--placement",
    "strategy",
    metavar="NAME",
    help="Show only this placement. Default: all.",
    shell_complete=complete_placement,
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def placement_command(model: str, servers: int, strategy: str | None, as_json: bool) -> None:
    """Show how evenly each placement spreads MODEL over the servers, and in how many partitions.

    MODEL is a built-in model (see run's --model), inception-v4, densenet121 or transformer-1b, for the input size of
    its publication and in float32: lenet for MNIST, convnet and the resnets for CIFAR-10, alexnet, googlenet (without
    auxiliary classifiers), inception-v4 and densenet121 for ImageNet. The output lists the sizes of its tensors, the MB
    on each server, their coefficient of variation (standard deviation / mean; 0 is even), and the number of partitions,
    that is, messages per push or pull.

    \b
    gossipx placement inception-v4 --servers 4
    gossipx placement resnet110 --servers 8 --placement sliced --json
    """
    from gossipx.server import placement as placements
    from gossipx.server.placement import survey
    from gossipx.tasks.models import published_sizes

    asked = [strategy] if strategy is not None else list(placements.BUILT_IN)
    chosen = {name: placements.placement_from(name) for name in asked}
    tables = [placements.Table(name, size) for name, size in published_sizes(model)]
    found = survey(model, tables, servers, chosen)
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        print_tables(_sizes_table(found), _placements_table(found))


def _sizes_table(found: Survey) -> Table:
    table = Table(title=f"{found.model}: {found.tables} tensors of {found.elements:,} elements", title_justify="left")
    for heading in ("elements", "tensors", "of all elements"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column()  # bars
    longest = max(one.tables for one in found.sizes)
    for one in found.sizes:
        span = f"{one.at_least:,} to {one.at_most:,}"
        bar = "█" * math.ceil(_BAR * one.tables / longest)
        table.add_row(span, str(one.tables), f"{one.elements / found.elements:.1%}", bar)
    return table


def _placements_table(found: Survey) -> Table:
    """Return a column per placement, which fits a terminal with any number of servers."""
    table = Table(title=f"{found.model} on {found.servers} servers, MB on each", title_justify="left")
    table.add_column("server", no_wrap=True)
    for one in found.placements:
        table.add_column(one.placement, justify="right", no_wrap=True)
    digits = 3 if max(max(one.bytes) for one in found.placements) < 1e9 else 0  # else six columns are too wide
    for server in range(found.servers):
        table.add_row(str(server), *(f"{one.bytes[server] / 1e6:.{digits}f}" for one in found.placements))
    table.add_section()
    table.add_row("variation", *(f"{one.variation:#.2g}" for one in found.placements))
    table.add_row("partitions", *(f"{one.partitions:,}" for one in found.placements))
    return table
