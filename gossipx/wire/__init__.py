"""Messages of a connection itself, the table of answers, and the sinks that take payloads in.

A connection says who its two ends are before it carries the messages of peers (:mod:`gossipx.protocol.messages`).
Frames, which hold both, are in :mod:`gossipx.wire.frames`. The reader and the writer of these messages is
:mod:`gossipx.transports`: ``handshake`` from Hello or Open to Description, ``checkup`` for ``gossipx doctor``, ``link``
for Taken and what a carrier beside the connection needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated, Protocol, runtime_checkable

from gossipx.errors import NotAuthorisedError, ProtocolError, RefusedError
from gossipx.memory import copy
from gossipx.protocol.fields import MAX_RANKS, Key, Rank, Report, Text, Texts, integer, kind, octets, one_of
from gossipx.protocol.messages import (
    AcceptReply,
    ArriveRequest,
    BusyReply,
    CarryingReply,
    CentreRequest,
    ElasticRequest,
    HereReply,
    InitialRequest,
    LeaveRequest,
    ModelReply,
    NotReadyReply,
    PairRequest,
    PullRequest,
    PushRequest,
    Reply,
    Request,
    RoundRequest,
    SettleRequest,
    TakeRequest,
)
from gossipx.protocol.server_messages import (
    CopyReply,
    CopyRequest,
    GradientRequest,
    PauseRequest,
    PlacedReply,
    PlaceRequest,
    PrepareRequest,
    RangesRequest,
    RecordRequest,
    ServersRequest,
    SwitchRequest,
    TablesReply,
    TablesRequest,
    WaitingReply,
    WaitingRequest,
)

# Bytes of a manifest: some 200,000 tensors, and what a stranger's peer can make us allocate.
MAX_DESCRIPTION = 16 * 2**20
# Bytes that one frame of a checkup brings along: enough to fill a link of 10 Gbit/s for longer than its round trip.
MAX_LOAD = 16 * 2**20
CHECKUP_PARTS = ("facts", "peers", "model", "load")
MAX_NOTE = 4096  # bytes; gloo has 170, NCCL 128
_Load = Annotated[int, integer(0, MAX_LOAD)]


@kind(1)
@dataclass(frozen=True)
class Hello:
    """The first frame on a connection: who opens it.

    Attributes:
        rank, name: of the opener.
        size: peers in its run.
        peers: digest of its list of peers.
        model: digest of its model's manifest.
        settings: by option, those that all peers of a run must have alike.
    """

    rank: Rank
    name: Text
    size: Annotated[int, integer(1, MAX_RANKS)]
    peers: Text
    model: Text
    settings: Texts = field(default_factory=dict)


@kind(2)
@dataclass(frozen=True)
class Welcome:
    """Answers :class:`Hello`. If ``model`` differs from the opener's, the opener may only ask for the
    :class:`Description`.

    Attributes:
        machine: tells machines apart; empty: unknown.
        local: the name of this process on its machine, which no other has had; by it, processes of the same ``machine``
            reach it with memory to share.
    """

    rank: Rank
    name: Text
    model: Text
    machine: Text = ""
    local: Text = ""


@kind(6)
@dataclass(frozen=True)
class Open:
    """The first frame of all where the run has a secret; see :mod:`gossipx.wire.auth`.

    Attributes:
        nonce: of the opener, 64 hexadecimal digits.
        run: id of the run, the digest of its list of peers.
        opener, answerer: names of the two.
    """

    nonce: Key
    run: Text
    opener: Text
    answerer: Text


@kind(7)
@dataclass(frozen=True)
class Challenge:
    """Answers :class:`Open` by the answerer's nonce. A stranger learns no more than that."""

    nonce: Key


@kind(8)
@dataclass(frozen=True)
class Proof:
    """Proves that the opener knows the secret, 64 hexadecimal digits."""

    proof: Key


@kind(9)
@dataclass(frozen=True)
class Accepted:
    """Answers :class:`Proof` by the answerer's own. All frames after this one are authenticated."""

    proof: Key


@kind(10)
@dataclass(frozen=True)
class NotAuthorised:
    """The opener is no member of the run; the connection will be closed. A stranger is told no more than that."""

    reason: Text


@kind(3)
@dataclass(frozen=True)
class Refused:
    """The connection will be closed; ``reason`` is one line for a person."""

    reason: Text


