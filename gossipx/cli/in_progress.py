"""``gossipx status``, ``gossipx peer`` and ``gossipx server``: the peers and servers of a run in progress."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from gossipx.cli.main_group import main
from gossipx.cli.output import print_tables, shown
from gossipx.cli.parsing import (
    ACCESS,
    complete_run,
    complete_sync_model,
    debug,
    logdir_option,
    options,
    script_argument,
)
from gossipx.errors import GossipxError, NotAuthorisedError, UsageError
from gossipx.launch.directory import CONFIG_FILE, HOSTS_FILE, no_run, refuse_simulated, run_directory, settings_in
from gossipx.launch.hosts import PeerLine
from gossipx.settings.sections import KEYS, ExchangeSettings, marked
from gossipx.specs import suggest

if TYPE_CHECKING:
    from gossipx.tools.query import PeerAnswer

WATCH_EVERY = 2.0
"""Seconds between two looks with --watch."""


@main.command("status", short_help="Show the peers of a run in progress.")
@click.argument("run", required=False, metavar="[RUN]", shell_complete=complete_run)
@click.option("--peers", "hosts", type=click.Path(path_type=Path), metavar="FILE", help="The hosts file, without RUN.")
@options(*ACCESS)
@logdir_option
@click.option("--watch", is_flag=True, help=f"Repeat every {WATCH_EVERY:g} s until no peer answers.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --watch one line each time.")
@debug
def status_command(
    run: str | None, hosts: Path | None, logdir: Path, watch: bool, as_json: bool, **access: Any
) -> None:
    """Ask the peers of a run in progress for their status: what they do, and what they know of each other.

    Give the run, by name or directory, or on another machine its hosts file and its secret or certificates. Exit code
    0: all peers answer; 1: some do not; 5: not authorised.

    \b
    gossipx status mine
    gossipx status mine --watch
    gossipx status --peers hosts.txt --secret-file secret --json
    """
    from gossipx.tools.query import statuses

    peers, exchange = peers_of(run, hosts, logdir, access)
    before: list[PeerAnswer] = []
    while True:
        found = statuses(peers, exchange)
        ended = not any(one.report for one in found)
        if not (watch and ended and before):
            _print_status(found, as_json, watch)
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


def _print_status(found: Sequence[PeerAnswer], as_json: bool, watch: bool) -> None:
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
            shown(report["loss"], ".3f"),
            str(report["retrievals"]),
            f"{report['blocked_seconds'] / report['seconds']:.1%}" if report["seconds"] else "–",
            _last_exchange(report),
            "; ".join(_others(report)),
        )
    if watch and sys.stdout.isatty():
        click.clear()
    print_tables(table)


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


LOOK_EVERY = 0.5
"""Seconds between two looks whether a peer has left."""
_names = click.argument("names", nargs=-1, required=True, metavar="[RUN] PEER", shell_complete=complete_run)


@main.group("peer")
def peer_group() -> None:
    """Restart, drain or add a peer of a run in progress.

    PEER is the peer's name, as 'gossipx status' shows it. RUN may be left out while only one run of --logdir is in
    progress.

    \b
    gossipx peer restart mine localhost:29401
    gossipx peer drain localhost:29401
    gossipx peer join --peers node-a:29400 train.py
    """


@peer_group.command("restart", short_help="End a peer in order and start it again, or start one that has died.")
@_names
@logdir_option
@debug
def restart_command(names: tuple[str, ...], logdir: Path) -> None:
    """Restart a peer: it ends its step, writes a checkpoint, leaves, and continues from there in a new process.

    A peer that has died is started again, from its last checkpoint or else with the model of another peer. The other
    peers train on. Give the command on a machine that sees the run's directory while 'gossipx run' is running there.

    \b
    gossipx peer restart mine localhost:29401
    """
    from gossipx.launch.run.control_files import RESTART, send

    run, name = _run_and_peer(names, logdir)
    peers, exchange = peers_of(run, None, logdir, {})
    _find(name, peers, exchange)
    path = run_directory(run, logdir)
    if not send(path, RESTART, {"peer": name}, patience=exchange.peer_timeout):
        raise GossipxError(
            f"{path}: no 'gossipx run' with {name} is running here; on its machine, 'gossipx run --resume' starts it"
        )
    print(f"{name} is being restarted; gossipx status {run} shows when it trains again")


@peer_group.command("drain", short_help="Let a peer leave in order.")
@_names
@click.option("--peers", "hosts", type=click.Path(path_type=Path), metavar="FILE", help="The hosts file, without RUN.")
@options(*ACCESS)
@logdir_option
@debug
def drain_command(names: tuple[str, ...], hosts: Path | None, logdir: Path, **access: Any) -> None:
    """Let a peer leave: it ends its step, writes a checkpoint, tells the others, and ends with exit code 0.

    The request goes to the peer's port, from any machine that may connect to it. The others train on without it.

    \b
    gossipx peer drain mine localhost:29401
    gossipx peer drain --peers hosts.txt --secret-file secret node-b
    """
    from gossipx.tools.query import query

    run, name = (None, names[0]) if hosts is not None and len(names) == 1 else _run_and_peer(names, logdir)
    peers, exchange = peers_of(run, hosts, logdir, access)
    asked = _find(name, peers, exchange)
    [answer] = query(peers, exchange, "drain", [asked])
    if not answer.authorised:
        raise NotAuthorisedError(f"{name}: {answer.why}")
    if not answer.report:
        raise GossipxError(f"{name}: {answer.why}")
    print(f"{name} ends its step, writes a checkpoint and leaves (iteration {answer.report['iteration']})", flush=True)
    until = time.monotonic() + exchange.peer_timeout
    while query(peers, exchange, "status", [asked])[0].report:
        if time.monotonic() > until:
            raise GossipxError(f"{name} has not left within {exchange.peer_timeout:g} s: see gossipx status")
        time.sleep(LOOK_EVERY)
    print(f"{name} has left")


def _run_and_peer(names: tuple[str, ...], logdir: Path) -> tuple[str, str]:
    """Return run and peer; a run that is not given is the only one in progress."""
    from gossipx.launch.directory import is_in_progress

    if len(names) > 2:
        raise UsageError(f"give a run and a peer, not {len(names)} names")
    if len(names) == 2:
        return names[0], names[1]
    running = [found.parent for found in logdir.glob(f"*/{CONFIG_FILE}") if is_in_progress(found.parent)]
    if len(running) != 1:
        raise UsageError(f"{logdir} has {len(running)} runs in progress: name the run, as in RUN {names[0]}")
    return str(running[0]), names[0]


def _find(name: str, peers: Sequence[PeerLine], exchange: ExchangeSettings) -> PeerLine:
    """Return the peer of this name: one of the hosts file, or one that joined, of which ``peers`` know."""
    from gossipx.tools.query import statuses

    known = {one.name: one for one in peers}
    if name not in known:
        known |= {one.peer.name: one.peer for one in statuses(peers, exchange)}
    if name not in known:
        shown = ", ".join(list(known)[:20])
        raise UsageError(f"no peer '{name}'{suggest(name, dict.fromkeys(known))}: the run has {shown}")
    return known[name]


@peer_group.command(
    "join",
    short_help="Join a run in progress as a further peer.",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
@click.option("--peers", metavar="HOST:PORT,...", help="Peers of the run, which are asked in turn.")
@click.option(
    "--port",
    type=click.IntRange(1024, 65535),
    metavar="PORT",
    help="Port at which this peer listens.  [default: the first free one from 29400 on]",
)
@options(*(name for name in KEYS if name in marked("machine") - {"peers", "overwrite"}))
@debug
@script_argument
def join_command(peers: str | None, port: int | None, script: tuple[str, ...], **settings: Any) -> None:
    """Join a run in progress, as a peer that is in nobody's hosts file.

    It takes the run's settings and a model from its peers, trains SCRIPT or the built-in task, and takes part in the
    finish. Only peers that exchange with each other take newcomers, not those with a hub or servers.

    \b
    gossipx peer join --peers node-a:29400,node-b:29400 train.py
    gossipx peer join --peers node-a:29400 --bind 0.0.0.0 --secret-file secret train.py --epochs 3
    """
    from gossipx.launch.run.newcomer import join as join_run
    from gossipx.launch.start import no_peers

    if peers is None:
        raise no_peers(script, "give --peers HOST:PORT of peers of the run")
    sys.exit(join_run(peers, port, settings, list(script)))


@main.group("server")
def server_group() -> None:
    """Change the parameter server of a run in progress.

    \b
    gossipx server set-sync runs/mine ssp:staleness=3
    gossipx server set-servers runs/mine 0,1,2
    """


@server_group.command("set-sync", short_help="Switch to another sync model.")
@debug
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN", shell_complete=complete_run)
@click.argument("sync", metavar="SYNC", shell_complete=complete_sync_model)
@click.option("--shard", type=click.IntRange(0), help="Change only this shard, counted from 0. Default: all.")
@click.option("--apply", default="", help="How gradients are applied: push, each, tick. Default: the sync model's.")
@click.option("--pulls", default="", help="When delayed pulls are answered: lazy or soft. Default: unchanged.")
@logdir_option
def set_sync_command(run: Path, sync: str, shard: int | None, apply: str, pulls: str, logdir: Path) -> None:
    """Switch to the sync model SYNC. No push is lost. Delayed pulls are looked at again by the new one.

    \b
    gossipx server set-sync runs/mine ssp:staleness=3
    gossipx server set-sync mine asp --shard 1
    """
    from gossipx.launch.run.control_files import command
    from gossipx.server.sync_models import sync_model_from

    sync_model_from(sync)
    command(
        run_directory(str(run), logdir),
        {"set-sync": sync, "shard": shard, "apply": apply, "pulls": pulls},
        patience=120.0,
    )
    print(f"{'all shards now use' if shard is None else f'shard {shard} now uses'} {sync}")


@server_group.command("set-servers", short_help="Move the shards to other peers.")
@debug
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN", shell_complete=complete_run)
@click.argument("servers", metavar="SERVERS")
@logdir_option
def set_servers_command(run: Path, servers: str, logdir: Path) -> None:
    """Move the shards to the peers SERVERS, given by number or name and separated by commas.

    \b
    gossipx server set-servers runs/mine 0,1,2
    gossipx server set-servers mine node-a,node-b
    """
    from gossipx.launch.run.control_files import command

    given = [name.strip() for name in servers.split(",")]
    if not all(given):
        raise UsageError(f"SERVERS '{servers}': give numbers or names of peers separated by commas, as in 0,1,2")
    command(run_directory(str(run), logdir), {"set-servers": ",".join(given)}, patience=3600.0)
    print(f"the servers are now {','.join(given)}")
