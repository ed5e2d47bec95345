"""Messages that set up and maintain a connection, and sinks that receive payloads.

The two ends of a connection identify themselves before it carries messages between peers
(:mod:`gossipx.protocol.messages`). Both kinds of messages travel in frames (:mod:`gossipx.wire.frames`). The messages
defined here are read and written by :mod:`gossipx.transports`: its ``handshake`` uses Hello or Open up to Description,
``checkup`` serves ``gossipx doctor``, and ``link`` uses ModelAck and the messages about *carriers*: faster paths for
payloads next to the connection, such as gloo. A process that asks to join the run begins with AdmitRequest in place of
Hello; the role decides (:mod:`gossipx.peer.joining.newcomers`). The last three reach peers behind NAT; see
:mod:`gossipx.comm.member`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, Protocol, TypeAlias, runtime_checkable

from msgspec import field

from gossipx.errors import NotAuthorisedError, ProtocolError, RefusedError
from gossipx.memory import copy
from gossipx.protocol import fields, messages
from gossipx.protocol.server_messages import CarryingReply

# Bytes of a manifest: enough for 200,000 tensors. Bounds what an untrusted peer can make us allocate.
MAX_DESCRIPTION = 16 * 2**20
# Bytes of payload in one frame of a checkup: enough to fill a link of 10 Gbit/s for longer than its round trip.
MAX_LOAD = 16 * 2**20
MAX_ADMISSION = 2**20
"""Maximum bytes of a run's settings and peers: 10,000 peers with names of 50 characters."""
Message: TypeAlias = fields.Message
CheckupPart: TypeAlias = Literal["facts", "load", "status", "drain"]
MAX_NOTE = 4096  # bytes; gloo needs 170, NCCL 128
_Load = Annotated[int, fields.between(0, MAX_LOAD)]


@fields.kind(2)
class Welcome(fields.Message, frozen=True):
    """The reply to :class:`Hello`. If ``model`` differs from the opener's, it may only request the
    :class:`Description`.

    Attributes:
        machine: identifies the machine; empty: unknown.
        local: unique name of this process on its machine, by which processes of the same ``machine`` share memory with
            it.
    """

    rank: fields.Rank
    name: fields.Text
    model: fields.Text
    machine: fields.Text = ""
    local: fields.Text = ""


@fields.kind(1, answers=(Welcome,))
class Hello(fields.Message, frozen=True):
    """The first frame on a connection; identifies the peer that opened it, the opener.

    Attributes:
        rank, name: of the opener.
        size: number of peers in its run.
        peers: digest of its list of peers.
        model: digest of its model's manifest.
        settings: the settings that must be equal on all peers of a run, by option.
        joined: the opener, if it joined the run while it was in progress; ``peers`` and ``size`` are then those of the
            peers that began it.
    """

    rank: fields.Rank
    name: fields.Text
    size: Annotated[int, fields.between(1, fields.MAX_RANKS)]
    peers: fields.Text
    model: fields.Text
    settings: fields.Texts = field(default_factory=dict)
    joined: fields.Joined = ()


@fields.kind(7)
class Challenge(fields.Message, frozen=True):
    """The reply to :class:`Open`: the answerer's nonce, which is all that an unauthenticated opener learns."""

    nonce: fields.Token


@fields.kind(6, answers=(Challenge,))
class Open(fields.Message, frozen=True):
    """The very first frame if the run has a secret; see :mod:`gossipx.wire.auth`.

    Attributes:
        nonce: of the opener, 64 hexadecimal digits.
        run: id of the run: the digest of its list of peers.
        opener, answerer: names of the two peers.
    """

    nonce: fields.Token
    run: fields.Text
    opener: fields.Text
    answerer: fields.Text


@fields.kind(9)
class Accepted(fields.Message, frozen=True):
    """The reply to :class:`Proof`: the answerer's own, by a secret of both. All later frames are authenticated."""

    proof: fields.Token


@fields.kind(8, answers=(Accepted,))
class Proof(fields.Message, frozen=True):
    """The opener's proofs that it knows the secret, 64 hexadecimal digits each: one for each secret that it has."""

    proofs: fields.Proofs


