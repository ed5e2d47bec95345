"""Effects: what roles ask of their driver.

A role decides and does nothing else; the driver carries out the effects in their order and tells what follows by events
(:mod:`gossipx.protocol.events`). Effects on the tables of a parameter server are in
:mod:`gossipx.protocol.table_effects`; of both, the driver of real processes does those that must follow the order of
decisions under its lock, and the others after it.

============  ============================================================  =========================================
effect        asked for by                                                  the driver then
============  ============================================================  =========================================
Send          the part of a role that needs something of another peer       sends, and tells Replied or Failed
Cancel        peer/pulls, hub/elastic, server/worker                        ends the request, and tells Failed
Answer        the part that has received a request                          answers, and tells Answered
Keep          hub/centre, server: shard, replica                            keeps the payload of a request
Capture       peer/serving, wave, pushes, pairs, exchange; hub/centre       holds the present model
Merge         peer/wave, hub/centre                                         changes a held model, and tells Merged
TakeIn        peer/waves, after the last round                              changes the model, and tells Mixed
Mix           peer/pulls, pushes, pairs; hub/elastic                        mixes, and tells Mixed or Poisoned
Adopt         peer/role for a peer that joins, hub/elastic at the finish    replaces the model, tells the same
Forget        the part that has asked, once it is done                      releases what it holds under the ticket
Given         peer/pushes, once a push stands                               measures drift from that model
Switched      server: switching, coordinator                                tells the user
SetTimer      any part that waits                                           tells TimerFired
Wait, Resume  peer/stages, training, any part of a blocking exchange        stops and frees the training thread
Note          any part                                                      logs
Stop          peer/role, peer/joining, hub/elastic, server: mode, holding,  ends training with an error
              migration
============  ============================================================  =========================================
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from gossipx.protocol.messages import Reply, Request
from gossipx.protocol.table_effects import Pieces, RequestedBucket, TableEffect


@dataclass(frozen=True)
class Send:
    """Send ``request``; exactly one of Replied and Failed follows, at the latest at ``deadline``.

    When the reply is mixed, the change is measured from a base: of a pull, from the model as it is now; of a take, from
    the captured one. An elastic request brings its base along.
    """

    ticket: int
    to: int
    request: Request
    deadline: float


@dataclass(frozen=True)
class Cancel:
    """End our request ``ticket``: its answer is of no interest any more.

    Failed follows, unless the answer was here already.
    """

    ticket: int


@dataclass(frozen=True)
class Answer:
    """Answer the received request ``key``; Answered follows.

    Attributes:
        deadline: the answer is given up if it is not handed over whole by then.
        whole_model: give a model with its frozen parameters and all buffers.
        captured: give the model held under this ticket (:class:`Capture`) rather than that of the last step boundary.
        begins: when to hand it over, if that is later than now.
        tables: give this bucket, as it is after all that was asked for before.
        copies: give a copy of this shard's tables, as they are after all that was asked for before.
        in_order: not before all that was asked for before is done to the tables.
        pieces: give all that belongs to these pieces of tables, as it is then.
        taker: of a model that may be given by a codec, the requester, and the checksums of what it has.
        differs: of a centre, the ticket of the model that it is given for: by a codec, their difference.
    """

    key: Hashable
    reply: Reply
    deadline: float
    whole_model: bool = False
    captured: int | None = None
    begins: float = 0.0
    tables: RequestedBucket | None = None
    copies: int | None = None
    in_order: bool = False
    pieces: Pieces | None = None
    taker: tuple[int, tuple[int, ...]] | None = None
    differs: int | None = None


@dataclass(frozen=True)
class Keep:
    """Keep the payload of the received request ``key`` under ``ticket``; without this it is dropped."""

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

    No weights change. All of it or nothing; Merged follows. Then forget ``ticket``.
    """

    ticket: int
    into: int
    own: float
    theirs: float


@dataclass(frozen=True)
class TakeIn:
    """x ← h + (x − x_captured): put the model held under ``ticket`` in the captured one's place, keep our steps since.

    Mixed follows. Then forget the ticket.
    """

    ticket: int


@dataclass(frozen=True)
class Mix:
    """Mix the model under ``ticket``: x += share · (x_j − base), base as of the request.

    All of it or nothing; Mixed or Poisoned follows. Then forget the ticket.
    """

    ticket: int
    share: float


@dataclass(frozen=True)
class Adopt:
    """Take the model under ``ticket`` as our own; Mixed or Poisoned follows. Then forget the ticket.

    Attributes:
        step: iterations that our model counts as having seen from then on; None: as many as before.
    """

    ticket: int
    step: int | None = None


@dataclass(frozen=True)
class Forget:
    """Release the bytes, the captured copy and what is held under ``ticket``."""

    ticket: int


@dataclass(frozen=True)
class Delivered:
    """Count drift from the model captured under ``ticket``, which has been given away. Then forget the ticket."""

    ticket: int


@dataclass(frozen=True)
class Switched:
    """Tell the user that what SwitchSync or ChangeServers has asked for is done, or not.

    Attributes:
        problem: why not, in one line, else empty.
    """

    number: int
    problem: str


@dataclass(frozen=True)
class SetTimer:
    """Tell TimerFired at ``at``; a timer of the same name is replaced."""

    name: str
    at: float


@dataclass(frozen=True)
class Wait:
    """Stop the training thread until :class:`Resume`; other events are still told."""


@dataclass(frozen=True)
class Resume:
    """Free the training thread."""


@dataclass(frozen=True)
class Note:
    """Log one line; ``topic`` limits how often a cause that repeats is told. Without one it is always told."""

    topic: str
    text: str


@dataclass(frozen=True)
class Stop:
    """End training: too few peers are left, or there is no model to begin with."""

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
    | Delivered
    | TableEffect
    | Switched
    | SetTimer
    | Wait
    | Resume
    | Note
    | Stop
)
