"""Everything that ``gossipx run`` decides before it starts peers: the settings, all peers, the peers of this machine,
and the run's directory."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from gossipx.assembly.devices import check_device, check_transport
from gossipx.assembly.presets import effective_config
from gossipx.errors import UsageError
from gossipx.hub import rank_of_hub
from gossipx.launch.directory import HOSTS_FILE, Directory, RunDirectory
from gossipx.launch.environment import ADDED, ENV_CONFIG, ENV_DEVICE, ENV_PEERS, ENV_RANK, ENV_RESUME, ENV_RESUME_AT
from gossipx.launch.hosts import PeerLine, bind_host, local_ranks, read_hosts
from gossipx.server.plan import server_ranks
from gossipx.settings.modes import Elastic, Server
from gossipx.settings.sections import RunConfig
from gossipx.transports import access

LEAST_MEMORY = 10**8
"""Bytes that a peer's process takes at least: with torch, and before its model and data, it has 160 MB of its own."""


def no_peers(script: Sequence[str], advice: str) -> UsageError:
    """Return the error of a command with a SCRIPT that names no peers; ``advice``: how to name them."""
    after = next((word for word in script[1:] if word.partition("=")[0] in ("--peers", "--config")), None)
    if after is not None:
        advice = f"{after.partition('=')[0]} stands after SCRIPT ({script[0]}), whose option it is: write it before"
    elif script and Path(script[0]).suffix != ".py":
        advice = f"'{script[0]}' was read as SCRIPT: {advice}"
    return UsageError(f"no peers given: {advice}")


@dataclass(frozen=True)
class Checked:
    """The checked settings and peers of a run that may be started.

    Attributes:
        settings: settings with a name and presets filled in.
        peers: all peers, by rank.
        here: ranks of the peers on this machine.
        notice: message to show first; None: none.
    """

    settings: RunConfig
    peers: list[PeerLine]
    here: list[int]
    notice: str | None


@dataclass(frozen=True, kw_only=True)
class Start(Checked):
    """Everything needed to start the peers of this machine.

    Attributes:
        directory: the run's directory, already created.
        resumed_size: number of peers that the run had, if it resumes from checkpoints; 0: the run is new.
        resumes_at: iteration of the checkpoints; None: each from its newest.
        shared: whether other processes on this terminal are peers of the run too.
        reserved: socket that keeps a port free for the peer until it is closed.
        joins: environment variables of a peer that joins a run under way; None: the peers begin it.
    """

    directory: Directory
    resumed_size: int = 0
    resumes_at: int | None = None
    shared: bool = False
    reserved: socket.socket | None = None
    joins: Mapping[str, str] | None = None

    @property
    def is_quiet(self) -> bool:
        """Whether another process on this terminal tells what concerns the whole run."""
        return self.shared and 0 not in self.here

    @property
    def title(self) -> str:
        """Name, policy and number of peers of the run."""
        mode, kind, central = self.settings.mode, "policy", ""
        if isinstance(mode, Elastic):
            central = f", hub {mode.hub}"
        elif isinstance(mode, Server):
            kind, central = "sync", f", servers {mode.servers or 0}"
        return f"{self.settings.run.name}: {kind} {self.settings.decides}, {len(self.peers)} peers{central}"

    def environment(self, rank: int, again: bool) -> dict[str, str]:
        """Return the environment of a peer's process; ``again``: it was started before, and resumes."""
        is_added = bool(self.resumed_size) and rank >= self.resumed_size and not again
        return {
            "OMP_NUM_THREADS": str(self.settings.run.threads),
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            ENV_CONFIG: str(self.directory.config.resolve()),
            ENV_PEERS: str((self.directory.path / HOSTS_FILE).resolve()),
            ENV_RANK: str(rank),
            ENV_DEVICE: self.peers[rank].device or self.settings.run.device,
            ENV_RESUME: ADDED if is_added else "1" if self.resumed_size or again else "",
            ENV_RESUME_AT: "" if self.resumes_at is None or again else str(self.resumes_at),
            **(self.joins or {}),
        }


