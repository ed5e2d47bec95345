"""Errors that gossipx raises, each with the exit code that a command ends with.

One error is one line: the cause, the place and the knob to turn. Errors of other libraries are turned
into these at the border where they arise.
"""

from __future__ import annotations

from pathlib import Path


class GossipxError(Exception):
    """Anything that gossipx itself refuses or fails at."""

    exit_code = 1


class UsageError(GossipxError):
    """Wrong usage, configuration or data: the caller's to mend.

    Args:
        message: one line.
        file: where the mistake stands, if it stands in a file.
        line: its line number, from 1.
        column: where in the line, from 1.
    """

    exit_code = 2

    def __init__(
        self, message: str, file: Path | str | None = None, line: int | None = None, column: int | None = None
    ):
        place = ":".join(str(part) for part in (file, line, column) if part is not None)
        super().__init__(f"{place}: {message}" if place else message)


class NotEnoughPeersError(GossipxError):
    """Fewer peers are left than ``min_peers`` asks for."""

    exit_code = 4


class CancelledError(GossipxError):
    """A request was given up by whoever made it."""


class PeerFaultError(GossipxError):
    """A request to another peer failed, through that peer or the way to it; this peer goes on."""


class PeerUnreachableError(PeerFaultError):
    """Nothing answers at the peer's address: its process is gone, or not there yet."""


class OutOfReachError(PeerUnreachableError):
    """No process can be reached by that name from here: it is gone, or the system keeps the two apart."""


class PeerTimeoutError(PeerFaultError):
    """The peer did not answer whole within its deadline."""


class LocalFaultError(PeerFaultError):
    """This process could not ask: it has no file descriptor or thread left, or its names cannot be looked up now."""


class NoCarrierError(PeerFaultError):
    """No way for models beside a connection could be built; another connection without one may well do."""


class ProtocolError(PeerFaultError):
    """The peer sent what the protocol does not allow."""


class TooFarError(ProtocolError):
    """The peer's model cannot be recovered near the one here: they are further apart than its codec was told."""


class RefusedError(ProtocolError):
    """The peer does not take this one in: what both must have alike differs.

    Ends a command with exit code 2 where no other peer of the run takes this one in.
    """

    exit_code = 2


class NotAuthorisedError(PeerFaultError):
    """Two peers do not take each other for members of one run, and it may be this one that is not.

    Ends a command with exit code 5 where no other peer of the run takes this one in.
    """

    exit_code = 5


class StrangerError(PeerFaultError):
    """What is at the other end does not belong to the run, whatever this peer is."""

    exit_code = 5


class ModelMismatchError(RefusedError):
    """Two peers hold models that differ in a tensor's name, shape or dtype."""
