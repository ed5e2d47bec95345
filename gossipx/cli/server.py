"""``gossipx server``: changes the parameter server of a run in progress."""

from __future__ import annotations

from pathlib import Path

import click

from gossipx.cli import completers
from gossipx.cli.commands import debug
from gossipx.cli.options import logdir_option
from gossipx.launch.directory import run_directory


@click.group("server")
def server() -> None:
    """Change the parameter server of a run in progress.

    \b
    gossipx server set-sync runs/mine ssp:staleness=3
    gossipx server set-servers runs/mine 0,1,2
    """


@server.command("set-sync", short_help="Switch to another sync model.")
@debug
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN", shell_complete=completers.runs())
@click.argument("sync", metavar="SYNC", shell_complete=completers.sync_models)
@click.option("--shard", type=click.IntRange(0), help="Change only this shard, counted from 0. Default: all.")
@click.option("--apply", default="", help="How gradients are applied: push, each, tick. Default: the sync model's.")
@click.option("--pulls", default="", help="When delayed pulls are answered: lazy or soft. Default: unchanged.")
@logdir_option
def set_sync(run: Path, sync: str, shard: int | None, apply: str, pulls: str, logdir: Path) -> None:
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


@server.command("set-servers", short_help="Move the shards to other peers.")
@debug
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN", shell_complete=completers.runs())
@click.argument("servers", metavar="SERVERS")
@logdir_option
def set_servers(run: Path, servers: str, logdir: Path) -> None:
    """Move the shards to the peers SERVERS, given by number or name and separated by commas.

    \b
    gossipx server set-servers runs/mine 0,1,2
    gossipx server set-servers mine node-a,node-b
    """
    from gossipx.errors import UsageError
    from gossipx.launch.run.control_files import command

    given = [name.strip() for name in servers.split(",")]
    if not all(given):
        raise UsageError(f"SERVERS '{servers}': give numbers or names of peers separated by commas, as in 0,1,2")
    command(run_directory(str(run), logdir), {"set-servers": ",".join(given)}, patience=3600.0)
    print(f"the servers are now {','.join(given)}")
