"""Events: what a driver reports to a role.

A role is a state machine, ``handle(event, now) -> effects``. A driver, in real processes or in virtual time, reports
events and carries out the returned effects (:mod:`gossipx.protocol.effects`) in order. ``now`` is in seconds on the
driver's monotonic clock. A *ticket* names one of our requests and is allocated by the role; a *key* names a received
request and is allocated by the driver.

:class:`gossipx.peer.PeerRole` receives every event and dispatches it to the part named here.

================  ===========================================  =================================================
event             reported by the driver                       handled by
================  ===========================================  =================================================
JoinRun           once, when the peer is listening             peer/stages, peer/joining
AllPresent        once, in place of JoinRun                    peer/stages
StepDone          at each optimizer step                       peer/training
GradientsReady    as the backward pass computes gradients      server/worker
SwitchSync        when a user or a program requests it         server/switches
ChangeServers     when a user or a program requests it         server/coordinator
TablesRestored    after RestoreTables                          server/hosted_shards
GradientPoisoned  when a gradient is ignored                   peer/role, which counts and logs it
Prepared          after ReportPrepared                         server/migration
AskEntry          when a process asks to join the run          peer/newcomers
PeerMet           when a peer that joined opens a connection   peer/newcomers
TrainingEnded     once, after the last iteration               peer/training
FinalModel        after the last wave, and a change after it   peer/stages
FiguresReady      once, after the finish                       peer/stages
Restored          when a checkpoint was loaded                 peer/training
LeaveRun          when the peer must leave                     peer/stages
Received          when a request arrives                       by its message: see :mod:`gossipx.protocol.messages`
Replied, Failed   after Send                                   the part that sent the request
Answered          after Answer                                 peer/serving, barrier, waves, exchange
Mixed, Poisoned   after Mix, Adopt and ApplyWave               the part that requested it
Merged            after Merge                                  peer/last_wave, hub
WaveEncoded       after EncodeWave                             peer/waves
ShardAveraged     after AverageShard                           peer/waves
WaveEnded         after EndWave                                peer/waves
TimerFired        after SetTimer                               the part that set the timer
Woke              before the first event after a sleep         peer/membership
================  ===========================================  =================================================
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import Any

from msgspec import Struct

from gossipx.protocol.fields import JoinedPeer
from gossipx.protocol.messages import Reply, Request


class Fault(enum.Enum):
    """Why a request of ours failed."""

    UNREACHABLE = "nothing answers at its address"
    TIMEOUT = "no complete reply within the deadline"
    LOCAL = "this machine is out of file descriptors or threads"
    PROTOCOL = "it violated the protocol"
    POISONED = "its model holds NaN or Inf"
    CANCELLED = "this peer cancelled it"


class Event(Struct, frozen=True):
    """Base of all events. Each says ``frozen=True`` again: type checkers do not take it from here."""


class JoinRun(Event, frozen=True):
    """The peer is listening and wants to join the run.

    Attributes:
        resumed: None: a new run, so the peer needs an initial model. In a run that resumes from checkpoints: whether
            this peer's model is from one; if not, it adopts the model of a peer whose model is.
    """

    resumed: bool | None = None


class AllPresent(Event, frozen=True):
    """All peers of the run are known to be present, so START is over at once.

    It is for runs simulated with thousands of peers: N peers would announce themselves in N² messages, which would be
    most of the work.
    """


class StepDone(Event, frozen=True):
    """One optimizer step is finished.

    Attributes:
        step: iterations finished, from 1.
        delta: ‖x_t − x_{t−1}‖₂ over all trainable parameters (Adaptive Communication, Eq. 6).
        drift: ‖x_t − x_r‖₂, the distance from the last retrieval by our own steps; None unless the policy uses it.
    """

    step: int
    delta: float
    drift: float | None = None


class GradientsReady(Event, frozen=True):
    """The gradients of these buckets, each a shard and a number, are complete and may be pushed.

    No buckets: the backward pass of the iteration is about to compute its first gradient; Wait blocks it.
    """

    buckets: tuple[tuple[int, int], ...]


class SwitchSync(Event, frozen=True):
    """A user or a program requests that shards switch to another sync model; ReportOutcome follows.

    Attributes:
        number: identifies the request; allocated by the driver.
        shard: which; None: all.
        sync: the sync model, as a spec.
        apply: when gradients are applied, as in the settings; empty: the default of the sync model.
        pulls: when pulls are answered, as in the settings; empty: unchanged.
    """

    number: int
    shard: int | None
    sync: str
    apply: str = ""
    pulls: str = ""


class ChangeServers(Event, frozen=True):
    """A user or a program requests that other peers host the shards; ReportOutcome follows.

    Attributes:
        number: identifies the request; allocated by the driver.
        servers: ranks of the new servers.
    """

    number: int
    servers: tuple[int, ...]


class TablesRestored(Event, frozen=True):
    """The tables of a shard were restored to their state before its server's process was killed.

    Attributes:
        shard: which.
        epoch: of the layout that it belongs to.
        state: of the shard's role at that time, as plain data; None: nothing was saved.
    """

    shard: int
    epoch: int
    state: dict[str, Any] | None


class GradientPoisoned(Event, frozen=True):
    """A bucket of a worker's gradient held NaN or Inf and was ignored.

    Attributes:
        sender: the worker's rank.
    """

    sender: int


class Prepared(Event, frozen=True):
    """The reply to ReportPrepared: all earlier effects on the new tables are done.

    Attributes:
        epoch: of the new layout.
        problem: why its tables are incomplete, in one line; empty: they are complete.
    """

    epoch: int
    problem: str


class TrainingEnded(Event, frozen=True):
    """The last iteration is done; the finish is next.

    Attributes:
        agrees: whether this peer's model may take part in it.
    """

    agrees: bool = True


class FinalModel(Event, frozen=True):
    """The final model of this peer is in its weights, and has the checksum ``digest``: compare it with the others'.

    It follows the finish while ``PeerRole.compares`` is true: a comparison may replace the model.
    """

    digest: str


class FiguresReady(Event, frozen=True):
    """The final figures of this peer are known; ``report`` is sent to all others."""

    report: dict[str, object]


class Restored(Event, frozen=True):
    """Our model was replaced by that of a checkpoint, which has seen ``step`` iterations.

    Attributes:
        sync: saved state of :meth:`gossipx.sync.SyncManager.state_dict`.
        weight: saved push-sum weight.
        draws: what partner choices depend on, as saved from the role; None: keep the current state.
    """

    step: int
    sync: dict[str, Any]
    weight: float = 1.0
    draws: dict[str, Any] | None = None


class LeaveRun(Event, frozen=True):
    """This peer must leave the run, because of SIGTERM or an error of its own."""


class Received(Event, frozen=True):
    """A request from another peer. It must be answered exactly once, by Answer with the same key."""

    sender: int
    key: Hashable
    request: Request


class Replied(Event, frozen=True):
    """Our request ``ticket`` has a complete reply; the bytes of a model are kept under the ticket."""

    ticket: int
    reply: Reply


class Failed(Event, frozen=True):
    """Our request ``ticket`` has failed."""

    ticket: int
    fault: Fault


class Answered(Event, frozen=True):
    """Our answer to ``key`` has ended: it was delivered completely if ``whole``, else it was abandoned."""

    key: Hashable
    whole: bool


class Woke(Event, frozen=True):
    """The process or its machine stood still for longer than ``peer_timeout``."""


class AskEntry(Event, frozen=True):
    """A process that is not a member asks to join the run; ReportEntry follows.

    Attributes:
        number: identifies the request; allocated by the driver.
        name, host, port: of the process.
        opener: the host that the request came from.
    """

    number: int
    name: str
    host: str
    port: int
    opener: str


class PeerMet(Event, frozen=True):
    """A peer that joined the run while it was in progress has opened a connection."""

    peer: JoinedPeer


class Mixed(Event, frozen=True):
    """The model under ``ticket`` was mixed, adopted or taken in."""

    ticket: int


class Poisoned(Event, frozen=True):
    """The model under ``ticket`` was not mixed, because it holds NaN or Inf."""

    ticket: int


class Merged(Event, frozen=True):
    """The model under ``ticket`` was merged into the model kept under ``into``.

    Attributes:
        sound: False: it holds NaN or Inf and was not merged.
    """

    ticket: int
    into: int
    sound: bool


class WaveEncoded(Event, frozen=True):
    """The codes of a wave are encoded.

    Attributes:
        ticket: of the wave.
        reference: from which they are measured; (0, 0): this peer has none, and there are no codes.
    """

    ticket: int
    reference: tuple[int, int]


class ShardAveraged(Event, frozen=True):
    """The mean of our shard's codes is encoded.

    Attributes:
        ticket: of the wave.
        counted: ranks of the members whose codes are in it; without those of which a code held NaN or Inf.
    """

    ticket: int
    counted: tuple[int, ...]


class WaveEnded(Event, frozen=True):
    """A wave is taken into the reference and into the captured model.

    Attributes:
        ticket: of the wave.
        poisoned: owners whose mean held NaN or Inf, and was left out, or the peer whose reference did.
    """

    ticket: int
    poisoned: tuple[int, ...]


class TimerFired(Event, frozen=True):
    """The last SetTimer of this name has expired."""

    name: str
