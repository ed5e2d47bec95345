"""``gossipx run`` as one process a peer, started by torchrun, SLURM or Open MPI: all agree to be one run.

Rank 0 gives the run its name and makes its directory. Where others see that directory, on a file system that they
share, they write into it; else the first rank of each machine makes one there. From then on no process needs another
one: one that dies is a lost peer, and each can write the summary.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gossipx.config import files, security
from gossipx.config.settings import KEYS, RunConfig
from gossipx.errors import UsageError
from gossipx.launch import resume
from gossipx.launch.cluster import membership
from gossipx.launch.cluster.rendezvous import Rendezvous
from gossipx.launch.cluster.world import World, check_size, is_loopback
from gossipx.launch.directory import CONFIG_FILE, HOSTS_FILE, RunDirectory, checked_name
from gossipx.launch.directory import replace as replace_file
from gossipx.launch.hosts import PeerLine, read_hosts
from gossipx.launch.start import Start, check_here, check_names, check_script, named, presets
from gossipx.metrics import summary
from gossipx.metrics.summary import Summary
from gossipx.runtime.models import directory_of

EACH_ITS_OWN = {
    *("peers", "name", "logdir", "overwrite", "threads", "device", "data_dir"),
    *("bind", "advertise", "secret_file", "tls_cert", "tls_key", "tls_ca", "rendezvous_timeout"),
}
"""Settings that may differ between processes of one run: where things are on their machines."""


def from_world(given: RunConfig, world: World, hosts: Path | None, script: list[str], resumes: bool) -> Start:
    """This process's peer.

    Args:
        hosts: the peers, if they are listed; None: where each is told is told at the rendezvous.

    Raises:
        UsageError: settings, hosts file or script are not right, the name is in use, or ranks differ in what they say.
        GossipxError: not all came in time, or one has given up.
    """
    listed, world = (None, world) if hosts is None else _listed(hosts, world)
    with contextlib.ExitStack() as undo:
        # What this process refuses, it refuses where the others hear it: they would wait for it.
        with Rendezvous(world, given.exchange.rendezvous_timeout) as meeting:
            settings = presets(given, world.size, script, hosts)
            check_script(script)
            if listed is None:
                membership.check_reach(world, settings.exchange)
            device = _device(settings.run.device, world)
            settings, token = _one_run(meeting, settings, bool(script))
            held = None
            if listed is None or hosts is None:
                text, held = membership.agree(meeting, settings.exchange, device)
                undo.callback(held.close)
            else:
                text = hosts.read_text(encoding="utf-8-sig")
            peers = listed or membership.lines_of(text)
            check_names(settings, peers)
            notice = check_here(settings, [peers[world.rank]], script, hosts)
            settings = replace(settings, exchange=security.absolute(settings.exchange))
            names, seen = [peer.name for peer in peers], _seen(settings, world)
            at, settings = resume.check(settings, names, seen, bool(script)) if resumes else (None, settings)
            content = f"{text.rstrip()}\n# {world.source}, {token}\n".encode()
            directory = _share(meeting, settings, content, script, resumes, undo)
        undo.pop_all()
    directory.begin()
    return Start(settings, directory, peers, [world.rank], resumes, at, notice, shared=True, held=held)


def _listed(hosts: Path, world: World) -> tuple[list[PeerLine], World]:
    """The peers of a hosts file, and what that says of the world."""
    peers = read_hosts(hosts)
    check_size(world, len(peers), hosts)
    if world.master is None:
        world = replace(world, master=peers[0].host, master_from=str(hosts))
    if not world.hosted and all(is_loopback(peer.host) for peer in peers):
        world = replace(world, master=membership.LOOPBACK, one_host=True)
    return peers, world


def _device(name: str, world: World) -> str | None:
    """``cuda`` without a number is one GPU a process of this machine, in turn; None: what the settings say holds."""
    if name != "cuda" or world.local_rank is None or not torch.cuda.device_count():
        return None
    return f"cuda:{world.local_rank % torch.cuda.device_count()}"


def _one_run(meeting: Rendezvous, settings: RunConfig, has_script: bool) -> tuple[RunConfig, str]:
    """Rank 0's name for the run, and a word that no other run has; settings are compared."""
    rank = meeting.world.rank
    own = {**_plain(settings), "a script": has_script}
    if rank == 0:
        settings = named(settings)
        meeting.tell("run", {"settings": own, "name": settings.run.name, "token": secrets.token_hex(8)})
    first = meeting.of("run")
    for key, value in own.items():
        if first["settings"].get(key) != value:
            option = KEYS[key].option if key in KEYS else key
            raise UsageError(
                f"{option} is {_shown(value)} for rank {rank}, and {_shown(first['settings'].get(key))} for rank 0: all"
                " processes of a run are given the same"
            )
    name = checked_name(str(first["name"]))
    return replace(settings, run=replace(settings.run, name=name)), str(first["token"])


