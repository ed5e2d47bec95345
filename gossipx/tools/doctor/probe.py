"""Probes of other hosts: whether a line of the hosts file answers, its facts, clock and rate.

This host sends the requests. The doctor there (``__init__.py``) or a peer of a run replies.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gossipx import errors
from gossipx.errors import printable
from gossipx.launch.hosts import PeerLine
from gossipx.protocol.messages import BusyReply
from gossipx.tools.doctor.verdicts import Line, Measurement
from gossipx.transports import Address, Stream, handshake
from gossipx.transports.access import Access
from gossipx.transports.handshake import facts_in
from gossipx.transports.link import Link, Links
from gossipx.wire import MAX_LOAD, CheckupPart, CheckupReply, CheckupRequest, Hello, Message, frames

# Seconds:
CONNECT = 3.0  # for a connection, and for a reply on it: ten times a round trip around the world
LOAD = 8.0  # for the first piece of a load: 66 kbit/s, too slow to train over
ENOUGH = 1.0  # after which a load is cut short, because TCP has reached the path's rate
BUSY = 30.0  # to wait for the other host's turn to send a load
RETRY = 0.3  # between two attempts at a host that does not answer or is busy

ROUND_TRIPS = 3  # of which the fastest tells the clock's offset best
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


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """The state that all probes of one process share.

    Attributes:
        me: its first peer, with the digest of its model.
        peers: all lines of the hosts file.
        access: by which it is authorised.
        links: of which each probe has one.
    """

    me: Hello
    peers: Sequence[PeerLine]
    access: Access
    links: Links


class Probe:
    """A connection to a line at which a doctor or a run has answered; ``facts`` are that process's."""

    def __init__(self, link: Link, name: str):
        self._link = link
        self._name = name
        _, _, self.facts = self._round_trip()
        link.admitted()

    def _ask(self, part: CheckupPart, seconds: float, load: Load | None = None) -> Message:
        request = CheckupRequest(self._name, part, load.nbytes if load else 0)
        return self._link.request(request, 0, time.monotonic() + seconds, load).message

    def _round_trip(self) -> tuple[float, float, dict[str, Any]]:
        """Request the facts; return the seconds it took, the seconds the other clock is ahead, and the facts."""
        began, clock = time.monotonic(), time.time()
        facts = facts_in(self.report("facts"))
        took = time.monotonic() - began
        return took, facts["clock"] - (clock + took / 2), facts

    def report(self, part: CheckupPart) -> dict[str, Any]:
        """Return the answer to "facts", or that of a run's peer to "status" or "drain"."""
        reply = self._ask(part, CONNECT)
        return reply.report if isinstance(reply, CheckupReply) else {}

    def measure(self) -> Measurement:
        """Measure the clock's offset and, with a doctor, the rate."""
        latency, offset = min(self._round_trip()[:2] for _ in range(ROUND_TRIPS))
        measured = Measurement(latency, offset)
        if self.facts["role"] != "doctor":
            return replace(measured, why="a run is at work there")
        until = time.monotonic() + BUSY
        while time.monotonic() < until:
            load = Load(time.monotonic() + latency)
            with contextlib.suppress(errors.PeerTimeoutError):
                if isinstance(self._ask("load", LOAD, load), BusyReply):
                    time.sleep(RETRY)
                    continue
            return replace(measured, rate=load.rate)
        return replace(measured, why=f"it was busy with other hosts for {BUSY:g} s")


def connect_to_line(settings: ProbeSettings, to: PeerLine) -> Stream:
    """Connect to the address of a line, as a peer of a run does."""
    return settings.access.transport.connect(Address(to.host, to.port), time.monotonic() + CONNECT)


@contextlib.contextmanager
def probing(settings: ProbeSettings, to: PeerLine, stream: Stream) -> Iterator[Probe]:
    """Authenticate and request the facts; raise PeerFaultError if they do not arrive."""
    link = settings.links.add(stream)
    with contextlib.ExitStack() as stack:
        stack.callback(settings.links.drop, link)
        if settings.access.secret is not None:
            handshake.prove(link, settings.access.secret, settings.me, to.name, time.monotonic() + CONNECT)
        yield Probe(link, settings.me.name)


def try_line(settings: ProbeSettings, to: PeerLine) -> Line:
    """Try to connect to a line, and return how far the connection got."""
    me, stream = settings.me, None
    try:
        stream = connect_to_line(settings, to)
        with probing(settings, to, stream) as probe:
            they = probe.facts
            if (they["peers"], they["size"]) != (me.peers, me.size):
                return Line(to.rank, "peers", f"{me.size} peers here and {they['size']} there", they)
            if they["name"] != to.name:
                return Line(to.rank, "other", f"{printable(they['name'])} answers there", they)
            return Line(to.rank, "ok", "", they)
    except errors.PeerFaultError as error:
        return Line(to.rank, *_failure(error, stream is not None))


def _failure(error: errors.PeerFaultError, connected: bool) -> tuple[str, str]:
    """Return the state of a line that cannot be probed, and what was seen there."""
    if not connected and isinstance(error, errors.PeerTimeoutError):
        return "timeout", ""
    if not connected and type(error) is errors.PeerUnreachableError:
        cause = str(error).rpartition(": ")[2]
        return ("refused" if cause == os.strerror(errno.ECONNREFUSED) else "no route"), cause
    state = next((state for kind, state in _STATES if isinstance(error, kind)), "foreign")
    # Drop the advice of a run: it follows a semicolon, or, if the version differs, a colon.
    cause = str(error).removeprefix("refused: ").removeprefix("not authorised: ")
    return state, printable(cause.partition(":" if state == "version" else ";")[0])


_STATES = (
    (errors.NotAuthorisedError | errors.StrangerError, "authorised"),
    (frames.VersionError, "version"),
    (errors.RefusedError, "peers"),  # the secret is right, but the hosts file or another setting differs
    (errors.ProtocolError, "foreign"),
    (errors.PeerTimeoutError, "silent"),
    (errors.LocalFaultError, "local"),
    (errors.PeerUnreachableError, "closed"),
)
