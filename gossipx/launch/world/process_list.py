"""The list of peers when there is no hosts file. Each process publishes its own :class:`PeerInfo`; all build the same
list."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct, convert, structs

from gossipx.errors import GossipxError, UsageError
from gossipx.launch import ports
from gossipx.launch.hosts import LOOPBACK, PeerLine, hosts_line, is_loopback_name, only_address, parse_hosts
from gossipx.launch.world.launchers import LaunchWorld
from gossipx.launch.world.rendezvous import Rendezvous
from gossipx.settings.sections import ExchangeSettings
from gossipx.transports import Address
from gossipx.transports.access import grant, is_loopback

log = logging.getLogger("gossipx")

Host = Annotated[str, Meta(pattern=r"\A[\w.:%-]{1,255}\Z")]


class PeerInfo(Struct, frozen=True, forbid_unknown_fields=True):
    """The information that a process publishes about its peer.

    Attributes:
        host: where others reach it: --advertise, or its own address on the connection to rank 0.
        advertised: whether ``host`` comes from --advertise.
        reached: address of rank 0 as seen from this process.
        hostname: name of its machine, for messages.
        port: TCP port on which it will listen.
        device: device to train on; None: the one in the run's settings.
    """

    host: Host
    advertised: bool
    reached: Host
    hostname: Annotated[str, Meta(pattern=r"\A[\w.-]{1,64}\Z")]
    port: Annotated[int, Meta(ge=1, le=65_535)]
    device: Annotated[str, Meta(pattern=r"\A[\w:.]{1,32}\Z")] | None


def check_reach(world: LaunchWorld, exchange: ExchangeSettings) -> None:
    """Check that peers on several machines will listen where others reach them, and will authenticate them.

    Raises:
        UsageError: they will not.
    """
    if not world.one_host and is_loopback(exchange.bind):
        raise UsageError(
            f"{world.source} starts peers on several machines, but they listen on loopback only: give --bind 0.0.0.0"
            " (or one address), and --secret-file FILE or --tls-cert, --tls-key and --tls-ca"
        )
    grant(exchange, exchange.bind)  # only for its refusals


def agree(meeting: Rendezvous, exchange: ExchangeSettings, device: str | None = None) -> tuple[str, socket.socket]:
    """Publish where this process will listen, and collect the same from all others.

    Args:
        device: device to train on; None: the one in the run's settings.

    Returns:
        The list of all peers as the text of a hosts file, the same for all; and a socket that keeps the port free until
        the peer listens on it.

    Raises:
        GossipxError: some did not arrive in time, or published invalid information.
    """
    world = meeting.world
    if world.size == 1:
        log.warning("%s started one process: this is a run of one peer, without any exchange", world.source)
    reserved = reserve(exchange.bind)
    own = LOOPBACK if world.one_host else meeting.own_host
    given = exchange.advertise or only_address(exchange.bind)
    host = (given or own).strip("[]")
    hostname = re.sub(r"[^\w.-]", "-", socket.gethostname().partition(".")[0])[:64] or "host"
    port = reserved.getsockname()[1]
    info = PeerInfo(host, given is not None, meeting.reached, hostname, port, device)
    meeting.publish("peer", structs.asdict(info))
    infos = [peer_info_of(received, rank) for rank, received in enumerate(meeting.gather("peer"))]
    return text_of(infos), reserved


def lines_of(text: str) -> list[PeerLine]:
    """Return the peers in the text that :func:`agree` returns."""
    return parse_hosts(text, None)


def text_of(infos: Sequence[PeerInfo]) -> str:
    """Return the hosts file of these peers, by rank.

    A process that reached rank 0 over loopback is on rank 0's machine, so its host is the address at which the others
    reached rank 0. If all did, all are on one machine.
    """
    outside = next((info.reached for info in infos if not is_loopback_name(info.reached)), LOOPBACK)
    lines = []
    for rank, info in enumerate(infos):
        host = outside if is_loopback_name(info.host) and not info.advertised else info.host
        lines.append(hosts_line(host, info.port, f"{info.hostname}-{rank}", info.device))
    return "".join(line + "\n" for line in lines)


def peer_info_of(received: Any, rank: int) -> PeerInfo:
    """Return the peer information in a value received over the network.

    Raises:
        GossipxError: the value is not valid peer information.
    """
    try:
        return convert(received, PeerInfo)
    except ValueError:
        raise GossipxError(
            f"rank {rank} published invalid peer information, perhaps from another version: {received!r:.200}"
        ) from None


def reserve(bind: str) -> socket.socket:
    """Return a socket that reserves a free port on which a peer may listen.

    Raises:
        UsageError: ``bind`` is not an address of this machine.
    """
    try:
        return ports.reserve(Address(LOOPBACK if is_loopback(bind) else bind, 0))
    except (OSError, UnicodeError) as error:
        why = ": give an address of this machine"
        if isinstance(error, OSError) and not isinstance(error, socket.gaierror):
            why = f" of this machine ({error.strerror}): give one"
        raise UsageError(f"--bind '{bind}' is not an address{why}, or 0.0.0.0 for all") from error
