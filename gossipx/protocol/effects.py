"""Effects: the actions that a role requests from its driver.

A role is a state machine of one peer, and only decides. The driver carries out the effects in order and reports their
outcomes as events (:mod:`gossipx.protocol.events`). Effects on the tables of a parameter server are in
:mod:`gossipx.protocol.table_effects`. The driver of real processes carries out an effect under its lock if its
order matters, and else after it has released the lock. A *ticket* is a number that the role allocates for one of its
requests or for a model that the driver keeps for it; a *key* names a received request.

=============  ===========================================================  =========================================
effect         requested by                                                 the driver
=============  ===========================================================  =========================================
Send           any part that needs something from another peer              sends, and reports Replied or Failed
Cancel         peer/pulls, hub                                              aborts the request, and reports Failed
Answer         the part that handles a request                              replies, and reports Answered
Keep           hub, server/shard                                            keeps the payload of a request
Capture        peer/serving, waves, pushes, pairs, offers; hub              captures the present model
EncodeWave     peer/waves, as a wave begins                                 encodes our codes; reports WaveEncoded
AverageShard   peer/waves, the owner of a shard                             averages codes; reports ShardAveraged
EndWave        peer/waves, with all means or a later reference              updates a captured model; reports WaveEnded
Merge          peer/last_wave, hub                                          merges two kept models; reports Merged
ApplyWave      peer/waves, last_wave                                        updates our model, and reports Mixed
Mix            peer/pulls, pushes, pairs; hub                               mixes; reports Mixed or Poisoned
Adopt          peer/role of a joining peer, hub at the finish               replaces our model; reports the same
Forget         the part that allocated the ticket                           releases all that the ticket holds
MoveReference  peer/pushes, once a push is settled                          measures drift from that model
AddPeer        peer/newcomers, for a peer that joined                       can exchange messages with it
ReportEntry    peer/newcomers                                               replies to the process that asked
ReportOutcome  peer/server_role; server: switching, coordinator             informs the user
SetTimer       any part that waits                                          reports TimerFired
Wait, Resume   peer: role, stages, joining, training; any part of a         blocks and releases the training thread
               blocking exchange; server: mode, hosted_shards, migration
Note           any part                                                     logs
Stop           peer/role, peer/joining, hub, server: mode,                  ends training with an error
               hosted_shards, migration
=============  ===========================================================  =========================================
"""

from __future__ import annotations

from collections.abc import Hashable

from msgspec import Struct

from gossipx.protocol.fields import JoinedPeer
from gossipx.protocol.messages import WHOLE, Reply, Request

Pieces = tuple[tuple[int, int, int], ...]
"""Pieces of tables: the index of the table, the first element, and the element after the last."""


class RequestedBucket(Struct, frozen=True):
    """A bucket requested by a worker.

    Attributes:
        shard, bucket: the bucket.
        worker: its rank.
        base: if pulls have a codec: the checksum of the bucket as the worker has it; 0: it has none.
    """

    shard: int
    bucket: int
    worker: int = 0
    base: int = 0


class Effect(Struct, frozen=True):
    """Base of all effects. Each says ``frozen=True`` again: type checkers do not take it from here."""


class Send(Effect, frozen=True):
    """Send ``request``. Exactly one of Replied and Failed follows, by ``deadline``.

    A later :class:`Mix` adds a share of the difference between the model of the reply and a base. For a pull, the base
    is our model when the request is sent. An elastic request carries its base.

    Attributes:
        ticket: of the request; the model of its reply is kept under it.
        to: rank of the receiver.
        deadline: on the driver's clock, in seconds.
    """

    ticket: int
    to: int
    request: Request
    deadline: float


class Cancel(Effect, frozen=True):
    """Abort our request ``ticket``. Failed follows, unless its reply has arrived already."""

    ticket: int


class Answer(Effect, frozen=True):
    """Reply to the received request ``key``; Answered follows.

    Attributes:
        deadline: time after which an incomplete reply is abandoned.
        whole_model: send our model including frozen parameters and all buffers.
        captured: send the model kept under this ticket (:class:`Capture`), rather than that of the last step boundary.
        begins: earliest time at which to send.
        tables: send this bucket, after all earlier effects on the tables.
        in_order: reply only after all earlier effects on the tables.
        pieces: send the values and state of these pieces of tables, after all earlier effects on the tables.
        receiver: for a model that a codec may encode: the requester's rank, and the checksums of what it has.
        share: send the mean of the shard of this owner, from the wave that our model was captured for under the ticket.
        fragment: send the reference of this fragment.
    """

    key: Hashable
    reply: Reply
    deadline: float
    whole_model: bool = False
    captured: int | None = None
    begins: float = 0.0
    tables: RequestedBucket | None = None
    in_order: bool = False
    pieces: Pieces | None = None
    receiver: tuple[int, tuple[int, ...]] | None = None
    share: tuple[int, int] | None = None
    fragment: int | None = None


