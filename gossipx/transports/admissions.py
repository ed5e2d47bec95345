"""The admission of newcomers on a connection: the answers to processes that are not in the hosts file.

A process that wants to join asks by AdmitRequest, on a connection of its own. Once it is admitted it opens
connections like any peer, and its Hello says that it joined. Whether the run takes it is decided by the role.
"""

from __future__ import annotations

from typing import Protocol

from gossipx.memory import Source
from gossipx.protocol.admission import AdmitReply, AdmitRequest
from gossipx.protocol.fields import JoinedPeer
from gossipx.transports.link import Link
from gossipx.wire import frames


class Admission(Protocol):
    """Decides on newcomers; :class:`gossipx.assembly.admission.Door`."""

    def admit(self, request: AdmitRequest, opener: str) -> tuple[AdmitReply, bytes] | str:
        """Return the reply to a process on host ``opener`` that asks to join, and its payload; or, in one line, why it
        cannot join.
        """

    def meet(self, peer: JoinedPeer) -> str | None:
        """Add a peer that joined; return in one line why it is not a member, None if it is."""


def answer(link: Link, request: AdmitRequest, admission: Admission | None, deadline: float) -> str | None:
    """Answer a process that asks to join; return why it cannot, None if it was answered."""
    opener = link.stream.remote.rpartition(":")[0]
    decided = "this process takes no newcomers" if admission is None else admission.admit(request, opener)
    if isinstance(decided, str):
        return decided
    reply, payload = decided
    source = Source(memoryview(payload)) if payload else None
    link.send(frames.encode(reply, 0, source, link.checks), deadline)
    return None
