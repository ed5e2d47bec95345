"""Events: what a driver tells a role.

A role is a state machine, ``handle(event, now) -> effects``. A driver (in real processes or in virtual time) tells it
events and carries out the effects (:mod:`gossipx.protocol.effects`) in their order. ``now`` is in seconds on the
driver's monotonic clock. A ticket names one request of ours and is chosen by the role; a key names one received request
and is chosen by the driver.

:class:`gossipx.peer.PeerRole` receives every event and hands it to the part of the role that is named here.

================  ===========================================  =================================================
event             told by the driver                           handled by
================  ===========================================  =================================================
JoinRun           once, when the peer listens                  peer/stages, peer/joining
StepDone          at each optimizer step                       peer/training
GradientsReady    as backward makes gradients                  server/worker
SwitchSync        when a user or a program asks for it         server: switching
ChangeServers     when a user or a program asks for it         server: coordinator
CameBack          after ComeBack, once a checkpoint is read    server/holding
GradientPoisoned  when a gradient is left out                  peer/role, which counts and notes it
Prepared          after TellPrepared                           server: migration
TrainingEnded     once, after the last iteration               peer/training
FiguresReady      once, after the finish                       peer/stages
Restored          when a checkpoint was loaded                 peer/training
LeaveRun          when the peer must leave                     peer/stages
Received          when a request comes in                      by its message: see :mod:`gossipx.protocol.messages`
Replied, Failed   after Send                                   the part that has sent the request
Answered          after Answer                                 peer/serving, gathering, waves, exchange
Mixed, Poisoned   after Mix, Adopt and TakeIn                  the part that has asked for it
Merged            after Merge                                  peer/wave, hub/centre
TimerFired        after SetTimer                               the part that has set the timer
================  ===========================================  =================================================
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from gossipx.protocol.messages import Reply, Request


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
        resumed: None: the run is a new one, and the peer needs a model to begin with. In a run that resumes from
            checkpoints: whether our model is one of these; if not, the peer takes one of a peer that has one.
    """

    resumed: bool | None = None


@dataclass(frozen=True)
class StepDone:
    """One optimizer step is done.

    Attributes:
        step: iterations finished, from 1.
        delta: ‖x_t − x_{t−1}‖₂ over all trainable parameters (Adaptive Communication, Eq. 6).
        drift: ‖x_t − x_r‖₂, the way from the last retrieval, our own steps alone; None unless the policy uses it.
    """

    step: int
    delta: float
    drift: float | None = None


@dataclass(frozen=True)
class GradientsReady:
    """The gradients of these buckets, each a shard and a number, have been made: they may leave.

    No bucket: the iteration's first gradient is about to be taken, unless Wait follows.
    """

    buckets: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SwitchSync:
    """A person or a program asks that shards switch to another sync model; Switched follows.

    Attributes:
        number: names this, chosen by the driver.
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
    """A person or a program asks that other peers hold the shards; Switched follows.

    Attributes:
        number: names this, chosen by the driver.
        servers: their ranks.
    """

    number: int
    servers: tuple[int, ...]


@dataclass(frozen=True)
class TablesRestored:
    """The tables of a shard are as they were when its holder's process was killed.

    Attributes:
        shard: which.
        epoch: of the layout that it belongs to.
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
    """Answers TellPrepared: all that was asked for before is done to the new tables.

    Attributes:
        epoch: of the new layout.
        problem: why its tables are not here, in one line; empty: they are.
    """

    epoch: int
    problem: str


@dataclass(frozen=True)
class TrainingEnded:
    """The last iteration is done; the finish comes next.

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
    """The model is now a checkpoint's, which has seen ``step`` iterations.

    Attributes:
        sync: what :meth:`gossipx.sync.SyncManager.state_dict` gave when the checkpoint was written.
        weight: the push-sum weight then.
        draws: what :meth:`gossipx.peer.PeerRole.draws` gave; None: they stay as they are.
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
    """A request from another peer; it must be answered once, by Answer with the same key."""

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
    """The time of the last SetTimer of this name has come."""

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
    | TablesRestored
    | Merged
    | TimerFired
)
