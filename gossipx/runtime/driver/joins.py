"""Peers that join a run while it is in progress: they are admitted, announced, and added to the lists of all peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gossipx.peer.joining.admission import Admission
from gossipx.protocol.events import Event, PeerMet
from gossipx.protocol.fields import JoinedPeer
from gossipx.runtime.driver.commands import Commands
from gossipx.transports import Address
from gossipx.wire import AdmitReply, AdmitRequest


@dataclass
class JoinHandler:
    """The names and addresses of a run's peers, and the answers to processes that want to join them.

    Attributes:
        commands: ask the role.
        handle: passes an event to the role.
        settings: of the run, as TOML.
        names, addresses: of all peers that are known when this one starts. The CommManager reads the same lists.
        begun: number of peers that began the run.
    """

    commands: Commands
    handle: Callable[[Event], None]
    settings: str
    names: list[str]
    addresses: list[Address]
    begun: int

    def admit(self, request: AdmitRequest, opener: str) -> tuple[AdmitReply, bytes] | str:
        """Return the reply to a process that asks to join, and its payload; or why it cannot join."""
        begun = list(zip(self.names, self.addresses, strict=True))[: self.begun]
        for rank, (name, address) in enumerate(begun):
            if request.name == name or (request.host, request.port) == (address.host, address.port):
                return f"{name} is peer {rank} of the run: choose another --port, or start that peer again"
        entry = self.commands.admit(request.name, request.host, request.port, opener)
        if entry is None:
            return AdmitReply(later="it does not answer"), b""
        if entry.refusal:
            return entry.refusal
        if entry.elsewhere is not None:
            return AdmitReply(elsewhere=str(self.addresses[entry.elsewhere])), b""
        if entry.rank is None:
            return AdmitReply(later=entry.later), b""
        of_begun = tuple((name, address.host, address.port) for name, address in begun)
        payload = Admission(entry.rank, self.settings, of_begun, entry.joined, entry.lost).encoded()
        return AdmitReply(len(payload)), payload

    def meet(self, peer: JoinedPeer) -> str | None:
        """Pass on that a peer joined; return in one line why it is not a member, None if it is."""
        self.handle(PeerMet(peer))
        if peer.rank < len(self.names) and self.names[peer.rank] == peer.name:
            return None
        owner = f"belongs to {self.names[peer.rank]}" if peer.rank < len(self.names) else "is not in use"
        return f"rank {peer.rank} of this run {owner}: join again"

    def add(self, peer: JoinedPeer) -> bool:
        """Add a peer that joined; called under the driver's lock. Return whether it replaces one that had its rank."""
        address, known = Address(peer.host, peer.port), len(self.names)
        for rank in range(known, peer.rank + 1):  # ranks in between belong to peers that were not heard of
            self.addresses.append(address)
            self.names.append(f"peer {rank}")
        self.addresses[peer.rank], self.names[peer.rank] = address, peer.name
        return peer.rank < known

    def close(self) -> None:
        """Break the reference cycle with the driver."""
        self.handle = lambda event: None
