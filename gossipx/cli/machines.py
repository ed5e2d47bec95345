"""``gossipx doctor``, ``gossipx tune`` and ``gossipx certs``: the machines of a run, before it starts."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from gossipx.cli.main_group import main
from gossipx.cli.output import print_tables
from gossipx.cli.parsing import ACCESS, FloatRange, debug, options, script_argument

if TYPE_CHECKING:
    from gossipx.tools.doctor.verdicts import Findings
    from gossipx.tools.tune import Measured

_OF_DOCTOR = ("model", "task", "data_dir", "device", "bind", "advertise", *ACCESS)
_COLOURS = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "red"}


@main.command(
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
@options(*_OF_DOCTOR)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@debug
@script_argument
def doctor_command(
    wait: float, config_file: Path | None, as_json: bool, script: tuple[str, ...], **settings: Any
) -> None:
    """Diagnose the machines of a run: names, ports, versions, clocks, devices, reachability and rates.

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
        print_tables(_hosts_table(found))
        for verdict in report:
            level = click.style(f"{verdict.level:4}", _COLOURS[verdict.level], bold=verdict.level == "fail")
            text = f"{verdict.text}: {verdict.advice}" if verdict.advice else verdict.text
            click.echo(f"{level}  {verdict.about:9}  {text}")
    sys.exit(code)


def _hosts_table(found: Findings) -> Table:
    """Return the table of hosts as this one sees them. It is printed before the verdicts, which stay in sight."""
    table = Table("host", "peers reached", "rate to here", "gossipx", "torch", "python")
    for host in found.hosts:
        seen, pair = found.seen(host), found.ways.get(host.number)
        facts = next((line.facts for line in seen if line.facts), {} if host in found.others else found.facts)
        table.add_row(
            host.name,
            f"{sum(line.state == 'ok' for line in seen)} of {len(host.peers)}" if seen else "–",
            "–" if pair is None or pair.rate is None else f"{pair.rate * 8 / 1e6:.0f} Mbit/s",
            *(facts.get(fact, "–") for fact in ("gossipx", "torch", "python")),
        )
    return table


_OF_TASK = ("task", "data_dir", "model", "batch_size", "optimizer", "lr")
_OF_MACHINE = ("threads", "device", "bind", "advertise", *ACCESS, "max_rate")


@main.command(
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
def tune_command(seconds: float, write: Path | None, as_json: bool, script: tuple[str, ...], **settings: Any) -> None:
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
    print_tables(_candidates_table(found.measured))
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


def _candidates_table(measured: list[Measured]) -> Table:
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


@main.group("certs")
def certs_group() -> None:
    """Certificates for mutual TLS.

    \b
    gossipx certs new certs hosts.txt
    """


@certs_group.command("new", short_help="Create a private CA and a certificate per host.")
@click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")
@click.argument("hosts", type=click.Path(path_type=Path), metavar="HOSTS")
@debug
def certs_new_command(directory: Path, hosts: Path) -> None:
    """Create a private CA in DIR and a certificate for each host of the HOSTS file.

    \b
    gossipx certs new certs hosts.txt
    """
    from gossipx.tools import certs as authority

    for line in authority.new(directory, hosts):
        print(line)
