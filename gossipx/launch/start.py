"""What ``gossipx run`` has settled before it starts peers: settings, who they are, which of them are its own, and where
the run is written."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from gossipx.assembly.devices import check_device, check_transport
from gossipx.assembly.hub import elastic_settings
from gossipx.assembly.server_settings import server_ranks
from gossipx.assembly.settings import effective_config
from gossipx.config import security
from gossipx.config.settings import RunConfig
from gossipx.errors import UsageError
from gossipx.launch.children import script_exists
from gossipx.launch.directory import RunDirectory
from gossipx.launch.hosts import PeerLine, bind_host, local_ranks, read_hosts
from gossipx.metrics.summary import Summary


class Directory(Protocol):
    """Where a run is written: :class:`gossipx.launch.directory.RunDirectory`, or one that others write into, too."""

    path: Path

    @property
    def config(self) -> Path:
        """The file of its settings."""

    def keep(self) -> None:
        """The run trains."""

    def give_up(self) -> None:
        """Nothing was trained."""

    def release(self) -> None:
        """The run has ended."""

    def conclude(self, summary: Summary) -> bool:
        """Write the run's summary; False: another process has one that lacks no more."""


@dataclass(frozen=True)
class Start:
    """See the module.

    Attributes:
        settings: presets filled in, with a name.
        directory: made, and this run's.
        peers: all, by rank; ``here``: the ranks of those to start.
        resumes: whether they go on from checkpoints; ``resumes_at``: of which iteration, None: each from its newest.
        notice: what the user should know first; None: nothing.
        shared: other processes on this terminal are peers of the run, too.
        held: keeps a port free, until it is closed.
    """

    settings: RunConfig
    directory: Directory
    peers: list[PeerLine]
    here: list[int]
    resumes: bool = False
    resumes_at: int | None = None
    notice: str | None = None
    shared: bool = False
    held: socket.socket | None = None


def from_hosts(given: RunConfig, hosts: Path, script: list[str], resumes: bool) -> Start:
    """The peers of this machine in a hosts file.

    Raises:
        UsageError: settings, hosts file or script are not right, or the name is in use.
    """
    checked = check(given, hosts, script)
    settings, peers, here = checked.settings, checked.peers, checked.here
    names = [peer.name for peer in peers]
    at: int | None = None
    if resumes:
        from gossipx.launch import resume  # and torch, which reads checkpoints

        at, settings = resume.check(settings, names, here, bool(script))
    directory = RunDirectory(settings, hosts.read_bytes(), script, goes_on=resumes)
    return Start(settings, directory, peers, here, resumes, at, checked.notice)


@dataclass(frozen=True)
class Checked:
    """A run that may be started.

    Attributes:
        settings: with presets filled in, and a name.
        peers: all of them, by rank; ``here``: the ranks of this machine.
        notice: what a user should be told first; None: nothing.
    """

    settings: RunConfig
    peers: list[PeerLine]
    here: list[int]
    notice: str | None


def check(given: RunConfig, hosts: Path, script: list[str]) -> Checked:
    """See that settings, hosts file and script are right; nothing is started or written.

    Args:
        given: settings, presets not yet filled in.
        hosts: the hosts file.
        script: a user's script and its arguments; empty: the built-in task.

    Raises:
        UsageError: the first that is not right.
    """
    peers = read_hosts(hosts)
    settings = presets(given, len(peers), script, hosts)
    check_names(settings, peers)
    here = local_ranks(peers, settings.exchange.advertise, hosts)
    notice = check_here(settings, [peers[rank] for rank in here], script, hosts)
    settings = named(replace(settings, exchange=security.absolute(settings.exchange)))
    return Checked(settings, peers, here, notice)


def presets(given: RunConfig, size: int, script: Sequence[str], hosts: Path | None) -> RunConfig:
    """The settings with presets filled in.

    Raises:
        UsageError: some do not go together.
    """
    if given.sync.min_peers > size:
        raise UsageError(f"--min-peers {given.sync.min_peers} is more than the {size} peers here", hosts)
    return effective_config(given, size, bool(script))


def check_names(settings: RunConfig, peers: Sequence[PeerLine]) -> None:
    """See that the hub and the servers are among the peers.

    Raises:
        UsageError: they are not.
    """
    names = [peer.name for peer in peers]
    elastic_settings(settings, names)
    server_ranks(settings, names)


def check_here(settings: RunConfig, own: Sequence[PeerLine], script: list[str], hosts: Path | None) -> str | None:
    """See that this machine has what its peers want.

    Args:
        own: its peers; ``hosts``: the file that they stand in, for messages.

    Returns:
        What the user should know of the bytes of models that others could get at; None: nothing.

    Raises:
        UsageError: it has not, or there is no such script.
    """
    uncovered = None
    for peer in own:
        bind = bind_host(peer, settings.exchange.bind, hosts)
        security.grant(settings.exchange, bind)
        uncovered = uncovered or security.uncovered(settings.exchange, bind)
        if peer.device is None:
            check_device(settings.run.device, "--device")
        else:
            check_device(peer.device, "device=", hosts, peer.line)
        check_transport(settings.exchange, None if script else peer.device or settings.run.device)
    check_script(script)
    return uncovered


def check_script(script: list[str]) -> None:
    """See that the script is there, if one is given.

    Raises:
        UsageError: it is not.
    """
    if not script_exists(script):
        raise UsageError("no such script", file=script[0])


def named(settings: RunConfig) -> RunConfig:
    """A name for a run that was given none: its policy's, or sync model's, with the first number that is free."""
    if settings.run.name is not None:
        return settings
    stem = re.split(r"\W", goes_by(settings))[0]
    name, number = stem, 1
    while (Path(settings.run.logdir) / name).exists():
        number += 1
        name = f"{stem}-{number}"
    return replace(settings, run=replace(settings.run, name=name))


def goes_by(settings: RunConfig) -> str:
    """The policy; or with servers the sync model."""
    return settings.server.sync if by_servers(settings) else settings.sync.policy


def by_servers(settings: RunConfig) -> bool:
    """Whether the run has a parameter server."""
    return settings.server.servers is not None or settings.sync.mode == "server"
