"""One host's visits to the lines of others: is it there, what is it, how far away, and how fast."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from gossipx import access
from gossipx.access import Access
from gossipx.errors import (
    LocalFaultError,
    NotAuthorisedError,
    PeerFaultError,
    PeerTimeoutError,
    PeerUnreachableError,
    ProtocolError,
    RefusedError,
    StrangerError,
)
from gossipx.fields import MAX_TEXT
from gossipx.launch.doctor.findings import Facts, Reached, Row, Way, dump, load
from gossipx.launch.hosts import PeerLine
from gossipx.memory import PIECE, Source
from gossipx.transports import Address, handshake
from gossipx.transports.link import Link
from gossipx.transports.links import Links
from gossipx.wire import MAX_LOAD, Bytes, CheckupReply, CheckupRequest, Hello, frames

CONNECT = 3.0
"""Seconds for a connection, and for an answer on it: ten times what a path around the world takes, and time for one
packet to be lost and sent again."""
TURN = 60.0
"""Seconds that a host waits for its turn at another one, which may be busy with others."""
LOAD = 8.0
"""Seconds for one load: 64 KiB in that time are 66 kbit/s, which nobody trains over."""
LOOKS = 9
"""Round trips whose median is the latency."""
FIRST_LOAD = 64 * 2**10
"""Bytes: so few that a path of 1 Mbit/s is done with in half a second."""
ENOUGH = 0.2
"""Seconds of a load after which no larger one is tried: long enough that TCP has found the path's rate."""
GROWTH = 4
ZEROS = memoryview(bytes(MAX_LOAD))
"""What loads are made of; the system gives no memory for them until they are read."""


class Scrap:
    """Takes a load in and keeps nothing of it; a :class:`gossipx.wire.Sink`.

    Args:
        nbytes: of the load.
    """

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self._room = memoryview(bytearray(min(nbytes, PIECE)))

    def room(self, start: int) -> memoryview:
        """As much as there is."""
        return self._room[: self.nbytes - start]

    def filled(self, start: int) -> None:
        """Forget it."""

    def take(self, start: int, view: memoryview) -> None:
        """Forget it."""


@dataclass(frozen=True)
class Guest:
    """Who visits, and by what.

    Attributes:
        me: the host's first peer; ``me.model`` is what it would train.
        peers: all lines.
        access: how connections are made.
        links: has them all.
    """

    me: Hello
    peers: Sequence[PeerLine]
    access: Access
    links: Links


class _StalledError(Exception):
    """A load of so many bytes did not arrive in time."""

    def __init__(self, nbytes: int):
        super().__init__(nbytes)
        self.nbytes = nbytes


