"""``gossipx doctor``: checks of the machines of a run and of the connections between them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from gossipx.cli.commands import FloatRange, debug
from gossipx.cli.options import option
from gossipx.cli.tables import show
from gossipx.config.settings import KEYS
from gossipx.errors import UsageError

if TYPE_CHECKING:
    from gossipx.tools.doctor.findings import Findings

_SETTINGS = ("model", "task", "data_dir", "device", "bind", "advertise", "secret_file", "tls_cert", "tls_key", "tls_ca")
_COLOURS = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "red"}


def _settings(command: Any) -> Any:
    for name in reversed(_SETTINGS):
        command = option(KEYS[name])(command)
    return command


@click.command("doctor", context_settings={"allow_interspersed_args": False})
@click.option("--peers", type=click.Path(), help="Hosts file. Required here or in the --config file.")
@click.option(
    "--wait", type=FloatRange(0, 3600), default=15.0, show_default=True, help="Seconds to wait for other hosts."
)
@click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="TOML file with the settings of the run."
)
@_settings
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@debug
@click.argument("script", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT [ARGS]...]")
def doctor(wait: float, config_file: Path | None, as_json: bool, script: tuple[str, ...], **settings: Any) -> None:
    """Check the machines of a run: names, ports, versions, clocks, devices, reachable hosts and their bandwidth.

    Start the same command on each host, with the hosts file and the --bind, --secret-file or --tls-... of the run. Each
    waits for the others and reports its own view. Exit code 0: no check failed; 1: one did; 5: not authorised.

    \b
    gossipx doctor --peers hosts.txt
    gossipx doctor --peers hosts.txt --bind 0.0.0.0 --secret-file secret --model resnet20
    gossipx doctor --peers hosts.txt train.py
    """
    from gossipx.config import files
    from gossipx.tools.doctor import examine
    from gossipx.tools.doctor.verdicts import verdicts

    given = files.load(config_file) if config_file else {}
    resolved = files.resolve(given, settings)
    if resolved.run.peers is None:
        raise UsageError("no peers given: use --peers hosts.txt, or peers = in [run] of the --config file")
    checks_model = bool(script) or config_file is not None or any(settings[name] for name in ("model", "task"))
    model_of = list(script) if checks_model else None
    found = examine(resolved, Path(resolved.run.peers), model_of, wait, lambda line: print(line, file=sys.stderr))
    said = verdicts(found)
    code = max((verdict.exit_code for verdict in said if verdict.level == "fail"), default=0)
    if as_json:
        plain = {"findings": found, "verdicts": said, "exit_code": code}
        print(json.dumps(plain, indent=2, default=lambda one: sorted(one) if isinstance(one, set) else vars(one)))
    else:
        show(_table(found))
        for verdict in said:
            level = click.style(f"{verdict.level:4}", _COLOURS[verdict.level], bold=verdict.level == "fail")
            text = f"{verdict.text}: {verdict.advice}" if verdict.advice else verdict.text
            click.echo(f"{level}  {verdict.about:9}  {text}")
    sys.exit(code)


def _table(found: Findings) -> Table:
    """Return a row per host, as seen from this one. Verdicts are printed below it, so that they stay visible."""
    table = Table("host", "peers reached", "round trip", "rate to here", "gossipx", "torch", "python")
    for host in found.hosts:
        seen, way = found.seen(host), found.ways.get(host.number)
        facts = next((one.facts for one in seen if one.facts), {} if host in found.others else found.facts)
        table.add_row(
            host.name,
            f"{sum(one.state == 'ok' for one in seen)} of {len(host.peers)}" if seen else "–",
            "–" if way is None or way.latency is None else f"{way.latency * 1e3:.3g} ms",
            "–" if way is None or way.rate is None else f"{way.rate * 8 / 1e6:.0f} Mbit/s",
            *(facts.get(what, "–") for what in ("gossipx", "torch", "python")),
        )
    return table
