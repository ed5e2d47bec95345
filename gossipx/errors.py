"""The exceptions of gossipx, each with the exit code of a command that it ends.

A message is one line: the cause, the place and the option to change. Exceptions of other libraries are converted to
these where they arise.
"""

from __future__ import annotations

from pathlib import Path

DIFFERENT_MODELS = 3
"""Exit code of a run that has ended, but whose peers hold different models. Nothing is raised, as it has ended."""


def printable(text: str, most: int = 4_000) -> str:
    """Return foreign text as at most ``most`` characters of one line, without any that control a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text[:most])


def how_to_install(extra: str) -> str:
    """Return the command that installs the packages of an extra; with the first release it is gossipx[EXTRA]."""
    return f"pip install '.[{extra}]' in your clone of gossipx"


class GossipxError(Exception):
    """Base class of all exceptions of gossipx."""

    exit_code = 1


class UsageError(GossipxError):
    """Wrong usage, configuration or data, which the caller has to correct.

    Args:
        message: one line.
        file: the file with the mistake, if it is in one.
        line: its line number, from 1; 0 or None: it is in no line.
        column: its column, from 1.
    """

    exit_code = 2

    def __init__(
        self, message: str, file: Path | str | None = None, line: int | None = None, column: int | None = None
    ):
        place = ":".join(str(part) for part in (file, line, column) if part)
        super().__init__(f"{place}: {message}" if place else message)


class NotEnoughPeersError(GossipxError):
    """Fewer peers are left than ``min_peers`` requires."""

    exit_code = 4


class CancelledError(GossipxError):
    """The caller cancelled its request."""


class PeerFaultError(GossipxError):
    """A request to another peer failed, because of that peer or the network. The run continues without its answer."""


class PeerUnreachableError(PeerFaultError):
    """Nothing answers at the peer's address: its process has ended, or has not started yet."""


class ConnectionClosedError(PeerUnreachableError):
    """The other side closed a connection: its process has ended, or it does not accept this one."""


class OutOfReachError(PeerUnreachableError):
    """A local socket name cannot be reached: its process has ended, or the system isolates the two processes."""


class PeerTimeoutError(PeerFaultError):
    """The peer did not complete its answer before the deadline."""


class LocalFaultError(PeerFaultError):
    """This process could not send: it is out of file descriptors or threads, or name resolution fails."""


class NoCarrierError(PeerFaultError):
    """A data channel (shared memory, process group) could not be set up; a plain connection may still work."""


class ProtocolError(PeerFaultError):
    """The peer violated the protocol."""


class CorruptedError(ProtocolError):
    """A frame or payload does not match its checksum: it was changed on its way."""


class RefusedError(ProtocolError):
    """The other peer refuses this peer, because settings that must be equal differ.

    Ends a command with exit code 2 if no other peer of the run accepts this one.
    """

    exit_code = 2


class NotAuthorisedError(PeerFaultError):
    """Authentication with another peer failed; either side may have the wrong secret or certificate.

    Ends a command with exit code 5 if no other peer of the run accepts this one.
    """

    exit_code = 5


class StrangerError(PeerFaultError):
    """The remote process is not a member of the run."""

    exit_code = 5


class ModelMismatchError(RefusedError):
    """Two peers' models differ in a tensor's name, shape or dtype."""


MALFORMED = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
"""Errors of code that reads nested data of another form than it expects, such as a number where a list should be."""
