"""A peer's identity and connections, shared by its client and its listener."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gossipx.transports import Address, Carriers, Transport
from gossipx.transports.handshake import JoinHandler, Trust
from gossipx.transports.link import Links
from gossipx.wire import Hello, auth

log = logging.getLogger("gossipx")


class Gate:
    """The way in for peers that are not in the hosts file.

    Args:
        links: all open connections.

    Attributes:
        admission: decides who is admitted; None: nobody is.
    """

    def __init__(self, links: Links):
        self.admission: JoinHandler | None = None
        self._links = links

    def forget(self, rank: int) -> None:
        """Close idle connections to a peer, as another one has its rank now."""
        self._links.forget(rank)


@dataclass(frozen=True, eq=False)
class Member:
    """A peer of a run: what it announces to others, and how it reaches them.

    Attributes:
        me: what this peer announces in a handshake.
        names, addresses: of all peers, by rank; they grow as peers join the run.
        manifest: description of the model, one line per tensor.
        timeout: seconds allowed for a handshake, and for receiving a request once its first byte has arrived.
        transport: makes the connections.
        machine: identifier of this machine; empty: memory is not shared.
        carriers: builds side channels for models; None: models use the connections.
        secret: shared secrets of the run; None: no authentication.
        trust: records which peers and strangers were turned away.
        links: all open connections.
        gate: decides on newcomers.
    """

    me: Hello
    names: Sequence[str]
    addresses: Sequence[Address]
    manifest: bytes
    timeout: float
    transport: Transport
    machine: str
    carriers: Carriers | None
    secret: auth.Secrets | None
    trust: Trust
    links: Links
    gate: Gate

    def is_cut_off(self, rank: int) -> bool:
        """Return whether this peer cannot connect to the peer of this rank, which is behind NAT on another host."""
        return self.addresses[rank].behind_nat and self.crosses_nat(rank)

    def crosses_nat(self, rank: int) -> bool:
        """Return whether a connection between this peer and another one leaves a host that is behind NAT."""
        own, other = self.addresses[self.me.rank], self.addresses[rank]
        return (own.behind_nat or other.behind_nat) and own.host != other.host

    @property
    def is_cut_off_itself(self) -> bool:
        """Whether this peer is behind NAT."""
        return self.addresses[self.me.rank].behind_nat

    def gateways(self) -> list[int]:
        """Return the ranks of the peers of other hosts that any peer can connect to."""
        own = self.addresses[self.me.rank].host
        return [rank for rank, one in enumerate(self.addresses) if not one.behind_nat and one.host != own]


def call_back(done: Callable[[Any], None], result: object) -> None:
    """Call ``done``; an exception from it is logged."""
    try:
        done(result)
    except Exception:
        log.exception("a callback has failed")


def call_back_in_thread(done: Callable[[Any], None], result: object) -> None:
    """Call ``done`` on a new thread, since the caller may hold locks that ``done`` takes."""
    threading.Thread(target=call_back, args=(done, result), name="gossipx-tell", daemon=True).start()