class Visit:
    """A connection to a line at which a doctor or a run has answered.

    Attributes:
        facts: of who answers.
        peers: digest of the hosts file that it has, and ``size``: of how many peers.
        name: of the peer that it is.
    """

    def __init__(self, link: Link, me: Hello):
        self._link = link
        self._me = me
        self.latency = 0.0
        self.offset = 0.0
        report = self._look()
        words = {key: _text(report, key) for key in ("role", "gossipx", "torch", "python", "machine", "model")}
        self.facts = Facts(**words, protocol=_integer(report, "protocol"))
        self.name, self.peers, self.size = _text(report, "name"), _text(report, "peers"), _integer(report, "size")
        link.admitted()

    def _look(self) -> dict[str, object]:
        """Ask for the facts; notes how long that took, and what the other clock shows."""
        began, clock = time.monotonic(), time.time()
        report = dict(self._ask("facts", CONNECT).report)
        self.latency = time.monotonic() - began
        theirs = report.get("clock")
        if type(theirs) is not float:
            raise ProtocolError("its report tells no clock")
        self.offset = theirs - (clock + self.latency / 2)
        return report

    def _ask(self, part: str, seconds: float, brought: bytes | memoryview = b"", back: int = 0) -> CheckupReply:
        return cast(CheckupReply, self._exchange(part, seconds, brought, back).message)

    def _exchange(self, part: str, seconds: float, brought: bytes | memoryview = b"", back: int = 0) -> frames.Frame:
        asked = CheckupRequest(self._me.name, part, len(brought), back)
        source = Source(memoryview(brought)) if brought else None
        sink = Scrap(back) if back else None
        return self._link.ask(asked, 0, time.monotonic() + seconds, sink, source)

    def lines(self) -> list[str]:
        """The lines of the hosts file that it has."""
        payload = self._exchange("peers", CONNECT).payload
        return bytes(payload.view).decode(errors="replace").split("\n") if isinstance(payload, Bytes) else []

    def turn(self) -> bool:
        """Wait until nobody else measures with that host, and keep it so while the visit lasts."""
        return bool(self._ask("turn", TURN + CONNECT).report)

    def exchange(self, rows: Sequence[Row], hosts: int) -> list[Row]:
        """Tell what is known here, and hear what is known there."""
        payload = self._exchange("findings", LOAD, dump(rows)).payload
        return load(bytes(payload.view), hosts) if isinstance(payload, Bytes) else []

    def measure(self, to: int, loads: bool) -> Way:
        """Latency, clock and, if ``loads``, rates of the way to host ``to``."""
        looks = []
        for _ in range(LOOKS):
            self._look()
            looks.append((self.latency, self.offset))
        latency = statistics.median(took for took, _ in looks)
        quickest, offset = min(looks)
        way = Way(to, latency, offset, quickest / 2)
        if not loads:
            return replace(way, why="a run is at work there")
        try:
            way = replace(way, sent=self._rate(True, latency))
            return replace(way, received=self._rate(False, latency))
        except _StalledError as error:
            return replace(way, stalled=error.nbytes)

    def _rate(self, outward: bool, latency: float) -> float:
        """Bytes a second of the largest load that was tried: each is so much larger than the last, until it takes long.

        As models go, and on the connection of a model: with its MACs or TLS, and with the start of TCP.
        """
        size = FIRST_LOAD
        while True:
            try:
                took = max(self._load(size, outward) - latency, 1e-6)
            except PeerTimeoutError:
                raise _StalledError(size) from None
            if took > ENOUGH or size >= MAX_LOAD:
                return size / took
            size = min(GROWTH * size, MAX_LOAD)

    def _load(self, size: int, outward: bool) -> float:
        """Seconds that so many bytes take there, or back."""
        brought = ZEROS[:size] if outward else b""
        began = time.monotonic()
        self._ask("load", LOAD, brought, 0 if outward else size)
        return time.monotonic() - began


@contextlib.contextmanager
def visit(guest: Guest, to: PeerLine) -> Iterator[Visit]:
    """Connect to a peer's line, and hear who is there.

    Raises:
        PeerFaultError: nobody who talks to this one.
    """
    deadline = time.monotonic() + CONNECT
    link = guest.links.add(guest.access.transport.connect(Address(to.host, to.port), deadline))
    try:
        if guest.access.secret is not None:
            handshake.prove(link, guest.access.secret, guest.me, to.name, deadline)
        yield Visit(link, guest.me)
    finally:
        guest.links.drop(link)


def reach(guest: Guest, to: PeerLine, addresses: Sequence[str]) -> Reached:
    """See how far one gets with a peer's line.

    Args:
        addresses: what its host's name stands for; none: it is not known.
    """
    if not addresses:
        return Reached(to.rank, "name", "its name is not known here")
    knocks = [_knock(address, to.port) for address in addresses]
    failed = [(outcome, text) for outcome, text in knocks if outcome != "ok"]
    told = fit("; ".join(dict.fromkeys(text for _, text in failed)))
    if len(failed) == len(knocks):
        return Reached(to.rank, failed[0][0], told)
    if access.is_loopback(to.host):  # localhost is often two addresses, of which the dead one costs no time
        told = ""
    try:
        with visit(guest, to) as visited:
            outcome, text = _objection(guest, to, visited)
            return Reached(to.rank, outcome, fit(text) or told, visited.facts)
    except PeerFaultError as error:
        if isinstance(error, PeerTimeoutError) and failed:  # one of its addresses, which came first, took all the time
            return Reached(to.rank, failed[0][0], told)
        # What follows a semicolon is advice, as a run would give it; of another version, what follows a colon.
        end = ":" if isinstance(error, frames.VersionError) else ";"
        cause = str(error).removeprefix("refused: ").removeprefix("not authorised: ").partition(end)[0]
        return Reached(to.rank, _outcome(error), fit(cause))