@fields.kind(10)
class NotAuthorised(fields.Message, frozen=True):
    """Says that the opener is not a member of the run, and no more; the connection is then closed."""

    reason: fields.Text


@fields.kind(3)
class Refused(fields.Message, frozen=True):
    """Says in one line why the connection is closed."""

    reason: fields.Text


@fields.kind(5, payload=MAX_DESCRIPTION)
class Description(fields.Message, frozen=True):
    """The manifest, one line per tensor, as a payload of ``size`` bytes of UTF-8."""

    size: Annotated[int, fields.between(0, MAX_DESCRIPTION)]


@fields.kind(4, answers=(Description,))
class DescribeRequest(fields.Message, frozen=True):
    """Requests the manifest of the model."""


@fields.kind(50, fields.MAX_METADATA, MAX_LOAD)
class CheckupReply(fields.Message, frozen=True):
    """The reply to :class:`CheckupRequest`.

    Attributes:
        report: facts or status by name; otherwise empty.
        size: bytes of the payload.
    """

    report: fields.Report = field(default_factory=dict)
    size: _Load = 0


@fields.kind(49, answers=(CheckupReply, messages.BusyReply))
class CheckupRequest(fields.Message, frozen=True):
    """A question from outside the run; may be the first frame, in place of Hello.

    ``gossipx doctor`` asks for all parts up to "load", ``gossipx status`` and ``gossipx peer`` for the others. A doctor
    answers only the former, a running peer only "facts" and the latter; it does not count the opener as a member.

    Attributes:
        name: of the peer whose line of the hosts file is checked.
        part: "facts" about the answerer, a "load", the "status" of a running peer
            (:func:`gossipx.peer.status.status`), or "drain", which asks it to leave.
        back: bytes of the load.
    """

    name: fields.Text
    part: CheckupPart
    back: _Load = 0


@fields.kind(57, payload=MAX_ADMISSION)
class AdmitReply(fields.Message, frozen=True):
    """The reply to :class:`AdmitRequest`.

    Attributes:
        size: bytes of the payload, a :class:`gossipx.peer.joining.admission.Admission` if the newcomer is admitted.
        elsewhere: HOST:PORT of the peer that admits others now; empty: it is this one.
        later: why no peer can be admitted yet; empty: one can.
    """

    size: Annotated[int, fields.between(0, MAX_ADMISSION)] = 0
    elsewhere: fields.Text = ""
    later: fields.Text = ""


@fields.kind(56, answers=(AdmitReply,))
class AdmitRequest(fields.Message, frozen=True):
    """Asks to join the run as a further peer.

    Attributes:
        name: of the newcomer.
        host, port: the address at which it will listen.
    """

    name: fields.Text
    host: fields.Text
    port: fields.Port


@fields.kind(11)
class ModelAck(fields.Message, frozen=True):
    """Acknowledges a model that has arrived whole, so that its sender may release the bytes."""


@fields.kind(12)
class CarrierRequest(fields.Message, frozen=True):
    """Requests that both sides set up a carrier for models next to this connection.

    Attributes:
        kind: of the carrier, such as "gloo".
    """

    kind: fields.Text


@fields.kind(13)
class SetNote(fields.Message, frozen=True):
    """Sets ``key`` to ``value`` for the other side while both set up a carrier.

    Attributes:
        value: bytes, as hexadecimal digits.
    """

    key: fields.Text
    value: Annotated[str, fields.octets(MAX_NOTE)]


@fields.kind(14)
class CarrierReply(fields.Message, frozen=True):
    """Reports that the sender has set up its end of the carrier."""


@fields.kind(15)
class NoCarrierReply(fields.Message, frozen=True):
    """Reports that the sender cannot set up its end of the carrier; the connection is unusable from then on."""

    reason: fields.Text


@fields.kind(48)
class Carried(fields.Message, frozen=True):
    """Confirms that a payload sent by a carrier is complete.

    Attributes:
        digest: of the payload's check, as hexadecimal digits.
    """

    digest: Annotated[str, fields.octets(32)]


