"""Messages by which a process that is not a member of a run asks one of its peers to be admitted.

They take the place of Hello on a connection; see :mod:`gossipx.transports.handshake`. The role decides in
:mod:`gossipx.peer.joining.newcomers`.
"""

from __future__ import annotations

from typing import Annotated

from gossipx.protocol.fields import Fields, Port, Text, between, kind

MAX_ADMISSION = 2**20
"""Maximum bytes of a run's settings and peers: 10,000 peers with names of 50 characters."""


@kind(57, payload=MAX_ADMISSION)
class AdmitReply(Fields, frozen=True):
    """The reply to :class:`AdmitRequest`.

    Attributes:
        size: bytes of the payload, a :class:`gossipx.peer.joining.admission.Admission` if the newcomer is admitted.
        elsewhere: HOST:PORT of the peer that admits others now; empty: it is this one.
        later: why no peer can be admitted yet; empty: one can.
    """

    size: Annotated[int, between(0, MAX_ADMISSION)] = 0
    elsewhere: Text = ""
    later: Text = ""


@kind(56, answers=(AdmitReply,))
class AdmitRequest(Fields, frozen=True):
    """Asks to join the run as a further peer.

    Attributes:
        name: of the newcomer.
        host, port: the address at which it will listen.
    """

    name: Text
    host: Text
    port: Port
