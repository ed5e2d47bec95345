"""Who the peers are, where each process tells of itself alone, by a card. All make the same list of the cards."""

from __future__ import annotations

import dataclasses
import logging
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gossipx.config.security import grant, is_loopback
from gossipx.config.settings import ExchangeSettings
from gossipx.errors import GossipxError, UsageError
from gossipx.launch.cluster import world as worlds
from gossipx.launch.cluster.rendezvous import Rendezvous
from gossipx.launch.cluster.world import World
from gossipx.launch.hosts import PeerLine, line_of, parse_hosts

log = logging.getLogger("gossipx")

LOOPBACK = "127.0.0.1"
_HOST = r"[\w.:%-]{1,255}"
_NAME = r"[\w.-]{1,64}"
_DEVICE = r"[\w:.]{1,32}"


@dataclass(frozen=True)
class PeerInfo:
    """What one process tells of itself.

    Attributes:
        host: where others reach it: as the user says (``advertised``), or its address on the way to rank 0.
        advertised: whether the user said so.
        reached: rank 0's address as this process reached it.
        hostname: of its machine, for people.
        port: where it will listen.
        device: what it trains on; None: what the run's settings say.
    """

    host: str
    advertised: bool
    reached: str
    hostname: str
    port: int
    device: str | None


def check_reach(world: World, exchange: ExchangeSettings) -> None:
    """See that peers on several machines will listen where others reach them, and ask these who they are.

    Raises:
        UsageError: they will not.
    """
    if not world.one_host and is_loopback(exchange.bind):
        raise UsageError(
            f"{world.source} starts peers on several machines, and they listen on loopback alone: give --bind 0.0.0.0"
            " (or one address), and --secret-file FILE or --tls-cert, --tls-key and --tls-ca"
        )
    grant(exchange, exchange.bind)


def agree(meeting: Rendezvous, exchange: ExchangeSettings, device: str | None = None) -> tuple[str, socket.socket]:
    """Tell the others where this process will listen, and hear where they do.

    Args:
        device: what it trains on; None: what the run's settings say.

    Returns:
        The list of all peers as the text of a hosts file, the same for all; and a socket that keeps the port free for
        this peer, until it listens there.

    Raises:
        GossipxError: some do not come in time, or what they tell is no card.
    """
    world = meeting.world
    if world.size == 1:
        log.warning("%s started one process: this is a run of one peer, which exchanges with nobody", world.source)
    reserved = reserve(exchange.bind)
    own = LOOPBACK if world.one_host else meeting.own
    host = (exchange.advertise or own).strip("[]")
    hostname = re.sub(r"[^\w.-]", "-", socket.gethostname().partition(".")[0])[:64] or "host"
    port = reserved.getsockname()[1]
    card = PeerInfo(host, exchange.advertise is not None, meeting.reached, hostname, port, device)
    meeting.tell("card", dataclasses.asdict(card))
    cards = [peer_info_of(told, rank) for rank, told in enumerate(meeting.all("card"))]
    return text_of(cards), reserved


def lines_of(text: str) -> list[PeerLine]:
    """The list of :func:`agree` as peers."""
    return parse_hosts(text, None)


def text_of(cards: Sequence[PeerInfo]) -> str:
    """The hosts file of these peers, by rank.

    Who reached rank 0 over loopback is on its machine, and is where the others reached that. If all did, all are on one
    machine.
    """
    outside = next((card.reached for card in cards if not worlds.is_loopback(card.reached)), LOOPBACK)
    lines = []
    for rank, card in enumerate(cards):
        host = outside if worlds.is_loopback(card.host) and not card.advertised else card.host
        lines.append(line_of(host, card.port, f"{card.hostname}-{rank}", card.device))
    return "".join(line + "\n" for line in lines)


def peer_info_of(told: Any, rank: int) -> PeerInfo:
    """A card that came over the network.

    Raises:
        GossipxError: it is none.
    """
    kinds = {"host": str, "advertised": bool, "reached": str, "hostname": str, "port": int, "device": str | None}
    forms = {"host": _HOST, "reached": _HOST, "hostname": _NAME, "device": _DEVICE}
    if (
        not isinstance(told, dict)
        or told.keys() != kinds.keys()
        or not all(isinstance(told[name], kind) for name, kind in kinds.items())
        or not all(re.fullmatch(form, told[name]) for name, form in forms.items() if told[name] is not None)
        or not 1 <= told["port"] <= 65_535
    ):
        raise GossipxError(f"what rank {rank} tells of itself is not gossipx's, or another version's: {told!r:.200}")
    return PeerInfo(**told)


def reserve(bind: str) -> socket.socket:
    """A port that the system gives nobody else as long as the socket is open, while a peer can listen on it.

    It is bound and does not listen, and both have SO_REUSEADDR.

    Raises:
        UsageError: ``bind`` is no address of this machine.
    """
    try:
        found = socket.getaddrinfo(
            LOOPBACK if is_loopback(bind) else bind, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, place = found[0]
        held = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--bind '{bind}' is no address: give this machine's, or 0.0.0.0 for all") from error
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(place)
    except OSError as error:
        held.close()
        raise UsageError(
            f"--bind '{bind}' is not this machine's ({error.strerror}): give one that is, or 0.0.0.0 for all"
        ) from error
    return held
