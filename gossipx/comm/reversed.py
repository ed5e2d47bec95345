"""Connections to peers that others cannot connect to, because they are behind NAT or a firewall.

Such a peer opens connections to each peer that it reaches, and hands them over: the other side sends requests on them,
as if it had opened them itself. Two peers behind NAT meet at a third one that both reach, the gateway, which passes the
bytes of a connection on. Hello, and with a secret Open, are repeated between the two, as on a new connection::

    B, behind NAT                     gateway                       A, behind NAT
      ReverseRequest       ────→  keeps the connection
                                         ←────  RelayRequest(to B)
             ←────  RelayedRequest(from A)
      AcceptReply          ────→    AcceptReply  ────→
             ←────────────────────────────────────  Hello, and all that follows
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Protocol

from gossipx.comm.member import Member
from gossipx.errors import GossipxError, PeerTimeoutError, PeerUnreachableError
from gossipx.transports import Stream
from gossipx.transports.link import Link, Links
from gossipx.wire import Welcome
from gossipx.wire.reversal import ReverseRequest

log = logging.getLogger("gossipx")

# Connections that a peer behind NAT keeps ready per gateway: one for a model, and one for a message meanwhile. Each is
# replaced as soon as it is used.
_READY = 2
# Connections kept per peer behind NAT; more than it opens, so that only those of an ended process are dropped.
_MOST_KEPT = 8
# Shares of peer_timeout: how long a request waits for a connection from a peer behind NAT; and the longest pause after
# such a peer failed to open one, first and at most. So a request fails where no such peer is running, as at an address
# where nothing listens.
WAIT, _PAUSE = 1 / 10, (1 / 300, 1 / 30)
_PIECE = 256 * 1024  # bytes passed on at a time
_POLL, _QUIET = 0.05, 0.5  # seconds between two looks, and until a peer without a connection counts as ended


class Kept:
    """The connections that peers behind NAT have handed over; thread-safe.

    Args:
        links: all connections of this peer.
    """

    def __init__(self, links: Links):
        self._links = links
        self._arrived = threading.Condition()
        self._kept: defaultdict[int, deque[Link]] = defaultdict(deque)  # not in use, by rank
        self._open: defaultdict[int, list[Link]] = defaultdict(list)  # also those in use
        self._passing_on = 0  # connections of others under way

    def put(self, rank: int, link: Link) -> None:
        """Keep a connection that peer ``rank`` has handed over."""
        with self._arrived:
            self._kept[rank].append(link)
            self._open[rank] = [*self._open_now(rank), link]
            oldest = self._kept[rank].popleft() if len(self._kept[rank]) > _MOST_KEPT else None
            self._arrived.notify_all()
        if oldest is not None:
            self._links.drop(oldest)

    def take(self, rank: int, deadline: float) -> Link:
        """Return a connection from peer ``rank``, for the caller's use; wait for one.

        Args:
            deadline: absolute. If the peer has no connection open, the wait is a share of peer_timeout at most.

        Raises:
            PeerUnreachableError: the peer has not connected, or all connections of this peer have ended.
            PeerTimeoutError: all connections of the peer are in use.
        """
        until = min(deadline, time.monotonic() + WAIT * self._links.timeout)
        while True:
            link = self._next(rank, until)
            if link is not None and link.stream.quiet():
                return link
            if link is not None:
                self._links.drop(link)
            elif not self._open_now(rank):
                raise PeerUnreachableError("it is behind NAT, and has not connected to this peer")
            elif until >= deadline:
                raise PeerTimeoutError("it is behind NAT, and all its connections to this peer are in use")
            else:
                until = deadline

    def _next(self, rank: int, until: float) -> Link | None:
        """Wait for a connection that is not in use; return None if none arrives in time."""
        with self._arrived:
            arrived = self._arrived.wait_for(
                lambda: self._kept[rank] or self._links.closed.is_set(), until - time.monotonic()
            )
            if self._links.closed.is_set():
                raise self._links.closed_error()
            return self._kept[rank].popleft() if arrived else None

    def _open_now(self, rank: int) -> list[Link]:
        """Return the connections of peer ``rank`` that have not ended."""
        return [link for link in self._open.get(rank, ()) if not link.stream.hung_up()]

    def wake(self) -> None:
        """Wake waiting calls after all connections have ended."""
        with self._arrived:
            self._arrived.notify_all()

    def pass_on(self, one: Stream, other: Stream) -> None:
        """Send all that arrives on either stream to the other, until one of them ends."""
        with self._arrived:
            self._passing_on += 1
        try:
            self._links.spawn("relay", self._pump, other, one)
            self._pump(one, other)
        finally:
            with self._arrived:
                self._passing_on -= 1

    def _pump(self, source: Stream, target: Stream) -> None:
        links, buffer = self._links, memoryview(bytearray(_PIECE))
        target.tune()
        try:
            while True:
                count = source.receive_into(buffer, float("inf"))
                for part in (buffer[:count],) if links.pace is None else links.pace.parts([buffer[:count]]):
                    if links.pace is not None:
                        links.closed.wait(links.pace.reserve(len(part)))
                    target.send([part], time.monotonic() + links.timeout)
                links.count(count, count)
        except GossipxError as error:
            log.debug("a connection between two other peers has ended: %s", error)
        finally:
            source.abort()
            target.abort()

    def linger(self, seconds: float, stop: Callable[[], bool]) -> None:
        """Wait until the peers behind NAT have ended, which may still need this peer to reach each other.

        Args:
            seconds: to wait at most.
            stop: polled; returns whether to wait no longer.
        """
        until, seen = time.monotonic() + seconds, time.monotonic()
        while not stop() and time.monotonic() < min(until, seen + _QUIET):
            with self._arrived:
                if self._passing_on or any(self._open_now(rank) for rank in self._open):
                    seen = time.monotonic()
            self._links.closed.wait(_POLL)


class Connecting(Protocol):
    """The sending side of a peer; :class:`gossipx.comm.client.Client`."""

    def connect(self, to: int, deadline: float) -> tuple[Link, Welcome]:
        """Open a connection to peer ``to`` and complete the handshake."""


class StandBy:
    """Opens connections from a peer behind NAT to all peers that it reaches, and serves requests on them.

    Args:
        member: identity and connections of this peer.
        client: opens the connections.
        serve: serves a connection that was handed over, until it ends. Its last argument is called at the first
            request.
    """

    def __init__(self, member: Member, client: Connecting, serve: Callable[[Link, Welcome, Callable[[], None]], None]):
        self._member = member
        self._links = member.links
        self._client = client
        self._serve = serve

    def start(self) -> None:
        """Begin to connect, if this peer is behind NAT."""
        if self._member.is_cut_off_itself:
            for rank in self._member.gateways() * _READY:
                self._links.spawn("stand-by", self._stand_by, rank)

    def _stand_by(self, rank: int) -> None:
        """Keep one connection to peer ``rank`` ready; return once it was used, as another one takes its place."""
        shortest, longest = (share * self._member.timeout for share in _PAUSE)
        pause, is_replaced = shortest, False

        def replace() -> None:
            nonlocal is_replaced
            self._links.spawn("stand-by", self._stand_by, rank)
            is_replaced = True

        while not is_replaced and not self._links.closed.is_set():
            try:
                deadline = time.monotonic() + WAIT * self._member.timeout
                link, welcome = self._client.connect(rank, deadline)
                with self._links.dropped_on_failure(link):
                    link.request(ReverseRequest(), 0, deadline)
                pause = shortest
                self._serve(link, welcome, replace)
            except GossipxError as error:
                log.debug("no connection is ready for requests of %s: %s", self._member.names[rank], error)
            if not is_replaced:
                self._links.closed.wait(pause)
                pause = min(2 * pause, longest)
