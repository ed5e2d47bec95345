"""The wire: frames (:mod:`gossipx.wire.frames`), and here what a connection itself says.

What peers say to each other over it is in :mod:`gossipx.messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from gossipx.errors import ProtocolError, UsageError
from gossipx.messages import (
    AcceptReply,
    AgreeRequest,
    ArriveRequest,
    BusyReply,
    HereReply,
    InitialRequest,
    LeaveRequest,
    ModelReply,
    NotReadyReply,
    PairRequest,
    PullRequest,
    PushRequest,
    SettleRequest,
    TakeRequest,
)


@dataclass(frozen=True)
class Hello:
    """The first frame on a connection: who opens it.

    Attributes:
        rank, name: of the opener.
        size: peers in its run.
        peers: digest of its list of peers.
        model: digest of its model's manifest.
    """

    rank: int
    name: str
    size: int
    peers: str
    model: str


@dataclass(frozen=True)
class Welcome:
    """Answers :class:`Hello`; where ``model`` differs from the opener's, it may only ask for the
    :class:`Description`."""

    rank: int
    name: str
    model: str


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


Message = (
    Hello
    | Welcome
    | Refused
    | DescribeRequest
    | Description
    | InitialRequest
    | PullRequest
    | PushRequest
    | PairRequest
    | TakeRequest
    | SettleRequest
    | AgreeRequest
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
    DescribeRequest: (Description,),
    InitialRequest: (ModelReply, NotReadyReply),
    PullRequest: (ModelReply, NotReadyReply),
    PushRequest: (AcceptReply, BusyReply, NotReadyReply),
    PairRequest: (AcceptReply, BusyReply, NotReadyReply),
    TakeRequest: (ModelReply, NotReadyReply),
    SettleRequest: (AcceptReply, NotReadyReply),
    AgreeRequest: (ModelReply, NotReadyReply),
    ArriveRequest: (HereReply, NotReadyReply),
    LeaveRequest: (HereReply, NotReadyReply),
}

# Tells, of a message and its request id, the buffer that its payload must fill exactly; None: no
# payload. Raises ProtocolError if the message is not wanted.
Expect = Callable[[Message, int], "memoryview | None"]

# Bytes of a manifest: some 200,000 tensors, and what a stranger's peer can make us allocate.
MAX_DESCRIPTION = 16 * 2**20
# Characters of a foreign line that a message shows.
_SHOWN = 200


def no_payload(message: Message, request: int) -> None:
    """Expects any message, without a payload."""


def answer_to(asked: Message, number: int, payload: memoryview | None) -> Expect:
    """Expects an answer to ``asked``, sent as request ``number``.

    Args:
        payload: filled by a ModelReply; a Description gets a buffer of the size that it tells.
    """

    def expect(message: Message, request: int) -> memoryview | None:
        if isinstance(message, Refused):
            raise ProtocolError(f"refused: {message.reason}")
        if request != number or not isinstance(message, ANSWERS[type(asked)]):
            raise ProtocolError(f"answered {type(asked).__name__} by {type(message).__name__}")
        if isinstance(message, Description):
            return memoryview(bytearray(message.size))
        return payload if isinstance(message, ModelReply) else None

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
