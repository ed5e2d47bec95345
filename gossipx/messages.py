"""What peers say to each other: requests, each answered by exactly one reply.

A message is small and plain; a model travels beside it as one contiguous payload (see :mod:`gossipx.wire.frames`).
Every field is checked when a message is read from the wire, so roles may trust the types, not the intentions.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Stage(enum.IntEnum):
    """How far a peer has come. Peers wait for each other when they enter START, FINISH and DONE."""

    JOINING = 0  # has no model yet; contributes none
    START = 1  # has a model, waits for the others
    TRAIN = 2
    FINISH = 3  # has done its iterations
    AGREE = 4  # takes part in the last wave
    DONE = 5  # has its final figures
    LEFT = 6  # takes no further part


@dataclass(frozen=True)
class InitialRequest:
    """Asks for a whole model (frozen parameters and all buffers too) to begin with."""


@dataclass(frozen=True)
class PullRequest:
    """Asks for the model as it is now.

    Attributes:
        step: iterations that the requester has done.
        patience: seconds that it waits for the whole model.
        bases: where models have a codec, for each section the checksum of what the requester has of it; 0: nothing.
            Empty: it is to be encoded by itself.
    """

    step: int
    patience: float
    bases: tuple[int, ...] = ()


LAST_WAVE = 2**63 - 1
"""The number of the wave that ends a run: above all that are started while training."""
MAX_WAVE = 2**32
"""The highest number of these: a wave a millisecond for 50 days. None is started beyond it, whatever others tell."""


@dataclass(frozen=True)
class PushRequest:
    """Offers the sender's model, to be fetched by :class:`TakeRequest`.

    Attributes:
        incarnation: of the sender; with ``number`` it names this exchange for good.
        number: of the sender's offers, from 1.
    """

    incarnation: int
    number: int


@dataclass(frozen=True)
class PairRequest:
    """Proposes to average the sender's model and the receiver's; each then fetches the other's.

    Attributes:
        incarnation, number: as in :class:`PushRequest`.
    """

    incarnation: int
    number: int


@dataclass(frozen=True)
class TakeRequest:
    """Asks for the model that the partner entered an exchange with.

    Attributes:
        incarnation, number: of the offer that began the exchange, whoever asks.
        bases: as in :class:`PullRequest`.
    """

    incarnation: int
    number: int
    bases: tuple[int, ...] = ()


@dataclass(frozen=True)
class SettleRequest:
    """Tells the peer whose offer it was how its model has come, and asks whether the exchange stands.

    Attributes:
        incarnation, number: of the offer.
        taken: the model is here, whole and finite; if not, the exchange is given up.
    """

    incarnation: int
    number: int
    taken: bool


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

    incarnation: int
    number: int
    step: int
    patience: float
    bases: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class CentreRequest:
    """Asks the hub for the centre as it is now.

    Attributes:
        patience: seconds that the requester waits for all of it.
    """

    patience: float


Parts = tuple[tuple[int, int], ...]
"""Of each partition in a bucket, in order: its number in the shard, and how many bytes of the payload are its."""


@dataclass(frozen=True)
class GradientRequest:
    """Brings the gradient of one bucket of a shard (FluentPS, sPush); its bytes are the frame's payload.

    The server takes in each once, however often it is brought.

    Attributes:
        shard, bucket: of which tables.
        incarnation: of the sender.
        progress: the iteration of the gradient, from 0.
        parts: what the payload holds.
        settings: of the optimizer's parameter groups, in order, the numbers that the sender has by now.
        patience: seconds that the sender waits.
        epoch: of the layout that the sender goes by.
        keep: the clock at which all shards take a checkpoint next, as far as the sender has heard.
    """

    shard: int
    bucket: int
    incarnation: int
    progress: int
    parts: Parts
    settings: tuple[dict[str, float], ...]
    patience: float
    epoch: int = 0
    keep: int = 0


MEASURED = -1.0
"""Of a request that a role has decided on: what is to be measured as it is sent."""


@dataclass(frozen=True)
class TablesRequest:
    """Asks for one bucket of a shard (FluentPS, sPull), or only when the shard would give it.

    Attributes:
        shard, bucket: of which tables; a bucket of −1 is none.
        incarnation: of the requester.
        progress: the iteration that it has pushed last; −1: it takes what there is now, and begins there.
        significance: |g| / |w| of that push, where the sync model looks at it; :data:`MEASURED` until it is sent.
        patience: seconds that it waits.
        epoch: of the layout that it goes by.
        base: checksum of what the requester has of the bucket, where pulls have a codec; 0: it has nothing.
    """

    shard: int
    bucket: int
    incarnation: int
    progress: int
    significance: float
    patience: float
    epoch: int = 0
    base: int = 0


@dataclass(frozen=True)
class SwitchRequest:
    """Asks a server to go over to another sync model with one of its shards.

    Attributes:
        shard: which.
        sync: the model, as a spec.
        apply, pulls: words as in the settings; empty: the model's way, and as before.
    """

    shard: int
    sync: str
    apply: str
    pulls: str


Happening = tuple[str | int | float, ...]
"""What happened to a shard: a word, and its figures; see :class:`gossipx.server.shard.Shard`."""


@dataclass(frozen=True)
class WaitingRequest:
    """Asks which workers wait at a shard for their gradients to be applied; see :mod:`gossipx.server.deadlock`.

    Attributes:
        shard: which.
    """

    shard: int


@dataclass(frozen=True)
class RecordRequest:
    """Tells the replica of a shard what has happened to it, in order; where that ends with the gradient of a bucket,
    its bytes are the frame's payload.

    Attributes:
        shard: which.
        copy: that the replica is to have begun with, as its sender numbers them; in a journal the layout's epoch.
        number: of the record; they count from that copy.
        happened: in order.
        bucket: of the gradient; −1: there is none.
        progress, parts, settings: of the gradient, as in :class:`GradientRequest`.
        patience: seconds that the sender waits.
    """

    shard: int
    copy: int
    number: int
    happened: tuple[Happening, ...]
    bucket: int
    progress: int
    parts: Parts
    settings: tuple[dict[str, float], ...]
    patience: float


@dataclass(frozen=True)
class CopyRequest:
    """Asks for a copy of a shard, to be its replica from then on; who is one tells by it that it still is.

    Attributes:
        shard: which.
        incarnation: of the sender.
        copy: that it has; −1: it has none.
        patience: seconds that it waits.
    """

    shard: int
    incarnation: int
    copy: int
    patience: float


@dataclass(frozen=True)
class ServersRequest:
    """Asks the holder of shard 0 to have the shards of the run held by other peers; see :mod:`gossipx.server.moving`.

    Attributes:
        number: of the sender's, so that one that is asked again is not begun again.
        servers: ranks, ascending.
        patience: seconds that the sender waits.
    """

    number: int
    servers: tuple[int, ...]
    patience: float


@dataclass(frozen=True)
class PauseRequest:
    """Asks for no push of a further iteration; answered once all that were begun have come.

    Attributes:
        epoch: of the layout that is to be.
        servers: by shard, the rank that is to hold it.
        patience: seconds that the sender waits.
    """

    epoch: int
    servers: tuple[int, ...]
    patience: float


@dataclass(frozen=True)
class PrepareRequest:
    """Asks a server of the layout that is to be to fetch what it lacks; answered once it has all.

    Attributes:
        epoch: of that layout.
        state: of the clock that its shards go on with, as JSON.
        sync: the sync model that it goes by.
        patience: seconds that the sender waits.
    """

    epoch: int
    state: str
    sync: str
    patience: float


@dataclass(frozen=True)
class RangesRequest:
    """Asks a server for values that move, with what belongs to them: the optimizer's state, gradients that wait.

    Attributes:
        epoch: of the layout that is to be.
        batch: number of what moves to it, as all peers count it.
        sync: the sync model that the sender's shards are to go by.
        patience: seconds that the sender waits.
    """

    epoch: int
    batch: int
    sync: str
    patience: float


@dataclass(frozen=True)
class PlaceRequest:
    """Tells by which layout the sender goes; answered by the receiver's.

    Attributes:
        epoch: of that layout.
        servers: by shard, the rank that holds it.
        decided: up to this epoch all changes are over, carried out or given up.
    """

    epoch: int
    servers: tuple[int, ...]
    decided: int


@dataclass(frozen=True)
class PlacedReply:
    """Tells by which layout the sender goes; a push or pull of an earlier one is answered so.

    Attributes:
        epoch, servers, decided: as in :class:`PlaceRequest`.
    """

    epoch: int
    servers: tuple[int, ...]
    decided: int


@dataclass(frozen=True)
class TablesReply:
    """A bucket of a shard; its bytes are the frame's payload.

    Attributes:
        clock: of the shard, V_train: who is behind it goes on there.
        parts: what the payload holds.
        sync: the sync model that the shard goes by since a switch; empty: the one that the run began with.
        keep: the clock at which it takes a checkpoint next, where that is due by the clock on the wall.
        base: checksum of the values that the payload changes; 0: it has the values as they are.
    """

    clock: int
    parts: Parts
    sync: str = ""
    keep: int = 0
    base: int = 0


@dataclass(frozen=True)
class CopyReply:
    """A copy of a shard; its tables are the frame's payload.

    Attributes:
        incarnation: of the sender.
        copy: its number.
        state: of the shard's role, as JSON.
        size: bytes of the payload.
    """

    incarnation: int
    copy: int
    state: str
    size: int


@dataclass(frozen=True)
class WaitingReply:
    """Who waits at a shard.

    Attributes:
        workers: ranks, each with the iteration of its gradient.
    """

    workers: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RoundRequest:
    """Asks for the partner's model of one round of a wave; whoever gets one takes part in that wave from then on.

    Attributes:
        wave: number of the wave, from 1 to :data:`MAX_WAVE`; :data:`LAST_WAVE` is the finish.
        round: from 0.
        members: ranks that take part, ascending; partners must mean the same ones.
    """

    wave: int
    round: int
    members: tuple[int, ...]


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

    stage: Stage
    incarnation: int
    report: dict[str, object] = field(default_factory=dict)
    wave: int = 0


@dataclass(frozen=True)
class LeaveRequest:
    """Tells that the sender takes no further part."""


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

    step: int
    weight: float = 1.0
    bases: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class HereReply:
    """Answers :class:`ArriveRequest` and :class:`LeaveRequest` with the answerer's own stage, figures and wave.

    It also answers a :class:`RoundRequest` that was only meant to tell of the wave.
    """

    stage: Stage
    report: dict[str, object] = field(default_factory=dict)
    wave: int = 0


@dataclass(frozen=True)
class NotReadyReply:
    """There is no model to give now; ``reason`` is one line for a person."""

    reason: str


@dataclass(frozen=True)
class AcceptReply:
    """Yes: the offer is taken up, the exchange stands."""


@dataclass(frozen=True)
class BusyReply:
    """Not now: another exchange is under way, and whoever asked chooses another peer at once.

    Of a pull from a server: it is still delayed, and is to be asked for again at once. Of a record of a shard: its
    receiver holds that shard itself.
    """


ExchangeRequest = PushRequest | PairRequest | TakeRequest | SettleRequest
"""What an exchange is made of that is more than one pull."""
CarryingRequest = ElasticRequest | GradientRequest | RecordRequest
"""What brings a model, or a part of one."""
ModelRequest = InitialRequest | PullRequest | TakeRequest | RoundRequest | ElasticRequest | CentreRequest
"""What is answered by a model."""
ServerRequest = GradientRequest | TablesRequest | SwitchRequest | WaitingRequest | RecordRequest | CopyRequest
"""What is asked of a server."""
MoveRequest = ServersRequest | PauseRequest | PrepareRequest | RangesRequest | PlaceRequest
"""What a change of servers is made of."""
Request = ModelRequest | ExchangeRequest | ServerRequest | MoveRequest | ArriveRequest | LeaveRequest
CarryingReply = ModelReply | TablesReply | CopyReply
"""What brings a model, or a part of one."""
Reply = CarryingReply | PlacedReply | WaitingReply | AcceptReply | BusyReply | HereReply | NotReadyReply
