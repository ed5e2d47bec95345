"""``gossipx tune``: measures a training with several kinds of exchange, and suggests one."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from gossipx.cli.commands import FloatRange, debug
from gossipx.cli.options import ACCESS, options, script_argument
from gossipx.cli.tables import show

if TYPE_CHECKING:
    from gossipx.tools.tune import Measured

_OF_TASK = ("task", "data_dir", "model", "batch_size", "base_lr")
_OF_MACHINE = ("threads", "device", "bind", "advertise", *ACCESS, "max_rate")


@click.command(
    "tune",
    short_help="Measure a training, and suggest how to exchange.",
    context_settings={"allow_interspersed_args": False},
)
@options("peers")
@click.option(
    "--seconds", type=FloatRange(1, 3600), default=10.0, show_default=True, help="Training per candidate, in seconds."
)
@click.option(
    "--write", type=click.Path(path_type=Path), help="Write the suggested settings for 'gossipx run --config'."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@options(*_OF_TASK, *_OF_MACHINE)
@debug
@script_argument
def tune(seconds: float, write: Path | None, as_json: bool, script: tuple[str, ...], **settings: Any) -> None:
    """Train for some seconds with each of three kinds of exchange; print what each costs, and suggest one.

    Start the same command on each host of the hosts file, at about the same time. The suggestion rests on the time that
    exchanges take; docs/choosing.md says what each kind does to the loss, which a short run cannot show.

    \b
    gossipx tune --peers hosts.txt train.py --batch-size 64
    gossipx tune --peers hosts.txt --model resnet20 --task cifar10 --data-dir data --write run.toml
    gossipx run --config run.toml
    """
    from gossipx.launch.hosts import ADVICE
    from gossipx.launch.start import no_peers
    from gossipx.settings import files
    from gossipx.tools import tune as tuning

    if write is not None:
        tuning.check_target(write)
    resolved = files.resolve({}, settings)
    if resolved.run.peers is None:
        raise no_peers(script, ADVICE)
    found = tuning.tune(
        resolved, Path(resolved.run.peers), list(script), seconds, lambda line: print(line, file=sys.stderr)
    )
    if write is not None:
        tuning.write(found, resolved, write)
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
        return
    show(_table(found.measured))
    for one in found.measured:
        if one.why:
            print(f"{one.candidate}: {one.why}")
    if not found.between_machines:
        print("all peers are on this machine: rates are those of its memory, not of a network")
    delta = next(one.delta for one in found.measured if not one.why)
    print(f"delta {delta:.3g}: --policy travel:distance={10 * delta:.2g} would fire about every 10 iterations now")
    print(f"suggested, as {found.reason}:")
    chosen = " ".join(f"--{name} {value}" for name, value in found.chosen.items())
    start = f"--config {shlex.quote(str(write))}" if write else f"--peers {shlex.quote(resolved.run.peers)} {chosen}"
    print("  " + " ".join(["gossipx run", start, *map(shlex.quote, script)]))


def _table(measured: list[Measured]) -> Table:
    table = Table(
        *("exchange", "ms per\niteration", "MB per\nexchange", "ms per\nexchange", "Mbit/s", "blocked", "skipped"),
        *("MB per 1,000\niterations", "s blocked per\n1,000 iterations"),
    )
    for one in measured:
        if one.why:
            continue
        table.add_row(
            one.candidate,
            f"{one.step_seconds * 1e3:.3g}",
            f"{one.model_bytes / 1e6:.3g}",
            f"{one.exchange_seconds * 1e3:.3g}",
            f"{one.rate * 8e-6:.3g}",
            f"{one.blocked:.1%}",
            f"{one.skipped:.0%}",
            f"{one.megabytes:.3g}",
            f"{one.blocked_seconds:.2g}",
        )
    return table
