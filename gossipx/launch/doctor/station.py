"""One host's end of the doctors' visits: listens where its peers would, and answers."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from gossipx.access import grant
from gossipx.errors import GossipxError, ProtocolError
from gossipx.launch.doctor.findings import Host, Port, Row, dump, load
from gossipx.launch.doctor.machine import listener
from gossipx.launch.doctor.visit import LOAD, TURN, ZEROS, Guest, Scrap, fit, line_of
from gossipx.memory import Source
from gossipx.settings import ExchangeSettings
from gossipx.transports import Address, Listener, Stream, checkup, handshake
from gossipx.transports.link import Link
from gossipx.wire import Bytes, CheckupReply, CheckupRequest, Hello, Message, Sink, frames

log = logging.getLogger("gossipx")

_SILENT = 15.0
"""Seconds that a visitor may say nothing: longer than any of its loads may take."""
_LONGEST = 2 * TURN
"""Seconds of a visit, whatever is said: a turn is not held for longer."""
_MOST = 64
"""Visits at a time beside two a host: each is a thread, and one load's memory at most."""
_PAUSE = 0.05
"""Seconds before accepting again where the system lacks something."""


class Station:
    """Listens on the ports of a host's lines.

    Args:
        host: whose.
        guest: of the same host; what it says of itself holds here, too.
        exchange: of them, how others are let in; ``binds``: where each line listens.
        hosts: how many the file has.
        swap: given rows that came; gives all that are known.
        told: of which host has been sent which rows.

    Attributes:
        ports: what became of each line's port.
        turn: whoever holds it measures with this host, and nobody else does.
    """

    def __init__(
        self,
        host: Host,
        guest: Guest,
        exchange: ExchangeSettings,
        binds: Sequence[str],
        hosts: int,
        swap: Callable[[Sequence[Row]], Sequence[Row]],
        told: Callable[[int, Sequence[Row]], None],
    ):
        self.turn = threading.Lock()
        self._guest = guest
        self._hosts = hosts
        self._swap = swap
        self._told = told
        self._visits = threading.BoundedSemaphore(_MOST + 2 * hosts)
        self._listeners: list[Listener] = []
        self.ports = [
            self._open(peer.rank, Address(bind, peer.port), exchange)
            for peer, bind in zip(host.peers, binds, strict=True)
        ]

    def _open(self, rank: int, place: Address, exchange: ExchangeSettings) -> Port:
        access = grant(exchange, place.host)
        try:
            listening = access.transport.listen(place)
        except GossipxError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE:
                return Port(rank, "taken", listener(place.port))
            return Port(rank, "refused", fit(str(error)))
        self._listeners.append(listening)
        peer = self._guest.peers[rank]
        me = replace(self._guest.me, rank=rank, name=peer.name)
        self._guest.links.spawn(f"accept-{rank}", self._accept, listening, me)
        return Port(rank, "open")

    def close(self) -> None:
        """Listen no more."""
        for listening in self._listeners:
            listening.close()

    def _accept(self, listening: Listener, me: Hello) -> None:
        links = self._guest.links
        while not links.closed.is_set():
            try:
                stream = listening.accept()
            except GossipxError:
                links.closed.wait(_PAUSE)
                continue
            if not self._visits.acquire(blocking=False):
                stream.abort()
                continue
            try:
                links.spawn("visit", self._receive, stream, me)
            except RuntimeError:  # the system has no thread left
                self._visits.release()
                stream.abort()
        listening.close()

    def _receive(self, stream: Stream, me: Hello) -> None:
        """All of a visit."""
        try:
            link = self._guest.links.add(stream)
            with contextlib.ExitStack() as last:
                last.callback(self._guest.links.drop, link)
                self._serve(link, me, last)
        except GossipxError as error:
            log.debug("the visit from %s has ended: %s", stream.remote, error)
        except Exception:
            log.exception("the visit from %s has failed", stream.remote)
        finally:
            self._visits.release()

    def _serve(self, link: Link, me: Hello, last: contextlib.ExitStack) -> None:
        by = time.monotonic() + _LONGEST
        deadline = time.monotonic() + _SILENT
        guest = self._guest
        if guest.access.secret is not None:
            handshake.challenge(link, guest.access.secret, me, deadline)
        names, hosts = [peer.name for peer in guest.peers], [peer.host for peer in guest.peers]
        asked: CheckupRequest = handshake.visited(link, names, hosts, deadline)
        brought = b""
        holds = False
        while True:
            if asked.part == "turn" and not holds:
                holds = self.turn.acquire(timeout=TURN)
                if holds:
                    last.callback(self.turn.release)
            self._answer(link, me, asked, brought, holds)
            frame = link.receive(min(by, time.monotonic() + _SILENT), _expected)
            if not isinstance(frame.message, CheckupRequest):
                raise ProtocolError(f"it asked by {type(frame.message).__name__}")
            asked = frame.message
            brought = (
                bytes(frame.payload.view) if asked.part == "findings" and isinstance(frame.payload, Bytes) else b""
            )

    def _answer(self, link: Link, me: Hello, asked: CheckupRequest, brought: bytes, holds: bool) -> None:
        report: dict[str, object] = {}
        payload: bytes | memoryview = b""
        heard: Sequence[Row] = ()
        told: Sequence[Row] = ()
        if asked.part == "facts":
            report = checkup.facts(me, "doctor")
        elif asked.part == "peers":
            payload = "\n".join(line_of(peer) for peer in self._guest.peers).encode()
        elif asked.part == "turn":
            report = {"turn": True} if holds else {}
        elif asked.part == "findings":
            heard = load(brought, self._hosts)
            told = self._swap(heard)
            payload = dump(told)
        elif not holds:
            raise ProtocolError("a load out of turn")
        else:
            payload = ZEROS[: asked.back]
        source = Source(memoryview(payload)) if payload else None
        reply = CheckupReply(report, len(payload))
        link.stream.tune()
        link.send(frames.encode(reply, 0, source, link.checks), time.monotonic() + LOAD)
        if heard:  # whose first is its sender's own
            self._told(heard[0].host, told)


def _expected(message: Message, request: int) -> Sink | None:
    if not isinstance(message, CheckupRequest) or not message.size:
        return None
    return Bytes(memoryview(bytearray(message.size))) if message.part == "findings" else Scrap(message.size)
