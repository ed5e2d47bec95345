"""The admission of peers that join a run under way: which runs have a place for them, and what they are told."""

from __future__ import annotations

from collections.abc import Sequence

from gossipx.peer.admission import Admission
from gossipx.protocol.admission import AdmitReply, AdmitRequest
from gossipx.protocol.events import PeerMet
from gossipx.protocol.fields import JoinedPeer
from gossipx.runtime.driver import Driver
from gossipx.runtime.driver.roster import Roster
from gossipx.settings.modes import Elastic, Server
from gossipx.settings.sections import RunConfig
from gossipx.topology.schedules import BandwidthAware, RandomNeighbour, Schedule
from gossipx.transports import Address

WHICH = "only peers that exchange with each other take newcomers"


def why_closed(config: RunConfig, turns: Schedule, addresses: Sequence[Address] = ()) -> str:
    """Return why no peer can join a run while it is in progress, in one line; empty: one can.

    Args:
        addresses: of the peers that begin the run.
    """
    if any(address.behind_nat for address in addresses):
        return "a peer of the run is behind NAT, and could not be reached by a new one"
    if isinstance(config.mode, Elastic):
        return f"the run has a hub, whose centre counts its workers: {WHICH}"
    if isinstance(config.mode, Server):
        return f"the run has servers, which count their workers: {WHICH}"
    if turns.topology.generator != "full":
        return (
            f"--topology {turns.topology.name} has no place for a new peer: only in 'full', the default, may any two"
            " peers exchange"
        )
    if not isinstance(turns, RandomNeighbour | BandwidthAware):
        spec = config.values["schedule"] or turns.topology.schedule
        return f"--schedule {spec} is an order of the peers that began the run: use random, the default"
    return ""


class JoinHandler:
    """Answers processes that want to join, for one peer; a :class:`gossipx.transports.handshake.Newcomers`.

    Args:
        settings: of the run, as TOML.
        roster: the peers of the run.
        begun: number of peers that began it.
    """

    def __init__(self, driver: Driver, settings: str, roster: Roster, begun: int):
        self._driver = driver
        self._settings = settings
        self._roster = roster
        self._begun = begun

    def admit(self, request: AdmitRequest, opener: str) -> tuple[AdmitReply, bytes] | str:
        """Return the reply to a process that asks to join, and its payload; or why it cannot join."""
        roster = self._roster
        begun = list(zip(roster.names, roster.addresses, strict=True))[: self._begun]
        for rank, (name, address) in enumerate(begun):
            if request.name == name or (request.host, request.port) == (address.host, address.port):
                return f"{name} is peer {rank} of the run: choose another --port, or start that peer again"
        entry = self._driver.commands.admit(request.name, request.host, request.port, opener)
        if entry is None:
            return AdmitReply(later="it does not answer"), b""
        if entry.refusal:
            return entry.refusal
        if entry.elsewhere is not None:
            there = roster.addresses[entry.elsewhere]
            return AdmitReply(elsewhere=str(there)), b""
        if entry.rank is None:
            return AdmitReply(later=entry.later), b""
        of_begun = tuple((name, address.host, address.port) for name, address in begun)
        payload = Admission(entry.rank, self._settings, of_begun, entry.joined, entry.lost).encoded()
        return AdmitReply(len(payload)), payload

    def meet(self, peer: JoinedPeer) -> str | None:
        """Add a peer that joined; return in one line why it is not a member, None if it is."""
        self._driver.handle(PeerMet(peer))
        names = self._roster.names
        if peer.rank < len(names) and names[peer.rank] == peer.name:
            return None
        owner = f"belongs to {names[peer.rank]}" if peer.rank < len(names) else "is not in use"
        return f"rank {peer.rank} of this run {owner}: join again"
