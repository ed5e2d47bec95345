"""What both sides of a peer's connections need: those that it opens, and those that it accepts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gossipx.transports import Address, Carriers, Transport
from gossipx.transports.links import Links
from gossipx.transports.trust import Trust
from gossipx.wire import Hello, auth

log = logging.getLogger("gossipx")


@dataclass(frozen=True, eq=False)
class Member:
    """A peer of a run: what it is to others, and what it reaches them by.

    Attributes:
        me: who it says it is.
        names, addresses: of all peers, by rank.
        manifest: of its model.
        timeout: seconds within which a handshake, and a request once begun, must be whole.
        transport: makes the connections.
        machine: tells machines apart; empty: no memory is shared.
        carriers: build ways for models beside connections; None: there are none.
        secret: of the run; None: it has none.
        trust: who was turned away.
        links: all connections.
    """

    me: Hello
    names: Sequence[str]
    addresses: Sequence[Address]
    manifest: bytes
    timeout: float
    transport: Transport
    machine: str
    carriers: Carriers | None
    secret: auth.Secret | None
    trust: Trust
    links: Links


def call_back(done: Callable[[Any], None], result: object) -> None:
    """Call back; what that raises is logged."""
    try:
        done(result)
    except Exception:
        log.exception("a callback has failed")


def call_back_in_thread(done: Callable[[Any], None], result: object) -> None:
    """Tell from a thread of its own: the caller may hold locks that ``done`` takes."""
    threading.Thread(target=call_back, args=(done, result), name="gossipx-tell", daemon=True).start()
