"""Ways for bytes to reach another peer; each is a module or object that is a :class:`Transport`.

:mod:`gossipx.transports.link` carries frames over any of them; :mod:`gossipx.transports.links` has all that a peer
has open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from gossipx.memory import ByteObserver


@dataclass(frozen=True)
class Address:
    """Where a peer listens.

    Attributes:
        host: a name, an IPv4 or an IPv6 address without brackets; "" means all interfaces.
        port: 0 lets the system choose when listening.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Stream(Protocol):
    """Bytes in order, both ways.

    One thread may send while another receives; :meth:`abort` may come from any thread. Deadlines
    are absolute, in seconds on :func:`time.monotonic`, and hold for the whole call: what trickles
    does not stretch them. After an error but a timed-out receive, only abort is of use.
    """

    @property
    def remote(self) -> str:
        """The other side's address, for messages."""

    @property
    def here(self) -> str:
        """This machine's address on it; empty where it has none."""

    def send(self, buffers: Sequence[bytes | memoryview], deadline: float, look: ByteObserver | None = None) -> None:
        """Hand over all bytes of all (contiguous) buffers; they may be changed afterwards.

        Args:
            look: is told of all bytes; where an error ends it earlier, of some.

        Raises:
            PeerTimeoutError: not all could be handed over by the deadline; some may have been.
            PeerUnreachableError: the other side is gone, or the stream was aborted.
        """

    def receive_into(self, view: memoryview, deadline: float, look: ByteObserver | None = None) -> int:
        """Wait for bytes and put them at the start of ``view``; how many, at least 1.

        Args:
            look: is told of all bytes, and ``view`` is full when it returns; where an error ends it earlier, it was
                told of some.

        Raises:
            PeerTimeoutError: none came by the deadline.
            PeerUnreachableError: the other side has closed or is gone, or the stream was aborted.
        """

    def tune(self) -> None:
        """A model is about to be sent: see that what is known of the path by now is made use of."""

    def quiet(self) -> bool:
        """Whether the other side has neither closed nor sent what is still unread; never waits."""

    def hung_up(self) -> bool:
        """Whether the other side has closed, whatever it had sent before; never waits."""

    def abort(self) -> None:
        """End both ways at once; calls blocked in other threads raise. Any number of times."""


@runtime_checkable
class Certified(Protocol):
    """A stream whose other side has proven, or will before its first byte, what host it is."""

    def speaks_for(self, host: str) -> bool:
        """Whether that host, as written in the hosts file, is the other side's; asked after something was received."""


@runtime_checkable
class SharesMemory(Protocol):
    """A stream between processes of one machine, over which files can be handed, and so memory shared."""

    def send_descriptor(self, descriptor: int, deadline: float) -> None:
        """Hand over a file descriptor, which stays this process's own too."""

    def receive_descriptor(self, deadline: float) -> int:
        """The descriptor that the other side sent, now this process's own to close.

        Raises:
            ProtocolError: there came something else.
        """


class Carrier(Protocol):
    """Carries payloads beside a connection, from who accepted it to who opened it.

    One payload at a time. Deadlines are as those of a :class:`Stream`. After an error, only abort is of use.
    """

    def send(
        self, view: memoryview, deadline: float, turn: Callable[[memoryview], None] = lambda part: None
    ) -> Iterator[memoryview]:
        """Send all of ``view``, which must not change until the last part was given.

        Args:
            turn: told of each part before it is sent, and returns when it may be.

        Yields:
            its bytes in order, in parts that are on their way, for whoever wants to look at them meanwhile.

        Raises:
            PeerTimeoutError, PeerUnreachableError: as :meth:`Stream.send`.
        """

    def receive(self, nbytes: int, deadline: float) -> Iterator[memoryview]:
        """What :meth:`send` sends on the other side.

        Yields:
            its bytes in order, in parts that are good until the next is asked for.

        Raises:
            PeerTimeoutError, PeerUnreachableError: as :meth:`Stream.receive_into`.
        """

    def abort(self) -> None:
        """End it at once; calls blocked in other threads raise. Any number of times."""


class KeyValueStore(Protocol):
    """What the two ends of a carrier tell each other while they are built; errors as those of a connection."""

    def set(self, key: str, value: bytes) -> None:
        """Tell the other end."""

    def get(self, key: str) -> bytes:
        """What was told of ``key``, by either end; waits for it."""


class Carriers(Protocol):
    """Builds carriers of one kind.

    Attributes:
        kind: such as "gloo".
    """

    @property
    def kind(self) -> str: ...

    def build(self, receives: bool, notes: KeyValueStore, here: str, deadline: float) -> Carrier:
        """One end of a carrier, while the other peer builds the other end.

        Args:
            receives: whether it is the end of who opened the connection.
            notes: carries what must be known on both sides.
            here: this machine's address on the connection.

        Raises:
            NoCarrierError: it cannot be built here, or with that peer.
            PeerFaultError: of the connection.
        """


class Listener(Protocol):
    """Waits for others to connect."""

    @property
    def address(self) -> Address:
        """Where it listens, with the port that the system chose if it was asked to."""

    def accept(self) -> Stream:
        """Wait, without a limit, for the next connection.

        Raises:
            GossipxError: the listener was closed, or the system lacks something now (file
                descriptors, memory): wait a little and call again.
        """

    def close(self) -> None:
        """Stop listening; a blocked accept raises. Any number of times."""


class Transport(Protocol):
    """Makes streams."""

    def listen(self, address: Address) -> Listener:
        """Listen at ``address``.

        Raises:
            GossipxError: it cannot be had; the message names it and what to do.
        """

    def connect(self, address: Address, deadline: float) -> Stream:
        """A stream to whoever listens at ``address``.

        Raises:
            PeerUnreachableError: its host is not known, or nothing listens there.
            PeerTimeoutError: no answer by the deadline.
            LocalFaultError: this machine lacks what it takes now.
        """
