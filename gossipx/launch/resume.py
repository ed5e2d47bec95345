"""``gossipx run --resume``: a run goes on from its checkpoints, under its own name and in its own directory."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gossipx.assembly.server_settings import server_ranks
from gossipx.config import files
from gossipx.config.settings import KEYS, RunConfig, RunSettings
from gossipx.errors import UsageError
from gossipx.launch.cluster.world import find
from gossipx.launch.directory import CONFIG_FILE, HOSTS_FILE, SCRIPT_FILE, run_directory
from gossipx.launch.hosts import read_hosts
from gossipx.runtime.checkpoints import store_of
from gossipx.runtime.shards import servers_of, store_of_shard

log = logging.getLogger("gossipx")

CHANGEABLE = {
    *("peers", "logdir", "iterations", "threads", "device", "log_interval", "eval_interval", "save_model"),
    *("checkpoint_every", "keep_checkpoints", "data_dir", "finish", "min_peers", "distance_interval"),
    *("bind", "advertise", "secret_file", "tls_cert", "tls_key", "tls_ca", "transport", "max_rate"),
    *("max_served", "max_pushes", "serve_share", "peer_timeout", "rendezvous_timeout"),
}
"""Settings that a run may go on with another value of. The others say what the checkpoints' state means: momenta are of
one model, a place in the data is of one seed, partition and batch size."""


def settings_of(
    run: str, given: Mapping[str, Any], script: list[str], environ: Mapping[str, str]
) -> tuple[RunConfig, Path | None, list[str]]:
    """What a run goes on with.

    Args:
        run: its directory, or its name in ``logdir``.
        given: settings that were given now, by name; None: not given.
        script: what was given now; empty: what the run began with, if it began with one.
        environ: where a launcher says who the peers are.

    Returns:
        Its settings, its hosts file (None: the environment says who the peers are now), its script with arguments.

    Raises:
        UsageError: it is no run, or a setting was given that cannot change; names the option.
    """
    path = run_directory(run, Path(given.get("logdir") or RunSettings().logdir))
    if not (path / CONFIG_FILE).is_file():
        raise UsageError(
            "no run to go on with is there: --resume takes the name of one in --logdir, or its directory", path
        )
    before = files.load(path / CONFIG_FILE)
    given = {name: value for name, value in given.items() if value is not None}
    place = {"name": path.resolve().name, "logdir": str(path.parent)}
    settings = files.resolve(before, given, place)
    _check_unchanged(files.resolve(before, place), files.resolve(before, given, {"logdir": place["logdir"]}), path)
    world = find(environ)
    if "peers" in given or world is None or world.size == 1:
        hosts = Path(given["peers"]) if "peers" in given else path / HOSTS_FILE
        _check_size(path, len(read_hosts(hosts)), "--peers names", hosts)
    else:
        hosts = None
        _check_size(path, world.size, f"{world.source} started", None)
    noted = path / SCRIPT_FILE
    if not script and noted.is_file():
        script = json.loads(noted.read_bytes())
    return settings, hosts, script


def _check_unchanged(before: RunConfig, now: RunConfig, path: Path) -> None:
    for key in KEYS.values():
        was, wanted = (getattr(getattr(one, key.table), key.name) for one in (before, now))
        same_kind = key.name == "policy" and was.partition(":")[0] == wanted.partition(":")[0].strip()
        if was != wanted and key.name not in CHANGEABLE and not same_kind:
            raise UsageError(
                f"{key.option} cannot change in a run that goes on, where it is {_shown(was)}: leave it out, or begin a"
                " new run",
                path,
            )


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "not given" if value is None else str(value)


def _check_size(path: Path, now: int, who: str, hosts: Path | None) -> None:
    was = len(read_hosts(path / HOSTS_FILE))
    if was != now:
        raise UsageError(f"{who} {now} peers, and the run that is to go on has {was}", hosts)


def check(settings: RunConfig, names: Sequence[str], here: list[int], has_script: bool) -> tuple[int | None, RunConfig]:
    """See that there is something to go on from.

    Args:
        settings: of the run.
        names: of its peers, by rank; ``here``: those of this machine, by rank.
        has_script: whether it trains a script, which has a length of its own.

    Returns:
        The iteration from which all are to go on; None: each from its own newest checkpoint. And the settings, with the
        servers of then: they may have been changed while the run went on.

    Raises:
        UsageError: no peer has a whole checkpoint, or they have done more iterations than there are to be.
    """
    assert settings.run.name is not None
    path = Path(settings.run.logdir) / settings.run.name
    servers = server_ranks(settings, names)
    if servers is not None:
        found, at, then = _served(path, settings, servers, here)
        if then != servers:
            settings = replace(settings, server=replace(settings.server, servers=",".join(map(str, then))))
    else:
        at = None
        found = [one for rank in here if (one := store_of(path, rank).find()) is not None]
    if not found and len(here) == len(names):
        raise UsageError(
            "no peer has a whole checkpoint to go on from: a run writes them with --checkpoint-every,"
            " and when SIGTERM ends it",
            path,
        )
    if not has_script and found and max(found) > settings.run.iterations:
        raise UsageError(
            f"--iterations {settings.run.iterations}, and its checkpoints have done {max(found)} already", path
        )
    return at, settings


Kept = dict[int, set[int]]
"""By shard, or by worker's rank: iterations of whole checkpoints."""


