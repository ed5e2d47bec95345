"""A peer's identity and connections, shared by its client and its listener; and connections from behind NAT.

A peer that others cannot connect to, because it is behind NAT or a firewall, opens connections to each peer that it
reaches, and hands them over: the other side sends requests on them, as if it had opened them itself. Two peers behind
NAT meet at a third one that both reach, the gateway, which passes the bytes of a connection on. Hello, and with a
secret Open, are repeated between the two, as on a new connection::

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gossipx.errors import GossipxError, PeerTimeoutError, PeerUnreachableError
from gossipx.transports import Address, Carriers, Stream, Transport
from gossipx.transports.handshake import JoinDecider, Trust
from gossipx.transports.link import Link, Links
from gossipx.wire import Hello, auth

log = logging.getLogger("gossipx")

# Connections kept per peer behind NAT; more than it opens, so that only those of an ended process are dropped.
_MOST_KEPT = 8
# Share of peer_timeout: how long a request waits for a connection from a peer behind NAT. So a request fails where no
# such peer is running, as at an address where nothing listens.
WAIT = 1 / 10
_PIECE = 256 * 1024  # bytes passed on at a time
_POLL, _QUIET = 0.05, 0.5  # seconds between two looks, and until a peer without a connection counts as ended


@dataclass(eq=False)
class Member:
    """A peer of a run: what it announces to others, and how it reaches them.

    Attributes:
        me: what this peer announces in a handshake.
        names, addresses: of all peers, by rank; they grow as peers join the run.
        manifest: description of the model, one line per tensor.
        timeout: seconds allowed for a handshake, and for receiving a request once its first byte has arrived.
        transport: makes the connections.
        machine: identifier of this machine; empty: memory is not shared.
        carriers: builds side channels for models; None: models use the connections.
        secret: shared secrets of the run; None: no authentication.
        trust: records which peers and strangers were turned away.
        links: all open connections.
        join_handler: decides on newcomers, processes that are not in the hosts file; None: nobody is admitted.
    """

    me: Hello
    names: Sequence[str]
    addresses: Sequence[Address]
    manifest: bytes
    timeout: float
    transport: Transport
    machine: str
    carriers: Carriers | None
    secret: auth.Secrets | None
    trust: Trust
    links: Links
    join_handler: JoinDecider | None = None

    def is_cut_off(self, rank: int) -> bool:
        """Return whether this peer cannot connect to the peer of this rank, which is behind NAT on another host."""
        return self.addresses[rank].behind_nat and self.crosses_nat(rank)

    def crosses_nat(self, rank: int) -> bool:
        """Return whether a connection between this peer and another one leaves a host that is behind NAT."""
        own, other = self.addresses[self.me.rank], self.addresses[rank]
        return (own.behind_nat or other.behind_nat) and own.host != other.host

    @property
    def is_cut_off_itself(self) -> bool:
        """Whether this peer is behind NAT."""
        return self.addresses[self.me.rank].behind_nat

    def gateways(self) -> list[int]:
        """Return the ranks of the peers of other hosts that any peer can connect to."""
        own = self.addresses[self.me.rank].host
        return [rank for rank, one in enumerate(self.addresses) if not one.behind_nat and one.host != own]


def call_back(done: Callable[[Any], None], result: object) -> None:
    """Call ``done``; an exception from it is logged."""
    try:
        done(result)
    except Exception:
        log.exception("a callback has failed")


def call_back_in_thread(done: Callable[[Any], None], result: object) -> None:
    """Call ``done`` on a new thread, since the caller may hold locks that ``done`` takes."""
    threading.Thread(target=call_back, args=(done, result), name="gossipx-tell", daemon=True).start()


class HandedOverLinks:
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
