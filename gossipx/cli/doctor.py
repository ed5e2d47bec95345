"""``gossipx doctor``: diagnosis of the machines of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from gossipx.cli.commands import FloatRange, debug
from gossipx.cli.options import ACCESS, options, script_argument
from gossipx.cli.tables import show

if TYPE_CHECKING:
    from gossipx.tools.doctor.findings import Findings

_ASKED = ("model", "task", "data_dir", "device", "bind", "advertise", *ACCESS)
_COLOURS = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "red"}


@click.command(
    "doctor", short_help="Diagnose the machines of a run.", context_settings={"allow_interspersed_args": False}
)
@click.option(
    "--peers", type=click.Path(), metavar="FILE", help="The hosts file. Required here or in the --config file."
)
@click.option(
    "--wait", type=FloatRange(0, 3600), default=15.0, show_default=True, help="Seconds to wait for the other hosts."
)
@click.option(
    "--config", "config_file", type=click.Path(path_type=Path), metavar="FILE", help="A TOML file of a run's settings."
)
@options(*_ASKED)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@debug
@script_argument
def doctor(wait: float, config_file: Path | None, as_json: bool, script: tuple[str, ...], **settings: Any) -> None:
    """Diagnose the machines of a run: names, ports, versions, clocks, devices, reachability, latency and rates.

    Start the same command on each host, with the hosts file and the --bind, --secret-file or --tls-... of the run. Each
    waits for the others, and reports what it sees. Exit code 0: no check fails; 1: a check fails; 5: not authorised.

    \b
    gossipx doctor --peers hosts.txt
    gossipx doctor --peers hosts.txt --bind 0.0.0.0 --secret-file secret --model resnet20
    gossipx doctor --peers hosts.txt train.py
    """
    from gossipx.launch.hosts import ADVICE
    from gossipx.launch.start import no_peers
    from gossipx.settings import files
    from gossipx.tools.doctor import examine
    from gossipx.tools.doctor.verdicts import verdicts

    given = files.load(config_file) if config_file else {}
    resolved = files.resolve(given, settings)
    if resolved.run.peers is None:
        raise no_peers(script, ADVICE)
    trained = list(script) if script or config_file or settings["model"] or settings["task"] else None
    found = examine(resolved, Path(resolved.run.peers), trained, wait, lambda line: print(line, file=sys.stderr))
    report = verdicts(found)
    code = max((verdict.exit_code for verdict in report if verdict.level == "fail"), default=0)
    if as_json:
        plain = {"findings": found, "verdicts": report, "exit_code": code}
        print(json.dumps(plain, indent=2, default=lambda item: sorted(item) if isinstance(item, set) else vars(item)))
    else:
        show(_table(found))
        for verdict in report:
            level = click.style(f"{verdict.level:4}", _COLOURS[verdict.level], bold=verdict.level == "fail")
            text = f"{verdict.text}: {verdict.advice}" if verdict.advice else verdict.text
            click.echo(f"{level}  {verdict.about:9}  {text}")
    sys.exit(code)


def _table(found: Findings) -> Table:
    """Return the table of hosts as this one sees them. It is printed before the verdicts, which stay in sight."""
    table = Table("host", "peers reached", "round trip", "rate to here", "gossipx", "torch", "python")
    for host in found.hosts:
        seen, pair = found.seen(host), found.ways.get(host.number)
        facts = next((line.facts for line in seen if line.facts), {} if host in found.others else found.facts)
        table.add_row(
            host.name,
            f"{sum(line.state == 'ok' for line in seen)} of {len(host.peers)}" if seen else "–",
            "–" if pair is None or pair.latency is None else f"{pair.latency * 1e3:.3g} ms",
            "–" if pair is None or pair.rate is None else f"{pair.rate * 8 / 1e6:.0f} Mbit/s",
            *(facts.get(fact, "–") for fact in ("gossipx", "torch", "python")),
        )
    return table
