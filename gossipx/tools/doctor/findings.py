"""What one host's doctor finds out, as plain data: probes fill it in, and the rules in ``verdicts.py`` read it.

A host is a name in the hosts file, with all its lines. Hosts are numbered in the file's order.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gossipx.launch.hosts import PeerLine


@dataclass(frozen=True)
class Host:
    """One host of the hosts file: its number, its name as the file has it, and its lines."""

    number: int
    name: str
    peers: tuple[PeerLine, ...]


def hosts_of(peers: Sequence[PeerLine]) -> list[Host]:
    """Return the hosts of a hosts file, in its order."""
    names = list(dict.fromkeys(peer.host for peer in peers))
    return [Host(n, name, tuple(peer for peer in peers if peer.host == name)) for n, name in enumerate(names)]


def plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address without its interface."""
    return ipaddress.ip_address(address.partition("%")[0])


@dataclass(frozen=True)
class Name:
    """The addresses that a host's name resolves to here, or why there are none."""

    host: int
    addresses: tuple[str, ...]
    error: str = ""


@dataclass(frozen=True)
class Verdict:
    """One line."""

    level: str  # "ok"; "note": not looked at; "warn": a run would start; "fail": it would not, or not with all peers
    about: str
    text: str
    advice: str = ""
    exit_code: int = 1  # of the command, if this fails


@dataclass(frozen=True)
class Line:
    """The result for the line of peer ``rank``; ``facts`` are those of the process that answered there.

    Its state is "ok", or a key of ``verdicts.REACH``. Of a port of this host: "open" if the doctor listens there, "run"
    if a peer of a run does, else why the doctor cannot.
    """

    rank: int
    state: str
    text: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """Return "run" or "doctor" if a peer of this hosts file answered; else nothing."""
        return str(self.facts["role"]) if self.state == "ok" and self.facts else ""


@dataclass(frozen=True)
class Way:
    """Measurements between this host and another."""

    latency: float | None = None  # seconds of a round trip
    offset: float = 0.0  # seconds by which the other clock is ahead, give or take half a round trip
    rate: float | None = None  # bytes per second that come from there; 0: they did not arrive in time
    why: str = ""  # the latency, or the rate, was not measured


@dataclass
class Findings:
    """Everything that this host sees."""

    hosts: Sequence[Host]
    here: Sequence[int]  # numbers of those that are this machine
    facts: dict[str, Any]  # of this doctor
    names: Sequence[Name] = ()
    devices: Sequence[Verdict] = ()
    tls: bool = False
    model: str = ""  # of which the facts have the fingerprint, in words
    fault: str = ""  # why there is no model
    differing: str = ""  # the first tensor that is another on another host
    ports: Sequence[Line] = ()
    reached: dict[int, Line] = field(default_factory=dict)  # by rank
    ways: dict[int, Way] = field(default_factory=dict)  # by host
    heard: set[int] = field(default_factory=set)  # other hosts whose doctors have probed this one

    @property
    def own(self) -> str:
        """The name of this host."""
        return self.hosts[self.here[0]].name

    @property
    def others(self) -> list[Host]:
        """The hosts that are not this machine."""
        return [host for host in self.hosts if host.number not in self.here]

    @property
    def met(self) -> set[int]:
        """The other hosts whose doctors have answered."""
        return {host.number for host in self.others if any(line.role == "doctor" for line in self.seen(host))}

    def names_of(self, hosts: Iterable[int]) -> str:
        """Return names of hosts, in the file's order."""
        return ", ".join(self.hosts[number].name for number in sorted(hosts))

    def seen(self, host: Host) -> list[Line]:
        """Return the results for the lines of a host."""
        return [self.reached[peer.rank] for peer in host.peers if peer.rank in self.reached]
