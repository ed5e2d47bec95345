"""The answering side of the doctor: it listens on the ports of this host's peers, and answers the probes of others."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from gossipx.errors import GossipxError, printable
from gossipx.launch.hosts import PeerLine
from gossipx.memory import Source
from gossipx.protocol.messages import BusyReply
from gossipx.tools.doctor.findings import Line
from gossipx.tools.doctor.probe import LOAD, Prober, reach
from gossipx.transports import Address, Stream, handshake
from gossipx.transports import Listener as Listening
from gossipx.transports.handshake import checkup_facts
from gossipx.transports.link import Link
from gossipx.wire import MAX_LOAD, CheckupReply, CheckupRequest, Hello, Message, frames

_SILENT = 15.0  # seconds after which a silent connection is closed
_MAX_THREADS = 64  # of the doctor, plus four per peer: each connection has its own thread
_ZEROS = memoryview(bytes(MAX_LOAD))  # the system allocates these pages when they are first read


class Listener:
    """The listening sockets of this host's ``lines``; ``binds`` has the address to bind to by rank."""

    def __init__(self, lines: Sequence[PeerLine], binds: Mapping[int, str], prober: Prober):
        self.news = threading.Condition()  # guards the findings, and this:
        self.probed: set[str] = set()  # names of peers that have received a load, the last step of a probe
        self._prober = prober
        self._listening: list[Listening] = []
        self.ports = [self._open(peer, Address(binds[peer.rank], peer.port)) for peer in lines]

    def _open(self, peer: PeerLine, place: Address) -> Line:
        try:
            listening = self._prober.access.transport.listen(place)
        except GossipxError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
                return Line(peer.rank, "denied", printable(str(error)))
            seen = reach(self._prober, peer)
            return replace(seen, state=seen.facts.get("role", seen.state))
        self._listening.append(listening)
        me = msgspec.structs.replace(self._prober.me, rank=peer.rank, name=peer.name)
        self._prober.links.spawn(f"accept-{peer.rank}", self._accept, listening, me)
        return Line(peer.rank, "open")

    def close(self) -> None:
        """Stop listening."""
        for listening in self._listening:
            listening.close()

    def _accept(self, listening: Listening, me: Hello) -> None:
        links = self._prober.links
        while not links.closed.is_set():
            try:
                stream = listening.accept()
            except GossipxError:
                links.closed.wait(0.05)  # the system lacks a resource, such as file descriptors
                continue
            if links.threads < _MAX_THREADS + 4 * len(self._prober.peers):
                links.spawn("answer", self._serve, stream, me)
            else:
                stream.abort()

    def _serve(self, stream: Stream, me: Hello) -> None:
        """Answer the requests on one connection until the other side closes it and reports the error, if any."""
        prober, deadline = self._prober, time.monotonic() + _SILENT
        with contextlib.suppress(GossipxError), contextlib.ExitStack() as stack:
            link = prober.links.add(stream)
            stack.callback(prober.links.drop, link)
            if prober.access.secret is not None:
                handshake.challenge(link, prober.access.secret, me, deadline)
            names, hosts = [peer.name for peer in prober.peers], [peer.host for peer in prober.peers]
            request: Message = handshake.visited(link, names, hosts, deadline)
            while isinstance(request, CheckupRequest):
                self._answer(link, me, request)
                request = link.receive(time.monotonic() + _SILENT).message

    def _answer(self, link: Link, me: Hello, request: CheckupRequest) -> None:
        if request.part == "facts":
            self._send(link, b"", CheckupReply(checkup_facts(me, "doctor")))
        elif request.part != "load":
            self._send(link, self._prober.manifest if request.part == "model" else self._prober.listing)
        # One load at a time, and none while this host measures a round trip: each would slow the other down.
        elif not self._prober.sending.acquire(blocking=False):
            self._send(link, b"", BusyReply())
        else:
            try:
                self._send(link, _ZEROS[: request.back])
            finally:
                self._prober.sending.release()
                with self.news:
                    self.probed.add(request.name)
                    self.news.notify_all()

    def _send(self, link: Link, payload: bytes | memoryview, reply: CheckupReply | BusyReply | None = None) -> None:
        link.stream.tune()
        source = Source(memoryview(payload)) if payload else None
        reply = reply or CheckupReply(size=len(payload))
        link.send(frames.encode(reply, 0, source, link.checks), time.monotonic() + LOAD)
