"""Messages about connections to peers behind NAT; see :mod:`gossipx.comm.member`."""

from __future__ import annotations

from gossipx.protocol.fields import Fields, Rank, kind
from gossipx.protocol.messages import AcceptReply, NotReadyReply


@kind(53)
class ReverseRequest(Fields, frozen=True):
    """Hands a connection over to its acceptor, which sends requests on it from then on: its opener is behind NAT."""


@kind(54)
class RelayRequest(Fields, frozen=True):
    """Requests a connection to peer ``to``, which is behind NAT as the sender is.

    After the reply, the bytes of this connection are passed on to that peer and back.
    """

    to: Rank


@kind(55)
class RelayedRequest(Fields, frozen=True):
    """Announces that peer ``sender`` speaks on this connection from now on, through the sender of this message."""

    sender: Rank


Messages = ReverseRequest | RelayRequest | RelayedRequest

ANSWERS: dict[type, tuple[type, ...]] = {
    ReverseRequest: (AcceptReply,),
    RelayRequest: (AcceptReply, NotReadyReply),
    RelayedRequest: (AcceptReply,),
}
"""The replies that may answer each of these."""
