"""The findings of one host's doctor, as plain data: the probes write them, the rules in ``verdicts.py`` read them.

A host is a host name in the hosts file together with all its lines. Hosts are numbered in the file's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gossipx.launch.hosts import PeerLine


@dataclass(frozen=True)
class Host:
    """One host of the hosts file: its number, its name in the file, and its lines."""

    number: int
    name: str
    peers: tuple[PeerLine, ...]

    @property
    def behind_nat(self) -> bool:
        """Whether the file says that other hosts cannot connect to it."""
        return any(peer.behind_nat for peer in self.peers)


def hosts_of(peers: Sequence[PeerLine]) -> list[Host]:
    """Return the hosts of a hosts file, in the file's order."""
    names = list(dict.fromkeys(peer.host for peer in peers))
    return [Host(n, name, tuple(peer for peer in peers if peer.host == name)) for n, name in enumerate(names)]


@dataclass(frozen=True)
class Name:
    """The addresses that a host's name resolves to on this machine, without interface, or the resolver's error."""

    host: int
    addresses: tuple[str, ...]
    error: str = ""


@dataclass(frozen=True)
class Verdict:
    """One line of the doctor's report."""

    level: str  # "ok"; "note": not examined; "warn": a run would start; "fail": it would not, or not with all peers
    about: str
    text: str
    advice: str = ""
    exit_code: int = 1  # of the command, if the level is "fail"


@dataclass(frozen=True)
class Line:
    """The result for the line of peer ``rank``, and the ``facts`` that the process there reported.

    The state is "ok" or a key of ``verdicts.REACH``. For a port of this host it is "open" if the doctor listens there,
    "run" if a peer of a run does, else the reason why the doctor cannot listen.
    """

    rank: int
    state: str
    text: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """The role of the peer that answered, "run" or "doctor"; empty if no peer of this hosts file did."""
        return str(self.facts["role"]) if self.state == "ok" and self.facts else ""


@dataclass(frozen=True)
class Measurement:
    """Latency, clock offset and rate between this host and another."""

    latency: float | None = None  # seconds per round trip
    offset: float = 0.0  # seconds by which the other clock is ahead, give or take half a round trip
    rate: float | None = None  # bytes per second received from there; 0: the load did not arrive in time
    why: str = ""  # the reason why latency or rate is missing


@dataclass
class Findings:
    """All observations of this host."""

    hosts: Sequence[Host]
    here: Sequence[int]  # numbers of the hosts that are this machine
    facts: dict[str, Any]  # of this doctor
    names: Sequence[Name] = ()
    devices: Sequence[Verdict] = ()
    tls: bool = False
    model: str = ""  # a title of the model whose fingerprint is in the facts
    fault: str = ""  # the reason why there is no model
    differing: str = ""  # the first tensor that differs on another host
    ports: Sequence[Line] = ()
    reached: dict[int, Line] = field(default_factory=dict)  # by rank
    ways: dict[int, Measurement] = field(default_factory=dict)  # by host
    heard: set[int] = field(default_factory=set)  # other hosts whose doctors have probed this host

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

    @property
    def is_behind_nat(self) -> bool:
        """Whether the file says that other hosts cannot connect to this one."""
        return self.hosts[self.here[0]].behind_nat

    @property
    def hidden(self) -> set[int]:
        """The other hosts to which the file says that this one cannot connect."""
        return {host.number for host in self.others if host.behind_nat}

    @property
    def expected(self) -> set[int]:
        """The other hosts whose doctors should probe this host, as far as is known."""
        return set() if self.is_behind_nat else self.met | self.hidden

    def names_of(self, hosts: Iterable[int]) -> str:
        """Return the names of hosts, in the file's order."""
        return ", ".join(self.hosts[number].name for number in sorted(hosts))

    def seen(self, host: Host) -> list[Line]:
        """Return the results for the lines of a host."""
        return [self.reached[peer.rank] for peer in host.peers if peer.rank in self.reached]
