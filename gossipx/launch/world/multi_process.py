"""``gossipx run`` as one process per peer, started by torchrun, SLURM or Open MPI: the processes agree to be one run.

Rank 0 names the run and creates its directory. Processes that see this directory, on a shared file system, write into
it; on each other machine the first rank creates one there. After that no process depends on another: a process that
dies is a lost peer, and any process can write the summary.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gossipx.errors import UsageError
from gossipx.launch.directory import HOSTS_FILE, RunDirectory, checked_name, resume
from gossipx.launch.directory.shared import SharedDirectory
from gossipx.launch.hosts import LOOPBACK, PeerLine, is_loopback_name, read_hosts
from gossipx.launch.start import Start, check_here, check_names, check_script, presets, with_name
from gossipx.launch.world import attempts, process_list
from gossipx.launch.world.launchers import LaunchWorld, check_world_size
from gossipx.launch.world.rendezvous import Rendezvous
from gossipx.runtime.model_files import directory_of
from gossipx.settings import files
from gossipx.settings.sections import KEYS, RunConfig, marked
from gossipx.specs import texts

log = logging.getLogger("gossipx")


def from_world(given: RunConfig, world: LaunchWorld, hosts: Path | None, script: list[str], resumed_size: int) -> Start:
    """Return the start of this process's peer.

    Args:
        hosts: hosts file with all peers; None: the processes publish their addresses at the rendezvous.
        resumed_size: as in :class:`gossipx.launch.start.Start`.

    Raises:
        UsageError: settings, hosts file or script are invalid, the name is in use, or the ranks' settings differ.
        GossipxError: some ranks did not arrive in time, or one has aborted.
        SystemExit: with code 0, if an earlier attempt of this job has completed the run.
    """
    listed, world = (None, world) if hosts is None else _listed(hosts, world)
    with contextlib.ExitStack() as undo:
        # Checks run inside the rendezvous, so that an error here aborts the other ranks instead of letting them wait.
        with Rendezvous(world, given.exchange.rendezvous_timeout) as meeting:
            start = _agree(meeting, given, listed, hosts, script, resumed_size, undo)
        undo.pop_all()
    if start is None:
        raise SystemExit(0)
    return start


def _agree(
    meeting: Rendezvous,
    given: RunConfig,
    listed: list[PeerLine] | None,
    hosts: Path | None,
    script: list[str],
    resumed_size: int,
    undo: contextlib.ExitStack,
) -> Start | None:
    """Agree with all ranks on the run; None: an earlier attempt of this job has completed it."""
    world = meeting.world
    settings = presets(given, world.size, script, hosts)
    check_script(script)
    if listed is None:
        process_list.check_reach(world, settings.exchange)
    device = _device(settings.run.device, world)
    settings, first = _one_run(meeting, settings, bool(script), resumed_size)
    if first["earlier"] is not None:
        settings, resumed_size, completed = attempts.continued(meeting, settings, first["earlier"])
        if completed:
            return None
    reserved = None
    if listed is None or hosts is None:
        text, reserved = process_list.agree(meeting, settings.exchange, device)
        undo.callback(reserved.close)
    else:
        text = texts.read(hosts, "hosts file")
    peers = listed or process_list.lines_of(text)
    check_names(settings, peers)
    notice = check_here(settings, [peers[world.rank]], script, hosts)
    names, visible = [peer.name for peer in peers], _visible_ranks(settings, world)
    at = None
    if resumed_size:
        resume.check_same_size(settings, resumed_size, world.size, f"{world.source} started", None)
        at, settings = resume.check(settings, names, visible, bool(script), resumed_size)
        if world.rank == 0:
            resume.tell_other_size(settings, names, resumed_size)
    content = f"{text.rstrip()}\n# {world.source}, {first['token']}, {meeting.mark}\n".encode()
    directory = _share(meeting, settings, content, script, bool(resumed_size), undo)
    directory.begin()
    return Start(
        settings=settings,
        peers=peers,
        here=[world.rank],
        notice=notice,
        directory=directory,
        resumed_size=resumed_size,
        resumes_at=at,
        shared=True,
        reserved=reserved,
    )


def _listed(hosts: Path, world: LaunchWorld) -> tuple[list[PeerLine], LaunchWorld]:
    """Return the peers of a hosts file, and the world with what the file says about rank 0."""
    peers = read_hosts(hosts)
    check_world_size(world, len(peers), hosts)
    if world.master is None:
        world = replace(world, master=peers[0].host, master_from=str(hosts))
    if not world.hosted and all(is_loopback_name(peer.host) for peer in peers):
        world = replace(world, master=LOOPBACK, one_host=True)
    return peers, world


def _device(name: str, world: LaunchWorld) -> str | None:
    """Return this process's GPU for ``cuda`` without a number: one per process of a machine, in turn; None: use the
    settings."""
    if name != "cuda" or world.local_rank is None or not torch.cuda.device_count():
        return None
    return f"cuda:{world.local_rank % torch.cuda.device_count()}"


def _one_run(
    meeting: Rendezvous, settings: RunConfig, has_script: bool, resumed_size: int
) -> tuple[RunConfig, dict[str, Any]]:
    """Return the settings with rank 0's name for the run, and what rank 0 publishes; compare the settings.

    Rank 0 publishes its ``settings``, the ``name``, a ``token`` that identifies the run, and as ``earlier`` the run of
    an earlier attempt of this job, if there is one.
    """
    rank = meeting.world.rank
    own = {**_common(settings), "a script": has_script}
    if rank == 0:
        earlier = None if resumed_size else attempts.earlier_run(meeting, settings)
        name = with_name(settings).run.name if earlier is None else earlier["name"]
        meeting.publish("run", {"settings": own, "name": name, "token": secrets.token_hex(8), "earlier": earlier})
    first = meeting.get("run")
    for key, value in own.items():
        if first["settings"].get(key) != value:
            option = KEYS[key].option if key in KEYS else key
            raise UsageError(
                f"{option} is {_shown(value)} for rank {rank}, but {_shown(first['settings'].get(key))} for rank 0:"
                " give all processes of a run the same"
            )
    name = checked_name(str(first["name"]))
    return files.changed(settings, name=name), first


def _common(settings: RunConfig) -> dict[str, Any]:
    """Return the settings that all processes must share, as they look after a round trip through JSON."""
    own = marked("machine", "process")
    common: dict[str, Any] = json.loads(json.dumps({name: settings.values[name] for name in KEYS if name not in own}))
    return common


def _shown(value: object) -> str:
    return "not given" if value is None else json.dumps(value).strip('"')


def _visible_ranks(settings: RunConfig, world: LaunchWorld) -> list[int]:
    """Return the ranks whose checkpoints are visible here: this process's, and those whose directories exist here."""
    assert settings.run.name is not None
    path = Path(settings.run.logdir) / settings.run.name
    return [rank for rank in range(world.size) if rank == world.rank or directory_of(path, rank).is_dir()]


