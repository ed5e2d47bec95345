"""``gossipx placement``: shows how a model's tensors are distributed over parameter servers."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING

import click
from rich.table import Table

from gossipx.cli import completers
from gossipx.cli.commands import debug
from gossipx.cli.tables import show

if TYPE_CHECKING:
    from gossipx.server.placement import Survey

_MOST = 1024
"""Maximum number of servers: more than any of the models has tensors, and the table can still be scrolled through."""
_BAR = 18
"""Characters of the longest bar; with it the widest table, that of transformer-1b, has fewer than 80 columns."""


@click.command("placement", short_help="Compare how placements spread a model.")
@debug
@click.argument("model", metavar="MODEL", shell_complete=completers.models)
@click.option("--servers", type=click.IntRange(1, _MOST), default=4, show_default=True, help="Number of servers.")
@click.option(
    "--placement",
    "strategy",
    metavar="NAME",
    help="Show only this placement. Default: all.",
    shell_complete=completers.placements,
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def placement(model: str, servers: int, strategy: str | None, as_json: bool) -> None:
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
        show(_sizes(found), _placements(found))


def _sizes(found: Survey) -> Table:
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


def _placements(found: Survey) -> Table:
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
