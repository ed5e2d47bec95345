"""``gossipx run --resume``: a run goes on from its checkpoints, under its own name and in its own directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gossipx import build, config
from gossipx.config import KEYS, RunConfig
from gossipx.drive.checkpoints import store_of
from gossipx.drive.shards import servers_of, store_of_shard
from gossipx.errors import UsageError
from gossipx.launch.directory import CONFIG_FILE, HOSTS_FILE, SCRIPT_FILE, run_directory
from gossipx.launch.hosts import read_hosts

CHANGEABLE = {
    *("peers", "logdir", "iterations", "threads", "device", "log_interval", "eval_interval", "save_model"),
    *("checkpoint_every", "keep_checkpoints", "data_dir", "finish", "min_peers", "distance_interval"),
    *("bind", "advertise", "secret_file", "tls_cert", "tls_key", "tls_ca", "transport", "max_rate"),
    *("max_served", "max_pushes", "serve_share", "peer_timeout"),
}
"""Settings that a run may go on with another value of. The others say what the checkpoints' state means: momenta are of
one model, a place in the data is of one seed, partition and batch size."""


def settings_of(run: str, given: Mapping[str, Any], script: list[str]) -> tuple[RunConfig, Path, list[str]]:
    """What a run goes on with.

    Args:
        run: its directory, or its name in ``logdir``.
        given: settings that were given now, by name; None: not given.
        script: what was given now; empty: what the run began with, if it began with one.

    Returns:
        Its settings, its hosts file, its script with arguments.

    Raises:
        UsageError: it is no run, or a setting was given that cannot change; names the option.
    """
    path = run_directory(run, Path(given.get("logdir") or config.RunSettings().logdir))
    if not (path / CONFIG_FILE).is_file():
        raise UsageError(
            "no run to go on with is there: --resume takes the name of one in --logdir, or its directory", path
        )
    before = config.load(path / CONFIG_FILE)
    given = {name: value for name, value in given.items() if value is not None}
    place = {"name": path.resolve().name, "logdir": str(path.parent)}
    settings = config.resolve(before, given, place)
    _check_unchanged(config.resolve(before, place), config.resolve(before, given, {"logdir": place["logdir"]}), path)
    hosts = Path(given["peers"]) if "peers" in given else path / HOSTS_FILE
    _check_size(path, hosts)
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


def _check_size(path: Path, hosts: Path) -> None:
    was, now = len(read_hosts(path / HOSTS_FILE)), len(read_hosts(hosts))
    if was != now:
        raise UsageError(f"--peers names {now} peers, and the run that is to go on has {was}", hosts)


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
    servers = build.servers(settings, names)
    if servers is not None:
        at, then = _common(path, settings, servers, here)
        found = [] if at is None else [at]
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


def _common(
    path: Path, settings: RunConfig, servers: tuple[int, ...], here: list[int]
) -> tuple[int | None, tuple[int, ...]]:
    """The newest iteration of which every worker and every shard here has a whole checkpoint, and the servers of then.

    Servers and workers go on from one and the same: a shard that has not what its workers have pushed would wait for
    it. A peer without any, on a new disk, joins as a late one does.
    """
    workers = [rank for rank in here if not (settings.server.servers_only and rank in servers)]
    trained = [found for rank in workers if (found := store_of(path, rank).whole())]
    shards: dict[tuple[int, ...], dict[int, set[int]]] = {servers: {}}  # by servers, by shard: iterations
    for index in range(len(read_hosts(path / HOSTS_FILE))):
        store = store_of_shard(path, index)
        for iteration in store.whole() - {0}:  # that of clock 0 is there for its journal alone: nothing was trained
            then = servers_of(store, iteration) or servers
            shards.setdefault(then, {}).setdefault(index, set()).add(iteration)
    best: tuple[int, int, tuple[int, ...]] | None = None  # the iteration, how many shards have it, the servers
    for then, kept in shards.items():
        held = [kept.get(index, set()) for index, rank in enumerate(then) if rank in here]
        having = [one for one in (*trained, *held) if one or then != servers]
        at = max(set.intersection(*having), default=None) if having else None
        if at is not None and (best is None or (at, len(kept)) > best[:2]):
            best = at, len(kept), then
    return (None, servers) if best is None else (best[0], best[2])