@dataclass(frozen=True)
class HostsFile:
    """A hosts file, of whose peers this process starts those on its machine."""

    hosts: Path
    launcher: ClassVar[str] = ""

    def start(self, given: RunConfig, script: list[str], resumed_size: int) -> Start:
        """Return the start of this machine's peers; see :data:`gossipx.launch.world.source.PeerSource`."""
        checked = check(given, self.hosts, script)
        settings, at = checked.settings, None
        if resumed_size:
            from gossipx.launch.directory import resume  # imports torch, to read checkpoints

            names = [peer.name for peer in checked.peers]
            at, settings = resume.check(settings, names, checked.here, bool(script), resumed_size)
            resume.tell_other_size(settings, names, resumed_size)
        directory = RunDirectory(settings, self.hosts.read_bytes(), script, bool(resumed_size))
        given_to = vars(checked) | {"settings": settings}
        return Start(**given_to, directory=directory, resumed_size=resumed_size, resumes_at=at)


def check(given: RunConfig, hosts: Path, script: list[str]) -> Checked:
    """Check settings, hosts file and script; nothing is started or written.

    Args:
        given: settings; :mod:`gossipx.assembly.presets` fills in the others.
        hosts: the hosts file.
        script: a user's script and its arguments; empty: the built-in task.

    Raises:
        UsageError: the first error found.
    """
    peers = read_hosts(hosts)
    settings = presets(given, len(peers), script, hosts)
    check_names(settings, peers)
    here = local_ranks(peers, settings.exchange.advertise, hosts)
    notice = check_here(settings, [peers[rank] for rank in here], script, hosts)
    settings = with_name(settings)
    return Checked(settings, peers, here, notice)


def presets(given: RunConfig, size: int, script: Sequence[str], hosts: Path | None) -> RunConfig:
    """Return the settings with presets filled in.

    Raises:
        UsageError: settings contradict each other.
    """
    if given.sync.min_peers > size:
        raise UsageError(f"--min-peers {given.sync.min_peers} is more than the {size} peers of the run", hosts)
    return effective_config(given, size, bool(script))


def check_names(settings: RunConfig, peers: Sequence[PeerLine]) -> None:
    """Check that the hub and the servers are among the peers.

    Raises:
        UsageError: they are not.
    """
    names = [peer.name for peer in peers]
    rank_of_hub(settings.mode, names)
    server_ranks(settings, names)


def check_here(settings: RunConfig, own: Sequence[PeerLine], script: list[str], hosts: Path | None) -> str | None:
    """Check that this machine has the devices, files and addresses that its peers need.

    Args:
        own: the peers of this machine.
        hosts: the hosts file, for messages.

    Returns:
        A warning about model bytes that others could read or change; None: no risk.

    Raises:
        UsageError: something is missing, or the script does not exist.
    """
    _check_memory(len(own), hosts)
    uncovered = None
    for peer in own:
        bind = bind_host(peer, settings.exchange.bind, hosts)
        access.grant(settings.exchange, bind)
        uncovered = uncovered or access.uncovered(settings.exchange, bind)
        if peer.device is None:
            check_device(settings.run.device, "--device")
        else:
            check_device(peer.device, "device=", hosts, peer.line)
        check_transport(settings.exchange, None if script else peer.device or settings.run.device)
    check_script(script)
    return uncovered


def _check_memory(peers: int, hosts: Path | None) -> None:
    least, memory = peers * LEAST_MEMORY, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if least > memory > 0:
        there = f"{peers} peers on this machine take at least {least / 1e9:.0f} GB, and it has {memory / 1e9:.0f} GB"
        raise UsageError(f"{there}: give fewer slots, or use gossipx simulate", hosts)


def check_script(script: list[str]) -> None:
    """Check that the script exists, if one is given.

    Raises:
        UsageError: it does not.
    """
    if not script_exists(script):
        raise UsageError("script not found", file=script[0])


def script_exists(script: list[str]) -> bool:
    """Return whether the script exists; True if none is given."""
    return not script or Path(script[0]).is_file()


def with_name(settings: RunConfig) -> RunConfig:
    """Return the settings with a name: if none is given, that of the policy or sync model, with the
    first free number."""
    if settings.run.name is not None:
        return settings
    stem = stem_of(settings)
    name, number = stem, 1
    while (Path(settings.run.logdir) / name).exists():
        number += 1
        name = f"{stem}-{number}"
    return replace(settings, run=replace(settings.run, name=name))


def stem_of(settings: RunConfig) -> str:
    """Return the name of a run's policy or sync model."""
    return re.split(r"\W", settings.decides)[0]