@fields.kind(53, answers=(messages.AcceptReply,))
class ReverseRequest(fields.Message, frozen=True):
    """Hands a connection over to its acceptor, which sends requests on it from then on: its opener is behind NAT."""


@fields.kind(54, answers=(messages.AcceptReply, messages.NotReadyReply))
class RelayRequest(fields.Message, frozen=True):
    """Requests a connection to peer ``to``, which is behind NAT as the sender is.

    After the reply, the bytes of this connection are passed on to that peer and back.
    """

    to: fields.Rank


@fields.kind(55, answers=(messages.AcceptReply,))
class RelayedRequest(fields.Message, frozen=True):
    """Announces that peer ``sender`` speaks on this connection from now on, through the sender of this message."""

    sender: fields.Rank


class Sink(Protocol):
    """Receives a payload piece by piece, so that each piece is processed while it is in the processor's cache.

    Attributes:
        nbytes: size of the whole payload.
    """

    @property
    def nbytes(self) -> int: ...

    def buffer_at(self, start: int) -> memoryview:
        """Return the buffer for the bytes from ``start`` on; :meth:`filled` is called once it is full."""

    def filled(self, start: int) -> None:
        """Process the buffer for the bytes from ``start`` on, which is full."""

    def take(self, start: int, view: memoryview) -> None:
        """Process the bytes from ``start`` on, any number of them, out of ``view`` instead of a buffer of the sink."""


@runtime_checkable
class SinkFactory(Protocol):
    """Creates the sink once the reply is known."""

    @property
    def nbytes(self) -> int: ...

    def fit(self, reply: CarryingReply) -> Sink:
        """Return the sink for the payload of ``reply``. Raises ProtocolError if the reply does not fit the request."""


class UploadSink(Sink, Protocol):
    """A sink for the payload of another peer's request, whose memory must be released."""

    def release(self) -> None:
        """Release the memory; nothing more will be received."""


class Bytes:
    """A :class:`Sink` that fills a given buffer."""

    def __init__(self, view: memoryview):
        self.view = view.cast("B") if view.nbytes else view
        self.nbytes = view.nbytes

    def buffer_at(self, start: int) -> memoryview:
        """Return the rest of the buffer."""
        return self.view[start:]

    def filled(self, start: int) -> None:
        """Do nothing: the bytes are in place."""

    def take(self, start: int, view: memoryview) -> None:
        """Copy the bytes."""
        copy(view, self.view[start : start + len(view)])


# Takes a message and its request id; returns the sink that its payload must fill exactly, or None for no payload.
# Raises ProtocolError if the message is not expected.
Expect = Callable[[fields.Message, int], "Sink | None"]


def no_payload(message: fields.Message, request: int) -> None:
    """Expect any message without a payload."""


def answer_to(asked: fields.Message, number: int, payload: Sink | SinkFactory | None) -> Expect:
    """Return the Expect function for replies to ``asked``, which was sent as request ``number``.

    Args:
        payload: sink of a reply with a payload. A Description or an AdmitReply gets a new buffer of the announced size,
            and so does a CheckupReply if this is None.
    """

    def expect(message: fields.Message, request: int) -> Sink | None:
        if isinstance(message, Refused):
            raise RefusedError(f"refused: {message.reason}")
        if isinstance(message, NotAuthorised):
            raise NotAuthorisedError(f"not authorised: {message.reason}")
        if request != number or not isinstance(message, fields.kind_of(type(asked)).answers):
            raise ProtocolError(f"answered {type(asked).__name__} by {type(message).__name__}")
        if isinstance(message, CheckupReply) and payload is not None and not isinstance(payload, SinkFactory):
            return payload
        if isinstance(message, Description | CheckupReply | AdmitReply):
            return Bytes(memoryview(bytearray(message.size)))
        if not isinstance(message, CarryingReply):
            return None
        return payload.fit(message) if isinstance(payload, SinkFactory) else payload

    return expect
