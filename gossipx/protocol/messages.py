"""Messages between peers: requests, each answered by exactly one reply.

A message is small and plain; a model travels beside it as one contiguous payload (see :mod:`gossipx.wire.frames`).
Messages of the parameter server are in :mod:`gossipx.protocol.server_messages`; ``gossipx.wire.ANSWERS`` tells which
replies answer which request. The driver carries all of them, and :class:`gossipx.peer.PeerRole` hands each that comes
in to the part of the role that is named here.

=================  ==========================================  =====================================================
message            sent by                                     handled by
=================  ==========================================  =====================================================
InitialRequest     peer/joining, a peer without a model        peer/role, any peer that has one
PullRequest        peer/pulls, when the policy says so         peer/serving, any peer that trains
PushRequest        peer/pushes, which begins an exchange       peer/pushes of the chosen peer
PairRequest        peer/pairs, which begins an exchange        peer/pairs of the chosen peer
TakeRequest        peer/exchange, peer/pairs: either side      peer/pushes, peer/pairs: the other side
SettleRequest      peer/exchange, the peer that was chosen     peer/pushes, peer/pairs of the peer that began
RoundRequest       peer/wave, every member of a wave           peer/stages, peer/wave of the partner in that round
ElasticRequest     hub/elastic, a worker at each period        hub/centre, the hub
CentreRequest      hub/elastic, every peer at the finish       hub/centre, the hub
ArriveRequest      peer/gathering at each stage; as a probe,   peer/gathering and peer/waves of every other peer
                   peer/training and server/mode
LeaveRequest       peer/stages, a peer that leaves             peer/role, every other peer
ModelReply         answers to what asks for a model            the module that has sent the request
HereReply          peer/role, to Arrive and Leave; peer/wave   peer/gathering, peer/waves
AcceptReply        peer/exchange, server/, to say yes          the module that has sent the request
BusyReply          peer/, hub/, server/, to say "not now"      the module that has sent the request, which asks again
                                                               or chooses another peer
NotReadyReply      any role that cannot answer                 the module that has sent the request, else peer/role
=================  ==========================================  =====================================================
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Annotated

from gossipx.protocol.fields import (
    MAX_METADATA,
    MAX_MODEL,
    Count,
    Flag,
    Ranks,
    Report,
    Seconds,
    Sections,
    Text,
    Weight,
    enumerated,
    integer,
    kind,
)
from gossipx.protocol.server_messages import (
    CopyReply,
    GradientRequest,
    MoveRequest,
    PlacedReply,
    RecordRequest,
    ServerRequest,
    TablesReply,
    WaitingReply,
)


class Stage(enum.IntEnum):
    """How far a peer has come. Peers wait for each other when they enter START, FINISH and DONE."""

    JOINING = 0  # has no model yet; contributes none
    START = 1  # has a model, waits for the others
    TRAIN = 2
    FINISH = 3  # has done its iterations
    AGREE = 4  # takes part in the last wave
    DONE = 5  # has its final figures
    LEFT = 6  # takes no further part


LAST_WAVE = 2**63 - 1
"""The number of the wave that ends a run: above all that are started while training."""
MAX_WAVE = 2**32
"""The highest number of these: a wave a millisecond for 50 days. None is started beyond it, whatever others tell."""
_training_wave = integer(1, MAX_WAVE)


def _any_wave(value: object) -> int:
    wave: int = LAST_WAVE if type(value) is int and value == LAST_WAVE else _training_wave(value)
    return wave


AnyStage = Annotated[Stage, enumerated(Stage)]
AnyWave = Annotated[int, _any_wave]
PastWave = Annotated[int, integer(0, MAX_WAVE)]

# --- models -------------------------------------------------------------------------------------


@kind(16)
@dataclass(frozen=True)
class InitialRequest:
    """Asks for a whole model (frozen parameters and all buffers too) to begin with."""


@kind(17)
@dataclass(frozen=True)
class PullRequest:
    """Asks for the model as it is now.

    Attributes:
        step: iterations that the requester has done.
        patience: seconds that it waits for the whole model.
        bases: where models have a codec, for each section the checksum of what the requester has of it; 0: nothing.
            Empty: the model must be encoded by itself.
    """

    step: Count
    patience: Seconds
    bases: Sections = ()


@kind(18, MAX_METADATA)
@dataclass(frozen=True)
class RoundRequest:
    """Asks for the partner's model of one round of a wave; its receiver takes part in that wave from then on.

    Attributes:
        wave: number of the wave, from 1 to :data:`MAX_WAVE`; :data:`LAST_WAVE` is the finish.
        round: from 0.
        members: ranks that take part, ascending; partners must mean the same ones.
    """

    wave: AnyWave
    round: Count
    members: Ranks


@kind(32, payload=MAX_MODEL)
@dataclass(frozen=True)
class ModelReply:
    """A model; its bytes are the frame's payload.

    Attributes:
        step: iterations that this model has seen.
        weight: above 0: how many peers' models are averaged in it in a wave, the push-sum weight that is given away
            with it in a push, else 1.
        bases: where models have a codec, for each section the checksum of the values that its part of the payload
            changes; 0: it has values, 1: these encoded by themselves.
        sizes: ... and how many bytes of the payload are its, without those of buffers.
    """

    step: Count
    weight: Weight = 1.0
    bases: Sections = ()
    sizes: Sections = ()


# --- exchanges ----------------------------------------------------------------------------------


@kind(21)
@dataclass(frozen=True)
class PushRequest:
    """Offers the sender's model, for the receiver to fetch by :class:`TakeRequest`.

    Attributes:
        incarnation: of the sender; with ``number`` it names this exchange for good.
        number: of the sender's offers, from 1.
    """

    incarnation: Count
    number: Count


@kind(22)
@dataclass(frozen=True)
class PairRequest:
    """Proposes to average the sender's model and the receiver's; each then fetches the other's.

    Attributes:
        incarnation, number: as in :class:`PushRequest`.
    """

    incarnation: Count
    number: Count


@kind(23)
@dataclass(frozen=True)
class TakeRequest:
    """Asks for the model that the partner entered an exchange with.

    Attributes:
        incarnation, number: of the offer that began the exchange, on both sides.
        bases: as in :class:`PullRequest`.
    """

    incarnation: Count
    number: Count
    bases: Sections = ()


@kind(24)
@dataclass(frozen=True)
class SettleRequest:
    """Tells the peer that made the offer whether its model has come, and asks whether the exchange stands.

    Attributes:
        incarnation, number: of the offer.
        taken: the model is here, whole and finite; if not, the exchange is given up.
    """

    incarnation: Count
    number: Count
    taken: Flag


# --- the hub ------------------------------------------------------------------------------------


@kind(25, payload=MAX_MODEL)
@dataclass(frozen=True)
class ElasticRequest:
    """Brings the sender's model to the hub, and asks for the centre as it was before that model entered it.

    The model's bytes are the frame's payload. The hub takes in each once, however often it is brought.

    Attributes:
        incarnation, number: of the sender's exchanges with the hub, from 1; they name this one for good.
        step: iterations that the model has seen.
        patience: seconds that the sender waits for both ways.
        bases, sizes: where models have a codec, as in :class:`ModelReply`.
    """

    incarnation: Count
    number: Count
    step: Count
    patience: Seconds
    bases: Sections = ()
    sizes: Sections = ()


@kind(26)
@dataclass(frozen=True)
class CentreRequest:
    """Asks the hub for the centre as it is now.

    Attributes:
        patience: seconds that the requester waits for all of it.
    """

    patience: Seconds


# --- membership ---------------------------------------------------------------------------------


@kind(19, MAX_METADATA)
@dataclass(frozen=True)
class ArriveRequest:
    """Tells that the sender has reached ``stage``, and its figures where it has final ones.

    Attributes:
        incarnation: of the sender; a peer that was restarted has another one. Messages of one incarnation may overtake
            each other, and its furthest stage counts.
        report: plain figures by name; empty before DONE.
        wave: the highest number of a wave while training that the sender knows to be over, 0 of none: a peer that
            was started again, or comes late, counts on from it.
    """

    stage: AnyStage
    incarnation: Count
    report: Report = field(default_factory=dict)
    wave: PastWave = 0


@kind(20)
@dataclass(frozen=True)
class LeaveRequest:
    """Tells that the sender takes no further part."""


@kind(33, MAX_METADATA)
@dataclass(frozen=True)
class HereReply:
    """Answers :class:`ArriveRequest` and :class:`LeaveRequest` with the replier's own stage, figures and wave.

    It also answers a :class:`RoundRequest` that was only meant to tell of the wave.
    """

    stage: AnyStage
    report: Report = field(default_factory=dict)
    wave: PastWave = 0


# --- yes and no ---------------------------------------------------------------------------------


@kind(34)
@dataclass(frozen=True)
class NotReadyReply:
    """There is no model to give now; ``reason`` is one line for a person."""

    reason: Text


@kind(35)
@dataclass(frozen=True)
class AcceptReply:
    """Yes: the offer is taken up, the exchange stands."""


@kind(36)
@dataclass(frozen=True)
class BusyReply:
    """Not now: another exchange is under way, and the requester chooses another peer at once.

    From a server to a pull: the pull is still delayed, and the worker repeats it at once. To a record of a shard: the
    receiver holds that shard itself.
    """


ExchangeRequest = PushRequest | PairRequest | TakeRequest | SettleRequest
"""Parts of an exchange that is more than one pull."""
CarryingRequest = ElasticRequest | GradientRequest | RecordRequest
"""Requests that bring a model, or a part of one."""
ModelRequest = InitialRequest | PullRequest | TakeRequest | RoundRequest | ElasticRequest | CentreRequest
"""Requests that a model answers."""
Request = ModelRequest | ExchangeRequest | ServerRequest | MoveRequest | ArriveRequest | LeaveRequest
CarryingReply = ModelReply | TablesReply | CopyReply
"""Replies that bring a model, or a part of one."""
Reply = CarryingReply | PlacedReply | WaitingReply | AcceptReply | BusyReply | HereReply | NotReadyReply