@kind(4)
@dataclass(frozen=True)
class DescribeRequest:
    """Asks for the manifest of the model."""


@kind(5, payload=MAX_DESCRIPTION)
@dataclass(frozen=True)
class Description:
    """The manifest, one line per tensor; the payload of ``size`` bytes of UTF-8."""

    size: Annotated[int, integer(0, MAX_DESCRIPTION)]


@kind(49)
@dataclass(frozen=True)
class CheckupRequest:
    """A question of ``gossipx doctor``; may be the first frame, in Hello's place.

    A peer of a run answers for "facts" alone, and does not take the opener for a member.

    Attributes:
        name: of the peer whose line of the hosts file it concerns.
        part: "facts" of the answerer; the "peers" that its hosts file lists; the description of its "model"; or a
            "load" of bytes.
        back: bytes of the load.
    """

    name: Text
    part: Annotated[str, one_of(CHECKUP_PARTS)]
    back: _Load = 0


@kind(50, payload=MAX_LOAD)
@dataclass(frozen=True)
class CheckupReply:
    """Answers :class:`CheckupRequest`.

    Attributes:
        report: the facts by name; else empty.
        size: bytes of the payload that comes along.
    """

    report: Report = field(default_factory=dict)
    size: _Load = 0


@kind(11)
@dataclass(frozen=True)
class Taken:
    """The requested model has arrived whole: the sender may release its bytes."""


@kind(12)
@dataclass(frozen=True)
class CarrierRequest:
    """Asks that both sides build a carrier for models beside this connection.

    Attributes:
        kind: of the carrier, such as "gloo".
    """

    kind: Text


@kind(13)
@dataclass(frozen=True)
class Noted:
    """Tells the other side the ``value`` of ``key`` while both build a carrier.

    Attributes:
        value: bytes, as hexadecimal digits.
    """

    key: Text
    value: Annotated[str, octets(MAX_NOTE)]


@kind(14)
@dataclass(frozen=True)
class CarrierReply:
    """The sender has built its end of the carrier."""


@kind(15)
@dataclass(frozen=True)
class NoCarrierReply:
    """The sender cannot build its end of the carrier; the connection is of no more use."""

    reason: Text


@kind(48)
@dataclass(frozen=True)
class Carried:
    """The payload that went beside the connection is whole.

    Attributes:
        digest: what its check ends in, as hexadecimal digits.
    """

    digest: Annotated[str, octets(32)]


Message = (
    Hello
    | Welcome
    | Refused
    | Open
    | Challenge
    | Proof
    | Accepted
    | NotAuthorised
    | DescribeRequest
    | Description
    | CheckupRequest
    | CheckupReply
    | Taken
    | CarrierRequest
    | Noted
    | CarrierReply
    | NoCarrierReply
    | Carried
    | Request
    | Reply
)

# Which replies answer which request.
ANSWERS: dict[type, tuple[type, ...]] = {
    Hello: (Welcome,),
    Open: (Challenge,),
    Proof: (Accepted,),
    DescribeRequest: (Description,),
    CheckupRequest: (CheckupReply, BusyReply),
    InitialRequest: (ModelReply, NotReadyReply),
    PullRequest: (ModelReply, BusyReply, NotReadyReply),
    PushRequest: (AcceptReply, BusyReply, NotReadyReply),
    PairRequest: (AcceptReply, BusyReply, NotReadyReply),
    TakeRequest: (ModelReply, NotReadyReply),
    SettleRequest: (AcceptReply, NotReadyReply),
    RoundRequest: (ModelReply, HereReply, NotReadyReply),
    ElasticRequest: (ModelReply, BusyReply, NotReadyReply),
    CentreRequest: (ModelReply, BusyReply, NotReadyReply),
    GradientRequest: (AcceptReply, PlacedReply, NotReadyReply),
    TablesRequest: (TablesReply, PlacedReply, BusyReply, NotReadyReply),
    SwitchRequest: (AcceptReply, NotReadyReply),
    WaitingRequest: (WaitingReply, NotReadyReply),
    RecordRequest: (AcceptReply, BusyReply, NotReadyReply),
    CopyRequest: (CopyReply, AcceptReply, NotReadyReply),
    ServersRequest: (AcceptReply, BusyReply, NotReadyReply),
    PauseRequest: (AcceptReply, BusyReply, NotReadyReply),
    PrepareRequest: (AcceptReply, BusyReply, NotReadyReply),
    RangesRequest: (TablesReply, NotReadyReply),
    PlaceRequest: (PlacedReply, BusyReply, NotReadyReply),
    ArriveRequest: (HereReply, NotReadyReply),
    LeaveRequest: (HereReply, NotReadyReply),
}


