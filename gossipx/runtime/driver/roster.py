"""The names and addresses of a run's peers, which grow as peers join while it is in progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gossipx.protocol.fields import JoinedPeer
from gossipx.transports import Address

if TYPE_CHECKING:
    from gossipx.runtime.driver import Driver


class Roster:
    """The peers of a run, by rank. The CommManager reads the same lists.

    Args:
        names, addresses: of all peers that are known when this one starts.
    """

    def __init__(self, names: list[str], addresses: list[Address]):
        self.names = names
        self.addresses = addresses

    def add(self, peer: JoinedPeer, driver: Driver) -> None:
        """Add a peer that joined, or replace the one that had its rank; called under the driver's lock."""
        address, known = Address(peer.host, peer.port), len(self.names)
        for rank in range(known, peer.rank + 1):  # ranks in between belong to peers that were not heard of
            self.addresses.append(address)
            self.names.append(f"peer {rank}")
        self.addresses[peer.rank], self.names[peer.rank] = address, peer.name
        if peer.rank < known and driver.comm is not None:
            driver.comm.forget(peer.rank)
        if driver.transfers.codec is not None:
            driver.transfers.codec.resize(len(self.names))
