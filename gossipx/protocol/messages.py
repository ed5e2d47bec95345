"""Messages between peers: requests, each answered by exactly one reply.

A message is small and consists of plain fields; a model travels with it as one contiguous payload (see
:mod:`gossipx.wire.frames`). Messages of the parameter server are in :mod:`gossipx.protocol.server_messages`;
each request is declared with the replies that may answer it. The driver transports all messages, and
:class:`gossipx.peer.PeerRole` dispatches each received message to the part of the peer that the table names.

Terms:

- *pull*: a peer requests another peer's model and mixes it into its own.
- *push*: a peer offers its model to another peer, which fetches and mixes it. *Pair* (push-pull): both peers fetch each
  other's model. Both take several requests, identified by the initiator's incarnation and a number.
- *wave*: all peers get the mean of their models. In the finish it takes several rounds of pairwise averaging. Before,
  it is a mean of *codes*: of what each peer's model has moved from the *reference*, a model that all of them hold. Each
  peer is the *owner* of one shard of the model, whose codes it averages.
- *hub*: a peer that holds the *centre* of elastic averaging, a model that moves towards the workers' models.
- *incarnation*: a number of a peer's process; a restarted peer has another one.
- *section*: the part of a model with one dtype.
- *fragment*: the part of a model that one exchange moves, by number from 1; :data:`WHOLE`: all of it.
- *base*: with a codec, the version of a section to which an encoded difference must be added. Both sides keep it.

The number in ``kind`` identifies a class on the wire. Field types such as ``Count`` check each received value.

=================  ==========================================  =====================================================
message            sent by                                     handled by
=================  ==========================================  =====================================================
InitialRequest     peer/joining, a peer without a model        peer/serving, any peer that has one
PullRequest        peer/pulls, when the policy fires           peer/serving, any peer that trains
PushRequest        peer/pushes, to start an exchange           peer/pushes of the chosen peer
PairRequest        peer/pairs, to start an exchange            peer/pairs of the chosen peer
TakeRequest        peer/offers, peer/pairs: either side        peer/pushes, peer/pairs: the other side
SettleRequest      peer/offers, the acceptor of an exchange    peer/pushes, peer/pairs of its initiator
ShardRequest       peer/waves, every member of a wave          peer/waves, the owner of a shard
ShareRequest       peer/waves, whose owner did not answer      peer/waves, another member of the wave
ReferenceRequest   peer/waves, whose reference is outdated     peer/waves, any peer with a later one
RoundRequest       peer/last_wave, every peer at the finish    peer/stages, peer/last_wave of the partner in the round
ElasticRequest     hub, a worker whose policy fires            hub
CentreRequest      hub, every peer at the finish               hub
FinalRequest       peer/agreement, whose final model differs   peer/agreement, a peer with the chosen final model
ArriveRequest      peer/barrier at each stage; as a probe,     peer/barrier and peer/waves of every other peer
                   peer/training and server/mode
LeaveRequest       peer/stages, a peer that leaves             peer/role, every other peer
ModelReply         in reply to requests for a model            the module that sent the request
ShareReply         peer/waves, the mean of a shard's codes     peer/waves
ReferenceReply     peer/waves                                  peer/waves
OutdatedReply      peer/waves, to one of another reference     peer/waves
HereReply          peer/role, to Arrive, Leave; peer/last_wave peer/barrier, peer/waves
AcceptReply        peer/offers; server/, to say yes            the module that sent the request
BusyReply          peer/serving, offers; server/, to say no    the module that sent the request, which retries or
                                                               chooses another peer
NotReadyReply      any role that cannot answer                 the module that sent the request, else peer/role
=================  ==========================================  =====================================================
"""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import field

from gossipx.protocol import fields


class Stage(enum.IntEnum):
    """The stages of a peer, in order. Peers wait for each other in START, FINISH, COMPARE and DONE."""

    JOINING = 0  # has no model yet
    START = 1  # has a model; waits for the others
    TRAIN = 2
    FINISH = 3  # has trained; waits for the others
    AGREE = 4  # averages its model with the others
    COMPARE = 5  # compares its final model with those of the others
    DONE = 6  # has its final figures; waits for the others
    LEFT = 7  # takes no further part