class Keep(Effect, frozen=True):
    """Keep the payload of the received request ``key`` under ``ticket``; otherwise it is dropped."""

    key: Hashable
    ticket: int


class Capture(Effect, frozen=True):
    """Capture the model of the last step boundary under ``ticket``; later training steps do not change it.

    Attributes:
        saved: use the captured model of the checkpoint instead, if there is one.
        fragment: the part of the model to capture.
    """

    ticket: int
    saved: bool = False
    fragment: int = WHOLE


class EncodeWave(Effect, frozen=True):
    """Encode the difference of the captured model to the reference, for each shard; WaveEncoded follows.

    Attributes:
        ticket: of the captured model, later also of the wave.
        number: of the wave.
        members: ranks of its members, each the owner of one shard.
        founds: if this peer has no reference, its captured model becomes one.
    """

    ticket: int
    number: int
    members: tuple[int, ...]
    founds: bool


class AverageShard(Effect, frozen=True):
    """Average the codes of our shard, our own included, and encode the mean; ShardAveraged follows.

    Attributes:
        ticket: of the wave.
        codes: the tickets under which those of others are kept, by rank. They are released.
    """

    ticket: int
    codes: tuple[tuple[int, int], ...]


class EndWave(Effect, frozen=True):
    """Take in what a wave has brought; WaveEnded follows. The captured model becomes what ApplyWave writes.

    Attributes:
        ticket: of the wave.
        shares: the tickets of the replies that brought means of shards, by owner.
        with_own: whether the mean of our own shard counts.
        reference: ticket of the reply that brought a later reference, which replaces ours; None: none.
    """

    ticket: int
    shares: tuple[tuple[int, int], ...] = ()
    with_own: bool = False
    reference: int | None = None


class Merge(Effect, frozen=True):
    """Merge the model under ``ticket`` into the captured model h: h ← (own · h + theirs · x_j) / (own + theirs).

    Our model does not change. The merge is all or nothing. Merged follows, and the ticket is released.

    Attributes:
        into: ticket of h.
    """

    ticket: int
    into: int
    own: float
    theirs: float


class ApplyWave(Effect, frozen=True):
    """x ← h + (x − x_captured): replace the captured model by its average h, and keep the training steps made since.

    h is the model kept under ``ticket``. Mixed follows, and the ticket is released.
    """

    ticket: int


class Mix(Effect, frozen=True):
    """Mix the model under ``ticket``: x += share · (x_j − base), with the base of :class:`Send`.

    The mix is all or nothing. Mixed or Poisoned follows, and the ticket is released.
    """

    ticket: int
    share: float


class Adopt(Effect, frozen=True):
    """Replace our model by the one under ``ticket``. Mixed or Poisoned follows, and the ticket is released.

    Attributes:
        step: iterations that our model counts as having seen from then on; None: unchanged.
    """

    ticket: int
    step: int | None = None


class Forget(Effect, frozen=True):
    """Release the received bytes, the captured model and everything else kept under ``ticket``."""

    ticket: int


class MoveReference(Effect, frozen=True):
    """Measure drift from the model captured under ``ticket``, which the receiver now has, and release the ticket."""

    ticket: int


class ReportOutcome(Effect, frozen=True):
    """Report to the user the outcome of a SwitchSync or ChangeServers.

    Attributes:
        number: of that event.
        problem: why it failed, in one line; empty: it succeeded.
    """

    number: int
    problem: str


class SetTimer(Effect, frozen=True):
    """Report TimerFired at time ``at``. It replaces an earlier timer of the same name."""

    name: str
    at: float


class Wait(Effect, frozen=True):
    """Block the training thread until :class:`Resume`; events are still delivered."""


class Resume(Effect, frozen=True):
    """Release the training thread."""


class AddPeer(Effect, frozen=True):
    """Add a peer that joined the run, or replace the one that had its rank."""

    peer: JoinedPeer


class ReportEntry(Effect, frozen=True):
    """Answer a process that asked to join the run.

    Attributes:
        number: of the AskEntry.
        rank: of the newcomer, if it is admitted.
        joined: all peers that joined, including the newcomer.
        lost: ranks of the peers that it need not wait for.
        elsewhere: rank of the peer that admits others; None: this one.
        later: why none can be admitted yet; empty: one can.
        refusal: why none can be admitted at all; empty: one can.
    """

    number: int
    rank: int | None = None
    joined: tuple[JoinedPeer, ...] = ()
    lost: tuple[int, ...] = ()
    elsewhere: int | None = None
    later: str = ""
    refusal: str = ""


class Note(Effect, frozen=True):
    """Log one line. Lines of the same ``topic`` are rate-limited; an empty topic is not."""

    topic: str
    text: str


class Stop(Effect, frozen=True):
    """End training with an error: too few peers are left, or there is no initial model."""

    reason: str
