"""Records of failed authentication: strangers that this peer turned away, and peers that turned this one away.

From these a peer decides whether it is itself the one that does not belong to the run.
"""

from __future__ import annotations

import logging
import math
import threading
import time

from gossipx.errors import NotAuthorisedError, RefusedError, StrangerError

log = logging.getLogger("gossipx")

# Seconds between two log lines about strangers; those in between are only counted.
_LOG_EVERY = 60.0
# Share of peer_timeout after which a peer that some have turned away, and none has admitted, stops waiting for the
# rest. Others may start a little later; but after the whole of peer_timeout this peer would begin to train alone.
_PATIENCE = 0.5


class Trust:
    """Records failed and successful authentications, as seen by one peer; thread-safe.

    Args:
        others: number of other peers in the run.
        peer_timeout: seconds after which a peer begins without those that it has not found.
    """

    def __init__(self, others: int, peer_timeout: float):
        self._others = others
        self._gives_up_at = time.monotonic() + _PATIENCE * peer_timeout
        self._lock = threading.Lock()
        self._strangers = 0
        self._logged = (-math.inf, 0)  # time of the last log line about strangers, and their number then
        self._is_admitted = False
        self._at_odds: set[int] = set()  # ranks of peers that turned this one away or were turned away by it
        self._doubt: NotAuthorisedError | RefusedError | None = None

    @property
    def strangers(self) -> int:
        """Connections that were turned away because their openers did not prove to belong to the run."""
        return self._strangers

    @property
    def is_outcast(self) -> bool:
        """Whether this peer itself seems not to belong to the run.

        That is so if all others turn it away, or if some do and none has admitted it for half of peer_timeout. Once one
        has admitted it, the peers that turn it away are taken for the strangers.
        """
        with self._lock:
            everybody = len(self._at_odds) == self._others
            late = time.monotonic() > self._gives_up_at
            return not self._is_admitted and bool(self._at_odds) and (everybody or late)

    @property
    def doubt(self) -> NotAuthorisedError | RefusedError | None:
        """The reason why no peer has admitted this one, if an authentication failure is known.

        The failure may be a stranger's that connected here, which anyone can cause. So this alone ends nothing; it only
        explains why a peer has found no others.
        """
        with self._lock:
            return None if self._is_admitted else self._doubt

    def record_admission(self) -> None:
        """Record that this peer and another one have admitted each other."""
        with self._lock:
            self._is_admitted = True

    def record_rejection(self, rank: int, error: NotAuthorisedError | RefusedError) -> None:
        """Record that this peer was turned away by, or has turned away, the peer of this rank."""
        with self._lock:
            self._doubt = error
            self._at_odds.add(rank)

    def record_stranger(self, remote: str, error: NotAuthorisedError | StrangerError) -> None:
        """Record that an inbound connection was turned away; log it at a limited rate."""
        with self._lock:
            self._strangers += 1
            if isinstance(error, NotAuthorisedError):
                self._doubt = self._doubt or error
            now = time.monotonic()
            when, before = self._logged
            if now - when < _LOG_EVERY:
                return
            self._logged = now, self._strangers
            more = self._strangers - before - 1
        log.warning("a connection from %s: %s%s", remote, error, f" ({more} more turned away before)" if more else "")
