"""What the rules look at, and what they say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gossipx.launch.doctor.findings import Host, Reached, Row

LEVELS = ("ok", "note", "warn", "fail")


@dataclass(frozen=True)
class Verdict:
    """One line.

    Attributes:
        level: one of ``LEVELS``: well; not looked at; a run would start, and something is odd; it would not start, or
            not with everybody.
        about: which rule says so.
        text: what was found.
        advice: what to do; empty where nothing is to be done.
        exit_code: of the command, if it fails by this.
    """

    level: str
    about: str
    text: str
    advice: str = ""
    exit_code: int = 1


@dataclass(frozen=True)
class Case:
    """All that was found.

    Attributes:
        hosts: by number.
        rows: by host, of those that were heard of.
        tls: whether peers know each other by certificates.
    """

    hosts: Sequence[Host]
    rows: Mapping[int, Row]
    tls: bool = False

    def name(self, host: int) -> str:
        """Of a host."""
        return self.hosts[host].name

    def names(self, hosts: Iterable[int]) -> str:
        """Of some hosts, in the file's order."""
        return ", ".join(self.name(host) for host in sorted(set(hosts)))

    def seen(self) -> Iterator[tuple[Row, Host, Reached]]:
        """All that was tried: who, which host, and how it got on with one of its lines."""
        whose = {peer.rank: host for host in self.hosts for peer in host.peers}
        for row in self.in_order():
            for one in row.reached:
                if one.rank in whose:
                    yield row, whose[one.rank], one

    def in_order(self) -> list[Row]:
        """All rows, by host."""
        return [self.rows[number] for number in sorted(self.rows)]

    def reaches(self, source: int, target: int) -> bool:
        """Whether a host reaches some line of another."""
        row = self.rows.get(source)
        reached = [row.reach(peer.rank) for peer in self.hosts[target].peers] if row else []
        return any(one is not None and one.outcome == "ok" for one in reached)
