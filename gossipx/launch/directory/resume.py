"""``gossipx run --resume``: a run continues from its checkpoints, with its name and in its directory."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossipx.errors import MALFORMED, UsageError
from gossipx.launch.directory import (
    CONFIG_FILE,
    HOSTS_FILE,
    SCRIPT_FILE,
    no_run,
    refuse_simulated,
    run_directory,
    settings_in,
)
from gossipx.launch.hosts import read_hosts
from gossipx.runtime.checkpoints import store_of
from gossipx.runtime.driver.shards import servers_of, store_of_shard
from gossipx.runtime.model_files import directory_of
from gossipx.server.plan import server_ranks
from gossipx.settings import files
from gossipx.settings.modes import Elastic, Server
from gossipx.settings.sections import KEYS, RunConfig, RunSettings

log = logging.getLogger("gossipx")


def resumed_settings(
    run: str, given: Mapping[str, Any], script: list[str], started: tuple[int, str] | None
) -> tuple[RunConfig, Path | None, list[str]]:
    """Return the settings with which a run resumes.

    Args:
        run: directory of the run, or its name in ``logdir``.
        given: settings given now, by name; None: not given.
        script: script and arguments given now; empty: those with which the run began, if any.
        started: how many processes a launcher has started, one per peer, and its name; None: no launcher has.

    Returns:
        The settings, the hosts file (None: the environment defines the peers), the script with its arguments.

    Raises:
        UsageError: the run does not exist, or a given setting or the number of peers cannot change.
    """
    logdir = Path(given.get("logdir") or RunSettings().logdir)
    path = run_directory(run, logdir)
    if not path.is_dir():
        raise no_run(run, logdir, CONFIG_FILE)
    refuse_simulated(path)
    before = settings_in(path)
    given = {name: value for name, value in given.items() if value is not None}
    place = {"name": path.resolve().name, "logdir": str(path.parent)}
    _check_unchanged([before, place], [before, given, {"logdir": place["logdir"]}], path)
    settings = files.resolve(before, given, place)
    if "peers" in given or started is None or started[0] == 1:
        hosts = Path(given["peers"]) if "peers" in given else path / HOSTS_FILE
        check_same_size(settings, peers_before(settings), len(read_hosts(hosts)), "--peers names", hosts)
    else:
        hosts = None
        check_same_size(settings, peers_before(settings), started[0], f"{started[1]} started", None)
    recorded = path / SCRIPT_FILE
    if not script and recorded.is_file():
        script = _script_in(recorded)
    return settings, hosts, script


def _script_in(recorded: Path) -> list[str]:
    """Return the script and the arguments with which a run began."""
    try:
        found = json.loads(recorded.read_bytes())
    except MALFORMED:
        found = None
    if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
        raise UsageError("not a script with its arguments: give the script on the command line", recorded)
    return found


def _check_unchanged(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], path: Path) -> None:
    values = [files.absolute_values(files.merged(*layers)[0]) for layers in (before, now)]
    for key in KEYS.values():
        was, wanted = (one.get(key.name, key.default) for one in values)
        same_kind = key.name == "policy" and was.partition(":")[0] == wanted.partition(":")[0].strip()
        if was != wanted and "later" not in key.marks and not same_kind:
            raise UsageError(
                f"{key.option} cannot change when a run resumes; it is {_shown(was)} there: leave it out, or start a"
                " new run",
                path,
            )


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "not given" if value is None else str(value)


def peers_before(settings: RunConfig) -> int:
    """Return the number of peers that the run to resume had."""
    return len(read_hosts(_directory(settings) / HOSTS_FILE))


def _directory(settings: RunConfig) -> Path:
    assert settings.run.name is not None
    return Path(settings.run.logdir) / settings.run.name


def check_same_size(settings: RunConfig, was: int, now: int, source: str, hosts: Path | None) -> None:
    """Check that a run of ``was`` peers can resume with the number of peers ``now``, which ``source`` defines.

    Raises:
        UsageError: it cannot.
    """
    mode = settings.mode
    around = "a hub" if isinstance(mode, Elastic) else "servers" if isinstance(mode, Server) else None
    if was != now and around is not None:
        raise UsageError(
            f"{source} {now} peers, but the run to resume has {was}: with {around} the number cannot change", hosts
        )


def tell_other_size(settings: RunConfig, names: Sequence[str], before: int) -> None:
    """Log in one line that a run resumes with more peers than before, or with fewer."""
    if len(names) > before:
        log.warning(
            "the run had %d peers, and %s had no part in it: each starts with the model of a peer that resumes",
            before,
            ", ".join(names[before:]),
        )
    elif len(names) < before:
        left = ", ".join(directory_of(_directory(settings), rank).name for rank in range(len(names), before))
        log.warning(
            "the run had %d peers, and %d resume: checkpoints in %s are left in place", before, len(names), left
        )


def check(
    settings: RunConfig, names: Sequence[str], here: list[int], has_script: bool, before: int
) -> tuple[int | None, RunConfig]:
    """Check that there are checkpoints to resume from, and choose the iteration.

    Args:
        settings: settings of the run.
        names: names of its peers, by rank.
        here: ranks of the peers whose checkpoints are visible on this machine.
        has_script: whether the run trains a script, which sets its own number of iterations.
        before: number of peers that the run had; ranks from that on do not resume.

    Returns:
        The iteration from which all peers resume; None: each from its own newest checkpoint. And the settings, with the
        servers of that checkpoint: they may have changed during the run.

    Raises:
        UsageError: no peer has a complete checkpoint, or the checkpoints exceed the number of iterations.
    """
    path = _directory(settings)
    servers = server_ranks(settings, names)
    if servers is not None:
        found, at, then = _served(path, settings, servers, here)
        if then != servers:
            settings = files.changed(settings, servers=",".join(map(str, then)))
    else:
        at = None
        found = [one for rank in here if rank < before and (one := store_of(path, rank).find()) is not None]
    if not found and len(here) == len(names):
        fault = next((fault for rank in here if (fault := store_of(path, rank).fault())), "")
        why = fault or "a run writes checkpoints with --checkpoint-every, and when SIGTERM ends it"
        raise UsageError(f"no peer has a complete checkpoint to resume from: {why}", path)
    if not has_script and found and max(found) > settings.run.iterations:
        raise UsageError(f"--iterations {settings.run.iterations}, but its checkpoints already have {max(found)}", path)
    return at, settings


Checkpoints = dict[int, set[int]]
"""Iterations of complete checkpoints, by shard or by rank of the worker."""


def _served(
    path: Path, settings: RunConfig, servers: tuple[int, ...], here: list[int]
) -> tuple[list[int], int | None, tuple[int, ...]]:
    """Choose where the workers and shards of this machine resume: at the newest iteration for which all have a
    checkpoint.

    There may be none, if fast workers were far ahead or checkpoints were taken by wall-clock time. Then each resumes
    from its newest. A peer without any checkpoint, for example on a new disk, joins like a late peer.

    Returns:
        The iterations of the checkpoints, the common iteration (None: each its own), and the servers at that time.
    """
    workers = [rank for rank in here if not (settings.values["servers_only"] and rank in servers)]
    trained = {rank: found for rank in workers if (found := store_of(path, rank).find_complete(log_damaged=True))}
    shards = _shards(path, servers)
    best: tuple[int, int, tuple[int, ...]] | None = None  # iteration, minus the number of shards without, servers
    known = {index for kept in shards.values() for index in kept}
    for then, kept in shards.items():
        held = {index: kept.get(index, set()) for index, rank in enumerate(then) if rank in here}
        # A shard may begin anew only if it has no checkpoint at all, also not of other servers.
        needed = [one for index, one in held.items() if one or then != servers or index in known]
        having = [*trained.values(), *needed]
        at = max(set.intersection(*having), default=None) if having else None
        lacking = list(held.values()).count(set())
        if at is not None and (best is None or (at, -lacking) > best[:2]):
            best = at, -lacking, then
    if best is not None:
        at, _, then = best
        _warn_new([index for index, rank in enumerate(then) if rank in here and index not in shards[then]])
        return [at], at, then
    return _uneven(path, trained, shards, servers, here)


def _uneven(
    path: Path,
    trained: Checkpoints,
    shards: dict[tuple[int, ...], Checkpoints],
    servers: tuple[int, ...],
    here: list[int],
) -> tuple[list[int], int | None, tuple[int, ...]]:
    """Choose as :func:`_served` does if there is no iteration for which all have a checkpoint.

    Raises:
        UsageError: the shards' newest checkpoints belong to different assignments of shards to servers.
    """
    newest: dict[int, tuple[int, tuple[int, ...]]] = {}  # by shard, with the servers at that time
    for then, kept in shards.items():
        for index, found in kept.items():
            newest[index] = max(newest.get(index, (0, then)), (max(found), then))
    whole = {  # servers to which all shards' newest checkpoints belong, with the oldest of these
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
            f"the newest checkpoints of the shards belong to different servers ({'; '.join(apart)}), and cannot be"
            " combined: remove the shard-* directories to resume from the workers' models alone",
            path,
        )
    then = max(whole, key=whole.__getitem__, default=servers)
    held = {index: newest[index][0] for index, rank in enumerate(then) if rank in here and index in newest}
    newest_of = [f"worker {rank}: {max(found)}" for rank, found in sorted(trained.items())]
    newest_of += [f"shard {index}: {at}" for index, at in sorted(held.items())]
    log.warning("no iteration has checkpoints of all: each resumes from its newest (%s)", ", ".join(newest_of))
    _warn_new([index for index, rank in enumerate(then) if rank in here and index not in held])
    return [max(found) for found in trained.values()], None, then


def _warn_new(shards: Sequence[int]) -> None:
    for index in shards:
        log.warning("shard %d has no checkpoint: it starts from its server's model, with a new optimizer state", index)


def _shards(path: Path, servers: tuple[int, ...]) -> dict[tuple[int, ...], Checkpoints]:
    """Return the checkpoints of the shards, by the servers of that time."""
    shards: dict[tuple[int, ...], Checkpoints] = {servers: {}}
    for index in range(len(read_hosts(path / HOSTS_FILE))):
        store = store_of_shard(path, index)
        trained_at = store.find_complete(log_damaged=True) - {0}  # the checkpoint of clock 0 only anchors the journal
        for iteration in trained_at:
            then = servers_of(store, iteration) or servers
            shards.setdefault(then, {}).setdefault(index, set()).add(iteration)
    return shards
