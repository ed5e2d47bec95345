"""The wire: frames (:mod:`gossipx.wire.frames`), and here what a connection itself says.

What peers say to each other over it is in :mod:`gossipx.messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Protocol, runtime_checkable

from gossipx.errors import NotAuthorisedError, ProtocolError, RefusedError, UsageError
from gossipx.memory import copy
from gossipx.messages import (
    AcceptReply,
    ArriveRequest,
    BusyReply,
    CarryingReply,
    CentreRequest,
    CopyReply,
    CopyRequest,
    ElasticRequest,
    GradientRequest,
    HereReply,
    InitialRequest,
    LeaveRequest,
    ModelReply,
    NotReadyReply,
    PairRequest,
    PauseRequest,
    PlacedReply,
    PlaceRequest,
    PrepareRequest,
    PullRequest,
    PushRequest,
    RangesRequest,
    RecordRequest,
    RoundRequest,
    ServersRequest,
    SettleRequest,
    SwitchRequest,
    TablesReply,
    TablesRequest,
    TakeRequest,
    WaitingReply,
    WaitingRequest,
)


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

    rank: int
    name: str
    size: int
    peers: str
    model: str
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Welcome:
    """Answers :class:`Hello`; where ``model`` differs from the opener's, it may only ask for the
    :class:`Description`.

    Attributes:
        machine: tells machines apart; empty: unknown.
        local: the name of this process on its machine, which no other has had; by it, processes of the same ``machine``
            reach it with memory to share.
    """

    rank: int
    name: str
    model: str
    machine: str = ""
    local: str = ""


@dataclass(frozen=True)
class Open:
    """The first frame of all where the run has a secret; see :mod:`gossipx.wire.auth`.

    Attributes:
        nonce: of the opener, 64 hexadecimal digits.
        run: id of the run, the digest of its list of peers.
        opener, answerer: names of the two.
    """

    nonce: str
    run: str
    opener: str
    answerer: str


@dataclass(frozen=True)
class Challenge:
    """Answers :class:`Open` by the answerer's nonce, which is all that a stranger learns."""

    nonce: str


@dataclass(frozen=True)
class Proof:
    """Proves that the opener knows the secret, 64 hexadecimal digits."""

    proof: str


@dataclass(frozen=True)
class Accepted:
    """Answers :class:`Proof` by the answerer's own. All frames after this one are authenticated."""

    proof: str


@dataclass(frozen=True)
class NotAuthorised:
    """Who opened the connection is no member of the run; it will be closed. A stranger is not told more than that."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """The connection will be closed; ``reason`` is one line for a person."""

    reason: str


@dataclass(frozen=True)
class DescribeRequest:
    """Asks for the manifest of the model."""


@dataclass(frozen=True)
class Description:
    """The manifest, one line a tensor, is the payload of ``size`` bytes of UTF-8."""

    size: int


@dataclass(frozen=True)
class CheckupRequest:
    """A question of a checkup of the machines (``gossipx doctor``); may be the first frame, in Hello's place.

    A peer of a run answers "facts" alone, and does not take the asking process for a member.

    Attributes:
        name: of the peer for whose line it is asked.
        part: "facts" of the answering process; the "peers" that its hosts file lists; the description of its "model";
            or a "load" of bytes.
        back: bytes of the load.
    """

    name: str
    part: str
    back: int = 0


@dataclass(frozen=True)
class CheckupReply:
    """Answers :class:`CheckupRequest`.

    Attributes:
        report: the facts by name; else empty.
        size: bytes of the payload that comes along.
    """

    report: Mapping[str, object] = field(default_factory=dict)
    size: int = 0


@dataclass(frozen=True)
class Taken:
    """The model that was asked for has arrived whole: its bytes need not be kept any longer."""


@dataclass(frozen=True)
class CarrierRequest:
    """Asks that both build a way for models beside this connection.

    Attributes:
        kind: of it, such as "gloo".
    """

    kind: str


@dataclass(frozen=True)
class Noted:
    """What one side tells the other while they build: both have the ``value`` of ``key`` then.

    Attributes:
        value: bytes, as hexadecimal digits.
    """

    key: str
    value: str


@dataclass(frozen=True)
class CarrierReply:
    """Who says so has built its end."""


@dataclass(frozen=True)
class NoCarrierReply:
    """Who says so cannot build its end; the connection is of no more use."""

    reason: str


@dataclass(frozen=True)
class Carried:
    """The payload that went beside the connection is whole.

    Attributes:
        digest: what its check ends in, as hexadecimal digits.
    """

    digest: str


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
    | InitialRequest
    | PullRequest
    | PushRequest
    | PairRequest
    | TakeRequest
    | SettleRequest
    | RoundRequest
    | ElasticRequest
    | CentreRequest
    | GradientRequest
    | TablesRequest
    | SwitchRequest
    | WaitingRequest
    | RecordRequest
    | CopyRequest
    | ServersRequest
    | PauseRequest
    | PrepareRequest
    | RangesRequest
    | PlaceRequest
    | PlacedReply
    | WaitingReply
    | TablesReply
    | CopyReply
    | ArriveRequest
    | LeaveRequest
    | ModelReply
    | AcceptReply
    | BusyReply
    | HereReply
    | NotReadyReply
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
    """Takes a payload in, piece by piece, so that what is done with a piece finds it in the processor's cache.

    Attributes:
        nbytes: of the whole payload.
    """

    @property
    def nbytes(self) -> int: ...

    def room(self, start: int) -> memoryview:
        """Where the bytes from ``start`` on belong, as many as are wanted before :meth:`filled` is told."""

    def filled(self, start: int) -> None:
        """The room from ``start`` on is full."""

    def take(self, start: int, view: memoryview) -> None:
        """The bytes from ``start`` on, any number of them, lie in ``view``, beside the connection."""


@runtime_checkable
class Fitting(Protocol):
    """A sink that is made when it is known what comes."""

    @property
    def nbytes(self) -> int: ...

    def fit(self, reply: CarryingReply) -> Sink:
        """What takes in what ``reply`` brings; ProtocolError if it is not what was asked for."""


class Room(Sink, Protocol):
    """Where what another peer brings is taken in; its memory is to be given back."""

    def release(self) -> None:
        """Give it back: nothing more will come."""


class Bytes:
    """A buffer that is to be filled exactly, as a :class:`Sink`."""

    def __init__(self, view: memoryview):
        self.view = view.cast("B") if view.nbytes else view
        self.nbytes = view.nbytes

    def room(self, start: int) -> memoryview:
        """All that is left of the buffer."""
        return self.view[start:]

    def filled(self, start: int) -> None:
        """Nothing is to be done with it."""

    def take(self, start: int, view: memoryview) -> None:
        """Copy them."""
        copy(view, self.view[start : start + len(view)])


def gather(parts: Iterable[memoryview], sink: Sink, look: Callable[[memoryview], None]) -> None:
    """Let ``sink`` take all its bytes from where they lie in parts.

    Args:
        parts: as many bytes as the sink takes, in order; each is done with when the next is asked for.
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


