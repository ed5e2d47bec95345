"""Events that roles are told of and effects that they ask for.

A role is a state machine, ``handle(event, now) -> effects``. A driver (``drive/`` in real processes, ``sim/`` in
virtual time) tells it of events and carries out the effects in their order. ``now`` is in seconds on a monotonic clock
of the driver's; a ticket names one request, a key one received request, both chosen by whoever makes them.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from gossipx.messages import Reply, Request
from gossipx.table_effects import Asked, Pieces, TableEffect

# --- events ---------------------------------------------------------------------------------------------------------


class Fault(enum.Enum):
    """Why a request of ours failed."""

    UNREACHABLE = "nothing answers at its address"
    TIMEOUT = "no whole answer within the deadline"
    LOCAL = "this machine lacks file descriptors or threads"
    PROTOCOL = "it sent what the protocol does not allow"
    POISONED = "its model holds NaN or Inf"
    CANCELLED = "its answer is of no interest any more"


@dataclass(frozen=True)
class JoinRun:
    """The peer is listening and wants to begin.

    Attributes:
        resumed: None: the run is a new one, and a model to begin with is wanted. In one that goes on from checkpoints:
            whether our model is such a one; if not, a model of those who have one is wanted, whoever we are.
    """

    resumed: bool | None = None


@dataclass(frozen=True)
class StepDone:
    """One optimizer step is done.

    Attributes:
        step: iterations finished, from 1.
        delta: ‖x_t − x_{t−1}‖₂ over all trainable parameters (Adaptive Communication, Eq. 6).
        drift: ‖x_t − x_r‖₂, the way from the last retrieval, own steps alone; None unless the policy uses it.
    """

    step: int
    delta: float
    drift: float | None = None


@dataclass(frozen=True)
class GradientsReady:
    """The gradients of these buckets, each a shard and a number, have been made: they may leave.

    None of any: the iteration's first gradient is about to be taken, unless :class:`Wait` follows.
    """

    buckets: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SwitchSync:
    """A person or a program asks that shards go over to another sync model; :class:`Switched` follows.

    Attributes:
        number: names this, by whoever asks.
        shard: which; None: all.
        sync: the model, as a spec.
        apply, pulls: words as in the settings; empty: the model's way, and as before.
    """

    number: int
    shard: int | None
    sync: str
    apply: str = ""
    pulls: str = ""


@dataclass(frozen=True)
class ChangeServers:
    """A person or a program asks that other peers hold the shards; :class:`Switched` follows.

    Attributes:
        number: names this, by whoever asks.
        servers: their ranks.
    """

    number: int
    servers: tuple[int, ...]


@dataclass(frozen=True)
class CameBack:
    """The tables of a shard are as they were when its holder's process was killed.

    Attributes:
        shard: which.
        epoch: of the layout that it is a shard of.
        state: of its role then, as plain data; None: there is nothing to come back to.
    """

    shard: int
    epoch: int
    state: dict[str, Any] | None


@dataclass(frozen=True)
class GradientPoisoned:
    """A bucket of a worker's gradient held NaN or Inf: it was left out.

    Attributes:
        sender: the worker's rank.
    """

    sender: int


@dataclass(frozen=True)
class Prepared:
    """What :class:`TellPrepared` has asked about.

    Attributes:
        epoch: of the layout that is to be.
        problem: why its tables are not here, in one line; empty: they are.
    """

    epoch: int
    problem: str


@dataclass(frozen=True)
class TrainingEnded:
    """The last iteration is done; what comes next is the finish.

    Attributes:
        agrees: whether this peer's model can take part in it.
    """

    agrees: bool = True


@dataclass(frozen=True)
class FiguresReady:
    """The final figures of this peer are known; ``report`` goes to all others."""

    report: dict[str, object]


@dataclass(frozen=True)
class Restored:
    """The model is another one now, a checkpoint's, that has seen ``step`` iterations.

    Attributes:
        sync: what :meth:`gossipx.sync.SyncManager.state_dict` gave when the checkpoint was written.
        weight: the push-sum weight then.
        draws: what :meth:`gossipx.peer.PeerRole.draws` gave; None: they go on as they are.
    """

    step: int
    sync: dict[str, Any]
    weight: float = 1.0
    draws: dict[str, Any] | None = None


@dataclass(frozen=True)
class LeaveRun:
    """This peer is asked to take no further part (SIGTERM, or an error of its own)."""


@dataclass(frozen=True)
class Received:
    """A request from another peer; it must be answered once, by :class:`Answer` with the same key."""

    sender: int
    key: Hashable
    request: Request


@dataclass(frozen=True)
class Replied:
    """Our request ``ticket`` was answered whole; a model's bytes wait under the same ticket."""

    ticket: int
    reply: Reply


@dataclass(frozen=True)
class Failed:
    """Our request ``ticket`` was not answered."""

    ticket: int
    fault: Fault


@dataclass(frozen=True)
class Answered:
    """Our answer to ``key`` has been handed over whole, or can no longer be (``whole`` is False)."""

    key: Hashable
    whole: bool


@dataclass(frozen=True)
class Mixed:
    """The model under ``ticket`` has been mixed, adopted or taken in."""

    ticket: int


@dataclass(frozen=True)
class Poisoned:
    """The model under ``ticket`` was not mixed: it holds NaN or Inf."""

    ticket: int