class Sink(Protocol):
    """Takes a payload in, piece by piece: each piece is processed while it is in the processor's cache.

    Attributes:
        nbytes: of the whole payload.
    """

    @property
    def nbytes(self) -> int: ...

    def room(self, start: int) -> memoryview:
        """Return where the bytes from ``start`` on belong, as many as come before the next :meth:`filled`."""

    def filled(self, start: int) -> None:
        """Process the room from ``start`` on, which is full."""

    def take(self, start: int, view: memoryview) -> None:
        """Take the bytes from ``start`` on, any number of them, from ``view``, which lies beside the connection."""


@runtime_checkable
class SinkFactory(Protocol):
    """A sink that is made once the reply is known."""

    @property
    def nbytes(self) -> int: ...

    def fit(self, reply: CarryingReply) -> Sink:
        """Return the sink for the payload of ``reply``; ProtocolError if that is not what was asked for."""


class UploadSink(Sink, Protocol):
    """A sink for the payload of another peer's request; its memory must be released."""

    def release(self) -> None:
        """Release the memory: nothing more will come."""


class Bytes:
    """A :class:`Sink` that fills a buffer exactly."""

    def __init__(self, view: memoryview):
        self.view = view.cast("B") if view.nbytes else view
        self.nbytes = view.nbytes

    def room(self, start: int) -> memoryview:
        """Return the rest of the buffer."""
        return self.view[start:]

    def filled(self, start: int) -> None:
        """Do nothing: the bytes are where they belong."""

    def take(self, start: int, view: memoryview) -> None:
        """Copy the bytes."""
        copy(view, self.view[start : start + len(view)])


def gather(parts: Iterable[memoryview], sink: Sink, look: Callable[[memoryview], None]) -> None:
    """Let ``sink`` take all its bytes, which come in parts.

    Args:
        parts: as many bytes as the sink takes, in order; each is done with before the next is asked for.
        look: sees all bytes in order, before they are taken.
    """
    start = had = 0  # of the piece, and how much of it lies in its room already
    room = memoryview(b"")
    for part in parts:
        done = 0
        while done < len(part):
            if not had:
                room = sink.room(start)
            view = part[done : done + len(room) - had]
            look(view)
            done += len(view)
            if len(view) == len(room):
                sink.take(start, view)
            else:  # the piece lies in two parts
                copy(view, room[had : had + len(view)])
                had += len(view)
                if had < len(room):
                    continue
                sink.filled(start)
            start, had = start + len(room), 0


# Given a message and its request id, returns the sink that its payload must fill exactly; None: no payload. Raises
# ProtocolError if the message is not wanted.
Expect = Callable[[Message, int], "Sink | None"]


def no_payload(message: Message, request: int) -> None:
    """Expect any message, without a payload."""


def answer_to(asked: Message, number: int, payload: Sink | SinkFactory | None) -> Expect:
    """Return what expects an answer to ``asked``, sent as request ``number``.

    Args:
        payload: filled by a reply that brings something; a Description gets a buffer of the size that it tells, and so
            does a CheckupReply where this is None.
    """

    def expect(message: Message, request: int) -> Sink | None:
        if isinstance(message, Refused):
            raise RefusedError(f"refused: {message.reason}")
        if isinstance(message, NotAuthorised):
            raise NotAuthorisedError(f"not authorised: {message.reason}")
        if request != number or not isinstance(message, ANSWERS[type(asked)]):
            raise ProtocolError(f"answered {type(asked).__name__} by {type(message).__name__}")
        if isinstance(message, CheckupReply) and payload is not None and not isinstance(payload, SinkFactory):
            return payload
        if isinstance(message, Description | CheckupReply):
            return Bytes(memoryview(bytearray(message.size)))
        if not isinstance(message, CarryingReply):
            return None
        return payload.fit(message) if isinstance(payload, SinkFactory) else payload

    return expect