# Tells, of a message and its request id, what its payload must fill exactly; None: no payload. Raises ProtocolError if
# the message is not wanted.
Expect = Callable[[Message, int], "Sink | None"]

# Bytes of a manifest: some 200,000 tensors, and what a stranger's peer can make us allocate.
MAX_DESCRIPTION = 16 * 2**20
# Bytes that one frame of a checkup brings along: enough to fill a link of 10 Gbit/s for longer than its round trip.
MAX_LOAD = 16 * 2**20
CHECKUP_PARTS = ("facts", "peers", "model", "load")
# Characters of a foreign line that a message shows.
_SHOWN = 200


def no_payload(message: Message, request: int) -> None:
    """Expects any message, without a payload."""


def answer_to(asked: Message, number: int, payload: Sink | Fitting | None) -> Expect:
    """Expects an answer to ``asked``, sent as request ``number``.

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
        if isinstance(message, CheckupReply) and payload is not None and not isinstance(payload, Fitting):
            return payload
        if isinstance(message, Description | CheckupReply):
            return Bytes(memoryview(bytearray(message.size)))
        if not isinstance(message, CarryingReply):
            return None
        return payload.fit(message) if isinstance(payload, Fitting) else payload

    return expect


def objection(own: Hello, theirs: Hello, names: Sequence[str]) -> str | None:
    """Why ``theirs`` may not connect to ``own``, in one line; None if it may.

    Another model is no objection yet: its opener may ask for the :class:`Description`.

    Args:
        names: of the run's peers, by rank.
    """
    if (theirs.peers, theirs.size) != (own.peers, own.size):
        return (
            f"the hosts files of {theirs.name} ({theirs.size} peers) and {own.name}"
            f" ({own.size} peers) differ; give every peer the same"
        )
    if theirs.rank == own.rank:
        return f"rank {own.rank} is this peer itself; start each line of the hosts file once"
    if theirs.rank >= own.size or theirs.name != names[theirs.rank]:
        return f"{theirs.name} is not rank {theirs.rank} of this run"
    for option in sorted(own.settings.keys() | theirs.settings.keys()):
        has = [f"{one.settings.get(option, 'none')} at {one.name}" for one in (theirs, own)]
        if own.settings.get(option) != theirs.settings.get(option):
            return f"{option} is {' and '.join(has)}; give every peer the same"
    return None


def manifest_bytes(lines: Sequence[str]) -> bytes:
    """A model's manifest, one line a tensor, as it is sent and digested.

    Raises:
        UsageError: it is larger than can be sent.
    """
    manifest = "\n".join(lines).encode()
    if len(manifest) > MAX_DESCRIPTION:
        raise UsageError(
            f"the model has too many tensors: their descriptions take {len(manifest)} bytes, at"
            f" most {MAX_DESCRIPTION} can be compared with other peers"
        )
    return manifest


def difference(own: bytes, theirs: bytes) -> str:
    """The first tensor in which two manifests differ, as each has it, in one line."""
    lines = [manifest.decode(errors="replace").split("\n") for manifest in (own, theirs)]
    for index, (mine, other) in enumerate(zip_longest(*lines, fillvalue="no such tensor")):
        if mine != other:
            return f"tensor {index} is {_shown(mine)} here and {_shown(other)} there"
    return "yet their descriptions are the same"


def _shown(line: str) -> str:
    return "'" + "".join(c if c.isprintable() else "?" for c in line[:_SHOWN]) + "'"
