"""Probes of other hosts: does a peer's line answer, what is it, how far away is it, and how fast.

A probe goes one way: this host asks, and the other's ``listener.py``, or a peer of a run, answers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gossipx import errors
from gossipx.config.security import Access
from gossipx.launch.hosts import PeerLine
from gossipx.protocol.fields import MAX_TEXT
from gossipx.protocol.messages import BusyReply
from gossipx.tools.doctor.findings import Line, Way
from gossipx.transports import Address, Stream, checkup, handshake
from gossipx.transports.link import Link
from gossipx.transports.links import Links
from gossipx.wire import MAX_LOAD, Bytes, CheckupReply, CheckupRequest, Hello, frames

# Seconds:
CONNECT = 3.0  # for a connection, and for an answer on it: ten times what a path around the world takes
LOAD = 8.0  # for the first piece of a load: that is 66 kbit/s, too slow to train over
ENOUGH = 1.0  # after which a load is cut short, as TCP has found the path's rate
BUSY = 30.0  # for a host to find time for this one's load, and for this one to find time for its own round trips
AGAIN = 0.3  # between two attempts at a host that does not answer, or is busy

LOOKS = 9  # round trips, of which the fastest is the latency
PIECE = 64 * 2**10  # bytes of a load between two looks at the time


class Load:
    """Takes a load in, and keeps its rate alone, in bytes per second; a :class:`gossipx.wire.Sink`."""

    nbytes = MAX_LOAD

    def __init__(self, began: float):
        self.rate = 0.0
        self._began = began  # when the first byte could have come
        self._room = memoryview(bytearray(PIECE))

    def room(self, start: int) -> memoryview:
        """Return room for a piece."""
        return self._room[: self.nbytes - start]

    def filled(self, start: int) -> None:
        """Take the time; raises EnoughError once the rate is known."""
        took = max(time.monotonic() - self._began, 1e-6)
        self.rate = (start + len(self.room(start))) / took
        if took > ENOUGH:
            raise EnoughError

    def take(self, start: int, view: memoryview) -> None:
        """Take the time."""
        self.filled(start)


class EnoughError(Exception):
    """A load is cut short."""


@dataclass(frozen=True)
class Prober:
    """What probes share."""

    me: Hello  # this host's first peer, and the model that it would train
    peers: Sequence[PeerLine]  # all lines
    access: Access
    links: Links
    sending: threading.Lock  # held while this host sends a load, or must not, since it measures a round trip


class Probe:
    """A connection to a line at which a doctor or a run has answered; ``facts`` are of that process."""

    def __init__(self, link: Link, me: Hello):
        self._link = link
        self._me = me
        _, _, self.facts = self._look()
        link.admitted()

    def _ask(self, part: str, seconds: float, load: Load | None = None) -> frames.Frame:
        asked = CheckupRequest(self._me.name, part, load.nbytes if load else 0)
        return self._link.ask(asked, 0, time.monotonic() + seconds, load)

    def _look(self) -> tuple[float, float, dict[str, Any]]:
        """Ask for the facts; return the seconds that it took, how far the other clock is ahead, and the facts."""
        began, clock = time.monotonic(), time.time()
        answer = self._ask("facts", CONNECT).message
        took = time.monotonic() - began
        facts = checkup.read(answer.report if isinstance(answer, CheckupReply) else {})
        return took, facts["clock"] - (clock + took / 2), facts

    def manifest(self) -> bytes:
        """Return the description of its model."""
        payload = self._ask("model", LOAD).payload
        return bytes(payload.view) if isinstance(payload, Bytes) else b""

    def measure(self, sending: threading.Lock) -> Way:
        """Measure the round trip, the clock and, with a doctor, the rate."""
        quiet = sending.acquire(timeout=BUSY)  # if not in time, a figure that is too high is better than none
        try:
            latency, offset = min(self._look()[:2] for _ in range(LOOKS))
        finally:
            if quiet:
                sending.release()
        way = Way(latency, offset)
        if self.facts["role"] != "doctor":
            return replace(way, why="a run is at work there")
        by = time.monotonic() + BUSY
        while time.monotonic() < by:
            load = Load(time.monotonic() + latency)
            with contextlib.suppress(EnoughError, errors.PeerTimeoutError):
                if isinstance(self._ask("load", LOAD, load).message, BusyReply):
                    time.sleep(AGAIN)
                    continue
            return replace(way, rate=load.rate)
        return replace(way, why=f"it was busy with other hosts for {BUSY:g} s")


def connect(prober: Prober, to: PeerLine) -> Stream:
    """Connect to a peer's line, as a peer of a run does."""
    return prober.access.transport.connect(Address(to.host, to.port), time.monotonic() + CONNECT)


@contextlib.contextmanager
def probing(prober: Prober, to: PeerLine, stream: Stream) -> Iterator[Probe]:
    """Prove who this is, and ask for the facts; PeerFaultError if these do not come."""
    link = prober.links.add(stream)
    try:
        if prober.access.secret is not None:
            handshake.prove(link, prober.access.secret, prober.me, to.name, time.monotonic() + CONNECT)
        yield Probe(link, prober.me)
    finally:
        prober.links.drop(link)


def reach(prober: Prober, to: PeerLine) -> Line:
    """Find out how far a connection to a peer's line gets."""
    try:
        stream = connect(prober, to)
    except errors.PeerTimeoutError:
        return Line(to.rank, "timeout", f"it does not answer within {CONNECT:g} s")
    except errors.PeerFaultError as error:
        cause = str(error).rpartition(": ")[2]
        state = "refused" if cause == os.strerror(errno.ECONNREFUSED) else "no route"
        return Line(to.rank, "local" if isinstance(error, errors.LocalFaultError) else state, cause)
    try:
        with probing(prober, to, stream) as probe:
            me, they = prober.me, probe.facts
            if (they["peers"], they["size"]) != (me.peers, me.size):
                return Line(to.rank, "peers", f"{me.size} peers here and {they['size']} there", they)
            if they["name"] != to.name:
                return Line(to.rank, "other", f"{fit(they['name'])} answers there", they)
            return Line(to.rank, "ok", "", they)
    except errors.PeerFaultError as error:
        state = next((state for kind, state in _STATES if isinstance(error, kind)), "foreign")
        # What follows a semicolon is advice, as a run would give it; of another version, what follows a colon.
        cause = str(error).removeprefix("refused: ").removeprefix("not authorised: ")
        return Line(to.rank, state, fit(cause.partition(":" if state == "version" else ";")[0]))


_STATES = (
    (errors.NotAuthorisedError | errors.StrangerError, "authorised"),
    (frames.VersionError, "version"),
    (errors.RefusedError, "peers"),  # the secret was proven, and the rest was not alike
    (errors.ProtocolError, "foreign"),
    (errors.PeerTimeoutError, "silent"),
    (errors.LocalFaultError, "local"),
    (errors.PeerUnreachableError, "closed"),
)


def fit(text: str) -> str:
    """Return text of others as one printable line: it is shown on a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_TEXT])