def _plain(settings: RunConfig) -> dict[str, Any]:
    """What all have alike, as JSON gives it back."""
    values = {name: getattr(getattr(settings, key.table), name) for name, key in KEYS.items()}
    alike: dict[str, Any] = json.loads(json.dumps({n: v for n, v in values.items() if n not in EACH_ITS_OWN}))
    return alike


def _shown(value: object) -> str:
    return "not given" if value is None else json.dumps(value).strip('"')


def _seen(settings: RunConfig, world: World) -> list[int]:
    """The ranks whose checkpoints can be looked at from here: its own, and those whose directories are here."""
    assert settings.run.name is not None
    path = Path(settings.run.logdir) / settings.run.name
    return [rank for rank in range(world.size) if rank == world.rank or directory_of(path, rank).is_dir()]


# --- the directory ------------------------------------------------------------------------------------


class SharedDirectory:
    """The directory of a run that other processes may write into, too; :class:`gossipx.launch.start.Directory`.

    Args:
        path: of the run.
        made: this process has made it; None: another one has.
        rank: of its peer.
        settings: of this process, which may differ from those that the directory has.
    """

    def __init__(self, path: Path, made: RunDirectory | None, rank: int, settings: RunConfig):
        self.path = path
        self._made = made
        self._rank = rank
        self._summary_before = self._summary()  # of a run that goes on
        own = path / f"config-{rank:02d}.toml"
        mine, all_have = files.dump(settings).encode(), path / CONFIG_FILE
        if mine == all_have.read_bytes():
            own.unlink(missing_ok=True)  # of a run before that goes on
            self.config = all_have
        else:
            replace_file(own, mine)
            self.config = own

    def begin(self) -> None:
        """All have met. From now on others may train here, and what was overwritten is gone."""
        if self._made is not None:
            self._made.keep()

    def keep(self) -> None:
        """It is kept already."""

    def give_up(self) -> None:
        """Others may train here."""

    def release(self) -> None:
        """This process's part of the run has ended."""
        if self._made is not None:
            self._made.release()

    def conclude(self, figures: Summary) -> bool:
        """Write the summary, if none is there that lacks as few peers: any may end first, or be lost."""
        if self._summary() != self._summary_before:
            with contextlib.suppress(UsageError):
                if len(summary.read(self.path).lost) <= len(figures.lost):
                    return False
        figures.write(self.path, by=self._rank)
        return True

    def _summary(self) -> bytes | None:
        with contextlib.suppress(OSError):
            return (self.path / summary.FILE).read_bytes()
        return None


def _share(
    meeting: Rendezvous,
    settings: RunConfig,
    hosts: bytes,
    script: Sequence[str],
    resumes: bool,
    undo: contextlib.ExitStack,
) -> SharedDirectory:
    """The directory: rank 0's, where this process sees it, else its machine's own."""
    assert settings.run.name is not None
    rank, path, made = meeting.world.rank, Path(settings.run.logdir) / settings.run.name, None

    def make() -> RunDirectory:
        directory = RunDirectory(settings, hosts, script, goes_on=resumes)
        undo.callback(directory.give_up)
        return directory

    def sees() -> bool:
        with contextlib.suppress(OSError):
            return (path / HOSTS_FILE).read_bytes() == hosts
        return False

    if rank == 0:
        made = make()
        meeting.tell("made", True)
    meeting.of("made")
    meeting.tell("sees", [socket.gethostname(), sees()])
    maker = maker_of(rank, meeting.all("sees"))
    if maker == rank and rank != 0:
        made = make()
    if maker is not None:
        meeting.tell("made-here", True)
        meeting.of("made-here", maker)
    if not sees():  # machines, or containers, of one name
        made = make()
    return SharedDirectory(path, made, rank, settings)


def maker_of(rank: int, told: Sequence[Any]) -> int | None:
    """Who makes the directory on this rank's machine, if it does not see rank 0's; None: it does.

    Args:
        told: by rank, the machine's name and whether it sees the directory.
    """
    host, sees = told[rank]
    return None if sees else next(other for other, one in enumerate(told) if one == [host, False])