def _served(
    path: Path, settings: RunConfig, servers: tuple[int, ...], here: list[int]
) -> tuple[list[int], int | None, tuple[int, ...]]:
    """From where workers and shards here go on.

    That is the newest iteration of which all have a whole checkpoint. Where there is none, as fast workers were far
    ahead or checkpoints were taken by the clock on the wall, each goes on from its newest. A peer without any, on a new
    disk, joins as a late one does.

    Returns:
        The iterations, the one that all have (None: there is none), and the servers of then.
    """
    workers = [rank for rank in here if not (settings.server.servers_only and rank in servers)]
    trained = {rank: found for rank in workers if (found := store_of(path, rank).whole(told=True))}
    shards = _shards(path, servers)
    best: tuple[int, int, tuple[int, ...]] | None = None  # the iteration, less shards that have none, the servers
    for then, kept in shards.items():
        held = [kept.get(index, set()) for index, rank in enumerate(then) if rank in here]
        having = [one for one in (*trained.values(), *held) if one or then != servers]
        at = max(set.intersection(*having), default=None) if having else None
        lacking = held.count(set())
        if at is not None and (best is None or (at, -lacking) > best[:2]):
            best = at, -lacking, then
    if best is not None:
        at, _, then = best
        _tell_new([index for index, rank in enumerate(then) if rank in here and index not in shards[then]])
        return [at], at, then
    return _uneven(path, trained, shards, servers, here)


def _uneven(
    path: Path, trained: Kept, shards: dict[tuple[int, ...], Kept], servers: tuple[int, ...], here: list[int]
) -> tuple[list[int], int | None, tuple[int, ...]]:
    """As :func:`_served`, where there is no iteration that all have.

    Raises:
        UsageError: the newest checkpoints of shards are of servers that do not go together.
    """
    newest: dict[int, tuple[int, tuple[int, ...]]] = {}  # by shard, with the servers of then
    for then, kept in shards.items():
        for index, found in kept.items():
            newest[index] = max(newest.get(index, (0, then)), (max(found), then))
    whole = {  # where each shard's newest, if it has one, is of these servers: that of the one furthest behind
        then: min(newest[index][0] for index in having)
        for then in shards
        if (having := [index for index, rank in enumerate(then) if rank in here and index in newest])
        and all(newest[index][1] == then for index in having)
    }
    if not trained:
        return [], None, servers
    if newest and not whole:
        apart = (f"shard {index} at {at}: {','.join(map(str, then))}" for index, (at, then) in sorted(newest.items()))
        raise UsageError(
            f"the newest checkpoints of its shards are of different servers ({'; '.join(apart)}), and do not go"
            " together: remove its shard-* directories to go on from the workers' models alone",
            path,
        )
    then = max(whole, key=whole.__getitem__, default=servers)
    held = {index: newest[index][0] for index, rank in enumerate(then) if rank in here and index in newest}
    told = [f"worker {rank}: {max(found)}" for rank, found in sorted(trained.items())]
    told += [f"shard {index}: {at}" for index, at in sorted(held.items())]
    log.warning("no iteration has a checkpoint of all, so that each goes on from its newest (%s)", ", ".join(told))
    _tell_new([index for index, rank in enumerate(then) if rank in here and index not in held])
    return [max(found) for found in trained.values()], None, then


def _tell_new(shards: Sequence[int]) -> None:
    for index in shards:
        log.warning("shard %d has no checkpoint: it begins with its holder's model, and the optimizer anew", index)


def _shards(path: Path, servers: tuple[int, ...]) -> dict[tuple[int, ...], Kept]:
    """What there is of shards, by the servers of then."""
    shards: dict[tuple[int, ...], Kept] = {servers: {}}
    for index in range(len(read_hosts(path / HOSTS_FILE))):
        store = store_of_shard(path, index)
        trained_at = store.whole(told=True) - {0}  # that of clock 0 is there for its journal alone
        for iteration in trained_at:
            then = servers_of(store, iteration) or servers
            shards.setdefault(then, {}).setdefault(index, set()).add(iteration)
    return shards
