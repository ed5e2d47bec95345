"""Where the peers of a run come from: a hosts file, or a launcher that starts a process per peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from gossipx.launch.environment import ENV_CONFIG, ENV_PEERS
from gossipx.launch.hosts import ADVICE
from gossipx.launch.start import HostsFile, Start, no_peers
from gossipx.launch.world.launchers import LaunchWorld, find, why_none
from gossipx.settings.sections import RunConfig


@dataclass(frozen=True)
class Launched:
    """Processes that a launcher has started, one per peer.

    Attributes:
        world: this process among them.
        hosts: hosts file with all peers; None: the processes publish their addresses at the rendezvous.
    """

    world: LaunchWorld
    hosts: Path | None

    @property
    def launcher(self) -> str:
        """Launcher or variables that define the processes, for messages."""
        return self.world.source

    def start(self, given: RunConfig, script: list[str], resumed_size: int) -> Start:
        """Return the start of this process's peer.

        Args:
            given: settings; :mod:`gossipx.assembly.presets` fills in the others.
            script: a user's script and its arguments; empty: the built-in task.
            resumed_size: as in :class:`gossipx.launch.start.Start`.

        Raises:
            UsageError: settings, hosts file or script are invalid, or the name is in use.
            GossipxError: the processes of the run did not find each other in time.
        """
        from gossipx.launch.world.multi_process import from_world  # imports torch, for its TCPStore

        return from_world(given, self.world, self.hosts, script, resumed_size)


PeerSource: TypeAlias = HostsFile | Launched
"""Where the peers of a run come from."""


def source_of(hosts: Path | None, script: Sequence[str], environ: Mapping[str, str]) -> PeerSource:
    """Return where the peers come from: a launcher, or a hosts file that is given or named by GOSSIPX_PEERS.

    Raises:
        UsageError: neither is given, or variables of a launcher contradict each other.
    """
    world = find(environ)
    if hosts is None and environ.get(ENV_PEERS) and not environ.get(ENV_CONFIG):
        hosts = Path(environ[ENV_PEERS])
    if hosts is not None and (world is None or world.size == 1):
        return HostsFile(hosts)
    if world is None:
        raise no_peers(script, ADVICE + why_none(environ))
    return Launched(world, hosts)
