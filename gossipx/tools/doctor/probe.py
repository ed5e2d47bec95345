"""Probes of other hosts: whether a line of the hosts file answers, its facts, round-trip time and rate.

This host sends the requests. The doctor there (``listener.py``) or a peer of a run replies.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from gossipx import errors
from gossipx.errors import printable
from gossipx.launch.hosts import PeerLine
from gossipx.protocol.messages import BusyReply
from gossipx.tools.doctor.findings import Line, Measurement
from gossipx.transports import Address, Stream, handshake
from gossipx.transports.access import Access
from gossipx.transports.handshake import facts_in
from gossipx.transports.link import Link, Links
from gossipx.wire import MAX_LOAD, Bytes, CheckupPart, CheckupReply, CheckupRequest, Hello, frames

# Seconds:
CONNECT = 3.0  # for a connection, and for a reply on it: ten times a round trip around the world
LOAD = 8.0  # for the first piece of a load: 66 kbit/s, too slow to train over
ENOUGH = 1.0  # after which a load is cut short, because TCP has reached the path's rate
BUSY = 30.0  # to wait for the other host's turn to send a load, and for a quiet moment to measure round trips
RETRY = 0.3  # between two attempts at a host that does not answer or is busy

ROUND_TRIPS = 9  # of which the fastest is the latency
PIECE = 64 * 2**10  # bytes of a load between two readings of the clock


class Load:
    """A :class:`gossipx.wire.Sink` that discards a load and measures its rate, in bytes per second."""

    nbytes = MAX_LOAD

    def __init__(self, began: float):
        self.rate = 0.0
        self._began = began  # the earliest time at which the first byte can arrive
        self._buffer = memoryview(bytearray(PIECE))

    def buffer_at(self, start: int) -> memoryview:
        """Return the buffer for the next piece."""
        return self._buffer[: self.nbytes - start]

    def filled(self, start: int) -> None:
        """Update the rate; raise PeerTimeoutError once it is known well enough."""
        took = max(time.monotonic() - self._began, 1e-6)
        self.rate = (start + len(self.buffer_at(start))) / took
        if took > ENOUGH:
            raise errors.PeerTimeoutError("the rest of the load is not needed")

    def take(self, start: int, view: memoryview) -> None:
        self.filled(start)


@dataclass(frozen=True)
class Prober:
    """The state that all probes of this host share."""

    me: Hello  # this host's first peer, and the digest of its model
    aliases: Sequence[str]  # the first peer of each further host name of this machine
    peers: Sequence[PeerLine]  # all lines of the hosts file
    listing: bytes  # the same as text, one line per peer
    manifest: bytes  # the description of this host's model
    access: Access
    links: Links
    sending: threading.Lock  # held while this host sends a load, or measures a round trip that a load would disturb


class Probe:
    """A connection to a line at which a doctor or a run has answered; ``facts`` are that process's."""

    def __init__(self, link: Link, prober: Prober):
        self._link = link
        self._prober = prober
        _, _, self.facts = self._round_trip()
        link.admitted()

    def _ask(
        self, part: CheckupPart, seconds: float, load: Load | None = None, name: str | None = None
    ) -> frames.Frame:
        request = CheckupRequest(name or self._prober.me.name, part, load.nbytes if load else 0)
        return self._link.request(request, 0, time.monotonic() + seconds, load)

    def _round_trip(self) -> tuple[float, float, dict[str, Any]]:
        """Request the facts; return the seconds it took, the seconds the other clock is ahead, and the facts."""
        began, clock = time.monotonic(), time.time()
        reply = self._ask("facts", CONNECT).message
        took = time.monotonic() - began
        facts = facts_in(reply.report if isinstance(reply, CheckupReply) else {})
        return took, facts["clock"] - (clock + took / 2), facts

    def read(self, part: CheckupPart) -> bytes:
        """Return a doctor's description of its "model", or its "peers", one line per item."""
        payload = self._ask(part, LOAD).payload
        return bytes(payload.view) if isinstance(payload, Bytes) else b""

    def report(self, part: CheckupPart) -> dict[str, Any]:
        """Return the answer of a run's peer to "status" or "drain"."""
        reply = self._ask(part, CONNECT).message
        return reply.report if isinstance(reply, CheckupReply) else {}

    def measure(self) -> Measurement:
        """Measure the round trip, the clock's offset and, with a doctor, the rate."""
        quiet = self._prober.sending.acquire(timeout=BUSY)  # without it the latency may be measured too high
        try:
            latency, offset = min(self._round_trip()[:2] for _ in range(ROUND_TRIPS))
        finally:
            if quiet:
                self._prober.sending.release()
        measured = Measurement(latency, offset)
        if self.facts["role"] != "doctor":
            return replace(measured, why="a run is at work there")
        until = time.monotonic() + BUSY
        while time.monotonic() < until:
            load = Load(time.monotonic() + latency)
            with contextlib.suppress(errors.PeerTimeoutError):
                # An empty load for each alias tells the other doctor that these hosts, too, have probed it.
                empty = (self._ask("load", LOAD, name=name) for name in self._prober.aliases)
                if any(isinstance(reply.message, BusyReply) for reply in (*empty, self._ask("load", LOAD, load))):
                    time.sleep(RETRY)
                    continue
            return replace(measured, rate=load.rate)
        return replace(measured, why=f"it was busy with other hosts for {BUSY:g} s")