@dataclass(frozen=True)
class Merged:
    """The model under ``ticket`` has been merged into the one held under ``into``.

    Attributes:
        sound: False: it holds NaN or Inf, and was not.
    """

    ticket: int
    into: int
    sound: bool


@dataclass(frozen=True)
class TimerFired:
    """The time of the last :class:`SetTimer` of this name has come."""

    name: str


Event = (
    JoinRun
    | StepDone
    | GradientsReady
    | SwitchSync
    | ChangeServers
    | Prepared
    | TrainingEnded
    | FiguresReady
    | Restored
    | LeaveRun
    | Received
    | Replied
    | Failed
    | Answered
    | Mixed
    | Poisoned
    | GradientPoisoned
    | CameBack
    | Merged
    | TimerFired
)

# --- effects --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Send ``request``; exactly one of :class:`Replied` and :class:`Failed` follows, at the latest at ``deadline``.

    Of a pull, the model as it is now is the base of the change when the reply is mixed; of a take, the one captured. An
    elastic request brings just that base along.
    """

    ticket: int
    to: int
    request: Request
    deadline: float


@dataclass(frozen=True)
class Cancel:
    """The answer to our request ``ticket`` is of no interest any more: what is on its way is not waited for.

    :class:`Failed` follows, unless the answer was there already.
    """

    ticket: int


@dataclass(frozen=True)
class Answer:
    """Answer the received request ``key``; :class:`Answered` follows.

    Attributes:
        deadline: the answer is given up if it is not handed over whole by then.
        whole_model: a model is given with its frozen parameters and all buffers.
        captured: give the model held under this ticket (:class:`Capture`) rather than that of the last step boundary.
        begins: when to hand it over, if that is later than now.
        tables: give this bucket, as it is after all that was asked for before.
        copies: give a copy of this shard's tables, as they are after all that was asked for before.
        in_order: not before all that was asked for before is done to the tables.
        pieces: give all that belongs to these pieces of tables, as it is then.
        taker: of a model that may be given by a codec, who asks for it, and the checksums of what that has.
        differs: of a centre, the ticket of the model that it is given for: by a codec, their difference.
    """

    key: Hashable
    reply: Reply
    deadline: float
    whole_model: bool = False
    captured: int | None = None
    begins: float = 0.0
    tables: Asked | None = None
    copies: int | None = None
    in_order: bool = False
    pieces: Pieces | None = None
    taker: tuple[int, tuple[int, ...]] | None = None
    differs: int | None = None


@dataclass(frozen=True)
class Keep:
    """What the received request ``key`` has brought is known under ``ticket`` from now on; else it is dropped."""

    key: Hashable
    ticket: int


@dataclass(frozen=True)
class Capture:
    """Hold the model as of the last step boundary under ``ticket``, whatever training does meanwhile.

    Attributes:
        saved: rather hold what a checkpoint has kept of a held model, if it has.
    """

    ticket: int
    saved: bool = False


@dataclass(frozen=True)
class Merge:
    """Merge the model under ``ticket`` into the held one h: h ← (own · h + theirs · x_j) / (own + theirs).

    No weights change. All of it or nothing; :class:`Merged` follows. Then forget ``ticket``.
    """

    ticket: int
    into: int
    own: float
    theirs: float


@dataclass(frozen=True)
class TakeIn:
    """x ← h + (x − x_captured): what is held under ``ticket`` in the captured model's place, own steps since then kept.

    :class:`Mixed` follows. Then forget the ticket.
    """

    ticket: int


@dataclass(frozen=True)
class Mix:
    """Mix the model under ``ticket``: x += share · (x_j − base), base as of the request.

    All of it or nothing; :class:`Mixed` or :class:`Poisoned` follows. Then forget the ticket.
    """

    ticket: int
    share: float


@dataclass(frozen=True)
class Adopt:
    """Take the model under ``ticket`` as one's own; :class:`Mixed` follows. Then forget the ticket.

    Attributes:
        step: iterations that one's own model counts as having seen from then on; None: as many as before.
    """

    ticket: int
    step: int | None = None


@dataclass(frozen=True)
class Forget:
    """The bytes, the captured copy and what is held under ``ticket`` are no longer needed."""

    ticket: int


@dataclass(frozen=True)
class Given:
    """The model captured under ``ticket`` has been given away: drift counts from it. Then forget the ticket."""

    ticket: int


@dataclass(frozen=True)
class Switched:
    """What :class:`SwitchSync` or :class:`ChangeServers` has asked for is done, or not.

    Attributes:
        problem: why not, in one line, else empty.
    """

    number: int
    problem: str


@dataclass(frozen=True)
class SetTimer:
    """Tell :class:`TimerFired` at ``at``; a timer of the same name is replaced."""

    name: str
    at: float


@dataclass(frozen=True)
class Wait:
    """The training thread may not go on before :class:`Resume`; other events go on being told."""


@dataclass(frozen=True)
class Resume:
    """The training thread may go on."""


@dataclass(frozen=True)
class Note:
    """One line for the log; ``topic`` limits how often a cause that repeats is told. Without one it is always told."""

    topic: str
    text: str


@dataclass(frozen=True)
class Stop:
    """Training cannot go on: too few peers are left, or no model could be had to begin with."""

    reason: str


Effect = (
    Send
    | Cancel
    | Answer
    | Keep
    | Capture
    | Merge
    | TakeIn
    | Mix
    | Adopt
    | Forget
    | Given
    | TableEffect
    | Switched
    | SetTimer
    | Wait
    | Resume
    | Note
    | Stop
)