WHOLE = 0
"""The number of the fragment that is the whole of what exchanges move."""
NO_REFERENCE = (0, 0)
"""The reference of a peer that has none; below all others."""
MAX_WAVE = 2**32
"""The highest number of a wave, enough for one wave per millisecond for 50 days.

Messages with a higher number are malformed, so a faulty peer cannot exhaust the numbers.
"""

TrainingWave = Annotated[int, fields.between(1, MAX_WAVE)]
PastWave = Annotated[int, fields.between(0, MAX_WAVE)]


class Request(fields.Message, frozen=True):
    """Base of the requests between peers of a run."""


class Reply(fields.Message, frozen=True):
    """Base of the replies to them."""


# --- replies ------------------------------------------------------------------------------------


@fields.kind(34)
class NotReadyReply(Reply, frozen=True):
    """Refuses a request; ``reason`` is one line for the log."""

    reason: fields.Text


@fields.kind(35)
class AcceptReply(Reply, frozen=True):
    """Says yes: the offer is accepted, the exchange takes effect, or the request was carried out."""


@fields.kind(36)
class BusyReply(Reply, frozen=True):
    """Refuses a request without a fault: another exchange is under way, or training has ended, which ends an exchange
    that is not settled. The requester tries another peer.

    A parameter server answers a worker's pull with it while the pull is delayed; the worker then repeats the pull. A
    standby server that receives records of a shard answers with it if it hosts that shard itself by now.
    """


@fields.kind(32, payload=fields.MAX_MODEL)
class ModelReply(Reply, frozen=True):
    """A model; its bytes are the payload.

    Attributes:
        step: number of iterations that this model has been trained for.
        weight: above 0. In the finish: the number of models of which this one is the mean. In a push: the push-sum
            weight that goes to the receiver. Else 1.
        bases: if models have a codec: for each section, the checksum of the base to which the encoded difference must
            be added; 0: the values are not encoded; 1: they are encoded without a base.
        sizes: if models have a codec: for each section, its size in the payload in bytes, without the module's buffers.
    """

    step: fields.Count
    weight: fields.Weight = 1.0
    bases: fields.Sections = ()
    sizes: fields.Sections = ()


@fields.kind(30, fields.MAX_METADATA, fields.MAX_MODEL)
class ShareReply(Reply, frozen=True):
    """The mean of a shard's codes, as its owner has encoded it; its bytes are the payload.

    Attributes:
        counted: ranks of the members whose codes are in the mean.
        sizes: for each section, the size of the encoded mean in bytes; the mean of the module's buffers follows it.
    """

    counted: fields.Ranks
    sizes: fields.Sections


@fields.kind(31)
class OutdatedReply(Reply, frozen=True):
    """Refuses a code that changes another reference than the owner's, which is the later one.

    Attributes:
        reference: of the sender of this reply.
    """

    reference: fields.Reference


@fields.kind(38, fields.MAX_METADATA, fields.MAX_MODEL)
class ReferenceReply(Reply, frozen=True):
    """A reference; its bytes are the payload.

    Attributes:
        reference: which.
        follows: whether it has come from the requester's reference; if not, the two have diverged.
        wave: the last wave in which a code of the requester was counted, 0: none is known.
        counted: owners of the shards for which it was counted there.
    """

    reference: fields.Reference
    follows: bool = False
    wave: PastWave = 0
    counted: fields.Ranks = ()


class PeerProgress(fields.Message, frozen=True):
    """How far a peer is, as it tells the others.

    Attributes:
        incarnation: the sender's incarnation. Its messages may overtake each other, so receivers keep its latest stage.
        report: the sender's final metrics by name; empty before DONE.
        wave: the highest number of a training wave that the sender knows to be over, 0 if none. A peer that restarts or
            joins late continues counting from it.
        step: iterations that the sender has done: its progress while others wait for it.
        comparison: number of the sender's comparison of final models, from 1; 0: it has no final model yet.
        digest: checksum of its final model; empty: it has none.
        models: weight of that model: the sum of the weights of the models of which it is the mean.
        joined: the peers that joined the run while it was in progress, as far as the sender knows.
    """

    stage: Stage
    incarnation: fields.Count = 0
    report: fields.Report = field(default_factory=dict)
    wave: PastWave = 0
    step: fields.Count = 0
    comparison: fields.Count = 0
    digest: fields.Digest = ""
    models: fields.FromZero = 0.0
    joined: fields.Joined = ()


