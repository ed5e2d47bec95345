"""``gossipx doctor``: who reaches whom, how fast, and who disagrees on the model."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import RenderableType
from rich.table import Table

from gossipx.cli.commands import FloatRange, debug
from gossipx.cli.options import option
from gossipx.cli.tables import show
from gossipx.errors import UsageError
from gossipx.settings import KEYS

if TYPE_CHECKING:
    from gossipx.launch.doctor import Report
    from gossipx.launch.doctor.findings import Row

_ASKED = ("model", "task", "data_dir", "device", "bind", "advertise", "secret_file", "tls_cert", "tls_key", "tls_ca")
_WIDE = 10
"""Columns of a matrix: as many fit a terminal of 80 characters beside a host's name."""
_COLOURS = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "red"}


def _settings(command: Any) -> Any:
    for name in reversed(_ASKED):
        command = option(KEYS[name])(command)
    return command


@click.command("doctor", context_settings={"allow_interspersed_args": False})
@click.option("--peers", type=click.Path(), help="The hosts file, a line a host. Needed here or in the --config file.")
@click.option("--wait", type=FloatRange(0, 3600), default=15.0, show_default=True, help="Seconds for other hosts.")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="A TOML file of a run's settings.")
@_settings
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@debug
@click.argument("script", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT [ARGS]...]")
def doctor(wait: float, config_file: Path | None, as_json: bool, script: tuple[str, ...], **settings: Any) -> None:
    """Look at the machines of a run: names, ports, versions, clocks, devices, who reaches whom and how fast.

    Start the same command on each host, with the hosts file and the --bind, --secret-file or --tls-... of the run. The
    first waits for the others; each tells of all. Exit code 0: a run would start; 1: it would not; 5: not authorised.

    \b
    gossipx doctor --peers hosts.txt
    gossipx doctor --peers hosts.txt --bind 0.0.0.0 --secret-file secret --model resnet20
    gossipx doctor --peers hosts.txt train.py
    """
    from gossipx import config
    from gossipx.launch.doctor import examine

    given = config.load(config_file) if config_file else {}
    resolved = config.resolve(given, settings)
    if resolved.run.peers is None:
        raise UsageError("who the peers are is not given: --peers hosts.txt, or peers = in [run] of the --config file")
    looks_at_model = bool(script) or config_file is not None or any(settings[name] for name in ("model", "task"))
    asked = list(script) if looks_at_model else None
    report = examine(resolved, Path(resolved.run.peers), asked, wait, lambda line: print(line, file=sys.stderr))
    if as_json:
        print(json.dumps(_plain(report), indent=2))
    else:
        show(*_tables(report))
        _print_verdicts(report)
    sys.exit(report.exit_code)


def _plain(report: Report) -> dict[str, Any]:
    case = report.case
    return {
        "hosts": [host.name for host in case.hosts],
        "peers": [{"name": peer.name, "host": host.number} for host in case.hosts for peer in host.peers],
        "findings": [_without_manifest(row) for row in case.in_order()],
        "verdicts": [dataclasses.asdict(verdict) for verdict in report.verdicts],
        "exit_code": report.exit_code,
    }


def _without_manifest(row: Row) -> dict[str, Any]:
    plain = dataclasses.asdict(row)
    del plain["manifest"]  # of use to compare models by, which is done
    return plain


def _tables(report: Report) -> list[RenderableType]:
    """Hosts; who reaches whom; round trips; rates. The verdicts come last: they stay in sight."""
    rows = report.case.rows.values()
    made = [_hosts(report), "peers of the host above that the host at the left reaches", *_matrix(report, _reached)]
    if any(way.latency is not None for row in rows for way in row.ways):
        made += ["round trip, ms", *_matrix(report, _latency)]
    if any(way.sent is not None for row in rows for way in row.ways):
        made += ["from the host at the left to the one above, Mbit/s", *_matrix(report, _rate)]
    return made


def _hosts(report: Report) -> Table:
    table = Table("", "host", "peers", "gossipx", "torch", "python", "devices")
    for host in report.case.hosts:
        row = report.case.rows.get(host.number)
        facts = (row.facts.gossipx, row.facts.torch, row.facts.python) if row else ("–", "–", "–")
        devices = ", ".join(dict.fromkeys(device.device for device in row.devices)) if row else "–"
        table.add_row(str(host.number), host.name, str(len(host.peers)), *facts, devices)
    return table


def _matrix(report: Report, cell: Callable[[Report, Row | None, int, int], str]) -> list[RenderableType]:
    """Tables of a row and a column a host, as many as are wanted to fit a terminal."""
    hosts = report.case.hosts
    made: list[RenderableType] = []
    for start in range(0, len(hosts), _WIDE):
        part = hosts[start : start + _WIDE]
        table = Table("", "")
        for other in part:
            table.add_column(str(other.number), justify="right", no_wrap=True)
        for host in hosts:
            row = report.case.rows.get(host.number)
            table.add_row(str(host.number), host.name, *(cell(report, row, host.number, to.number) for to in part))
        made.append(table)
    return made


def _reached(report: Report, row: Row | None, source: int, to: int) -> str:
    if row is None:
        return "–"
    tried = [one for peer in report.case.hosts[to].peers if (one := row.reach(peer.rank)) is not None]
    good = sum(one.outcome == "ok" for one in tried)
    return f"{good}/{len(report.case.hosts[to].peers)}" if tried else "–"


def _latency(report: Report, row: Row | None, source: int, to: int) -> str:
    for one, other in ((source, to), (to, source)):
        way = report.case.rows[one].way(other) if one in report.case.rows else None
        if way is not None and way.latency is not None:
            return f"{way.latency * 1e3:.2g}" if way.latency < 0.1 else f"{way.latency * 1e3:.0f}"
    return "–"


def _rate(report: Report, row: Row | None, source: int, to: int) -> str:
    there, back = row.way(to) if row else None, report.case.rows[to].way(source) if to in report.case.rows else None
    rate = there.sent if there is not None else back.received if back is not None else None
    return "–" if rate is None else f"{rate * 8 / 1e6:.3g}" if rate < 1.25e7 else f"{rate * 8 / 1e6:.0f}"


def _print_verdicts(report: Report) -> None:
    for verdict in report.verdicts:
        level = click.style(f"{verdict.level:4}", _COLOURS[verdict.level], bold=verdict.level == "fail")
        text = f"{verdict.text}: {verdict.advice}" if verdict.advice else verdict.text
        click.echo(f"{level}  {verdict.about:9}  {text}")
