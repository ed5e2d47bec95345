"""The answering side of the doctor: listens where this host's peers would, and answers the probes of others."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gossipx.errors import GossipxError, ProtocolError
from gossipx.launch.hosts import PeerLine
from gossipx.memory import Source
from gossipx.protocol.messages import BusyReply
from gossipx.tools.doctor.findings import Line
from gossipx.tools.doctor.probe import LOAD, Prober, fit, reach
from gossipx.transports import Address, Stream, checkup, handshake
from gossipx.transports import Listener as Listening
from gossipx.transports.link import Link
from gossipx.wire import MAX_LOAD, CheckupReply, CheckupRequest, Hello, frames

_SILENT = 15.0  # seconds that a connection may be silent
_MOST = 64  # threads of this process, beside four per peer: each connection is one
_ZEROS = memoryview(bytes(MAX_LOAD))  # the system gives no memory for them until they are read


class Listener:
    """Listens on the ports of this host's ``lines``, as the same host as the prober; ``binds`` says by rank where."""

    def __init__(self, lines: Sequence[PeerLine], binds: Mapping[int, str], prober: Prober, manifest: bytes):
        self.news = threading.Condition()  # held to read or change the findings, and this:
        self.probed: set[str] = set()  # first peers of the hosts that have been sent a load, with which a probe ends
        self._prober = prober
        self._manifest = manifest
        self._listening: list[Listening] = []
        self.ports = [self._open(peer, Address(binds[peer.rank], peer.port)) for peer in lines]

    def _open(self, peer: PeerLine, place: Address) -> Line:
        try:
            listening = self._prober.access.transport.listen(place)
        except GossipxError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
                return Line(peer.rank, "denied", fit(str(error)))
            seen = reach(self._prober, peer)
            return replace(seen, state=seen.facts.get("role", seen.state))
        self._listening.append(listening)
        me = replace(self._prober.me, rank=peer.rank, name=peer.name)
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
                links.closed.wait(0.05)  # the system lacks something
                continue
            if threading.active_count() < _MOST + 4 * len(self._prober.peers):
                links.spawn("answer", self._connected, stream, me)
            else:
                stream.abort()

    def _connected(self, stream: Stream, me: Hello) -> None:
        with contextlib.suppress(GossipxError):  # the prober ends the connection, and tells its user why
            link = self._prober.links.add(stream)
            try:
                self._serve(link, me)
            finally:
                self._prober.links.drop(link)

    def _serve(self, link: Link, me: Hello) -> None:
        """Answer all questions on one connection, until its other side ends it."""
        deadline = time.monotonic() + _SILENT
        prober = self._prober
        if prober.access.secret is not None:
            handshake.challenge(link, prober.access.secret, me, deadline)
        names, hosts = [peer.name for peer in prober.peers], [peer.host for peer in prober.peers]
        asked: CheckupRequest = handshake.visited(link, names, hosts, deadline)
        while True:
            self._answer(link, me, asked)
            message = link.receive(time.monotonic() + _SILENT).message
            if not isinstance(message, CheckupRequest):
                raise ProtocolError(f"it asked by {type(message).__name__}")
            asked = message

    def _answer(self, link: Link, me: Hello, asked: CheckupRequest) -> None:
        if asked.part == "facts":
            self._send(link, CheckupReply(checkup.facts(me, "doctor")))
        elif asked.part == "model":
            self._send(link, CheckupReply(size=len(self._manifest)), memoryview(self._manifest))
        # One load at a time, and none while this host measures a round trip: each would slow the other down.
        elif not self._prober.sending.acquire(blocking=False):
            self._send(link, BusyReply())
        else:
            try:
                self._send(link, CheckupReply(size=asked.back), _ZEROS[: asked.back])
            finally:
                self._prober.sending.release()
                with self.news:
                    self.probed.add(asked.name)
                    self.news.notify_all()

    def _send(self, link: Link, reply: CheckupReply | BusyReply, payload: memoryview | None = None) -> None:
        link.stream.tune()
        source = Source(payload) if payload else None
        link.send(frames.encode(reply, 0, source, link.checks), time.monotonic() + LOAD)