@fields.kind(33, fields.MAX_METADATA)
class HereReply(Reply, PeerProgress, frozen=True):
    """Answers :class:`ArriveRequest` and :class:`LeaveRequest` with the same fields of the replying peer.

    It also answers a :class:`RoundRequest` in a round in which the receiver gets a model but gives none, and a
    :class:`ShardRequest` that reaches a peer whose training is over.
    """


# --- models -------------------------------------------------------------------------------------


@fields.kind(16, answers=(ModelReply, BusyReply, NotReadyReply))
class InitialRequest(Request, frozen=True):
    """Requests a whole model, with frozen parameters and all buffers, from which the sender starts to train."""


@fields.kind(17, answers=(ModelReply, BusyReply, NotReadyReply))
class PullRequest(Request, frozen=True):
    """Requests the receiver's current model: a pull.

    Attributes:
        step: number of iterations that the sender has done.
        patience: seconds that the sender waits for the whole model.
        bases: if models have a codec: for each section, the checksum of the version that the sender keeps as a base; 0:
            none. Empty: the model must not be encoded as a difference.
        fragment: the part of the model that is requested.
    """

    step: fields.Count
    patience: fields.Seconds
    bases: fields.Sections = ()
    fragment: fields.Count = WHOLE


# --- waves --------------------------------------------------------------------------------------


@fields.kind(46, fields.MAX_METADATA, fields.MAX_MODEL, answers=(ShareReply, OutdatedReply, HereReply, NotReadyReply))
class ShardRequest(Request, frozen=True):
    """Uploads the sender's code of the receiver's shard, and requests the mean of all codes of that shard.

    A receiver that is not in the wave joins it. It replies once it has the mean.

    Attributes:
        wave: number of the wave, from 1.
        members: ranks of the peers that take part, ascending; each is the owner of one shard.
        fragment: the part of the model that the wave averages, as its number implies.
        reference: of the sender, from which its code is measured.
        sizes: for each section, the size of the code in bytes; the module's buffers follow it.
        patience: seconds that the sender waits.
    """

    wave: TrainingWave
    members: fields.Ranks
    fragment: fields.Count
    reference: fields.Reference
    sizes: fields.Sections
    patience: fields.Seconds


@fields.kind(47, fields.MAX_METADATA, answers=(ShareReply, NotReadyReply))
class ShareRequest(Request, frozen=True):
    """Requests the mean of a shard's codes from a member that is not its owner.

    Attributes:
        wave, members, fragment: as in :class:`ShardRequest`.
        owner: rank of the shard's owner.
    """

    wave: TrainingWave
    members: fields.Ranks
    fragment: fields.Count
    owner: fields.Rank


@fields.kind(51, answers=(ReferenceReply, NotReadyReply))
class ReferenceRequest(Request, frozen=True):
    """Requests the receiver's reference.

    Attributes:
        fragment: the part of the model that it is a reference of.
        reference: of the sender; :data:`NO_REFERENCE`: it has none.
        before: its reference before the last wave that it took in.
        wave: the number of that wave, 0: none.
        taken: owners whose means it took in there, which may be fewer than others did.
    """

    fragment: fields.Count
    reference: fields.Reference = NO_REFERENCE
    before: fields.Reference = NO_REFERENCE
    wave: PastWave = 0
    taken: fields.Ranks = ()


@fields.kind(18, fields.MAX_METADATA, answers=(ModelReply, HereReply, NotReadyReply))
class RoundRequest(Request, frozen=True):
    """Requests the partner's model in one round of the finish.

    Attributes:
        round: number of the round, from 0.
        members: ranks of the peers that take part, ascending; both partners must have the same.
    """

    round: fields.Count
    members: fields.Ranks


# --- exchanges ----------------------------------------------------------------------------------


