"""Reserved ports, which no other process can take between the choice of a port and the moment a peer listens on it.

Loading torch and reading data takes seconds, in which the system may give the port to an outgoing connection.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterable, Iterator

from gossipx.transports import Address


def reserve(address: Address) -> socket.socket:
    """Return a socket that reserves a port until it is closed: no other process gets the port, but a peer can listen.

    The socket is bound and does not listen; it and the peer's socket have SO_REUSEADDR.

    Args:
        address: port 0 lets the system choose one.

    Raises:
        OSError, UnicodeError: the host is not an address of this machine, or the port is in use.
    """
    found = socket.getaddrinfo(address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, place = found[0]
    with contextlib.ExitStack() as undo:
        reserved = undo.enter_context(socket.socket(family, kind, protocol))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(place)
        undo.pop_all()
    return reserved


@contextlib.contextmanager
def kept_free(addresses: Iterable[Address]) -> Iterator[None]:
    """Return a context that reserves ports where the system allows it; the peers report those that are in use."""
    with contextlib.ExitStack() as until_end:
        if sys.platform == "linux":  # others let nobody listen on a port that another socket is bound to
            for address in addresses:
                with contextlib.suppress(OSError, UnicodeError):
                    until_end.enter_context(reserve(address))
        yield
