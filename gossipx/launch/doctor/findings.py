"""What the doctors of all hosts have found, as plain data: each writes one row, and in the end all have all rows.

A host is what the hosts file calls so, with all its lines; hosts are numbered in the file's order. A row goes over the
wire as JSON, and what comes in is taken apart field by field.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from gossipx.errors import ProtocolError
from gossipx.fields import MAX_RANKS, MAX_TEXT
from gossipx.launch.hosts import PeerLine

MOST_MANIFEST = 2**20
"""Characters of a model's description that go along; the digest of a larger one still does."""


@dataclass(frozen=True)
class Host:
    """One host of the hosts file.

    Attributes:
        number: from 0.
        name: as the file has it.
        peers: its lines.
    """

    number: int
    name: str
    peers: tuple[PeerLine, ...]


def hosts_of(peers: Sequence[PeerLine]) -> list[Host]:
    """The hosts of a hosts file, in its order."""
    by_name: dict[str, list[PeerLine]] = {}
    for peer in peers:
        by_name.setdefault(peer.host, []).append(peer)
    return [Host(number, name, tuple(lines)) for number, (name, lines) in enumerate(by_name.items())]


def turns(number: int, hosts: int) -> list[int]:
    """Whom a host meets, round by round, where all meet all and nobody two at once (a tournament's circle method)."""
    seats = hosts + hosts % 2  # of an odd number one rests in each round
    met = []
    for round_ in range(seats - 1):
        if number == seats - 1:
            half = round_ * (seats // 2)  # who meets the seat that does not move: twice its number is the round
            other = half % (seats - 1)
        else:
            other = (round_ - number) % (seats - 1)
            other = seats - 1 if other == number else other
        if other < hosts:
            met.append(other)
    return met


@dataclass(frozen=True)
class Facts:
    """Of a process; ``role`` is "doctor" or "run", ``machine`` tells machines apart, ``model`` is a digest or empty."""

    role: str
    gossipx: str
    torch: str
    python: str
    protocol: int
    machine: str
    model: str


@dataclass(frozen=True)
class Name:
    """What a host's name stands for on the machine that looked it up: ``addresses``, or why there is none."""

    host: int
    addresses: tuple[str, ...]
    error: str = ""


@dataclass(frozen=True)
class Port:
    """Where a peer of this host would listen.

    Attributes:
        state: "open": the doctor listens there; "run": a peer of a run does; "doctor": another doctor; "authorised",
            "version", "peers": a gossipx that did not say which, by the outcome of asking it; "taken": something else;
            "refused": the system does not let it listen there.
        text: who has taken it, or what the system says.
        cause: what came of asking.
    """

    rank: int
    state: str
    text: str = ""
    cause: str = ""


@dataclass(frozen=True)
class Device:
    """What a line is to train on; ``text`` says what it is, or what is wrong."""

    rank: int
    device: str
    there: bool
    text: str


@dataclass(frozen=True)
class Reached:
    """How a host got on with one peer's line.

    Attributes:
        rank: of that peer.
        outcome: "ok", or what failed: "name", "refused", "timeout", "no route", "silent", "closed", "foreign",
            "authorised", "version", "peers", "other", "local".
        text: what was seen of it.
        facts: of who answered.
    """

    rank: int
    outcome: str
    text: str = ""
    facts: Facts | None = None


TALKED = {"ok", "foreign", "authorised", "version", "peers", "other"}
"""Outcomes of who has been talked to: that it is not there a little later, as it has ended, tells less."""
UNASKED = {"authorised", "version", "peers"}
"""Outcomes of a gossipx that does not say what it is."""


@dataclass(frozen=True)
class Way:
    """What was measured between two hosts, by the one whose row it stands in.

    Attributes:
        to: the other host.
        latency: seconds of a round trip, the median; None: it could not be measured.
        offset: seconds by which its clock is ahead, give or take ``error``.
        sent, received: bytes a second; None: not measured.
        stalled: bytes of the load that did not arrive in time; 0: all did.
        why: nothing, or no rate, was measured.
    """

    to: int
    latency: float | None
    offset: float | None
    error: float | None
    sent: float | None = None
    received: float | None = None
    stalled: int = 0
    why: str = ""


@dataclass(frozen=True)
class Row:
    """All that one host's doctor knows at first hand.

    Attributes:
        host: its number.
        began: seconds since 1970; of two rows of one host, the doctor that began later wrote the one that holds.
        version: of that doctor's rows the one with the highest holds.
        waited: nobody is waited for any longer.
        settled: who is not reached by now is not expected any more.
        done: it has measured all that is its to measure.
        manifest: of the model, a line a tensor; empty: too large, or there is none.
        model: whose fingerprint it is, in words; empty: no model was asked about. ``fault``: why there is none.
        devices: of its lines; ``accelerators``: all that it has, and the ``driver``.
    """

    host: int
    began: float
    version: int
    facts: Facts
    waited: bool = False
    settled: bool = False
    done: bool = False
    manifest: str = ""
    model: str = ""
    fault: str = ""
    names: tuple[Name, ...] = ()
    ports: tuple[Port, ...] = ()
    devices: tuple[Device, ...] = ()
    accelerators: tuple[str, ...] = ()
    driver: str = ""
    reached: tuple[Reached, ...] = ()
    ways: tuple[Way, ...] = ()

    def reach(self, rank: int) -> Reached | None:
        """How it got on with that peer; None: not tried yet."""
        return next((one for one in self.reached if one.rank == rank), None)

    def way(self, to: int) -> Way | None:
        """What it has measured to that host."""
        return next((one for one in self.ways if one.to == to), None)


def merge(known: Mapping[int, Row], news: Iterable[Row]) -> dict[int, Row]:
    """The newest row of each host."""
    rows = dict(known)
    for row in news:
        had = rows.get(row.host)
        if had is None or (had.began, had.version) < (row.began, row.version):
            rows[row.host] = row
    return rows


# --- over the wire ----------------------------------------------------------------------------------


def dump(rows: Iterable[Row]) -> bytes:
    """Rows as they are sent."""
    return json.dumps([dataclasses.asdict(row) for row in rows], ensure_ascii=False, separators=(",", ":")).encode()


def load(data: bytes, hosts: int) -> list[Row]:
    """Rows that another doctor has sent.

    Args:
        hosts: how many there are.

    Raises:
        ProtocolError: they are none.
    """
    try:
        plain = json.loads(data.decode())
        if type(plain) is not list or len(plain) > hosts:
            raise ValueError(f"not a list of at most {hosts} rows")
        rows = [_read(Row, item) for item in plain]
        for row in rows:
            numbers = [row.host, *(way.to for way in row.ways), *(name.host for name in row.names)]
            if not all(0 <= number < hosts for number in numbers):
                raise ValueError("of a host that there is not")
            for name in row.names:
                for address in name.addresses:
                    ipaddress.ip_address(address.partition("%")[0])
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"findings that are none: {error}"[:MAX_TEXT]) from None
    return rows