@fields.kind(21, answers=(AcceptReply, BusyReply, NotReadyReply))
class PushRequest(Request, frozen=True):
    """Offers the sender's model, which the receiver fetches by :class:`TakeRequest`.

    Attributes:
        incarnation: the sender's incarnation; with ``number`` it identifies the exchange.
        number: number of this offer among the sender's, from 1.
        fragment: the part of the model that is offered.
    """

    incarnation: fields.Count
    number: fields.Count
    fragment: fields.Count = WHOLE


@fields.kind(22, answers=(AcceptReply, BusyReply, NotReadyReply))
class PairRequest(Request, frozen=True):
    """Offers to average the sender's and the receiver's models; each side then fetches the other's.

    Attributes:
        incarnation, number, fragment: as in :class:`PushRequest`.
    """

    incarnation: fields.Count
    number: fields.Count
    fragment: fields.Count = WHOLE


@fields.kind(23, answers=(ModelReply, BusyReply, NotReadyReply))
class TakeRequest(Request, frozen=True):
    """Requests the model that the partner captured when it entered the exchange.

    Attributes:
        incarnation, number, fragment: those of the offer, also if the side that accepted it sends this request.
        bases: as in :class:`PullRequest`.
    """

    incarnation: fields.Count
    number: fields.Count
    bases: fields.Sections = ()
    fragment: fields.Count = WHOLE


@fields.kind(24, answers=(AcceptReply, BusyReply, NotReadyReply))
class SettleRequest(Request, frozen=True):
    """Tells the initiator whether its model has arrived, and asks whether the exchange takes effect.

    Attributes:
        incarnation, number: those of the offer.
        taken: whether the model has arrived, complete and finite; if not, the exchange has no effect on either side.
        ended: whether it was not taken because the sender of this request has ended its training; not a failure.
    """

    incarnation: fields.Count
    number: fields.Count
    taken: bool
    ended: bool = False


# --- the hub ------------------------------------------------------------------------------------


@fields.kind(25, payload=fields.MAX_MODEL, answers=(ModelReply, BusyReply, NotReadyReply))
class ElasticRequest(Request, frozen=True):
    """Uploads the sender's model to the hub, and requests the centre as it was before the hub merged that model.

    The model's bytes are the payload. The hub merges each model once, even if the request is repeated.

    Attributes:
        incarnation: the sender's incarnation; with ``number`` it identifies the exchange.
        number: number of this exchange among the sender's with the hub, from 1.
        step: number of iterations that the model has been trained for.
        patience: seconds that the sender waits for both transfers together.
    """

    incarnation: fields.Count
    number: fields.Count
    step: fields.Count
    patience: fields.Seconds


@fields.kind(26, answers=(ModelReply, BusyReply, NotReadyReply))
class CentreRequest(Request, frozen=True):
    """Requests the current centre from the hub.

    Attributes:
        patience: seconds that the sender waits for the whole centre.
    """

    patience: fields.Seconds


# --- the end ------------------------------------------------------------------------------------


@fields.kind(52, answers=(ModelReply, NotReadyReply))
class FinalRequest(Request, frozen=True):
    """Requests the receiver's final model, which replaces the sender's.

    Attributes:
        digest: of the model that the sender wants; the receiver refuses if its own is another.
    """

    digest: fields.Digest


# --- membership ---------------------------------------------------------------------------------


@fields.kind(19, fields.MAX_METADATA, answers=(HereReply, NotReadyReply))
class ArriveRequest(Request, PeerProgress, frozen=True):
    """Announces that the sender has reached ``stage``."""


@fields.kind(20, answers=(HereReply, NotReadyReply))
class LeaveRequest(Request, frozen=True):
    """Announces that the sender takes no further part."""


ExchangeRequest = PushRequest | PairRequest | TakeRequest | SettleRequest
"""Requests that belong to a push or a pair, an exchange of several requests."""
WaveRequest = ShardRequest | ShareRequest | ReferenceRequest
"""Requests of waves."""
ModelRequest = InitialRequest | PullRequest | TakeRequest | RoundRequest | ElasticRequest | CentreRequest | FinalRequest
"""Requests that are answered with a model."""


def fragment_of(request: Request) -> int:
    """Return the fragment of the model that a request is about."""
    match request:
        case PullRequest() | PushRequest() | PairRequest() | TakeRequest():
            return request.fragment
        case ShardRequest() | ShareRequest() | ReferenceRequest():
            return request.fragment
    return WHOLE