def connect(prober: Prober, to: PeerLine) -> Stream:
    """Connect to the address of a line, as a peer of a run does."""
    return prober.access.transport.connect(Address(to.host, to.port), time.monotonic() + CONNECT)


@contextlib.contextmanager
def probing(prober: Prober, to: PeerLine, stream: Stream) -> Iterator[Probe]:
    """Authenticate and request the facts; raise PeerFaultError if they do not arrive."""
    link = prober.links.add(stream)
    with contextlib.ExitStack() as stack:
        stack.callback(prober.links.drop, link)
        if prober.access.secret is not None:
            handshake.prove(link, prober.access.secret, prober.me, to.name, time.monotonic() + CONNECT)
        yield Probe(link, prober)


def reach(prober: Prober, to: PeerLine) -> Line:
    """Try to connect to a line, and return how far the connection got."""
    try:
        stream = connect(prober, to)
    except errors.PeerTimeoutError:
        return Line(to.rank, "timeout", f"it does not answer within {CONNECT:g} s")
    except errors.PeerFaultError as error:
        cause = str(error).rpartition(": ")[2]
        if isinstance(error, errors.LocalFaultError):
            return Line(to.rank, "local", cause)
        if type(error) is errors.PeerUnreachableError:
            return Line(to.rank, "refused" if cause == os.strerror(errno.ECONNREFUSED) else "no route", cause)
        return _unusable(to, error)  # of TLS, which authenticates as it connects
    try:
        with probing(prober, to, stream) as probe:
            me, they = prober.me, probe.facts
            if (they["peers"], they["size"]) != (me.peers, me.size):
                # A run does not send its list of peers.
                more = _difference(prober.listing, probe.read("peers")) if they["role"] == "doctor" else ""
                return Line(to.rank, "peers", f"{me.size} peers here and {they['size']} there{more}", they)
            if they["name"] != to.name:
                return Line(to.rank, "other", f"{printable(they['name'])} answers there", they)
            return Line(to.rank, "ok", "", they)
    except errors.PeerFaultError as error:
        return _unusable(to, error)


def _unusable(to: PeerLine, error: errors.PeerFaultError) -> Line:
    state = next((state for kind, state in _STATES if isinstance(error, kind)), "foreign")
    # Drop the advice of a run: it follows a semicolon, or, if the version differs, a colon.
    cause = str(error).removeprefix("refused: ").removeprefix("not authorised: ")
    return Line(to.rank, state, printable(cause.partition(":" if state == "version" else ";")[0]))


_STATES = (
    (errors.NotAuthorisedError | errors.StrangerError, "authorised"),
    (frames.VersionError, "version"),
    (errors.RefusedError, "peers"),  # the secret is right, but the hosts file or another setting differs
    (errors.ProtocolError, "foreign"),
    (errors.PeerTimeoutError, "silent"),
    (errors.LocalFaultError, "local"),
    (errors.PeerUnreachableError, "closed"),
)


def _difference(here: bytes, there: bytes) -> str:
    """Describe the first line in which two listings differ."""
    lines = (text.decode(errors="replace").split("\n") for text in (here, there))
    pairs = enumerate(zip_longest(*lines, fillvalue="missing"))
    return next((f"; peer {n} is {printable(a)} here and {printable(b)} there" for n, (a, b) in pairs if a != b), "")