# --- the directory ------------------------------------------------------------------------------------


def _share(
    meeting: Rendezvous,
    settings: RunConfig,
    hosts: bytes,
    script: Sequence[str],
    resumes: bool,
    undo: contextlib.ExitStack,
) -> SharedDirectory:
    """Return the directory: rank 0's if this process sees it, else one for this machine."""
    assert settings.run.name is not None
    rank, path, created = meeting.world.rank, Path(settings.run.logdir) / settings.run.name, None

    def create() -> RunDirectory:
        directory = RunDirectory(settings, hosts, script, resumes)
        undo.callback(directory.revert)
        return directory

    def sees() -> bool:
        with contextlib.suppress(OSError):
            return (path / HOSTS_FILE).read_bytes() == hosts
        return False

    if rank == 0:
        created = create()
        meeting.publish("created", True)
    meeting.get("created")
    meeting.publish("sees", [socket.gethostname(), sees()])
    creator = creator_of(rank, meeting.gather("sees"))
    if creator == rank and rank != 0:
        created = create()
    if creator is not None:
        meeting.publish("created-here", True)
        meeting.get("created-here", creator)
    if not sees():  # several machines or containers have the same host name
        created = create()
    return SharedDirectory(path, created, rank, settings)


def creator_of(rank: int, reports: Sequence[Any]) -> int | None:
    """Return the rank that creates the directory on this rank's machine; None: this rank sees rank 0's directory.

    Args:
        reports: by rank, the host name and whether the rank sees the directory.
    """
    host, sees = reports[rank]
    return None if sees else next(other for other, report in enumerate(reports) if report == [host, False])