_Read = TypeVar("_Read")


def _read(kind: type[_Read], plain: object) -> _Read:
    hints = get_type_hints(kind)
    if type(plain) is not dict or plain.keys() != hints.keys():
        raise ValueError(f"{kind.__name__} has other fields")
    return kind(**{name: _value(name, hint, plain[name]) for name, hint in hints.items()})


def _value(name: str, hint: Any, plain: Any) -> Any:
    if get_origin(hint) is tuple:
        if type(plain) is not list or len(plain) > MAX_RANKS:
            raise ValueError(f"{name} is no list of at most {MAX_RANKS}")
        return tuple(_value(name, get_args(hint)[0], item) for item in plain)
    if type(None) in get_args(hint):
        return None if plain is None else _value(name, get_args(hint)[0], plain)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return _read(hint, plain)
    if hint is float and type(plain) in (int, float) and math.isfinite(plain):
        return float(plain)
    if hint is int and type(plain) is int and -(2**63) < plain < 2**63:
        return plain
    if hint is bool and type(plain) is bool:
        return plain
    if hint is str and type(plain) is str and _is_fit(name, plain):
        return plain
    raise ValueError(f"{name} is not what it should be")


def _is_fit(name: str, text: str) -> bool:
    # It ends up on terminals. The manifest is shown by gossipx.wire.agreement.difference, which sees to that.
    return len(text) <= MOST_MANIFEST if name == "manifest" else len(text) <= MAX_TEXT and text.isprintable()
