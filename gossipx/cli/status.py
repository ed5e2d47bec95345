"""``gossipx runs`` and ``gossipx status``: the runs of a directory, and the peers of a run in progress."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from gossipx.cli import completers
from gossipx.cli.commands import debug
from gossipx.cli.options import ACCESS, logdir_option, options
from gossipx.cli.tables import show
from gossipx.errors import NotAuthorisedError, UsageError
from gossipx.launch.directory import CONFIG_FILE, HOSTS_FILE, no_run, refuse_simulated, run_directory, settings_in

if TYPE_CHECKING:
    from gossipx.launch.hosts import PeerLine
    from gossipx.settings.sections import ExchangeSettings
    from gossipx.tools.visit import Visit

WATCH_EVERY = 2.0
"""Seconds between two looks with --watch."""


@click.command("runs", short_help="List runs.")
@click.argument("logdir", type=click.Path(path_type=Path), default=Path("runs"), metavar="[DIR]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@debug
def runs(logdir: Path, as_json: bool) -> None:
    """List the runs in DIR, by default runs, the newest last.

    \b
    gossipx runs
    gossipx runs experiments --json
    """
    from gossipx.tools.runs import runs_in

    if not logdir.is_dir():
        raise UsageError("no such directory: give the DIR of your runs", logdir)
    found = runs_in(logdir)
    if as_json:
        print(json.dumps([vars(run) for run in found], indent=2))
        return
    figures = ("iterations", "accuracy", "loss", "MB per peer")
    table = Table("run", "state", "peers", "began", "policy", *figures, "resumable")
    for run in found:
        table.add_row(
            run.name,
            run.state,
            str(run.peers),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(run.began)),
            run.policy,
            _shown(run.iterations, "d"),
            _shown(run.accuracy, ".4f"),
            _shown(run.loss, ".4f"),
            _shown(run.received_mb, ".1f"),
            "–" if run.resumable is None else f"from {run.resumable}",
        )
    show(table if found else f"{logdir} has no runs")


@click.command("status", short_help="Show the peers of a run in progress.")
@click.argument("run", required=False, metavar="[RUN]", shell_complete=completers.runs())
@click.option("--peers", "hosts", type=click.Path(path_type=Path), metavar="FILE", help="The hosts file, without RUN.")
@options(*ACCESS)
@logdir_option
@click.option("--watch", is_flag=True, help=f"Repeat every {WATCH_EVERY:g} s until no peer answers.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --watch one line each time.")
@debug
def status(run: str | None, hosts: Path | None, logdir: Path, watch: bool, as_json: bool, **access: Any) -> None:
    """Ask the peers of a run in progress for their status: what they do, and what they know of each other.

    Give the run, by name or directory, or on another machine its hosts file and its secret or certificates. Exit code
    0: all peers answer; 1: some do not; 5: not authorised.

    \b
    gossipx status mine
    gossipx status mine --watch
    gossipx status --peers hosts.txt --secret-file secret --json
    """
    from gossipx.tools.visit import statuses

    peers, exchange = peers_of(run, hosts, logdir, access)
    before: list[Visit] = []
    while True:
        found = statuses(peers, exchange)
        ended = not any(one.report for one in found)
        if not (watch and ended and before):
            _show(found, as_json, watch)
        if not watch or ended:
            break
        before = found
        time.sleep(WATCH_EVERY)
    if watch and before:
        if not as_json:
            print("no peer answers any more: the run has ended")
        return
    if any(not one.authorised for one in found):
        sys.exit(NotAuthorisedError.exit_code)
    if ended:
        print("no peer answers; gossipx runs shows whether the run is in progress", file=sys.stderr)
    sys.exit(0 if all(one.report for one in found) else 1)


def peers_of(
    run: str | None, hosts: Path | None, logdir: Path, access: dict[str, Any]
) -> tuple[list[PeerLine], ExchangeSettings]:
    """Return the peers and the settings of the exchange of a run that is given by name, directory or hosts file.

    Raises:
        UsageError: neither or both are given, or the run does not exist.
    """
    from gossipx.launch.hosts import read_hosts
    from gossipx.settings import files

    if (run is None) == (hosts is None):
        raise UsageError("give the RUN, or --peers hosts.txt on a machine that does not have it; and not both")
    if hosts is not None:
        return read_hosts(hosts), files.resolve({}, access).exchange
    assert run is not None
    path = run_directory(run, logdir)
    if not (path / HOSTS_FILE).is_file():
        raise no_run(run, logdir, CONFIG_FILE)
    refuse_simulated(path)
    given = {name: value for name, value in access.items() if value is not None}
    return read_hosts(path / HOSTS_FILE), files.resolve(settings_in(path), given).exchange


def _show(found: Sequence[Visit], as_json: bool, watch: bool) -> None:
    if as_json:
        plain = [
            {"name": one.peer.name, "host": one.peer.host, "port": one.peer.port, "why": one.why, **one.report}
            for one in found
        ]
        print(json.dumps(plain, indent=None if watch else 2), flush=True)
        return
    table = Table("peer", "state", "iteration", "loss", "retrievals", "blocked", "last exchange", "others")
    for one in found:
        if not one.report:
            table.add_row(one.peer.name, one.why)
            continue
        report = one.report
        table.add_row(
            one.peer.name,
            report["stage"],
            str(report["iteration"]),
            _shown(report["loss"], ".3f"),
            str(report["retrievals"]),
            f"{report['blocked_seconds'] / report['seconds']:.1%}" if report["seconds"] else "–",
            _last_exchange(report),
            "; ".join(_others(report)),
        )
    if watch and sys.stdout.isatty():
        click.clear()
    show(table)


def _last_exchange(report: dict[str, Any]) -> str:
    if report["last_exchange"] is None:
        return "–"
    return f"{report['last_exchange']}, {report['last_exchange_seconds']:.1f} s ago"


def _others(report: dict[str, Any]) -> Iterator[str]:
    """Say what a peer waits for, and which peers it misses."""
    if report["waits_for"]:
        yield f"waits for {', '.join(report['waits_for'])} to {report['waits_to']}"
    elif report["waiting"] and report["exchanges_with"]:
        yield f"waits for a model of {', '.join(report['exchanges_with'])}"
    elif report["exchanges_with"]:
        yield f"exchanges with {', '.join(report['exchanges_with'])}"
    for word, key in (("suspects", "suspects"), ("has lost", "lost"), ("has left:", "left")):
        if report[key]:
            yield f"{word} {', '.join(report[key])}"


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