def _objection(guest: Guest, to: PeerLine, visited: Visit) -> tuple[str, str]:
    me = guest.me
    if (visited.peers, visited.size) != (me.peers, me.size):
        own = [line_of(peer) for peer in guest.peers]
        return "peers", _difference(own, visited.lines() if visited.facts.role == "doctor" else [], visited.size)
    if visited.name != to.name:
        return "other", f"{visited.name} answers there"
    return "ok", ""


def line_of(peer: PeerLine) -> str:
    """A peer as the hosts file has it, for comparing."""
    place = str(Address(peer.host, peer.port))
    return place if peer.name == place else f"{peer.name} at {place}"


def _difference(own: Sequence[str], theirs: Sequence[str], size: int) -> str:
    """The first peer in which two hosts files differ."""
    if not theirs:
        return f"it lists {size} peers, and here are {len(own)}" if size != len(own) else "names or addresses differ"
    for rank, (mine, other) in enumerate(zip(own, theirs, strict=False)):
        if mine != other:
            return f"peer {rank} is {mine} here and {_shown(other)} there"
    return f"{len(own)} peers here and {len(theirs)} there"


def _outcome(error: PeerFaultError) -> str:
    if isinstance(error, NotAuthorisedError | StrangerError):
        return "authorised"
    if isinstance(error, frames.VersionError):
        return "version"
    if isinstance(error, RefusedError):
        return "peers"  # the secret was proven, and the rest was not alike
    if isinstance(error, ProtocolError):
        return "foreign"
    if isinstance(error, PeerTimeoutError):
        return "silent"
    if isinstance(error, LocalFaultError):
        return "local"
    return "closed" if isinstance(error, PeerUnreachableError) else "foreign"


_KNOCKS = {
    errno.ECONNREFUSED: "refused",
    errno.ETIMEDOUT: "timeout",
    errno.EHOSTUNREACH: "no route",
    errno.ENETUNREACH: "no route",
    errno.EADDRNOTAVAIL: "no route",  # no address of that family here
    errno.EAFNOSUPPORT: "no route",
    errno.EACCES: "no route",  # a route that prohibits
    errno.EPERM: "no route",  # a firewall here
    errno.EINVAL: "no route",  # a black hole
}


def _knock(address: str, port: int) -> tuple[str, str]:
    """Whether a TCP connection can be had; what happened, and in words."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        with socket.socket(family, kind, protocol) as knocking:
            knocking.setblocking(False)
            code = knocking.connect_ex(place)
            if code == errno.EINPROGRESS:
                poll = select.poll()
                poll.register(knocking, select.POLLOUT)
                if not poll.poll(CONNECT * 1e3):
                    return "timeout", f"{address} does not answer within {CONNECT:g} s"
                code = knocking.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if not code and knocking.getsockname() == knocking.getpeername():
                code = errno.ECONNREFUSED  # connected to itself, as nobody listens
    except OSError as error:
        code = error.errno or 0
        return _KNOCKS.get(code, "local"), f"{address}: {error.strerror or error}"
    return ("ok", "") if not code else (_KNOCKS.get(code, "local"), f"{address}: {os.strerror(code)}")


def _text(report: dict[str, object], key: str) -> str:
    value = report.get(key)
    if type(value) is not str:
        raise ProtocolError(f"its report tells no {key}")
    return value


def _integer(report: dict[str, object], key: str) -> int:
    value = report.get(key)
    if type(value) is not int:
        raise ProtocolError(f"its report tells no {key}")
    return value


def _shown(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:200])


def fit(text: str) -> str:
    """As text goes over the wire: one printable line."""
    return _shown(text[:200]) if not text.isprintable() else text[:MAX_TEXT]
