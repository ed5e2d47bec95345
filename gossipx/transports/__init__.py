"""Interfaces of transports, which move bytes to another peer: streams, listeners, and carriers for models.

Each transport is a module or object that implements :class:`Transport`. :mod:`gossipx.transports.link` carries frames
over any of them, and :mod:`gossipx.transports.link` keeps all connections of a peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from gossipx.figures import Counters
from gossipx.memory import ByteObserver


@dataclass(frozen=True)
class Address:
    """Where a peer listens.

    Attributes:
        host: a name, an IPv4 or an IPv6 address without brackets; "" means all interfaces.
        port: when listening, 0 lets the system choose a port.
        behind_nat: whether other hosts cannot connect to it.
    """

    host: str
    port: int
    behind_nat: bool = False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Stream(Protocol):
    """An ordered stream of bytes in both directions.

    One thread may send while another receives, and any thread may call :meth:`abort`. Deadlines are absolute, in
    seconds on :func:`time.monotonic`, and cover the whole call: a slow trickle of bytes does not extend them. After any
    error except a receive timeout, the stream may only be aborted.
    """

    @property
    def remote(self) -> str:
        """The remote address, for messages."""

    @property
    def here(self) -> str:
        """The local address; empty if the stream has no local address."""

    def send(self, buffers: Sequence[bytes | memoryview], deadline: float, observe: ByteObserver | None = None) -> None:
        """Send all bytes of the (contiguous) buffers; they may be changed afterwards.

        Args:
            observe: called with the bytes as they are sent: with all of them, or with a part if an error occurs.

        Raises:
            PeerTimeoutError: not all bytes were accepted by the deadline; some may have been.
            PeerUnreachableError: the remote side is gone, or the stream was aborted.
        """

    def receive_into(self, view: memoryview, deadline: float, observe: ByteObserver | None = None) -> int:
        """Wait for bytes, store them at the start of ``view``, and return how many there are, at least 1.

        Args:
            observe: called with the bytes as they arrive. The call then fills all of ``view``; after an error it may
                have been called with a part of them.

        Raises:
            PeerTimeoutError: nothing arrived by the deadline.
            PeerUnreachableError: the remote side has closed or is gone, or the stream was aborted.
        """

    def tune(self) -> None:
        """Adapt to what is known of the path by now; called before a model is sent."""

    def quiet(self) -> bool:
        """Return whether the remote side has neither closed nor sent unread bytes; never blocks."""

    def hung_up(self) -> bool:
        """Return whether the remote side has closed, even if unread bytes remain; never blocks."""

    def abort(self) -> None:
        """Close both directions at once; calls blocked in other threads raise. May be called any number of times."""


@runtime_checkable
class Certified(Protocol):
    """A stream whose remote side proves its host by a certificate before its first byte."""

    def speaks_for(self, host: str) -> bool:
        """Return whether the remote side's certificate is for ``host`` of the hosts file; valid after a receive."""


@runtime_checkable
class SharesMemory(Protocol):
    """A stream between processes of one machine that can pass file descriptors, and so share memory."""

    def send_descriptor(self, descriptor: int, deadline: float) -> None:
        """Pass a file descriptor; this process keeps its own copy."""

    def receive_descriptor(self, deadline: float) -> int:
        """Receive a descriptor, which the caller must close.

        Raises:
            ProtocolError: something else arrived.
        """


@runtime_checkable
class Counting(Protocol):
    """A transport that counts; the peer that uses it counts there, too."""

    counts: Counters


class Carrier(Protocol):
    """A side channel for payloads, from the side that accepted a connection to the side that opened it.

    It carries one payload at a time. Deadlines are those of a :class:`Stream`. After an error it may only be aborted.
    """

    def send(
        self, view: memoryview, deadline: float, before_part: Callable[[memoryview], None] = lambda part: None
    ) -> Iterator[memoryview]:
        """Send all of ``view``, which must not change until the iterator is exhausted.

        Args:
            turn: called with each part before it is sent; it may block to limit the rate.

        Yields:
            The bytes in order, in parts that are being sent, so that the caller can compute a checksum meanwhile.

        Raises:
            PeerTimeoutError, PeerUnreachableError: as :meth:`Stream.send`.
        """

    def receive(self, nbytes: int, deadline: float) -> Iterator[memoryview]:
        """Receive a payload of ``nbytes`` from :meth:`send` on the other side.

        Yields:
            The bytes in order, in parts that are valid until the next one is requested.

        Raises:
            PeerTimeoutError, PeerUnreachableError: as :meth:`Stream.receive_into`.
        """

    def abort(self) -> None:
        """Close it at once; calls blocked in other threads raise. May be called any number of times."""


class KeyValueStore(Protocol):
    """Keys and values that the two ends of a carrier exchange while they are built; errors as those of a connection."""

    def set(self, key: str, value: bytes) -> None:
        """Publish a value to the other end."""

    def get(self, key: str) -> bytes:
        """Return the value of ``key`` from either end; waits for it."""


class Carriers(Protocol):
    """Builds carriers of one kind.

    Attributes:
        kind: name of the library, such as "gloo".
    """

    @property
    def kind(self) -> str: ...

    def build(self, receives: bool, notes: KeyValueStore, here: str, deadline: float) -> Carrier:
        """Build one end of a carrier, while the other peer builds the other end.

        Args:
            receives: whether this is the receiving end, which is the side that opened the connection.
            notes: exchanges values between the two ends.
            here: this machine's address on the connection.

        Raises:
            NoCarrierError: it cannot be built here, or not with that peer.
            PeerFaultError: the connection failed.
        """


class Listener(Protocol):
    """Accepts connections."""

    @property
    def address(self) -> Address:
        """The address listened at, including the port if the system chose it."""

    def accept(self) -> Stream:
        """Wait, without a limit, for the next connection.

        Raises:
            GossipxError: the listener was closed, or the system has run out of a resource (file
                descriptors, memory): wait a little and call again.
        """

    def close(self) -> None:
        """Stop listening; a blocked accept raises. May be called any number of times."""


class Transport(Protocol):
    """Makes streams: connects and listens."""

    def listen(self, address: Address) -> Listener:
        """Listen at ``address``.

        Raises:
            GossipxError: the address is not available; the message says why and what to do.
        """

    def connect(self, address: Address, deadline: float) -> Stream:
        """Connect to ``address``.

        Raises:
            PeerUnreachableError: its host is unknown, or nothing listens there.
            PeerTimeoutError: no answer by the deadline.
            LocalFaultError: this machine has run out of a resource.
        """
