"""What becomes of those who do not prove that they belong to the run, and of a peer that no other takes in."""

from __future__ import annotations

import logging
import math
import threading
import time

from gossipx.errors import NotAuthorisedError, RefusedError, StrangerError

log = logging.getLogger("gossipx")

# Seconds between two log lines of strangers that were turned away; what falls between is counted.
_TELL = 60.0
# Share of peer_timeout after which a peer that some turn away, and that none has taken in, no longer hopes for the
# rest: others may be started a little later, and after the whole of it this one would begin to train alone.
_HOPE = 0.5


class Trust:
    """Counts, of one peer, who has turned away whom; for any thread.

    Args:
        others: how many other peers the run has.
        peer_timeout: seconds.
    """

    def __init__(self, others: int, peer_timeout: float):
        self._others = others
        self._hopes_until = time.monotonic() + _HOPE * peer_timeout
        self._lock = threading.Lock()
        self._strangers = 0
        self._told = (-math.inf, 0)  # when a line was logged of them, and how many there were
        self._taken_in = False
        self._turned_away: set[int] = set()
        self._doubt: NotAuthorisedError | RefusedError | None = None

    @property
    def strangers(self) -> int:
        """Connections that were turned away, as whoever opened them did not prove to belong to the run."""
        return self._strangers

    @property
    def is_outcast(self) -> bool:
        """Whether it is this peer that does not belong to the run, as far as can be told.

        All others turn it away, or some do and nobody has taken it in for half of peer_timeout. Once one has, it is
        those who turn it away that do not belong.
        """
        with self._lock:
            everybody = len(self._turned_away) == self._others
            late = time.monotonic() > self._hopes_until
            return not self._taken_in and bool(self._turned_away) and (everybody or late)

    @property
    def doubt(self) -> NotAuthorisedError | RefusedError | None:
        """Why nobody has taken this peer in, if somebody was there and that is why.

        Others may have asked this peer, not have been taken in, and be gone before it could ask them. Anybody can do
        that, so it ends nothing by itself: it tells why a peer that is alone is alone.
        """
        with self._lock:
            return None if self._taken_in else self._doubt

    def taken_in(self) -> None:
        """Another peer and this one have taken each other for members."""
        with self._lock:
            self._taken_in = True

    def turned_away(self, rank: int, error: NotAuthorisedError | RefusedError) -> None:
        """That has failed with the peer of this rank."""
        with self._lock:
            self._doubt = error
            self._turned_away.add(rank)

    def stranger(self, remote: str, error: NotAuthorisedError | StrangerError) -> None:
        """Somebody who opened a connection was turned away; tells of it, at a limited rate."""
        with self._lock:
            self._strangers += 1
            if isinstance(error, NotAuthorisedError):
                self._doubt = self._doubt or error
            now = time.monotonic()
            when, before = self._told
            if now - when < _TELL:
                return
            self._told = now, self._strangers
            more = self._strangers - before - 1
        log.warning("a connection from %s: %s%s", remote, error, f" ({more} more turned away before)" if more else "")
