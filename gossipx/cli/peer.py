"""``gossipx peer``: single peers of a run in progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from gossipx.cli import completers
from gossipx.cli.commands import debug
from gossipx.cli.options import ACCESS, logdir_option, options, script_argument
from gossipx.cli.status import peers_of
from gossipx.errors import GossipxError, NotAuthorisedError, UsageError
from gossipx.launch.directory import CONFIG_FILE, run_directory
from gossipx.launch.hosts import PeerLine
from gossipx.settings.sections import KEYS, ExchangeSettings, marked
from gossipx.specs import suggest

LOOK_EVERY = 0.5
"""Seconds between two looks whether a peer has left."""
_names = click.argument("names", nargs=-1, required=True, metavar="[RUN] PEER", shell_complete=completers.runs())


@click.group("peer")
def peer() -> None:
    """Restart, drain or add a peer of a run in progress.

    PEER is the peer's name, as 'gossipx status' shows it. RUN may be left out while only one run of --logdir is in
    progress.

    \b
    gossipx peer restart mine localhost:29401
    gossipx peer drain localhost:29401
    gossipx peer join --peers node-a:29400 train.py
    """


@peer.command("restart", short_help="End a peer in order and start it again, or start one that has died.")
@_names
@logdir_option
@debug
def restart(names: tuple[str, ...], logdir: Path) -> None:
    """Restart a peer: it ends its step, writes a checkpoint, leaves, and continues from there in a new process.

    A peer that has died is started again, from its last checkpoint or else with the model of another peer. The other
    peers train on. Give the command on a machine that sees the run's directory while 'gossipx run' is running there.

    \b
    gossipx peer restart mine localhost:29401
    """
    from gossipx.launch.run.control_files import RESTART, send

    run, name = _meant(names, logdir)
    peers, exchange = peers_of(run, None, logdir, {})
    _find(name, peers, exchange)
    path = run_directory(run, logdir)
    if not send(path, RESTART, {"peer": name}, patience=exchange.peer_timeout):
        raise GossipxError(
            f"{path}: no 'gossipx run' with {name} is running here; on its machine, 'gossipx run --resume' starts it"
        )
    print(f"{name} is being restarted; gossipx status {run} shows when it trains again")


@peer.command("drain", short_help="Let a peer leave in order.")
@_names
@click.option("--peers", "hosts", type=click.Path(path_type=Path), metavar="FILE", help="The hosts file, without RUN.")
@options(*ACCESS)
@logdir_option
@debug
def drain(names: tuple[str, ...], hosts: Path | None, logdir: Path, **access: Any) -> None:
    """Let a peer leave: it ends its step, writes a checkpoint, tells the others, and ends with exit code 0.

    The request goes to the peer's port, from any machine that may connect to it. The others train on without it.

    \b
    gossipx peer drain mine localhost:29401
    gossipx peer drain --peers hosts.txt --secret-file secret node-b
    """
    from gossipx.tools.visit import visit

    run, name = (None, names[0]) if hosts is not None and len(names) == 1 else _meant(names, logdir)
    peers, exchange = peers_of(run, hosts, logdir, access)
    asked = _find(name, peers, exchange)
    [answer] = visit(peers, exchange, "drain", [asked])
    if not answer.authorised:
        raise NotAuthorisedError(f"{name}: {answer.why}")
    if not answer.report:
        raise GossipxError(f"{name}: {answer.why}")
    print(f"{name} ends its step, writes a checkpoint and leaves (iteration {answer.report['iteration']})", flush=True)
    until = time.monotonic() + exchange.peer_timeout
    while visit(peers, exchange, "status", [asked])[0].report:
        if time.monotonic() > until:
            raise GossipxError(f"{name} has not left within {exchange.peer_timeout:g} s: see gossipx status")
        time.sleep(LOOK_EVERY)
    print(f"{name} has left")


def _meant(names: tuple[str, ...], logdir: Path) -> tuple[str, str]:
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
    from gossipx.tools.visit import statuses

    known = {one.name: one for one in peers}
    if name not in known:
        known |= {one.peer.name: one.peer for one in statuses(peers, exchange)}
    if name not in known:
        shown = ", ".join(list(known)[:20])
        raise UsageError(f"no peer '{name}'{suggest(name, dict.fromkeys(known))}: the run has {shown}")
    return known[name]


@peer.command(
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
def join(peers: str | None, port: int | None, script: tuple[str, ...], **settings: Any) -> None:
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
